"""Makes the Linux system calls that Python does not offer, for files, folders and file systems.

Numbers and layouts are those of linux/fs.h, linux/fiemap.h, linux/openat2.h and xfs_fs.h, which the kernel keeps the
same on all machines with 64-bit `long`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FICLONE = 0x40049409
_FIEMAP = 0xC020660B
_GETFLAGS = 0x80086601
_SETFLAGS = 0x40086602
_GETVERSION = 0x80087601
_XFS_FREE_EOFBLOCKS = 0x8080583A

_NOCOW_FLAG = 0x00800000
_XFS_EOFBLOCKS = struct.Struct("=II120x")
_XFS_EOFBLOCKS_VERSION = 1
_XFS_EOFBLOCKS_SYNC = 1

_FIEMAP_HEADER = struct.Struct("=QQIIII")
_FIEMAP_EXTENT = struct.Struct("=QQQQQIIII")
_FIEMAP_SYNC = 0x1
_EXTENTS_A_CALL = 512
EXTENT_LAST = 0x1
EXTENT_UNKNOWN = 0x2
EXTENT_DELAYED = 0x4
EXTENT_ENCODED = 0x8
EXTENT_INLINE = 0x200
EXTENT_UNWRITTEN = 0x800
EXTENT_SHARED = 0x2000

_SYS_OPENAT2 = 437  # the same number on every architecture
_OPEN_HOW = struct.Struct("=QQQ")
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RENAME_NOREPLACE = 1

# Types of file systems (statfs(2)) that syncfs(2) makes durable: ext2 to ext4, XFS, btrfs, F2FS, tmpfs.
_SYNCED_WHOLE = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})
_STATFS_BYTES = 256
_LONG_BYTES = 8
_WHOLE_FILE = 2**64 - 1

_NO_FLAGS_YET = b"\0" * 8

# The file system has no such flags, or cannot tell them.
_NO_FLAGS = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL})
# The file system cannot share blocks between these two files; anything else is a failure.
_NO_CLONE = _NO_FLAGS | {errno.EXDEV, errno.ENOSYS, errno.ETXTBSY, errno.EPERM}

# CDLL releases the GIL around each call and keeps errno for us.
_libc = ctypes.CDLL(None, use_errno=True)
# With its types known a call is quicker: it is made for each file of a tree.
_openat2: Callable[[int, int, bytes, bytes, int], int] = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
    use_errno=True,
)(("syscall", _libc))


class Extent(Struct, frozen=True, kw_only=True):
    """A piece of a file that is in one piece on its device, as the file system tells it; all in bytes."""

    logical: int
    """Offset in the file."""
    physical: int
    """Offset on the device (for btrfs: in its own address space)."""
    length: int
    """In the file: of a compressed extent more than it takes on the device."""
    flags: int = 0

    @property
    def placed(self) -> bool:
        """Whether it is on the device at a known place: not in the inode, nor still in memory."""
        return not self.flags & (EXTENT_UNKNOWN | EXTENT_DELAYED | EXTENT_INLINE)

    @property
    def encoded(self) -> bool:
        """Whether it is compressed or encrypted: then its length on the device is not known."""
        return bool(self.flags & EXTENT_ENCODED)

    @property
    def shared(self) -> bool:
        """Whether another file shares it."""
        return bool(self.flags & EXTENT_SHARED)


def _failure(path: str | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)


def clone_file(source_fd: int, copy_fd: int) -> None:
    """Make `copy_fd` share all blocks of `source_fd` (FICLONE); atomic for this one file. Raises OSError."""
    fcntl.ioctl(copy_fd, _FICLONE, source_fd)


def try_clone_file(source_fd: int, copy_fd: int) -> bool:
    """Like `clone_file`, but return False where the two files cannot share blocks. Raises OSError otherwise."""
    try:
        clone_file(source_fd, copy_fd)
    except OSError as error:
        if error.errno in _NO_CLONE:
            return False
        raise
    return True


@cache
def _open_how(flags: int) -> bytes:
    # O_LARGEFILE is implied: openat2 refuses flags that it does not know, and 64-bit systems know no other files.
    return _OPEN_HOW.pack(
        flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0, _RESOLVE_NO_XDEV | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
    )


def open_beneath(name: str, dir_fd: int, flags: int) -> int:
    """Open one entry of a directory, never through a symlink (ELOOP) and never into another mount (EXDEV).

    st_dev does not show a bind mount of the same file system; RESOLVE_NO_XDEV does. Raises OSError, ENOSYS before
    Linux 5.6.
    """
    how = _open_how(flags)
    while True:
        fd = _openat2(_SYS_OPENAT2, dir_fd, os.fsencode(name), how, _OPEN_HOW.size)
        if fd >= 0:
            return fd
        # EAGAIN: something was renamed in the meantime and the kernel asks to try again (openat2(2)).
        if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
            raise _failure(name)


def unsupported() -> str | None:
    """Return why `open_beneath` cannot work with this kernel or on this machine; None if it can."""
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


def rename_new(old: str, new: str, dir_fd: int, new_dir_fd: int | None = None) -> None:
    """Rename an entry, but never onto something: rename(2) would replace an empty folder. Raises OSError.

    `dir_fd` is the folder that holds it, `new_dir_fd` the one that it goes to, by default the same.
    """
    done = _libc.renameat2(
        ctypes.c_int(dir_fd),
        ctypes.c_char_p(os.fsencode(old)),
        ctypes.c_int(dir_fd if new_dir_fd is None else new_dir_fd),
        ctypes.c_char_p(os.fsencode(new)),
        ctypes.c_uint(_RENAME_NOREPLACE),
    )
    if done != 0:
        raise _failure(new)


def sync_file_system(fd: int) -> None:
    """Write all dirty data of the file system that holds `fd` (syncfs). Raises OSError, also for lost writes."""
    if _libc.syncfs(ctypes.c_int(fd)) != 0:
        raise _failure()


def syncs_as_a_whole(fd: int) -> bool:
    """Return whether `sync_file_system` makes all of the file system durable: not through FUSE, nor to every server."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(ctypes.c_int(fd), buffer) != 0:
        raise _failure()
    return ctypes.c_long.from_buffer(buffer).value in _SYNCED_WHOLE


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
    return flags_of(fd) & _NOCOW_FLAG != 0


def set_nocow(fd: int, *, nocow: bool) -> None:
    """Give an *empty* file, or a folder, the NOCOW attribute or take it away, where the file system has it."""
    flags = flags_of(fd)
    wanted = flags | _NOCOW_FLAG if nocow else flags & ~_NOCOW_FLAG
    if wanted != flags:
        try:
            set_flags(fd, wanted)
        except OSError as error:
            if error.errno not in _NO_FLAGS:
                raise


def flags_of(fd: int) -> int:
    """Return an inode's flags (FS_*_FL of linux/fs.h); 0 where the file system has none. Raises OSError."""
    try:
        # The number says long, the kernel moves an int (ioctl_iflags(2)).
        return int.from_bytes(fcntl.ioctl(fd, _GETFLAGS, _NO_FLAGS_YET)[:4], sys.byteorder)
    except OSError as error:
        if error.errno in _NO_FLAGS:
            return 0
        raise


def set_flags(fd: int, flags: int) -> None:
    """Set an inode's flags. Raises OSError."""
    fcntl.ioctl(fd, _SETFLAGS, struct.pack("=q", flags))


def generation(fd: int) -> int:
    """Return an inode's generation: another one when its number is used again. 0 where the file system has none."""
    found = bytearray(8)
    with suppress(OSError):
        fcntl.ioctl(fd, _GETVERSION, found)
    return int.from_bytes(found[:4], sys.byteorder)


def count_extents(fd: int) -> int:
    """Return the number of extents of a file, as it is on disk; 1 where the file system does not tell."""
    try:
        answer = _fiemap(fd, bytearray(_FIEMAP_HEADER.pack(0, _WHOLE_FILE, 0, 0, 0, 0)))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return 1
        raise
    return answer


def extents(fd: int) -> Iterator[Extent]:
    """Flush a file, and yield its extents by their place in it. Raises OSError, EOPNOTSUPP for "cannot tell"."""
    start, flags = 0, _FIEMAP_SYNC
    request = bytearray(_FIEMAP_HEADER.size + _EXTENTS_A_CALL * _FIEMAP_EXTENT.size)
    while True:
        _FIEMAP_HEADER.pack_into(request, 0, start, _WHOLE_FILE - start, flags, 0, _EXTENTS_A_CALL, 0)
        count = _fiemap(fd, request)
        view = memoryview(request)[_FIEMAP_HEADER.size : _FIEMAP_HEADER.size + count * _FIEMAP_EXTENT.size]
        found = EXTENT_LAST
        for logical, physical, length, _, _, found, *_ in _FIEMAP_EXTENT.iter_unpack(view):
            yield Extent(logical=logical, physical=physical, length=length, flags=found)
            start = logical + length
        if found & EXTENT_LAST:
            return
        flags = 0


def _fiemap(fd: int, request: bytearray) -> int:
    """Ask for extents, as far as the request has room for them; return how many there are."""
    try:
        fcntl.ioctl(fd, _FIEMAP, request)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EBADR):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)) from error
        raise
    return int(_FIEMAP_HEADER.unpack_from(request)[3])
