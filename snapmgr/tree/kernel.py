"""The system calls for trees that Python does not offer: FICLONE, inode flags, renameat2, syncfs.

Numbers and layouts are those of linux/fs.h, the same on all machines with 64-bit `long`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
from contextlib import suppress

_FICLONE = 0x40049409
_GETFLAGS = 0x80086601
_SETFLAGS = 0x40086602
_GETVERSION = 0x80087601
_NOCOW_FLAG = 0x00800000
_RENAME_NOREPLACE = 1
# The file system cannot share blocks between these two files; anything else is a failure.
_NO_CLONE = frozenset({
    errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.EXDEV, errno.ENOSYS, errno.ETXTBSY, errno.EPERM
})  # fmt: skip

# CDLL releases the GIL around each call and keeps errno for us.
_libc = ctypes.CDLL(None, use_errno=True)


def clone_file(source_fd: int, copy_fd: int) -> bool:
    """Make `copy_fd` share all blocks of `source_fd`; False where that is not possible. Raises OSError otherwise."""
    try:
        fcntl.ioctl(copy_fd, _FICLONE, source_fd)
    except OSError as error:
        if error.errno in _NO_CLONE:
            return False
        raise
    return True


def is_nocow(fd: int) -> bool:
    """Return whether a file (or a folder, for its future files) has the NOCOW attribute (chattr +C)."""
    return bool(_flags(fd) & _NOCOW_FLAG)


def set_nocow(fd: int, *, nocow: bool) -> None:
    """Give an *empty* file, or a folder, the NOCOW attribute or take it away, where the file system has it."""
    flags = _flags(fd)
    wanted = flags | _NOCOW_FLAG if nocow else flags & ~_NOCOW_FLAG
    if wanted != flags:
        try:
            fcntl.ioctl(fd, _SETFLAGS, struct.pack("=q", wanted))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL):
                raise


def generation(fd: int) -> int:
    """Return how often, or since when, a file's inode number is used; 0 where the file system does not tell."""
    found = bytearray(8)
    with suppress(OSError):
        # The number says long, the kernel moves an int.
        fcntl.ioctl(fd, _GETVERSION, found)
    return int.from_bytes(found[:4], sys.byteorder)


def _flags(fd: int) -> int:
    try:
        # The number says long, the kernel moves an int (ioctl_iflags(2)).
        return int(struct.unpack("=i", fcntl.ioctl(fd, _GETFLAGS, b"\0" * 8)[:4])[0])
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL):
            return 0
        raise


def rename_new(source_fd: int, name: str, target_fd: int) -> None:
    """Move an entry into another folder, keeping its name, but never onto something. Raises OSError."""
    encoded = os.fsencode(name)
    done = _libc.renameat2(
        ctypes.c_int(source_fd),
        ctypes.c_char_p(encoded),
        ctypes.c_int(target_fd),
        ctypes.c_char_p(encoded),
        ctypes.c_uint(_RENAME_NOREPLACE),
    )
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def sync_file_system(fd: int) -> None:
    """Write all dirty data of the file system that holds `fd` (syncfs). Raises OSError, also for lost writes."""
    if _libc.syncfs(ctypes.c_int(fd)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
