"""Walks a directory tree: counts its entries, notes obstacles to a copy, measures the blocks that it does not share."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from msgspec import Struct, field

from snapmgr.api import StorageError, kernel
from snapmgr.api.copystore import FOLDER_FLAGS, entries, subfolder
from snapmgr.api.kernel import shown

if TYPE_CHECKING:
    from snapmgr.api.copystore import Entry

_NAMED_AT_MOST = 8
# The walks recurse, with two descriptors a level in a copy: Python's limit (1000 calls) and the usual one of open files
# (1024) are not far beyond.
_DEEPEST = 400


class Survey(Struct, kw_only=True):
    """The result of a walk over a tree."""

    files: int = 0
    folders: int = 0
    extents: int = 0
    allocated_bytes: int = 0
    excluded: list[str] = field(default_factory=list)
    """Nested subvolumes and mounts, relative to the tree."""
    obstacles: list[str] = field(default_factory=list)
    """Why this user cannot copy some entries; the first few."""

    def hinder(self, path: str, why: str) -> None:
        """Note an entry that cannot be copied."""
        if len(self.obstacles) < _NAMED_AT_MOST:
            self.obstacles.append(f"{shown(path) or '.'} {why}")


def survey(root_fd: int, *, extents: bool) -> Survey:
    """Walk a tree; count extents (FIEMAP, one call a file) only if asked. Entries that vanish meanwhile are skipped."""
    seen = Survey()
    _Surveyor(seen, root_fd, extents=extents).walk(root_fd, "")
    return seen


class _Surveyor:
    def __init__(self, seen: Survey, root_fd: int, *, extents: bool) -> None:
        self._seen = seen
        self._device = os.fstat(root_fd).st_dev
        self._block_bytes = os.fstatvfs(root_fd).f_frsize
        self._extents = extents
        self._user = os.geteuid()
        self._groups = {os.getegid(), *os.getgroups()}

    def walk(self, fd: int, path: str) -> None:
        self._seen.folders += 1
        if path.count("/") > _DEEPEST:
            raise StorageError(
                f"folders are nested more than {_DEEPEST} deep, at {shown(path)[:200]}…",
                hint="a copy cannot go that deep; a snapshot of a whole volume (btrfs) can",
            )
        self._judge(os.fstat(fd), path.removesuffix("/"))
        for entry in entries(fd):
            name = entry.name
            try:
                if entry.is_folder:
                    self._folder(fd, name, path)
                else:
                    self._other(fd, entry, path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except PermissionError:
                self._seen.hinder(path + name, "cannot be read by this user")
            except OSError as error:
                if error.errno == errno.ELOOP:  # a symlink took its place
                    continue
                if error.errno != errno.EXDEV:
                    raise
                self._seen.excluded.append(path + name)

    def _folder(self, fd: int, name: str, path: str) -> None:
        with subfolder(name, fd) as child:
            # On btrfs a nested subvolume has a device number of its own without being a mount.
            if os.fstat(child).st_dev != self._device:
                self._seen.excluded.append(path + name)
                return
            self.walk(child, f"{path}{name}/")

    def _other(self, fd: int, entry: Entry, path: str) -> None:
        self._seen.files += 1
        if not self._extents:
            return
        name = entry.name
        if not entry.is_file:
            self._judge(os.stat(name, dir_fd=fd, follow_symlinks=False), path + name)
            return
        if self._user == 0:
            # Root can read all, and the folder has another number for a file that something is mounted at.
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            small = stat.S_ISREG(info.st_mode) and info.st_blocks * 512 <= self._block_bytes
            if small and info.st_ino == entry.inode and info.st_dev == self._device:
                self._count(info, -1)
                return
        try:
            # Opening comes before anything that could be saved by st_blocks: it finds unreadable files and file mounts.
            file_fd = kernel.open_beneath(name, fd, os.O_RDONLY | os.O_NONBLOCK)
        except PermissionError:
            self._judge(os.stat(name, dir_fd=fd, follow_symlinks=False), path + name)
            raise
        try:
            info = os.fstat(file_fd)
            if self._user:
                self._judge(info, path + name)
            if stat.S_ISREG(info.st_mode):
                self._count(info, file_fd)
        finally:
            os.close(file_fd)

    def _count(self, info: os.stat_result, fd: int) -> None:
        allocated_bytes = info.st_blocks * 512
        self._seen.allocated_bytes += allocated_bytes
        # What fits into one block has one extent: most small files need no further call.
        if allocated_bytes > self._block_bytes:
            self._seen.extents += kernel.count_extents(fd)
        elif allocated_bytes:
            self._seen.extents += 1

    def _judge(self, info: os.stat_result, path: str) -> None:
        if self._user == 0:
            return
        if info.st_uid != self._user or info.st_gid not in self._groups:
            self._seen.hinder(path, f"belongs to user {info.st_uid}, group {info.st_gid}, which a copy could not keep")
        elif stat.S_ISBLK(info.st_mode) or stat.S_ISCHR(info.st_mode):
            self._seen.hinder(path, "is a device node, which only root can make")


def exclusive_bytes(fd: int) -> int | None:
    """Return the bytes on disk that only files of this tree hold; None if one of them cannot tell (compressed data)."""
    total = 0
    for entry in entries(fd):
        if not entry.is_folder and not entry.is_file:
            continue
        child = kernel.open_beneath(entry.name, fd, FOLDER_FLAGS if entry.is_folder else os.O_RDONLY)
        try:
            info = os.fstat(child)
            part = exclusive_bytes(child) if entry.is_folder else _file_exclusive_bytes(child, info)
        finally:
            os.close(child)
        if part is None:
            return None
        # A file with several names counts once in all; a part of it a name comes to the same, but for the rounding.
        total += part if entry.is_folder else part // info.st_nlink
    return total


def _file_exclusive_bytes(fd: int, info: os.stat_result) -> int | None:
    if info.st_blocks == 0:
        return 0
    total, encoded = 0, False
    try:
        for extent in kernel.extents(fd):
            if not extent.shared:
                total += extent.length
                encoded = encoded or extent.encoded
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return info.st_blocks * 512
        raise
    return None if encoded else total
