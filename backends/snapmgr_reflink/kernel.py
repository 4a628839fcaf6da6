"""The system calls that Python does not offer: FICLONE, FIEMAP, openat2, renameat2, syncfs, file systems' identities.

Numbers and layouts are those of linux/fs.h, linux/fiemap.h, linux/openat2.h, linux/btrfs.h and xfs_fs.h, which the
kernel keeps the same on all machines with 64-bit `long`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
import uuid
from dataclasses import dataclass

_FICLONE = 0x40049409
_FIEMAP = 0xC020660B
_GETFLAGS = 0x80086601
_SETFLAGS = 0x40086602
_GETFSUUID = 0x80111500
_XFS_GEOMETRY = 0x8100587E
_XFS_FREE_EOFBLOCKS = 0x8080583A
_BTRFS_FS_INFO = 0x8400941F
_BTRFS_SUBVOL_INFO = 0x81F8943C
_FS_IOC_GETVERSION = 0x80087601

_NOCOW_FLAG = 0x00800000
_XFS_REFLINK_FLAG = 1 << 20
_XFS_EOFBLOCKS = struct.Struct("=II120x")
_XFS_EOFBLOCKS_VERSION = 1
_XFS_EOFBLOCKS_SYNC = 1

_FIEMAP_HEADER = struct.Struct("=QQIIII")
_FIEMAP_EXTENT = struct.Struct("=QQQQQIIII")
_FIEMAP_SYNC = 0x1
_EXTENT_LAST = 0x1
_EXTENT_ENCODED = 0x8
_EXTENT_SHARED = 0x2000
_EXTENTS_A_CALL = 512

_SYS_OPENAT2 = 437  # the same number on every architecture
_OPEN_HOW = struct.Struct("=QQQ")
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RENAME_NOREPLACE = 1

_UUID_BYTES = 16
_LONG_BYTES = 8
_WHOLE_FILE = 2**64 - 1

# CDLL releases the GIL around each call and keeps errno for us.
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Extents:
    """A file's extents as FIEMAP counts them."""

    exclusive_bytes: int
    """Bytes in extents that no other file shares."""
    encoded: bool
    """Whether an unshared extent is compressed or encrypted: then its size on disk is not known."""


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    """What decides where a directory's files can be cloned to."""

    id: str
    """UUID where there is one: the same after a reboot, unlike st_dev."""
    subvolume: int
    """btrfs: number of the subvolume, which is never used again; else 0. Inode numbers repeat between subvolumes."""
    reflinks: bool
    """Whether FICLONE is to be expected; only a probe knows."""


def _fail(path: str | int) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path if isinstance(path, str) else None)


def clone_file(source_fd: int, copy_fd: int) -> None:
    """Make `copy_fd` share all blocks of `source_fd` (FICLONE); atomic for this one file. Raises OSError."""
    fcntl.ioctl(copy_fd, _FICLONE, source_fd)


def open_beneath(name: str, dir_fd: int, flags: int) -> int:
    """Open one entry of a directory, never through a symlink (ELOOP) and never into another mount (EXDEV).

    st_dev does not show a bind mount of the same file system; RESOLVE_NO_XDEV does. Raises OSError, ENOSYS before
    Linux 5.6.
    """
    encoded = os.fsencode(name)
    # O_LARGEFILE is implied: openat2 refuses flags that it does not know, and 64-bit systems know no other files.
    how = _OPEN_HOW.pack(
        flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0, _RESOLVE_NO_XDEV | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
    )
    while True:
        fd = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(dir_fd),
            ctypes.c_char_p(encoded),
            ctypes.c_char_p(how),
            ctypes.c_size_t(_OPEN_HOW.size),
        )
        if fd >= 0:
            return int(fd)
        # EAGAIN: something was renamed in the meantime and the kernel asks to try again (openat2(2)).
        if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
            raise _fail(name)


def rename_new(old: str, new: str, dir_fd: int) -> None:
    """Rename within a directory, but never onto something: rename(2) would replace an empty folder. Raises OSError."""
    done = _libc.renameat2(
        ctypes.c_int(dir_fd),
        ctypes.c_char_p(os.fsencode(old)),
        ctypes.c_int(dir_fd),
        ctypes.c_char_p(os.fsencode(new)),
        ctypes.c_uint(_RENAME_NOREPLACE),
    )
    if done != 0:
        raise _fail(new)


def sync_file_system(fd: int) -> None:
    """Write all dirty data of the file system that holds `fd` (syncfs). Raises OSError, also for lost writes."""
    if _libc.syncfs(ctypes.c_int(fd)) != 0:
        raise _fail(fd)


def free_removed_files(fd: int) -> bool:
    """Wait until XFS has freed what unlinked files held; False where this is not XFS or not root.

    XFS frees them in the background, which neither syncfs nor statfs waits for; this ioctl does (xfs_blockgc_free_space
    ends with xfs_inodegc_flush).
    """
    try:
        fcntl.ioctl(fd, _XFS_FREE_EOFBLOCKS, _XFS_EOFBLOCKS.pack(_XFS_EOFBLOCKS_VERSION, _XFS_EOFBLOCKS_SYNC))
    except OSError:
        return False
    return True


def is_nocow(fd: int) -> bool:
    """Return whether a file (or folder, for its future files) has the NOCOW attribute (chattr +C)."""
    return bool(_flags(fd) & _NOCOW_FLAG)


def set_nocow(fd: int, *, nocow: bool) -> None:
    """Give an *empty* file, or a folder, the NOCOW attribute or take it away; nothing is called if it is as wanted."""
    flags = _flags(fd)
    wanted = flags | _NOCOW_FLAG if nocow else flags & ~_NOCOW_FLAG
    if wanted != flags:
        fcntl.ioctl(fd, _SETFLAGS, struct.pack("=q", wanted))


def _flags(fd: int) -> int:
    # The number says long, the kernel moves an int (ioctl_iflags(2)).
    return int(struct.unpack("=i", fcntl.ioctl(fd, _GETFLAGS, b"\0" * 8)[:4])[0])


def count_extents(fd: int) -> int:
    """Return the number of extents of a file; 1 where the file system does not tell."""
    request = _FIEMAP_HEADER.pack(0, _WHOLE_FILE, 0, 0, 0, 0)
    try:
        answer = fcntl.ioctl(fd, _FIEMAP, request)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EBADR):
            return 1
        raise
    return int(_FIEMAP_HEADER.unpack(answer)[3])


def exclusive_extents(fd: int) -> Extents | None:
    """Return what of a file is its own, flushed first; None where the file system does not tell."""
    start, exclusive_bytes, encoded = 0, 0, False
    while True:
        request = bytearray(_FIEMAP_HEADER.size + _EXTENTS_A_CALL * _FIEMAP_EXTENT.size)
        _FIEMAP_HEADER.pack_into(request, 0, start, _WHOLE_FILE - start, _FIEMAP_SYNC, 0, _EXTENTS_A_CALL, 0)
        try:
            fcntl.ioctl(fd, _FIEMAP, request)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EBADR):
                return None
            raise
        count = int(_FIEMAP_HEADER.unpack_from(request)[3])
        flags = _EXTENT_LAST
        for index in range(count):
            logical, _, length, _, _, flags, *_ = _FIEMAP_EXTENT.unpack_from(
                request, _FIEMAP_HEADER.size + index * _FIEMAP_EXTENT.size
            )
            start = logical + length
            if not flags & _EXTENT_SHARED:
                exclusive_bytes += length
                encoded = encoded or bool(flags & _EXTENT_ENCODED)
        if flags & _EXTENT_LAST:
            return Extents(exclusive_bytes=exclusive_bytes, encoded=encoded)


def identify(fd: int, fs_type: str, known_uuid: str | None) -> FileSystem:
    """Given an open directory, its file system's type and the UUID its device showed, return its identity.

    The kernel's own answer comes first, so that the identity is the same whether or not the device could be read.
    """
    if fs_type == "btrfs":
        info = fcntl.ioctl(fd, _BTRFS_FS_INFO, b"\0" * 1024)
        subvolume = struct.unpack_from("=Q", fcntl.ioctl(fd, _BTRFS_SUBVOL_INFO, b"\0" * 504))[0]
        return FileSystem(id=str(uuid.UUID(bytes=info[16:32])), subvolume=int(subvolume), reflinks=True)
    if fs_type == "xfs":
        geometry = fcntl.ioctl(fd, _XFS_GEOMETRY, b"\0" * 256)
        flags = struct.unpack_from("=I", geometry, 92)[0]
        return FileSystem(
            id=str(uuid.UUID(bytes=geometry[64:80])), subvolume=0, reflinks=bool(flags & _XFS_REFLINK_FLAG)
        )
    return FileSystem(id=_uuid(fd) or known_uuid or _weak_id(fd), subvolume=0, reflinks=fs_type == "bcachefs")


def _uuid(fd: int) -> str | None:
    try:
        answer = fcntl.ioctl(fd, _GETFSUUID, b"\0" * 17)
    except OSError:
        return None  # Linux before 6.9, or a file system without one
    return str(uuid.UUID(bytes=answer[1:17])) if answer[0] == _UUID_BYTES else None


def _weak_id(fd: int) -> str:
    # f_fsid comes from the UUID on ext4 and f2fs; where it is 0 (tmpfs on old kernels) the device number must do.
    return f"fsid-{os.fstatvfs(fd).f_fsid or os.fstat(fd).st_dev:x}"


def lacking() -> str | None:
    """Return what this kernel or platform lacks, or None."""
    if sys.platform != "linux" or struct.calcsize("l") != _LONG_BYTES:
        return "this is not 64-bit Linux"
    root = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(open_beneath(".", root, os.O_PATH))
    except OSError as error:
        return f"the system call openat2 fails: {error.strerror}"
    finally:
        os.close(root)
    return None


def generation(fd: int) -> int:
    """Return an inode's generation: another one when its number is used again. 0 where the file system has none."""
    buffer = bytearray(8)
    try:
        fcntl.ioctl(fd, _FS_IOC_GETVERSION, buffer)
    except OSError:
        return 0
    return int.from_bytes(buffer[:4], sys.byteorder)
