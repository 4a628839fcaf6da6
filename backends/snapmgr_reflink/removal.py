"""Removes a directory tree by descriptors, never into a mount or a subvolume."""

from __future__ import annotations

import errno
import os
import stat

from snapmgr.api import InUseError, StorageError
from snapmgr_reflink import kernel
from snapmgr_reflink.tree import FOLDER_FLAGS, entries, shown


def remove_contents(fd: int, path: str, *, keep: frozenset[str] = frozenset()) -> None:
    """Remove all entries of the folder `fd` but those in `keep`; what is gone already is no error.

    `path` is for messages. Raises InUseError if something is mounted inside, StorageError for a nested subvolume or
    what cannot be removed.
    """
    device = os.fstat(fd).st_dev
    for name in (entry.name for entry in entries(fd)):
        if name in keep:
            continue
        inside = f"{path}/{name}"
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                _remove_folder(fd, name, inside, device)
            else:
                os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EBUSY):
                raise InUseError(
                    f"something is mounted at {shown(inside)}", hint=f"umount {shown(inside)} and try again"
                ) from error
            raise StorageError(
                f"cannot remove {shown(inside)}: {error.strerror}",
                hint="look at its attributes (lsattr) and owner, and try again",
            ) from error


def _remove_folder(fd: int, name: str, path: str, device: int) -> None:
    try:
        child = kernel.open_beneath(name, fd, FOLDER_FLAGS)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=fd)  # an ordinary user's folder without "r" or "x"
        child = kernel.open_beneath(name, fd, FOLDER_FLAGS)
    try:
        info = os.fstat(child)
        if info.st_dev != device:
            raise StorageError(
                f"{shown(path)} is a subvolume that somebody made there",
                hint="remove it with `btrfs subvolume delete` and try again",
            )
        if info.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.fchmod(child, 0o700)
        remove_contents(child, path)
    finally:
        os.close(child)
    os.rmdir(name, dir_fd=fd)
