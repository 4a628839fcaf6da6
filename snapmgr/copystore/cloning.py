"""Clones any folder to a new name on the same storage: the body of `snapmgr.api.FolderCloning.clone_folder`."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from snapmgr.contract.errors import BusyError, NotFoundError, SnapmgrError, StorageError
from snapmgr.copystore.copyfolder import DATA
from snapmgr.copystore.copying import OpenFolder, explain
from snapmgr.system import kernel
from snapmgr.system.paths import lies_in, shown
from snapmgr.tree.entries import entries
from snapmgr.tree.walk import FOLDER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.copystore.copyfolder import Folder
    from snapmgr.copystore.copying import FolderCopy


def clone_beside(
    source: str,
    target: str,
    new_copy: Callable[[Folder, Folder], FolderCopy],
    remove: Callable[[Folder, str], None],
) -> None:
    """Clone the folder `source` to the new path `target` in an existing folder.

    The clone is made in a hidden, locked folder beside `target`, whose name depends on `target` alone. It is renamed
    when it is complete. The next call removes the leftovers of a killed one. `remove` removes a folder in the hidden
    folder. Raises NotFoundError, BusyError, StorageError.
    """
    parent, name = os.path.split(os.path.abspath(target))
    with ExitStack() as stack:
        try:
            source_fd = os.open(source, FOLDER_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"there is no folder {shown(source)}", hint="is its storage mounted?") from None
        except OSError as error:
            raise StorageError(f"cannot open {shown(source)}: {error.strerror}") from error
        stack.callback(os.close, source_fd)
        try:
            parent_fd = os.open(parent, FOLDER_FLAGS)
        except OSError as error:
            raise StorageError(f"cannot open {shown(parent)}: {error.strerror}") from error
        stack.callback(os.close, parent_fd)
        if lies_in(os.path.realpath(parent), os.path.realpath(source)):
            raise StorageError(f"{shown(target)} lies inside {shown(source)}", hint="name a folder outside of it")
        if os.path.lexists(target):
            raise StorageError(f"{shown(target)} exists already", hint="name another one")
        hidden = f".snapmgr-clone-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
        folder = OpenFolder(path=f"{parent}/{hidden}", fd=_open_hidden(hidden, parent_fd, parent, name))
        stack.callback(os.close, folder.fd)
        stack.callback(_remove_hidden, folder, hidden, parent_fd, remove)
        try:
            _empty(folder, remove)
            new_copy(OpenFolder(path=source, fd=source_fd), folder).run(math.inf)
            _publish(folder, name, parent_fd)
        except (SnapmgrError, OSError) as error:
            why, hint = explain(error)
            why = "it exists already" if isinstance(error, FileExistsError) else why
            raise StorageError(f"cannot clone {shown(source)} to {shown(target)}: {why}", hint=hint) from error


def _open_hidden(hidden: str, parent_fd: int, parent: str, name: str) -> int:
    """Make the hidden folder, or take over that of a killed call; return it locked."""
    busy = BusyError(f"{shown(parent)}/{shown(name)} is being cloned already", hint="wait until that has ended")
    with ExitStack() as undo:
        try:
            with suppress(FileExistsError):
                os.mkdir(hidden, 0o700, dir_fd=parent_fd)
            fd = os.open(hidden, FOLDER_FLAGS, dir_fd=parent_fd)
            undo.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_uid != os.geteuid():
                raise StorageError(f"{shown(parent)}/{hidden} belongs to another user", hint="remove it")
            # The last owner may have removed it before releasing the lock.
            if os.stat(hidden, dir_fd=parent_fd, follow_symlinks=False).st_ino != os.fstat(fd).st_ino:
                raise busy
        except (BlockingIOError, FileNotFoundError):
            raise busy from None
        except OSError as error:
            raise StorageError(
                f"cannot make {shown(parent)}/{hidden}: {error.strerror}", hint="is the file system full?"
            ) from error
        undo.pop_all()
        return fd


def _empty(folder: Folder, remove: Callable[[Folder, str], None]) -> None:
    for entry in entries(folder.fd):
        if entry.is_folder:
            remove(folder, entry.name)
        else:
            os.unlink(entry.name, dir_fd=folder.fd)


def _publish(folder: Folder, name: str, parent_fd: int) -> None:
    """Give the clone its own name. An ordinary user can only move a folder that they can write to."""
    fd = os.open(DATA, FOLDER_FLAGS, dir_fd=folder.fd)
    try:
        mode = os.fstat(fd).st_mode
        if os.geteuid() != 0:
            os.fchmod(fd, 0o700)
        kernel.rename_new(DATA, name, folder.fd, parent_fd)
        if os.geteuid() != 0:
            os.fchmod(fd, mode & 0o7777)
        os.fsync(parent_fd)
    finally:
        os.close(fd)


def _remove_hidden(folder: Folder, hidden: str, parent_fd: int, remove: Callable[[Folder, str], None]) -> None:
    with suppress(OSError, SnapmgrError):  # the next call tries again
        _empty(folder, remove)
        os.rmdir(hidden, dir_fd=parent_fd)
