"""Reads our own files with care, and replaces them durably.

A file that is not renamed yet is named ".NAME.PID", so that files of killed processes can be recognised.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.contract.errors import CatalogError, MissingRequirementError, NoRoomError, NotFoundError
from snapmgr.system.trust import changeable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_MAX_BYTES = 1 << 20
# Of fewer files each is flushed by itself: others may have much dirty data on the file system.
_WORTH_A_FLUSH = 3
BEGUN = re.compile(r"\..+\.(?P<pid>[0-9]+)")
"""Name of a file that is not renamed yet."""


def read_file(path: Path) -> bytes:
    """Return the contents of one of our files.

    Raises NotFoundError, MissingRequirementError without the right, CatalogError.
    """
    try:
        # Without O_NONBLOCK a FIFO in its place would block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{path} does not exist") from None
    except PermissionError:
        raise MissingRequirementError(f"no right to read {path}") from None
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        why = changeable(status) if stat.S_ISREG(status.st_mode) else "it is not a regular file"
        if why is not None:
            raise CatalogError(f"{path} is not a file of snapmgr: {why}", hint="inspect it and move it away")
        # Not the most that is allowed: to reserve 1 MiB takes longer than to read a few KiB.
        data = os.read(fd, min(status.st_size, _MAX_BYTES) + 1)
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from None
    finally:
        os.close(fd)
    if len(data) > _MAX_BYTES:
        raise CatalogError(f"{path} is too large for a file of snapmgr (more than {_MAX_BYTES} bytes)")
    return data


def write_file(path: Path, data: bytes, *, durably: bool = True) -> None:
    """Replace a file. Raises NoRoomError or another CatalogError, with the old content still in place.

    Unless `durably`, after a power cut it may have its old, its new or no content.
    """
    try:
        replace_file(path, data, durably=durably)
    except OSError as error:
        raise _write_error(path, error) from None


def write_files(contents: Mapping[Path, bytes]) -> dict[Path, CatalogError]:
    """Replace files of one file system durably, as `write_file` does each, with two flushes for all of them.

    Return the error of each that could not be written; its old content is still in place, unless the last flush failed.
    Few files, and those of a file system whose flush may not reach the disk, are flushed one by one.
    """
    errors: dict[Path, CatalogError] = {}
    if len(contents) < _WORTH_A_FLUSH or not _is_synced_whole(next(iter(contents)).parent):
        for path, data in contents.items():
            try:
                write_file(path, data)
            except CatalogError as error:
                errors[path] = error
        return errors

    def attempt(paths: Iterable[Path], step: Callable[[], object]) -> bool:
        try:
            step()
        except OSError as error:
            for path in paths:
                errors[path] = _write_error(path, error)
                with suppress(OSError):
                    _fresh(path).unlink()
            return False
        return True

    from snapmgr.system.kernel import sync_file_system  # noqa: PLC0415 - only a batch needs it

    # From here on: a flush reports the writes that were lost since its descriptor was opened.
    with _opened(next(iter(contents)).parent) as fd:
        flush = partial(sync_file_system, fd)
        written = [
            path
            for path, data in contents.items()
            if attempt((path,), partial(_write, _fresh(path), data, 0o600, flush=False))
        ]
        if written and attempt(written, flush):
            renamed = [path for path in written if attempt((path,), partial(_fresh(path).rename, path))]
            if renamed:
                attempt(renamed, flush)
    return errors


def _write_error(path: Path, error: OSError) -> CatalogError:
    hint = space_hint(error)
    kind = CatalogError if hint is None else NoRoomError
    return kind(f"cannot write {path}: {error.strerror}", hint=hint)


def replace_file(path: Path, data: bytes, mode: int = 0o600, *, durably: bool = True) -> None:
    """Replace a file: new content under another name, fsync, rename, fsync of the folder; the fsyncs only if `durably`.

    Raises OSError, with the old content still in place.
    """
    fresh = _fresh(path)
    try:
        _write(fresh, data, mode, flush=durably)
        fresh.rename(path)
        if durably:
            sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise


def _fresh(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _write(path: Path, data: bytes, mode: int, *, flush: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with os.fdopen(fd, "wb") as file:
        # Independent of our umask.
        os.fchmod(file.fileno(), mode)
        file.write(data)
        if flush:
            file.flush()
            os.fsync(file.fileno())


def drop_file(path: Path) -> None:
    """Remove a file durably; idempotent."""
    with suppress(FileNotFoundError):  # its folder
        path.unlink(missing_ok=True)
        sync_folder(path.parent)


def is_abandoned(path: Path) -> bool:
    """Whether `path` is the unfinished file of a process that no longer exists."""
    match = BEGUN.fullmatch(path.name)
    return match is not None and not Path("/proc", match["pid"]).exists()


def sync_folder(path: Path) -> None:
    """Make creations and removals in a folder durable."""
    with _opened(path) as fd:
        os.fsync(fd)


def _is_synced_whole(folder: Path) -> bool:
    from snapmgr.system.kernel import syncs_as_a_whole  # noqa: PLC0415 - only a batch needs it

    with suppress(OSError), _opened(folder) as fd:
        return syncs_as_a_whole(fd)
    return False


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def space_hint(error: OSError) -> str | None:
    """Return a hint if an error means that the file system is full, else None."""
    return "make room on its file system" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
