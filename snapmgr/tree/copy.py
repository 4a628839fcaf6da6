"""Copies a tree: shares blocks if the file system can, else copies data and keeps holes."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from msgspec import Struct, field

from snapmgr.contract.errors import StorageError
from snapmgr.system import kernel
from snapmgr.system.paths import shown
from snapmgr.tree.attributes import Handle, keep
from snapmgr.tree.walk import FOLDER_FLAGS, Step, allocated, is_full, reach, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Container

# Bytes between two progress reports; a disk with 100 MB/s writes them in 0.1 s.
_STEP_BYTES = 8 << 20
# Limit of dirty data of a file: gigabytes of dirty pages would delay the live server's own flushes.
_DIRTY_BYTES = 128 << 20
_LEADS_KEPT = 10_000


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
            progress: called with the number of bytes done since the last call.
        """
        self.tally = Tally()
        self._share = share
        self._progress = progress
        self._links: dict[tuple[int, int], str] = {}
        self._root_fd = -1

    def run(self, source_fd: int, copy_fd: int, *, apart: Container[str] = ()) -> None:
        """Copy the contents and attributes of the folder `source_fd` to the empty folder `copy_fd`.

        The folders in `apart`, relative to the root, are left empty. Attributes that the file system or our privileges
        do not allow are left out; `snapmgr.tree.compare` reports them. Raises StorageError that names the entry.
        """
        self._root_fd = copy_fd
        self._links.clear()
        self.tally.leads.clear()
        folders: list[int] = []
        path = "."
        try:
            for step in walk(source_fd, skip=apart):
                path = step.path or "."
                if step.kind == "enter":
                    folders.append(self._enter(step, folders[-1] if folders else -1))
                elif step.kind == "leave":
                    # Last, as adding entries changes the times, and a mode without "w" forbids it.
                    keep(Handle(step.fd), Handle(folders[-1]))
                    os.close(folders.pop())
                elif stat.S_ISREG(step.info.st_mode):
                    self._file(step, folders[-1])
                else:
                    self._special(step, folders[-1])
        except OSError as error:
            raise _failure(error, path) from error
        finally:
            for fd in folders:
                os.close(fd)

    def _enter(self, step: Step, parent: int) -> int:
        if parent < 0:
            copy = os.open(".", FOLDER_FLAGS, dir_fd=self._root_fd)
        else:
            os.mkdir(step.name, 0o700, dir_fd=parent)
            copy = os.open(step.name, FOLDER_FLAGS, dir_fd=parent)
            self.tally.folders += 1
        kernel.set_nocow(copy, nocow=kernel.is_nocow(step.fd))
        return copy

    def _file(self, step: Step, folder: int) -> None:
        if self._linked(step, folder):
            return
        # O_NONBLOCK: a FIFO that took the file's place must not hang us.
        source = os.open(step.name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=step.parent_fd)
        try:
            info = os.fstat(source)
            if (info.st_dev, info.st_ino) != (step.info.st_dev, step.info.st_ino):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            copy = os.open(step.name, flags, 0o600, dir_fd=folder)
            try:
                # Both must have the same attribute for a clone, and it can be set only on an empty file.
                kernel.set_nocow(copy, nocow=kernel.is_nocow(source))
                self._fill(source, copy, info)
                keep(Handle(source), Handle(copy))
            finally:
                os.close(copy)
        finally:
            os.close(source)

    def _fill(self, source: int, copy: int, info: os.stat_result) -> None:
        self.tally.files += 1
        self.tally.size_bytes += info.st_size
        if not info.st_size:
            return
        if self._share and kernel.try_clone_file(source, copy):
            self.tally.shared_files += 1
            self._progress(allocated(info))
            return
        self.tally.copied_files += 1
        self.tally.inodes.add(os.fstat(copy).st_ino)
        self.tally.copied_bytes += self._copy_data(source, copy, info.st_size)

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
                self._progress(sent)
                if dirty_bytes >= _DIRTY_BYTES:
                    os.fdatasync(copy)
                    dirty_bytes = 0
        return copied_bytes

    def _special(self, step: Step, folder: int) -> None:
        if self._linked(step, folder):
            return
        if stat.S_ISLNK(step.info.st_mode):
            aim = os.readlink(step.name, dir_fd=step.parent_fd)
            os.symlink(aim, step.name, dir_fd=folder)
            self.tally.symlinks += 1
            if leads_out(step.path, aim) and len(self.tally.leads) < _LEADS_KEPT:
                self.tally.leads.append((step.path, aim))
        else:
            os.mknod(step.name, step.info.st_mode, step.info.st_rdev, dir_fd=folder)
            self.tally.special += 1
        # Opening them has side effects, so attributes are set by name, in a folder that only we can enter.
        keep(Handle(step.parent_fd, step.name), Handle(folder, step.name))

    def _linked(self, step: Step, folder: int) -> bool:
        """Create a hard link if the file was copied already; return whether it was."""
        if step.info.st_nlink == 1:
            return False
        first = self._links.setdefault((step.info.st_dev, step.info.st_ino), step.path)
        if first == step.path:
            return False
        above, _, name = first.rpartition("/")
        first_folder = reach(self._root_fd, above)
        try:
            os.link(name, step.name, src_dir_fd=first_folder, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(first_folder)
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
