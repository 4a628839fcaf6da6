"""Opening what is in a tree, by descriptors: no symlink is followed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.errors import StorageError
from snapmgr.tree.walk import FOLDER_FLAGS, reach, shown

if TYPE_CHECKING:
    from contextlib import ExitStack


def open_folder(stack: ExitStack, path: str) -> int:
    """Open a folder for as long as `stack` lasts. Raises StorageError."""
    try:
        fd = os.open(path, FOLDER_FLAGS)
    except OSError as error:
        raise StorageError(f"cannot open {shown(path)}: {error.strerror}") from None
    stack.callback(os.close, fd)
    return fd


def open_file(root_fd: int, path: str, flags: int) -> int:
    """Open a file of a tree, without following symlinks."""
    above = reach(root_fd, path.rpartition("/")[0])
    try:
        return os.open(path.rpartition("/")[2], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
    finally:
        os.close(above)
