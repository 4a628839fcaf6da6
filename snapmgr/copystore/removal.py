"""Removes copy folders and directory trees by descriptors, and never enters a mount or a subvolume."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.contract.errors import InUseError, StorageError
from snapmgr.copystore.copyfolder import DELETING, STATES, CopyFolder
from snapmgr.system import kernel
from snapmgr.system.paths import shown
from snapmgr.tree.entries import entries
from snapmgr.tree.walk import FOLDER_FLAGS, is_full

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.copystore.copyfolder import Folder

_MARKS = frozenset(f"{state}.json" for state in STATES)


@contextmanager
def locked(fd: int) -> Iterator[None]:
    """Hold the lock of an open folder."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def remove_contents(fd: int, path: str) -> None:
    """Remove all entries of the folder `fd`; see `remove_entry`."""
    for entry in entries(fd):
        remove_entry(fd, entry.name, f"{path}/{entry.name}", is_folder=entry.is_folder)


def remove_entry(dir_fd: int, name: str, path: str, *, is_folder: bool = True) -> None:
    """Remove an entry of the folder `dir_fd` with all its contents; ignore an entry that is already gone.

    `path` is for messages. `is_folder` may be wrong: without it an entry is unlinked without looking at it. Raises
    InUseError if something is mounted there, StorageError for a nested subvolume or anything that cannot be removed.
    """
    try:
        if not is_folder:
            try:
                os.unlink(name, dir_fd=dir_fd)
            except IsADirectoryError:
                _remove_folder(dir_fd, name, path)
        elif stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            _remove_folder(dir_fd, name, path)
        else:
            os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EBUSY):
            raise InUseError(
                f"something is mounted at {shown(path)}", hint=f"umount {shown(path)} and try again"
            ) from error
        raise StorageError(
            f"cannot remove {shown(path)}: {error.strerror}",
            hint="look at its attributes (lsattr) and owner, and try again",
        ) from error


def _remove_folder(dir_fd: int, name: str, path: str) -> None:
    try:
        child = kernel.open_beneath(name, dir_fd, FOLDER_FLAGS)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=dir_fd)  # an ordinary user's folder without "r" or "x"
        child = kernel.open_beneath(name, dir_fd, FOLDER_FLAGS)
    try:
        info = os.fstat(child)
        if info.st_dev != os.fstat(dir_fd).st_dev:
            raise StorageError(
                f"{shown(path)} is a subvolume that somebody made there",
                hint="remove it with `btrfs subvolume delete` and try again",
            )
        if info.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.fchmod(child, 0o700)
        remove_contents(child, path)
    finally:
        os.close(child)
    os.rmdir(name, dir_fd=dir_fd)


def remove_data(folder: Folder, name: str) -> None:
    """Remove an entry of an open folder; see `remove_entry`."""
    remove_entry(folder.fd, name, f"{folder.path}/{name}")


def discard(folder: CopyFolder, remove: Callable[[Folder, str], None] = remove_data) -> None:
    """Remove a locked copy folder with all its contents, the mark last: after a crash the rest is still provably ours.

    First gives the folder another name, so that the old one is durably gone before the slow part. `remove` removes a
    folder in it, by its name. Raises InUseError or StorageError for anything that cannot be removed; the rest stays as
    debris.
    """
    try:
        doomed = _doom(folder)
        for entry in entries(folder.fd):
            if entry.is_folder:
                remove(doomed, entry.name)
            elif entry.name not in _MARKS:
                remove_data(doomed, entry.name)
        # There is room now. Without its mark the folder could not be recognised as ours.
        doomed = _doom(doomed)
        with locked(folder.store.fd):
            for mark in _MARKS:
                with suppress(FileNotFoundError):
                    os.unlink(mark, dir_fd=folder.fd)
            os.rmdir(doomed.name, dir_fd=folder.store.fd)
        os.fsync(folder.store.fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise InUseError(f"{shown(folder.path)} is mounted", hint="umount it and try again") from error
        raise StorageError(f"cannot remove {shown(folder.path)}: {error.strerror}") from error


def _doom(folder: CopyFolder) -> CopyFolder:
    """Durably prevent a copy folder from being taken for a complete one; return it in its new state."""
    doomed = replace(folder, name=f"{DELETING}{folder.nonce}")
    if folder.name == doomed.name:
        return doomed
    try:
        kernel.rename_new(folder.name, doomed.name, folder.store.fd)
    except OSError as error:
        if not is_full(error) or folder.state is None:
            raise
        # A full XFS does not have room for one more name in the store, but the copy folder does: set its state back to
        # "begun", which makes it debris.
        folder.advance(folder.state, "begun", durable=True)
        return replace(folder, state="begun")
    os.fsync(folder.store.fd)
    return doomed
