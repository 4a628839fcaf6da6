"""Copies and compares owner, mode, times and extended attributes of files."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# btrfs.compression and the like are settings of the file system, not part of the data.
_OF_THE_STORAGE = "btrfs."
# Attributes that the file system or our privileges do not allow are reported by the comparison, for all files together.
_NOT_ALLOWED = frozenset({errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ERANGE})
_COARSE_NS = 2_000_000_000
_SOME_BLOCKS = 64


class Handle:
    """A file, by an open descriptor, or (symlinks, devices) by its name in an open folder."""

    def __init__(self, fd: int, name: str | None = None) -> None:
        """`fd` is the file itself, or the folder that contains `name`."""
        self._fd = fd
        self._name = name
        # There is no lgetxattrat(2) yet; this path is short, however long the folder's own is.
        self._path: int | str = fd if name is None else f"/proc/self/fd/{fd}/{name}"
        self._follow = name is None

    def info(self) -> os.stat_result:
        """Return its status."""
        if self._name is None:
            return os.fstat(self._fd)
        return os.stat(self._name, dir_fd=self._fd, follow_symlinks=False)

    def xattrs(self) -> dict[str, bytes]:
        """Return its extended attributes that belong to the data; none if the file system has none."""
        return _xattrs(self._path, follow=self._follow)

    def own(self, uid: int, gid: int) -> None:
        """Set its owner and group."""
        if self._name is None:
            os.fchown(self._fd, uid, gid)
        else:
            os.chown(self._name, uid, gid, dir_fd=self._fd, follow_symlinks=False)

    def set_mode(self, mode: int) -> None:
        """Set its mode."""
        if self._name is None:
            os.fchmod(self._fd, mode)
        else:
            os.chmod(self._name, mode, dir_fd=self._fd)

    def set_times(self, atime_ns: int, mtime_ns: int) -> None:
        """Set its times."""
        if self._name is None:
            os.utime(self._fd, ns=(atime_ns, mtime_ns))
        else:
            os.utime(self._name, ns=(atime_ns, mtime_ns), dir_fd=self._fd, follow_symlinks=False)

    def set_xattrs(self, wanted: dict[str, bytes]) -> None:
        """Set its extended attributes as far as allowed, and remove others, such as those inherited from a folder."""
        there = self.xattrs()
        for name in there.keys() - wanted.keys():
            with suppress(OSError):
                os.removexattr(self._path, name, follow_symlinks=self._follow)
        for name, value in wanted.items():
            if there.get(name) != value:
                try:
                    os.setxattr(self._path, name, value, follow_symlinks=self._follow)
                except OSError as error:
                    if error.errno not in _NOT_ALLOWED and not self._too_large(error):
                        raise

    def _too_large(self, error: OSError) -> bool:
        # ext4 reports "no space left" also if only the inode's block for attributes is full.
        room = os.fstatvfs(self._fd)
        return error.errno == errno.E2BIG or (error.errno == errno.ENOSPC and room.f_bavail > _SOME_BLOCKS)


def _xattrs(path: int | str, *, follow: bool = True) -> dict[str, bytes]:
    try:
        names = os.listxattr(path, follow_symlinks=follow)
        if not names:
            return {}
        return {
            name: os.getxattr(path, name, follow_symlinks=follow)
            for name in names
            if not name.startswith(_OF_THE_STORAGE)
        }
    except OSError as error:
        if error.errno in _NOT_ALLOWED:
            return {}
        raise


def keep(source: Handle, copy: Handle) -> None:
    """Copy owner, extended attributes, mode and times of `source` to `copy`, as far as allowed.

    The order matters: chown drops set-user-id bits and file capabilities, and a mode may forbid setxattr to the owner.
    """
    info, made = source.info(), copy.info()
    _keep_owner(copy, info, made)
    copy.set_xattrs(source.xattrs())
    if not stat.S_ISLNK(info.st_mode):
        copy.set_mode(stat.S_IMODE(info.st_mode))
    copy.set_times(info.st_atime_ns, info.st_mtime_ns)


def _keep_owner(copy: Handle, info: os.stat_result, made: os.stat_result) -> None:
    if made.st_uid != info.st_uid or made.st_gid != info.st_gid:
        try:
            copy.own(info.st_uid, info.st_gid)
        except OSError as error:
            if error.errno not in _NOT_ALLOWED:
                raise


def keep_file(source_fd: int, copy_fd: int, info: os.stat_result, *, born: tuple[int, int, int]) -> list[str]:
    """Do what `keep` does for a new regular file, and return its `differences` as the kernel then tells them.

    `info` is the status of `source_fd`; `born` are mode, owner and group that the copy should have now. Asks nothing
    twice: this is done for each of many small files.
    """
    wanted = _xattrs(source_fd)
    if wanted or (info.st_mode, info.st_uid, info.st_gid) != born:
        _set(copy_fd, info, wanted)
    os.utime(copy_fd, ns=(info.st_atime_ns, info.st_mtime_ns))
    made, there = os.fstat(copy_fd), _xattrs(copy_fd)
    if there != wanted or (made.st_mode, made.st_uid, made.st_gid) != (info.st_mode, info.st_uid, info.st_gid):
        # It inherited something from its folder.
        _set(copy_fd, info, wanted)
        os.utime(copy_fd, ns=(info.st_atime_ns, info.st_mtime_ns))
        made, there = os.fstat(copy_fd), _xattrs(copy_fd)
    if (
        made.st_mode == info.st_mode
        and made.st_mtime_ns == info.st_mtime_ns
        and made.st_size == info.st_size
        and made.st_uid == info.st_uid
        and made.st_gid == info.st_gid
        and there == wanted
    ):
        return []
    return list(_differences(info, made, wanted, there))


def _set(copy_fd: int, info: os.stat_result, wanted: dict[str, bytes]) -> None:
    copy = Handle(copy_fd)
    _keep_owner(copy, info, os.fstat(copy_fd))
    copy.set_xattrs(wanted)
    os.fchmod(copy_fd, stat.S_IMODE(info.st_mode))


def differences(source: Handle, copy: Handle) -> Iterator[str]:
    """Yield in words the differences between the attributes of two files, except access times."""
    return _differences(source.info(), copy.info(), source.xattrs(), copy.xattrs())


def _differences(
    info: os.stat_result, made: os.stat_result, wanted: dict[str, bytes], there: dict[str, bytes]
) -> Iterator[str]:
    if stat.S_IFMT(info.st_mode) != stat.S_IFMT(made.st_mode):
        yield f"is {_kind(made)}, not {_kind(info)}"
        return
    if (info.st_uid, info.st_gid) != (made.st_uid, made.st_gid):
        yield f"belongs to {made.st_uid}:{made.st_gid}, not to {info.st_uid}:{info.st_gid}"
    if stat.S_IMODE(info.st_mode) != stat.S_IMODE(made.st_mode):
        yield f"has mode {stat.S_IMODE(made.st_mode):04o}, not {stat.S_IMODE(info.st_mode):04o}"
    if stat.S_ISREG(info.st_mode) and info.st_size != made.st_size:
        yield f"has {made.st_size} bytes, not {info.st_size}"
    if (stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode)) and info.st_rdev != made.st_rdev:
        yield "is another device"
    if not _same_time(info.st_mtime_ns, made.st_mtime_ns):
        yield f"has the modification time {made.st_mtime_ns} ns, not {info.st_mtime_ns} ns"
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            how = "lacks" if name not in there else "should not have" if name not in wanted else "has another value of"
            yield f"{how} the extended attribute {name}"


def _same_time(wanted_ns: int, there_ns: int) -> bool:
    # Some file systems (ext4 with 128-byte inodes, NFS servers, FAT) store only whole seconds.
    coarse = there_ns % 1_000_000_000 == 0 and abs(wanted_ns - there_ns) < _COARSE_NS
    return wanted_ns == there_ns or coarse


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISREG, "a file"),
    (stat.S_ISLNK, "a symlink"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


def _kind(info: os.stat_result) -> str:
    return next((text for fits, text in _KINDS if fits(info.st_mode)), "a device")
