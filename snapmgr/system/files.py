"""Reads our own files with care, and replaces them durably.

A file that is not renamed yet is named ".NAME.PID", so that files of killed processes can be recognised.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from snapmgr.contract.errors import CatalogError, MissingRequirementError, NoRoomError, NotFoundError
from snapmgr.system.trust import changeable

_MAX_BYTES = 1 << 20
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
        with open(fd, "rb", closefd=False) as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from None
    finally:
        os.close(fd)
    if len(data) > _MAX_BYTES:
        raise CatalogError(f"{path} is too large for a file of snapmgr (more than {_MAX_BYTES} bytes)")
    return data


def write_file(path: Path, data: bytes) -> None:
    """Replace a file durably. Raises NoRoomError or another CatalogError, with the old content still in place."""
    try:
        replace_file(path, data)
    except OSError as error:
        hint = space_hint(error)
        kind = CatalogError if hint is None else NoRoomError
        raise kind(f"cannot write {path}: {error.strerror}", hint=hint) from None


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file durably: new content under another name, fsync, rename, fsync of the folder.

    Raises OSError, with the old content still in place.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with os.fdopen(fd, "wb") as file:
            # Independent of our umask.
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
        sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise


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
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def space_hint(error: OSError) -> str | None:
    """Return a hint if an error means that the file system is full, else None."""
    return "make room on its file system" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
