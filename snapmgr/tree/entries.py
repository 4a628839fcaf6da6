"""Lists folders and opens their subfolders by descriptors, never through a symlink or into another mount."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.system import kernel
from snapmgr.tree.walk import FOLDER_FLAGS, STUB_INODE, mounted_at, open_named

if TYPE_CHECKING:
    from collections.abc import Container, Iterator


class Entry(Struct, frozen=True):
    """A name in a folder and what kind it seemed to have when the folder was read."""

    name: str
    is_folder: bool
    is_file: bool
    inode: int
    """As the folder says: a mount there has another one, and some network and overlay file systems differ."""


class FolderStep(Struct, frozen=True):
    """One step of a walk over folders: a folder is entered, or left after all folders below it."""

    entered: bool
    path: str
    """Relative to the tree's root, "" for the root itself; names are decoded with os.fsdecode."""
    name: str
    fd: int
    """The folder, open for reading."""
    listed: list[Entry]
    """What is in it; nothing if it is left out."""


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
                Entry(one.name, one.is_dir(follow_symlinks=False), one.is_file(follow_symlinks=False), one.inode())
                for one in listed
            ]
    except FileNotFoundError:
        # A local file system shows a removed folder as an empty one; a network file system may say that it is gone.
        return []
    finally:
        if own_fd >= 0:
            os.close(own_fd)


def walk_folders(root_fd: int, *, skip: Container[str] = ()) -> Iterator[FolderStep]:
    """Yield the steps through the folders at `root_fd`, depth first, in the order of the file system.

    Needs no system call for a file, unlike `walk`, whose `skip` and errors it has.
    """
    device = os.fstat(root_fd).st_dev
    levels: list[tuple[FolderStep, list[str]]] = []
    name = path = ""
    try:
        while True:
            parent_fd = levels[-1][0].fd if levels else root_fd
            folder = FolderStep(
                entered=True, path=path, name=name, fd=open_named(name or ".", parent_fd, path), listed=[]
            )
            levels.append((folder, []))
            info = os.fstat(folder.fd)
            if path not in skip:
                try:
                    folder.listed.extend(entries(folder.fd))
                except OSError as error:
                    raise OSError(error.errno, error.strerror, path) from error
            if info.st_dev != device and (info.st_ino != STUB_INODE or folder.listed):
                raise mounted_at(path)
            levels[-1][1].extend(entry.name for entry in reversed(folder.listed) if entry.is_folder)
            yield folder
            while not levels[-1][1]:
                folder = levels[-1][0]
                yield FolderStep(entered=False, path=folder.path, name=folder.name, fd=folder.fd, listed=folder.listed)
                os.close(folder.fd)
                levels.pop()
                if not levels:
                    return
            name = levels[-1][1].pop()
            above = levels[-1][0].path
            path = f"{above}/{name}" if above else name
    finally:
        for folder, _ in levels:
            os.close(folder.fd)


@contextmanager
def subfolder(name: str, dir_fd: int) -> Iterator[int]:
    """Open a subfolder, as `kernel.open_beneath` does, until the context ends."""
    fd = kernel.open_beneath(name, dir_fd, FOLDER_FLAGS)
    try:
        yield fd
    finally:
        os.close(fd)
