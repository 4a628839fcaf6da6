"""Lists a folder and opens its subfolders by descriptors, never through a symlink or into another mount."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.system import kernel
from snapmgr.tree.walk import FOLDER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator


class Entry(Struct, frozen=True, kw_only=True):
    """A name in a folder and what kind it seemed to have when the folder was read."""

    name: str
    is_folder: bool
    is_file: bool


def entries(fd: int) -> list[Entry]:
    """Return what is in the folder `fd` now; nothing if it was removed meanwhile. Raises OSError.

    Read by a descriptor of its own: btrfs shows a descriptor only entries from before it was opened (Linux 6.5), and a
    forked child would share the position in the list.
    """
    own_fd = -1
    try:
        own_fd = os.open(".", FOLDER_FLAGS, dir_fd=fd)
        with os.scandir(own_fd) as listed:
            return [
                Entry(
                    name=entry.name,
                    is_folder=entry.is_dir(follow_symlinks=False),
                    is_file=entry.is_file(follow_symlinks=False),
                )
                for entry in listed
            ]
    except FileNotFoundError:
        # A local file system shows a removed folder as an empty one; a network file system may say that it is gone.
        return []
    finally:
        if own_fd >= 0:
            os.close(own_fd)


@contextmanager
def subfolder(name: str, dir_fd: int) -> Iterator[int]:
    """Open a subfolder, as `kernel.open_beneath` does, until the context ends."""
    fd = kernel.open_beneath(name, dir_fd, FOLDER_FLAGS)
    try:
        yield fd
    finally:
        os.close(fd)
