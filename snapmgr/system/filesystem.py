"""Identifies file systems by their own ids, which a reboot does not change."""

from __future__ import annotations

import fcntl
import os
import struct
import uuid

from msgspec import Struct

# linux/fs.h, linux/btrfs.h, xfs_fs.h
_GETFSUUID = 0x80111500
_XFS_GEOMETRY = 0x8100587E
_BTRFS_FS_INFO = 0x8400941F
_BTRFS_SUBVOL_INFO = 0x81F8943C

_XFS_REFLINK_FLAG = 1 << 20
_UUID_BYTES = 16


class FileSystem(Struct, frozen=True, kw_only=True):
    """The identity of a file system."""

    id: str
    """UUID where there is one: the same after a reboot, unlike st_dev."""
    subvolume: int = 0
    """btrfs: number of the subvolume, which is never used again; else 0. Inode numbers repeat between subvolumes."""
    reflinks: bool = False
    """Whether it is an XFS or btrfs whose files can share blocks."""


def identify(fd: int) -> FileSystem:
    """Return the identity of the file system that holds `fd`, as the kernel tells it. Raises OSError."""
    info = _ask(fd, _BTRFS_FS_INFO, 1024)
    if info is not None:
        (subvolume,) = struct.unpack_from("=Q", fcntl.ioctl(fd, _BTRFS_SUBVOL_INFO, b"\0" * 504))
        return FileSystem(id=str(uuid.UUID(bytes=info[16:32])), subvolume=int(subvolume), reflinks=True)
    geometry = _ask(fd, _XFS_GEOMETRY, 256)
    if geometry is not None:
        (flags,) = struct.unpack_from("=I", geometry, 92)
        return FileSystem(id=str(uuid.UUID(bytes=geometry[64:80])), reflinks=bool(flags & _XFS_REFLINK_FLAG))
    answer = _ask(fd, _GETFSUUID, 17)
    if answer is not None and answer[0] == _UUID_BYTES:
        return FileSystem(id=str(uuid.UUID(bytes=answer[1:17])))
    # Linux before 6.9, or a file system without a UUID. f_fsid comes from the UUID on ext4 and f2fs; where it is 0
    # (tmpfs on old kernels) the device number must do.
    return FileSystem(id=f"fsid-{os.fstatvfs(fd).f_fsid or os.fstat(fd).st_dev:x}")


def _ask(fd: int, request: int, size_bytes: int) -> bytes | None:
    """Return the answer to an ioctl; None where the file system does not know it."""
    try:
        return fcntl.ioctl(fd, request, b"\0" * size_bytes)
    except OSError:
        return None
