"""Compares a tree with its copy: all names, and what was not compared while it was copied."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from snapmgr.system.paths import shown
from snapmgr.tree.attributes import Handle, differences
from snapmgr.tree.entries import entries, walk_folders
from snapmgr.tree.survey import allocated
from snapmgr.tree.walk import FOLDER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from snapmgr.tree.entries import Entry, FolderStep

_CHUNK_BYTES = 1 << 20


def compare(
    source_fd: int,
    copy_fd: int,
    *,
    contents: Container[int] | None = None,
    apart: Container[str] = (),
    progress: Callable[[int], None] = lambda _done: None,
) -> Iterator[str]:
    """Yield in words, with the path, how the tree at `copy_fd` differs from `source_fd`.

    Names and kinds of all entries are compared. So are owners, modes, modification times, extended attributes, targets
    of symlinks, devices and hard links of everything but files, and of the files in `contents` also sizes and contents,
    read from the disk. `snapmgr.tree.copy.TreeCopy` compared the other files when it made them. Access times and
    sizes of folders are not compared.

    Args:
        source_fd: open folder of the original.
        copy_fd: open folder of the copy.
        contents: inode numbers of the copy's files that are compared in full; None for no file.
        apart: folders, relative to the root, whose contents and attributes are not compared; neither are the empty
            folders that btrfs has for nested subvolumes.
        progress: called with the number of compared bytes since the last call.

    Raises OSError with the path as its filename, StorageError as `walk`.
    """
    comparison = _Comparison(contents, apart, progress)
    try:
        yield from comparison.run(source_fd, copy_fd)
    finally:
        comparison.close()


class _Comparison:
    def __init__(self, contents: Container[int] | None, apart: Container[str], progress: Callable[[int], None]) -> None:
        self._contents = contents
        self._apart = apart
        self._progress = progress
        self._folders: list[int] = []
        self._first_names: dict[int, int] = {}
        self._copies: dict[int, int] = {}
        self._device = -1

    def close(self) -> None:
        for fd in self._folders:
            os.close(fd)
        self._folders.clear()

    def run(self, source_fd: int, copy_fd: int) -> Iterator[str]:
        missing = ""
        self._device = os.fstat(source_fd).st_dev
        for step in walk_folders(source_fd, skip=self._apart):
            path = step.path
            if missing and (path == missing or path.startswith(missing + "/")):
                continue
            missing = ""
            try:
                if step.entered:
                    yield from self._enter(step, copy_fd)
                else:
                    os.close(self._folders.pop())
            except (FileNotFoundError, NotADirectoryError):
                yield f"{shown(path)} is missing"
                missing = path
            except OSError as error:
                raise OSError(error.errno, error.strerror, error.filename or path) from error

    def _enter(self, step: FolderStep, root_fd: int) -> Iterator[str]:
        parent = self._folders[-1] if self._folders else root_fd
        fd = os.open(step.name or ".", FOLDER_FLAGS, dir_fd=parent)
        self._folders.append(fd)
        if step.path in self._apart or os.fstat(step.fd).st_dev != self._device:
            return
        for text in differences(Handle(step.fd), Handle(fd)):
            yield f"{shown(step.path or '.')} {text}"
        above = f"{step.path}/" if step.path else ""
        there = {entry.name: entry for entry in entries(fd)}
        for entry in step.listed:
            copy = there.pop(entry.name, None)
            if entry.is_folder:
                continue  # it is entered soon
            if copy is None:
                yield f"{shown(above + entry.name)} is missing"
            elif not (entry.is_file and copy.is_file) or self._contents is not None:
                try:
                    yield from self._entry(entry, above + entry.name, step.fd, fd)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, above + entry.name) from error
        for name in sorted(there):
            yield f"{shown(above + name)} should not be there"

    def _entry(self, entry: Entry, path: str, source_folder: int, folder: int) -> Iterator[str]:
        name = entry.name
        made = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if entry.is_file and stat.S_ISREG(made.st_mode) and made.st_ino not in (self._contents or ()):
            return
        info = os.stat(name, dir_fd=source_folder, follow_symlinks=False)
        for text in differences(Handle(source_folder, name), Handle(folder, name)):
            yield f"{shown(path)} {text}"
        if stat.S_ISLNK(info.st_mode) and stat.S_ISLNK(made.st_mode):
            aims = [os.readlink(name, dir_fd=fd) for fd in (source_folder, folder)]
            if aims[0] != aims[1]:
                yield f"{shown(path)} leads to {shown(aims[1])}, not to {shown(aims[0])}"
        both_files = stat.S_ISREG(info.st_mode) and stat.S_ISREG(made.st_mode)
        if not self._same_links(info, made):
            yield f"{shown(path)} is not one file with its other names"
        elif (
            both_files
            and info.st_size == made.st_size
            and not _same_contents(name, source_folder, folder, info.st_size)
        ):
            yield f"{shown(path)} has other contents"
        if both_files:
            self._progress(allocated(info))

    def _same_links(self, info: os.stat_result, made: os.stat_result) -> bool:
        """Whether hard links of a file in the source are hard links of one file in the copy, and vice versa."""
        if info.st_nlink == 1 and made.st_nlink == 1:
            return True
        return (
            self._first_names.setdefault(info.st_ino, made.st_ino) == made.st_ino
            and self._copies.setdefault(made.st_ino, info.st_ino) == info.st_ino
        )


def _same_contents(name: str, source_folder: int, folder: int, size_bytes: int) -> bool:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    source = os.open(name, flags, dir_fd=source_folder)
    try:
        copy = os.open(name, flags, dir_fd=folder)
        try:
            # Read from the disk, not from memory: the file was synced, so its clean pages can be dropped.
            os.posix_fadvise(copy, 0, 0, os.POSIX_FADV_DONTNEED)
            return _same_bytes(source, copy, size_bytes)
        finally:
            os.close(copy)
    finally:
        os.close(source)


def _same_bytes(source: int, copy: int, size_bytes: int) -> bool:
    position = 0
    while position < size_bytes:
        position = min(_next_data(source, position, size_bytes), _next_data(copy, position, size_bytes))
        wanted = min(_CHUNK_BYTES, size_bytes - position)
        if _read(source, position, wanted) != _read(copy, position, wanted):
            return False
        position += wanted
    return True


def _read(fd: int, position: int, wanted: int) -> bytes:
    # A read may be short; at the end of the file it is empty.
    parts = []
    while wanted and (part := os.pread(fd, wanted, position)):
        parts.append(part)
        position += len(part)
        wanted -= len(part)
    return b"".join(parts)


def _next_data(fd: int, position: int, end: int) -> int:
    try:
        return os.lseek(fd, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return end
