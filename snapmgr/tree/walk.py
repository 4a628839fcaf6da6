"""Walks a tree by descriptors, measures it, removes it."""

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
_BLOCK_BYTES = 512
STUB_INODE = 2
"""Inode of the empty folder, with its own device number, that a btrfs snapshot has in place of a nested subvolume:
BTRFS_EMPTY_SUBVOL_DIR_OBJECTID of linux/btrfs_tree.h. It exists only in memory, so its times change."""


class Step(Struct, frozen=True, kw_only=True):
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


class _Level(Struct):
    step: Step
    names: list[str]


def walk(root_fd: int, *, skip: Container[str] = (), pry: bool = False) -> Iterator[Step]:
    """Yield the steps through the tree at `root_fd`, depth first, names sorted by their bytes.

    An entry may be removed at its step, a folder when it is left. The folders with paths in `skip` are treated as
    empty. `pry` makes our own folders readable that are not. Raises StorageError at another mount, else OSError with
    the path as its filename.
    """
    device = os.fstat(root_fd).st_dev
    levels: list[_Level] = []
    try:
        root = Step(
            kind="enter", path="", name="", parent_fd=-1, fd=_open(".", root_fd, "", pry=pry), info=os.fstat(root_fd)
        )
        levels.append(_Level(root, []))
        levels[-1].names = _names(root)
        yield root
        while levels:
            level = levels[-1]
            if not level.names:
                yield _left(level.step)
                os.close(levels.pop().step.fd)
                continue
            name = level.names.pop()
            path = f"{level.step.path}/{name}" if level.step.path else name
            with _named(path):
                info = os.stat(name, dir_fd=level.step.fd, follow_symlinks=False)
            if not stat.S_ISDIR(info.st_mode):
                yield Step(kind="entry", path=path, name=name, parent_fd=level.step.fd, fd=-1, info=info)
                continue
            step = Step(
                kind="enter",
                path=path,
                name=name,
                parent_fd=level.step.fd,
                fd=_open(name, level.step.fd, path, pry=pry),
                info=info,
            )
            levels.append(_Level(step, []))
            if path not in skip:
                levels[-1].names = _names(step)
            if info.st_dev != device and (info.st_ino != STUB_INODE or levels[-1].names):
                raise StorageError(f"something else is mounted at {shown(path)}", hint="unmount it first")
            yield step
    finally:
        for level in levels:
            os.close(level.step.fd)


def _left(step: Step) -> Step:
    return Step(
        kind="leave", path=step.path, name=step.name, parent_fd=step.parent_fd, fd=step.fd, info=os.fstat(step.fd)
    )


def _open(name: str, dir_fd: int, path: str, *, pry: bool) -> int:
    with _named(path):
        try:
            return os.open(name, FOLDER_FLAGS, dir_fd=dir_fd)
        except PermissionError:
            if not pry:
                raise
            os.chmod(name, 0o700, dir_fd=dir_fd)
            return os.open(name, FOLDER_FLAGS, dir_fd=dir_fd)


def _names(step: Step) -> list[str]:
    # By a new descriptor, as btrfs lists only entries from before its opening (Linux 6.5).
    with _named(step.path):
        return sorted(os.listdir(step.fd), key=os.fsencode, reverse=True)


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


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


class Survey(Struct, frozen=True, kw_only=True):
    """The size of a tree."""

    entries: int
    """Number of folders, files and everything else, without the root."""
    allocated_bytes: int
    """Space of its files on disk, without holes; hard links count once."""

    def __add__(self, other: Survey) -> Survey:
        return Survey(
            entries=self.entries + other.entries, allocated_bytes=self.allocated_bytes + other.allocated_bytes
        )


def survey(root_fd: int, *, skip: Container[str] = ()) -> Survey:
    """Return the size of the tree at `root_fd`; `skip` and errors as for `walk`."""
    entries, allocated_bytes = 0, 0
    linked: set[int] = set()
    for step in walk(root_fd, skip=skip):
        if step.kind == "leave" or not step.path:
            continue
        entries += 1
        if stat.S_ISREG(step.info.st_mode) and step.info.st_ino not in linked:
            allocated_bytes += allocated(step.info)
            if step.info.st_nlink > 1:
                linked.add(step.info.st_ino)
    return Survey(entries=entries, allocated_bytes=allocated_bytes)


def allocated(info: os.stat_result) -> int:
    """Return how many bytes of a file are on disk."""
    return min(info.st_blocks * _BLOCK_BYTES, info.st_size)


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
            with _named(f"{name}/{step.path}"), suppress(FileNotFoundError):
                if step.kind == "enter":
                    if not os.access(".", os.W_OK | os.X_OK, dir_fd=step.fd, effective_ids=True):
                        os.fchmod(step.fd, 0o700)
                elif step.kind == "entry":
                    os.unlink(step.name, dir_fd=step.parent_fd)
                elif step.path:
                    os.rmdir(step.name, dir_fd=step.parent_fd)
    finally:
        os.close(root_fd)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent_fd)


def is_full(error: OSError) -> bool:
    """Return whether an error says that the file system is full or a quota is exceeded."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
