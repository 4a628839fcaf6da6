"""Copies a directory tree by descriptors.

Every step is taken relative to an open directory and never through a symlink or into another mount, so that nobody who
can write to the tree can lead a walk elsewhere. Names are what os.fsdecode makes of the bytes on disk.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import Literal

from snapmgr.api import StorageError, format_size, kernel
from snapmgr.api.copystore import entries, reach, subfolder
from snapmgr.api.kernel import shown

Method = Literal["reflink", "copy"]

# O_NONBLOCK: a FIFO that took a file's place must not hang us.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK
_MAKE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Between two looks at the clock in a plain copy; a disk that manages 100 MB/s writes it in 0.3 s.
_COPY_STEP_BYTES = 32 << 20


class TreeCopy:
    """Copies one tree, file by file, until a deadline."""

    def __init__(self, *, method: Method, deadline: float, excluded: frozenset[str], nocow: bool) -> None:
        """Prepare a copy.

        Args:
            method: "reflink" shares blocks, "copy" reads and writes data (holes stay holes).
            deadline: time.monotonic() after which no further file is begun.
            excluded: mounts and subvolumes, relative to the tree, that become empty folders; others are an error.
            nocow: whether the file system is btrfs, where the NOCOW attribute must agree before a clone.
        """
        self._method = method
        self._deadline = deadline
        self._excluded = excluded
        self._nocow = nocow
        self._links: dict[tuple[int, int], str] = {}
        self._device = -1
        self._root_fd = -1

    def run(self, source_fd: int, copy_fd: int) -> None:
        """Copy all in the folder `source_fd` and its own attributes into the empty folder `copy_fd`.

        Raises StorageError that names the entry if it changed meanwhile, cannot be copied, or the deadline has passed.
        """
        self._device = os.fstat(source_fd).st_dev
        self._root_fd = copy_fd
        try:
            self._fill(source_fd, copy_fd, "")
        except OSError as error:
            raise self._failure(error, ".") from error

    def _fill(self, source_fd: int, copy_fd: int, path: str) -> None:
        if self._nocow:
            kernel.set_nocow(copy_fd, nocow=kernel.is_nocow(source_fd))
        for entry in entries(source_fd):
            name = entry.name
            if time.monotonic() > self._deadline:
                raise self._late(path + name)
            try:
                if entry.is_folder:
                    self._folder(source_fd, copy_fd, name, path)
                elif not entry.is_file:
                    self._special(source_fd, copy_fd, name, path)
                else:
                    self._file(source_fd, copy_fd, name, path)
            except OSError as error:
                raise self._failure(error, path + name) from error
        # Last: adding entries would change the times, and a mode without "w" would forbid adding them.
        _keep_attributes(source_fd, copy_fd, os.fstat(source_fd), os.fstat(copy_fd))

    @staticmethod
    def _late(path: str) -> StorageError:
        return StorageError(
            f"the copy was not finished in time: {shown(path)} was next",
            hint="allow more time, or defragment: each extent costs about 14 µs",
        )

    def _failure(self, error: OSError, path: str) -> StorageError:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE):
            return StorageError(
                f"{shown(path)} changed or vanished while it was copied",
                hint="a copy of files is consistent only if nothing writes to the directory meanwhile",
            )
        if error.errno == errno.EXDEV:
            return StorageError(
                f"{shown(path)} is another mount or subvolume, or the store is on another file system",
                hint="try again: it has appeared since the directory was looked at",
            )
        if error.errno in (errno.EINVAL, errno.ETXTBSY, errno.EOPNOTSUPP) and self._method == "reflink":
            return StorageError(
                f"the file system refuses to clone {shown(path)}: {error.strerror}",
                hint="swap files, and files of other checksum or NOCOW settings, cannot be cloned",
            )
        said = error.strerror
        if error.errno == errno.ENOSPC:
            room = os.fstatvfs(self._root_fd)
            said = f"{said}: {format_size(room.f_bfree * room.f_frsize)} and {room.f_ffree} inodes are free"
        return StorageError(f"cannot copy {shown(path)}: {said}", hint=_HINTS.get(error.errno or 0))

    def _folder(self, source_fd: int, copy_fd: int, name: str, path: str) -> None:
        os.mkdir(name, 0o700, dir_fd=copy_fd)
        with subfolder(name, copy_fd) as copy:
            try:
                with subfolder(name, source_fd) as source:
                    if os.fstat(source).st_dev == self._device:
                        self._fill(source, copy, f"{path}{name}/")
                        return
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
            if path + name not in self._excluded:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            info = os.stat(name, dir_fd=source_fd, follow_symlinks=False)
            os.fchmod(copy, stat.S_IMODE(info.st_mode))
            if os.geteuid() == 0:
                os.fchown(copy, info.st_uid, info.st_gid)

    def _file(self, source_fd: int, copy_fd: int, name: str, path: str) -> None:
        try:
            source = kernel.open_beneath(name, source_fd, _READ_FLAGS)
        except OSError as error:
            if error.errno != errno.EXDEV or path + name not in self._excluded:
                raise
            os.close(os.open(name, _MAKE_FLAGS, 0o600, dir_fd=copy_fd))
            return
        try:
            info = os.fstat(source)
            if not stat.S_ISREG(info.st_mode):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            if info.st_nlink > 1 and self._linked(info, copy_fd, name, path):
                return
            # Nobody else can enter the store, and most files then need no chmod, which is a transaction of its own.
            copy = os.open(name, _MAKE_FLAGS, info.st_mode & 0o777 | 0o600, dir_fd=copy_fd)
            try:
                if self._nocow:
                    kernel.set_nocow(copy, nocow=kernel.is_nocow(source))
                if info.st_size:
                    if self._method == "reflink":
                        kernel.clone_file(source, copy)
                    else:
                        self._copy_data(source, copy, info.st_size, path + name)
                _keep_attributes(source, copy, info, os.fstat(copy))
            finally:
                os.close(copy)
        finally:
            os.close(source)

    def _special(self, source_fd: int, copy_fd: int, name: str, path: str) -> None:
        info = os.stat(name, dir_fd=source_fd, follow_symlinks=False)
        if info.st_nlink > 1 and self._linked(info, copy_fd, name, path):
            return
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=source_fd), name, dir_fd=copy_fd)
        elif stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        else:
            os.mknod(name, info.st_mode, info.st_rdev, dir_fd=copy_fd)
        # Neither can be opened without consequences, so its attributes go by name, in a folder that only we can enter.
        made = os.stat(name, dir_fd=copy_fd, follow_symlinks=False)
        if (made.st_uid, made.st_gid) != (info.st_uid, info.st_gid):
            os.chown(name, info.st_uid, info.st_gid, dir_fd=copy_fd, follow_symlinks=False)
        _keep_xattrs(f"/proc/self/fd/{source_fd}/{name}", f"/proc/self/fd/{copy_fd}/{name}")
        if not stat.S_ISLNK(info.st_mode):
            os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=copy_fd)
        os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=copy_fd, follow_symlinks=False)

    def _linked(self, info: os.stat_result, copy_fd: int, name: str, path: str) -> bool:
        first = self._links.setdefault((info.st_dev, info.st_ino), path + name)
        if first == path + name:
            return False
        # Step by step: this path may be longer than a system call takes.
        above, _, first_name = first.rpartition("/")
        first_fd = reach(self._root_fd, above)
        try:
            os.link(first_name, name, src_dir_fd=first_fd, dst_dir_fd=copy_fd, follow_symlinks=False)
        finally:
            os.close(first_fd)
        return True

    def _copy_data(self, source: int, copy: int, size_bytes: int, path: str) -> None:
        os.ftruncate(copy, size_bytes)
        position = 0
        while position < size_bytes:
            try:
                position = os.lseek(source, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end
                    return
                raise
            end = min(os.lseek(source, position, os.SEEK_HOLE), size_bytes)
            os.lseek(copy, position, os.SEEK_SET)
            while position < end:
                if time.monotonic() > self._deadline:
                    raise self._late(path)
                sent = os.sendfile(copy, source, position, min(end - position, _COPY_STEP_BYTES))
                if sent == 0:
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
                position += sent


_HINTS = {
    errno.ENOSPC: "free space in the file system of the store",
    errno.EDQUOT: "the quota of the store's owner is used up",
    errno.EMFILE: "the directory is nested too deeply for the limit of open files (ulimit -n)",
}


def _keep_attributes(source: int, copy: int, info: os.stat_result, made: os.stat_result) -> None:
    """Give the copy the attributes of its source, given the status of both."""
    # The order matters: chown drops set-user-id bits and file capabilities, and a mode may forbid its owner setxattr.
    others = made.st_uid != info.st_uid or made.st_gid != info.st_gid
    if others:
        os.fchown(copy, info.st_uid, info.st_gid)
    if _keep_xattrs(source, copy) or others or made.st_mode != info.st_mode:
        os.fchmod(copy, stat.S_IMODE(info.st_mode))
    os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))


def _keep_xattrs(source: int | str, copy: int | str) -> bool:
    """Copy the extended attributes; return whether there were any."""
    follow = isinstance(source, int)
    try:
        names = os.listxattr(source, follow_symlinks=follow)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EPERM):
            return False
        raise
    for name in names:
        value = os.getxattr(source, name, follow_symlinks=follow)
        try:
            os.setxattr(copy, name, value, follow_symlinks=follow)
        except OSError:
            # A security label that an ordinary user may not set is often there already.
            if name not in os.listxattr(copy, follow_symlinks=follow) or value != os.getxattr(
                copy, name, follow_symlinks=follow
            ):
                raise
    return bool(names)
