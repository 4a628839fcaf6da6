"""Walks a tree by descriptors, and removes it."""

from __future__ import annotations

import errno
import os
import resource
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from snapmgr.contract.errors import StorageError
from snapmgr.system.paths import shown

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from contextlib import ExitStack

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
STUB_INODE = 2
"""Inode of the empty folder, with its own device number, that a btrfs snapshot has in place of a nested subvolume:
BTRFS_EMPTY_SUBVOL_DIR_OBJECTID of linux/btrfs_tree.h. It exists only in memory, so its times change."""


class Step(Struct, frozen=True):
    """One step of a walk: a folder is entered, then its entries follow, then it is left."""

    kind: Literal["enter", "entry", "leave"]
    path: str
    """Relative to the tree's root, "" for the root itself; names are decoded with os.fsdecode."""
    name: str
    parent_fd: int
    """The open folder that holds it; -1 for the root."""
    fd: int
    """The folder itself, open for reading, if it is entered or left; else -1."""
    info: os.stat_result


def walk(root_fd: int, *, skip: Container[str] = (), pry: bool = False) -> Iterator[Step]:
    """Yield the steps through the tree at `root_fd`, depth first, names sorted by their bytes.

    An entry may be removed at its step, a folder when it is left. The folders with paths in `skip` are treated as
    empty. `pry` makes our own folders readable that are not. Raises StorageError at another mount, else OSError with
    the path as its filename.
    """
    device = os.fstat(root_fd).st_dev
    levels: list[tuple[Step, list[str]]] = []
    try:
        root = Step("enter", "", "", -1, open_named(".", root_fd, "", pry=pry), os.fstat(root_fd))
        levels.append((root, []))
        levels[-1][1].extend(_names(root.fd, ""))
        yield root
        while levels:
            folder, names = levels[-1]
            if not names:
                yield Step("leave", folder.path, folder.name, folder.parent_fd, folder.fd, os.fstat(folder.fd))
                os.close(folder.fd)
                levels.pop()
                continue
            name = names.pop()
            path = f"{folder.path}/{name}" if folder.path else name
            try:
                info = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
            except OSError as error:
                raise _named(error, path) from error
            if not stat.S_ISDIR(info.st_mode):
                yield Step("entry", path, name, folder.fd, -1, info)
                continue
            step = Step("enter", path, name, folder.fd, open_named(name, folder.fd, path, pry=pry), info)
            levels.append((step, []))
            if path not in skip:
                levels[-1][1].extend(_names(step.fd, path))
            if info.st_dev != device and (info.st_ino != STUB_INODE or levels[-1][1]):
                raise mounted_at(path)
            yield step
    finally:
        for folder, _ in levels:
            os.close(folder.fd)


def open_named(name: str, dir_fd: int, path: str, *, pry: bool = False) -> int:
    """Open a folder; `path` is the filename of an OSError. `pry` makes our own one readable if it is not."""
    try:
        try:
            return os.open(name, FOLDER_FLAGS, dir_fd=dir_fd)
        except PermissionError:
            if not pry:
                raise
            os.chmod(name, 0o700, dir_fd=dir_fd)
            return os.open(name, FOLDER_FLAGS, dir_fd=dir_fd)
    except OSError as error:
        raise _named(error, path) from error


def _names(fd: int, path: str) -> list[str]:
    # By a new descriptor, as btrfs lists only entries from before its opening (Linux 6.5).
    try:
        return sorted(os.listdir(fd), key=os.fsencode, reverse=True)
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: str) -> OSError:
    return OSError(error.errno, error.strerror, path)


def mounted_at(path: str) -> StorageError:
    """Return the error for a mount inside a tree."""
    return StorageError(f"something else is mounted at {shown(path)}", hint="unmount it first")


def reach(root_fd: int, path: str) -> int:
    """Open the folder `path` below `root_fd` and return its descriptor; follows no symlinks, any length."""
    fd = os.open(".", FOLDER_FLAGS, dir_fd=root_fd)
    try:
        for name in path.split("/") if path else ():
            following = os.open(name, FOLDER_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = following
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_folder(stack: ExitStack, path: str) -> int:
    """Open a folder for as long as `stack` lasts. Raises StorageError."""
    try:
        fd = os.open(path, FOLDER_FLAGS)
    except OSError as error:
        raise StorageError(f"cannot open {shown(path)}: {error.strerror}") from None
    stack.callback(os.close, fd)
    return fd


def open_file(root_fd: int, path: str, flags: int = os.O_RDONLY) -> int:
    """Open a file, or a folder for reading, below `root_fd` step by step: no symlinks. Return its descriptor."""
    above, _, name = path.rpartition("/")
    folder_fd = reach(root_fd, above)
    try:
        return os.open(name or ".", flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    finally:
        os.close(folder_fd)


@contextmanager
def opened(root_fd: int, path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Yield the descriptor of a file below `root_fd`, as `open_file` opens it."""
    fd = open_file(root_fd, path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def deep_trees() -> Iterator[None]:
    """Raise the limit of open files to its maximum, as a walk needs one for each level of folders."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def remove(parent_fd: int, name: str) -> None:
    """Remove the folder `name` with its contents, if it exists.

    Raises StorageError if something is mounted in it, OSError that names the entry that could not be removed.
    """
    try:
        root_fd = os.open(name, FOLDER_FLAGS, dir_fd=parent_fd)
    except FileNotFoundError:
        return
    try:
        for step in walk(root_fd, pry=True):
            try:
                if step.kind == "enter":
                    if not os.access(".", os.W_OK | os.X_OK, dir_fd=step.fd, effective_ids=True):
                        os.fchmod(step.fd, 0o700)
                elif step.kind == "entry":
                    os.unlink(step.name, dir_fd=step.parent_fd)
                elif step.path:
                    os.rmdir(step.name, dir_fd=step.parent_fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _named(error, f"{name}/{step.path}") from error
    finally:
        os.close(root_fd)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent_fd)


def is_full(error: OSError) -> bool:
    """Return whether an error says that the file system is full or a quota is exceeded."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
