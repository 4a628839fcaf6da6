"""Copies a tree: shares blocks if the file system can, else copies data and keeps holes."""

from __future__ import annotations

import errno
import os
import stat
import threading
from typing import TYPE_CHECKING

from msgspec import Struct, field

from snapmgr.contract.errors import StorageError
from snapmgr.system import kernel
from snapmgr.system.paths import shown
from snapmgr.tree.attributes import Handle, keep, keep_file
from snapmgr.tree.entries import walk_folders
from snapmgr.tree.walk import FOLDER_FLAGS, is_full, reach, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from snapmgr.tree.entries import Entry, FolderStep

# O_NONBLOCK: a FIFO that took the file's place must not hang us.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MAKE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Most bytes of one copying call; a disk with 100 MB/s writes them in 0.1 s.
_STEP_BYTES = 8 << 20
# Least between two progress reports.
_REPORT_BYTES = 1 << 20
_REPORT_ENTRIES = 256
# Limit of dirty data of a file: gigabytes of dirty pages would delay the live server's own flushes.
_DIRTY_BYTES = 128 << 20
_LEADS_KEPT = 10_000
DIFFERENCES_KEPT = 1000
"""Most differences that a report names; one more is collected."""


class Tally(Struct):
    """What was copied."""

    folders: int = 0
    files: int = 0
    """Files, not counting further names of a file, which are `links`."""
    links: int = 0
    symlinks: int = 0
    special: int = 0
    """FIFOs, sockets and devices."""
    size_bytes: int = 0
    """The files' sizes, holes included."""
    shared_files: int = 0
    copied_files: int = 0
    copied_bytes: int = 0
    inodes: set[int] = field(default_factory=set)
    """Inodes of the copied files, which have to be read back."""
    leads: list[tuple[str, str]] = field(default_factory=list)
    """Symlinks of the last tree that lead out of it, with their targets; limited to the first ones."""


class TreeCopy:
    """Copies trees into folders of one file system; `tally` adds up what was done."""

    def __init__(self, *, share: bool, progress: Callable[[int], None]) -> None:
        """Prepare a copy.

        Args:
            share: try to share blocks (FICLONE) before copying data.
            progress: called with what was done since the last call: entries if blocks are shared, else bytes.
        """
        self.tally = Tally()
        self.differences: list[str] = []
        """How files of the last tree differ from their originals, with their paths: limited to the first ones."""
        self._share = share
        self._progress = progress
        self._links: dict[tuple[int, int], str] = {}
        self._root_fd = -1
        self._path = "."
        self._born_nocow: bool | None = None
        self._user = os.geteuid(), os.getegid()
        self._unreported = 0

    def run(self, source_fd: int, copy_fd: int, *, apart: Container[str] = ()) -> None:
        """Copy the contents and attributes of the folder `source_fd` to the empty folder `copy_fd`.

        The folders in `apart`, relative to the root, are left empty. Attributes that the file system or our privileges
        do not allow are left out; `differences` names them. Raises StorageError that names the entry.
        """
        self._root_fd = copy_fd
        self._links.clear()
        self.tally.leads.clear()
        self.differences.clear()
        folders: list[int] = []
        # Only we can enter the folder yet, and most files then get their mode when they are made. But the umask is that
        # of the process: a program that another thread starts now (`auto_extended`) would inherit it.
        umask = os.umask(0) if threading.active_count() == 1 else None
        try:
            for step in walk_folders(source_fd, skip=apart):
                self._path = step.path or "."
                try:
                    if step.entered:
                        folders.append(self._enter(step, folders[-1] if folders else -1))
                        self._fill_folder(step, folders[-1])
                    else:
                        # Last, as adding entries changes the times, and a mode without "w" forbids it.
                        keep(Handle(step.fd), Handle(folders[-1]))
                        os.close(folders.pop())
                except OSError as error:
                    raise _failure(error, self._path) from error
        except OSError as error:
            raise _failure(error, error.filename or ".") from error
        finally:
            if umask is not None:
                os.umask(umask)
            for fd in folders:
                os.close(fd)
        self._progress(self._unreported)
        self._unreported = 0

    def _enter(self, step: FolderStep, parent: int) -> int:
        if parent < 0:
            copy = os.open(".", FOLDER_FLAGS, dir_fd=self._root_fd)
        else:
            os.mkdir(step.name, 0o700, dir_fd=parent)
            copy = os.open(step.name, FOLDER_FLAGS, dir_fd=parent)
            self.tally.folders += 1
        kernel.set_nocow(copy, nocow=kernel.is_nocow(step.fd))
        return copy

    def _fill_folder(self, step: FolderStep, folder: int) -> None:
        above = f"{step.path}/" if step.path else ""
        self._born_nocow = None
        for entry in step.listed:
            if not entry.is_folder:
                self._path = above + entry.name
                (self._file if entry.is_file else self._special)(entry, step.fd, folder)
            if self._share:
                self._report(1, _REPORT_ENTRIES)

    def _file(self, entry: Entry, source_folder: int, folder: int) -> None:
        source = os.open(entry.name, _READ_FLAGS, dir_fd=source_folder)
        try:
            info = os.fstat(source)
            if info.st_ino != entry.inode:
                self._refuse_exchanged(entry, source_folder, info)
            if info.st_nlink > 1 and self._linked(info, entry.name, folder):
                return
            mode = info.st_mode & 0o777 | 0o600
            copy = os.open(entry.name, _MAKE_FLAGS, mode, dir_fd=folder)
            try:
                nocow = kernel.is_nocow(source)
                if self._born_nocow is None:
                    # By its folder or its mount, so all new files of one folder have the same.
                    self._born_nocow = kernel.is_nocow(copy)
                if nocow != self._born_nocow:
                    # A clone needs the same attribute on both, and it can be set only on an empty file.
                    kernel.set_nocow(copy, nocow=nocow)
                self.tally.files += 1
                self.tally.size_bytes += info.st_size
                if info.st_size:
                    if self._share and kernel.try_clone_file(source, copy):
                        self.tally.shared_files += 1
                    else:
                        self._copy(source, copy, info)
                for text in keep_file(source, copy, info, born=(stat.S_IFREG | mode, *self._user)):
                    self._differs(text)
            finally:
                os.close(copy)
        finally:
            os.close(source)

    def _refuse_exchanged(self, entry: Entry, folder: int, opened: os.stat_result) -> None:
        # The number in a folder may be another one than the file's, so its name is looked at before it is refused.
        info = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
        if (info.st_dev, info.st_ino) != (opened.st_dev, opened.st_ino):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def _copy(self, source: int, copy: int, info: os.stat_result) -> None:
        self.tally.copied_files += 1
        self.tally.inodes.add(os.fstat(copy).st_ino)
        self.tally.copied_bytes += self._copy_data(source, copy, info.st_size)

    def _report(self, done: int, least: int) -> None:
        self._unreported += done
        if self._unreported >= least:
            self._progress(self._unreported)
            self._unreported = 0

    def _differs(self, text: str) -> None:
        if len(self.differences) <= DIFFERENCES_KEPT:
            self.differences.append(f"{shown(self._path)} {text}")

    def _copy_data(self, source: int, copy: int, size_bytes: int) -> int:
        os.ftruncate(copy, size_bytes)
        position, copied_bytes, dirty_bytes = 0, 0, 0
        while position < size_bytes:
            try:
                position = os.lseek(source, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end
                    break
                raise
            end = min(os.lseek(source, position, os.SEEK_HOLE), size_bytes)
            os.lseek(copy, position, os.SEEK_SET)
            while position < end:
                sent = os.sendfile(copy, source, position, min(end - position, _STEP_BYTES))
                if sent == 0:
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
                position += sent
                copied_bytes += sent
                dirty_bytes += sent
                if not self._share:
                    self._report(sent, _REPORT_BYTES)
                if dirty_bytes >= _DIRTY_BYTES:
                    os.fdatasync(copy)
                    dirty_bytes = 0
        return copied_bytes

    def _special(self, entry: Entry, source_folder: int, folder: int) -> None:
        name = entry.name
        info = os.stat(name, dir_fd=source_folder, follow_symlinks=False)
        if info.st_nlink > 1 and self._linked(info, name, folder):
            return
        if stat.S_ISLNK(info.st_mode):
            aim = os.readlink(name, dir_fd=source_folder)
            os.symlink(aim, name, dir_fd=folder)
            self.tally.symlinks += 1
            if leads_out(self._path, aim) and len(self.tally.leads) < _LEADS_KEPT:
                self.tally.leads.append((self._path, aim))
        elif stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        else:
            os.mknod(name, info.st_mode, info.st_rdev, dir_fd=folder)
            self.tally.special += 1
        # Opening them has side effects, so attributes are set by name, in a folder that only we can enter.
        keep(Handle(source_folder, name), Handle(folder, name))

    def _linked(self, info: os.stat_result, name: str, folder: int) -> bool:
        """Create a hard link if the file was copied already; return whether it was."""
        first = self._links.setdefault((info.st_dev, info.st_ino), self._path)
        if first == self._path:
            return False
        above, _, first_name = first.rpartition("/")
        first_folder = reach(self._root_fd, above)
        try:
            os.link(first_name, name, src_dir_fd=first_folder, dst_dir_fd=folder, follow_symlinks=False)
            made = [
                os.stat(one, dir_fd=fd, follow_symlinks=False)
                for one, fd in ((first_name, first_folder), (name, folder))
            ]
        finally:
            os.close(first_folder)
        if made[0].st_ino != made[1].st_ino:
            self._differs("is not one file with its other names")
        self.tally.links += 1
        return True


def leads_out(path: str, aim: str) -> bool:
    """Return whether a symlink at `path`, relative to a tree's root, leads out of the tree, judged by its target."""
    return aim.startswith("/") or os.path.normpath(os.path.join(os.path.dirname(path), aim)).split("/")[0] == ".."


_HINTS = {
    errno.EMFILE: "the folders are nested too deeply for the limit of open files (ulimit -n)",
    errno.EPERM: "run as root",
    errno.EIO: "see the kernel log: a device may be failing",
}


def _failure(error: OSError, path: str) -> StorageError:
    if is_full(error):
        return StorageError(f"no space left for {shown(path)}", hint="make room, or name a larger place")
    if error.errno == errno.ESTALE:
        return StorageError(f"{shown(path)} changed while it was copied", hint="try again")
    return StorageError(f"cannot copy {shown(path)}: {error.strerror}", hint=_HINTS.get(error.errno or 0))


def can_share(source_fd: int, scratch_fd: int) -> bool:
    """Return whether files of the tree at `source_fd` can share blocks with files in the folder `scratch_fd`.

    Tried with the tree's first file that is not empty; the trial copy is removed. Raises OSError, StorageError.
    """
    name = "trial~"
    for step in walk(source_fd):
        if step.kind != "entry" or not stat.S_ISREG(step.info.st_mode) or not step.info.st_size:
            continue
        source = os.open(step.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=step.parent_fd)
        try:
            copy = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=scratch_fd)
            try:
                kernel.set_nocow(copy, nocow=kernel.is_nocow(source))
                return kernel.try_clone_file(source, copy)
            finally:
                os.close(copy)
                os.unlink(name, dir_fd=scratch_fd)
        finally:
            os.close(source)
    return False
