"""Makes the btrfs system calls that libbtrfsutil's Python binding does not offer; layouts as in linux/btrfs.h."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import uuid
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.api.kernel import flags_of, set_flags

if TYPE_CHECKING:
    from collections.abc import Iterator

_FS_INFO = 0x8400941F
_DEV_INFO = 0xD000941E
_INO_LOOKUP = 0xD0009412
_SNAP_DESTROY_V2 = 0x5000943F
_TREE_SEARCH_V2 = 0xC0709411
_LOGICAL_INO_V2 = 0xC038943B
_SYNC = 0x9408
_WAIT_SYNC = 0x40089416
_GET_SUBVOL_INFO = 0x81F8943C

_SUBVOLUME_BY_ID = 1 << 4
_IGNORE_OFFSET = 1
_LOCKING_FLAGS = 0x10 | 0x20  # FS_IMMUTABLE_FL, FS_APPEND_FL
_INODE_ITEM = 1
_EXTENT_DATA = 108
_ROOT_ITEM = 132
_ROOT_BACKREF = 144
_INLINE = 0
_ROOT_TREE = 1
SUBVOLUME_INODE = 256  # BTRFS_FIRST_FREE_OBJECTID: a subvolume's own folder
_MAX_KIND = 255
_MAX = 2**64 - 1
# The ids of subvolumes (BTRFS_LAST_FREE_OBJECTID).
_FIRST_ID, _LAST_ID = 256, 2**64 - 256

_LOOKUP = struct.Struct("=QQ4080s")
_DESTROY = struct.Struct("=qQQ32sQ4032x")
_SEARCH = struct.Struct("=7Q4I4QQ")
_ITEM_HEADER = struct.Struct("=QQQII")
# generation, ram_bytes, compression, encryption, other encoding, type, disk_bytenr, disk_num_bytes, offset, num_bytes
_FILE_EXTENT = struct.Struct("=QQBBHBQQQQ")
# transid (after generation), then ctime (after sizes, owners, flags, sequence, reserved and atime)
_INODE = struct.Struct("=8xQ108xQI")
# flags; uuid, parent_uuid, received_uuid, ctransid, otransid (zero in items from before Linux 3.6, which are shorter)
_ROOT = struct.Struct("=208xQ31x16s16s16sQQ")
# The folder's inode; the length of the name, which follows.
_ROOT_REF = struct.Struct("=Q8xH")
_LOGICAL = struct.Struct("=QQ3QQQ")
_CONTAINER = struct.Struct("=IIII")
_SEARCH_BUFFER = 1 << 18
_OWNERS_BUFFER = 1 << 16
_OWNERS_BUFFER_MAX = 1 << 24


class Device(Struct, frozen=True):
    """A device of a file system: its node, how much of it btrfs may use, and how much of that is allocated."""

    path: str
    size_bytes: int
    allocated_bytes: int


class Subvolume(Struct):
    """The facts of a subvolume, as `snapmgr_btrfs.library.SubvolumeInfo`."""

    id: int
    parent_id: int
    flags: int
    uuid: bytes
    parent_uuid: bytes
    received_uuid: bytes
    ctransid: int
    otransid: int


def fs_uuid(fd: int) -> str:
    """Return the file system's UUID. Raises OSError (ENOTTY) if it is not btrfs."""
    return _fs_info(fd)[2]


def _fs_info(fd: int) -> tuple[int, int, str]:
    buffer = bytearray(1024)
    fcntl.ioctl(fd, _FS_INFO, buffer)
    max_id, count = struct.unpack_from("=QQ", buffer)
    return max_id, count, str(uuid.UUID(bytes=bytes(buffer[16:32])))


def devices(fd: int) -> tuple[Device, ...]:
    """Return the file system's devices."""
    max_id, _, _ = _fs_info(fd)
    found = []
    for number in range(1, max_id + 1):
        buffer = bytearray(4096)
        struct.pack_into("=Q", buffer, 0, number)
        try:
            fcntl.ioctl(fd, _DEV_INFO, buffer)
        except OSError as error:
            if error.errno == errno.ENODEV:  # a number that was given up
                continue
            raise
        allocated_bytes, size_bytes = struct.unpack_from("=QQ", buffer, 24)
        found.append(Device(os.fsdecode(bytes(buffer[3072:]).partition(b"\0")[0]), size_bytes, allocated_bytes))
    return tuple(found)


def path_in_subvolume(fd: int) -> str:
    """Return the path of the folder `fd` inside its subvolume; "" for the subvolume itself. Raises OSError (EPERM)."""
    inode = os.fstat(fd).st_ino
    if inode == SUBVOLUME_INODE:  # needs no rights
        return ""
    buffer = bytearray(_LOOKUP.pack(0, inode, b""))
    fcntl.ioctl(fd, _INO_LOOKUP, buffer)
    return os.fsdecode(bytes(buffer[16:]).partition(b"\0")[0].rstrip(b"/"))


def unlock(fd: int) -> None:
    """Take the flags from a folder that keep it from being removed (chattr +i, +a). Raises OSError."""
    flags = flags_of(fd)
    if flags & _LOCKING_FLAGS:
        set_flags(fd, flags & ~_LOCKING_FLAGS)


def commit(fd: int) -> None:
    """Write all dirty data, commit the transaction, and wake the cleaner. Raises OSError.

    Not BTRFS_IOC_START_SYNC, which would commit without the data: it only wakes a kernel thread, and where that misses
    the call (seen with eight threads at once) nothing happens until the next periodic commit, 30 s later.
    """
    fcntl.ioctl(fd, _SYNC)


def wait_commit(fd: int, transaction: int) -> None:
    """Return when `transaction` is on disk, now if it is already. Cannot be interrupted; lets other threads run."""
    fcntl.ioctl(fd, _WAIT_SYNC, struct.pack("=Q", transaction))


def destroy(fd: int, subvolume_id: int) -> None:
    """Delete the subvolume with this id, whatever its path is: no swap of names can make it hit another one.

    `fd` is open on a mount of the top level. Raises OSError: ENOTEMPTY with subvolumes in it, EPERM while it is sent.
    """
    fcntl.ioctl(fd, _SNAP_DESTROY_V2, bytearray(_DESTROY.pack(0, 0, _SUBVOLUME_BY_ID, b"", subvolume_id)))


def made_ns(fd: int) -> int:
    """Return when the subvolume that `fd` is in was made (otime), in nanoseconds since the epoch."""
    buffer = bytearray(504)
    fcntl.ioctl(fd, _GET_SUBVOL_INFO, buffer)
    seconds, nanoseconds = struct.unpack_from("=QI", buffer, 392)
    return int(seconds) * 10**9 + int(nanoseconds)


def subvolumes_in(fd: int, parent_id: int, inode: int) -> Iterator[tuple[str, Subvolume]]:
    """Yield name and facts of each subvolume in one folder of the file system that `fd` is on. Raises OSError.

    This reads the tree of all roots, 500 subvolumes a call: for 10,000 it takes a fifth of the time that opening each
    of them takes.

    Args:
        fd: a descriptor on the file system.
        parent_id: the id of the subvolume that holds the folder.
        inode: the folder's inode number there.
    """
    root_id, root = 0, b""
    for objectid, kind, offset, item in _items(fd, _ROOT_TREE, first=_FIRST_ID, last=_LAST_ID):
        if kind == _ROOT_ITEM:
            root_id, root = objectid, item
        # A deleted subvolume keeps its item until its space is free, but has no reference.
        elif kind == _ROOT_BACKREF and objectid == root_id and offset == parent_id:
            folder, length = _ROOT_REF.unpack_from(item)
            if folder == inode:
                name = os.fsdecode(item[_ROOT_REF.size : _ROOT_REF.size + length])
                flags, own, parent, received, changed, made = _ROOT.unpack_from(root.ljust(_ROOT.size, b"\0"))
                yield name, Subvolume(objectid, parent_id, flags, own, parent, received, changed, made)


def inodes_since(fd: int, subvolume_id: int, transaction: int) -> Iterator[tuple[int, int]]:
    """Yield (transaction of its last change, ctime in ns) of inodes of a subvolume; those in tree blocks that were
    written before `transaction` are left out."""
    for _, kind, _, item in _items(fd, subvolume_id, since=transaction):
        if kind == _INODE_ITEM and len(item) >= _INODE.size:
            changed_in, seconds, nanoseconds = _INODE.unpack_from(item)
            yield changed_in, seconds * 10**9 + nanoseconds


def data_extents(fd: int, subvolume_id: int) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes on disk) of every extent reference in a subvolume; an extent may come more than once."""
    for _, kind, _, item in _items(fd, subvolume_id):
        if kind == _EXTENT_DATA and len(item) >= _FILE_EXTENT.size:
            fields = _FILE_EXTENT.unpack_from(item)
            if fields[5] != _INLINE and fields[6] != 0:  # address 0: a hole
                yield fields[6], fields[7]


def _items(
    fd: int, tree_id: int, *, first: int = 0, last: int = _MAX, since: int = 0
) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (object id, type, offset, content) of every item in a tree, of the tree blocks written in or after `since`.

    `first` and `last` bound the object ids.
    """
    objectid, kind, offset = first, 0, 0
    buffer = bytearray(_SEARCH.size + _SEARCH_BUFFER)
    while True:
        key = (tree_id, objectid, last, offset, _MAX, since, _MAX, kind, _MAX_KIND, 2**32 - 1, 0, 0, 0, 0, 0)
        _SEARCH.pack_into(buffer, 0, *key, _SEARCH_BUFFER)
        fcntl.ioctl(fd, _TREE_SEARCH_V2, buffer)
        (count,) = struct.unpack_from("=I", buffer, 64)
        if count == 0:
            return
        position = _SEARCH.size
        for _ in range(count):
            _, objectid, offset, kind, length = _ITEM_HEADER.unpack_from(buffer, position)
            position += _ITEM_HEADER.size
            yield objectid, kind, offset, bytes(buffer[position : position + length])
            position += length
        # The next key after the last one: (objectid, kind, offset) counts like one large number.
        if offset < _MAX:
            offset += 1
        elif kind < _MAX_KIND:
            kind, offset = kind + 1, 0
        elif objectid < last:
            objectid, kind, offset = objectid + 1, 0, 0
        else:
            return


def extent_owners(fd: int, address: int) -> frozenset[int]:
    """Return the ids of all subvolumes that refer to any part of the extent at `address`."""
    size = _OWNERS_BUFFER
    while True:
        container = ctypes.create_string_buffer(size)
        arguments = bytearray(_LOGICAL.pack(address, size, 0, 0, 0, _IGNORE_OFFSET, ctypes.addressof(container)))
        fcntl.ioctl(fd, _LOGICAL_INO_V2, arguments)
        _, _, count, missed = _CONTAINER.unpack_from(container.raw)
        # Each element has three values: inode, offset, root.
        roots = frozenset(struct.unpack_from(f"={count}Q", container.raw, _CONTAINER.size)[2::3])
        if missed == 0 or len(roots) > 1 or size >= _OWNERS_BUFFER_MAX:
            return roots
        size *= 16
