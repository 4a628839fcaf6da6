"""Checks the folder for results: whether it can be written to, and whether a sample fits."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from snapmgr.contract.errors import CatalogError, ConfigError, NoRoomError
from snapmgr.system.files import space_hint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WORK = ".work"
# No sample is larger, but for one with many layouts.
_ROOM_BYTES = 1 << 20


def unwritable(path: Path, error: OSError, folder: Path) -> CatalogError:
    """Return what ends a run whose `folder` cannot be written to any more, as an error at `path` in it showed."""
    hint = space_hint(error)
    return (CatalogError if hint is None else NoRoomError)(
        f"cannot write {path}: {error.strerror or error}",
        hint=f"{hint or 'check that its file system is mounted and writable'}; "
        f"the samples are kept; to continue, repeat the command with -o {folder}",
    )


def require_writable(folder: Path) -> None:
    """Raise NoRoomError or CatalogError if there is no room for a sample in `folder`. Leaves nothing there."""
    try:
        _try_out(folder)
    except OSError as error:
        raise unwritable(folder, error, folder) from None


def opened(folder: Path) -> int:
    """Make a folder if need be, and return a descriptor of it. Raises ConfigError with what to do about it."""
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{folder} is not a folder", hint="name a new one with -o") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.parent.exists():
            raise ConfigError(
                f"the folder {folder.parent} does not exist", hint="make it, or name another with -o"
            ) from None
        raise ConfigError(f"cannot make {folder}: {error.strerror}", hint=_elsewhere(error)) from None


def require_fit(folder: Path) -> None:
    """Raise ConfigError if a run cannot write to `folder`, which exists."""
    _own_work(folder)
    try:
        _try_out(folder)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", hint=_elsewhere(error)) from None


@contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder in `folder` for the temporary files of a sample.

    Raises ConfigError if something else has its name, CatalogError and NoRoomError if it cannot be made.
    """
    work = folder.absolute() / _WORK
    try:
        if _own_work(folder):
            shutil.rmtree(work)
        work.mkdir(mode=0o700)
    except OSError as error:
        raise unwritable(work, error, folder) from None
    try:
        yield work
    finally:
        # A failure to remove it is reported with the next sample, if it matters then; this one counts.
        with suppress(OSError):
            shutil.rmtree(work)


def _own_work(folder: Path) -> bool:
    """Return whether a run has left its work folder; raise ConfigError for anything else of that name."""
    work = folder / _WORK
    try:
        mode = os.lstat(work).st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unwritable(work, error, folder) from None
    # The target of a link or a mount is not ours, and would be removed.
    if not stat.S_ISDIR(mode) or os.path.ismount(work):
        raise ConfigError(
            f"{work} was not made by a run",
            hint="examine it and move it away, or name a new folder with -o",
        )
    return True


def _try_out(folder: Path) -> None:
    # The file never has a name. Random data: compressed data would need no space.
    with TemporaryFile(dir=folder) as file:
        file.write(os.urandom(_ROOM_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _elsewhere(error: OSError) -> str:
    room = space_hint(error)
    return f"{room}, or name another folder with -o" if room else "name a folder on another file system with -o"
