"""Where the blocks of a file are, by FIEMAP: its extents as filefrag counts them, and how often a reader must jump.

Numbers and layouts are those of linux/fiemap.h.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapmgr.contract.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

POINTS = 2000
"""Most extents that a document has, for a map."""

_FIEMAP = 0xC020660B
_HEADER = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_AT_ONCE = 4096
_SYNC = 0x1
_LAST = 0x1
_UNKNOWN = 0x2
_DELAYED = 0x4
_ENCODED = 0x8
_INLINE = 0x200
_UNWRITTEN = 0x800
_SHARED = 0x2000
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
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
        return not self.flags & (_UNKNOWN | _DELAYED | _INLINE)

    @property
    def encoded(self) -> bool:
        """Whether it is compressed or encrypted: then its length on the device is not known."""
        return bool(self.flags & _ENCODED)


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """How a file lies on its device."""

    size_bytes: int
    """The file's length."""
    mapped_bytes: int
    """Of that, what is not a hole."""
    unwritten_bytes: int
    """Of `mapped_bytes`, what was allocated and never written: it reads as zeros, without the device."""
    shared_bytes: int
    """Of `mapped_bytes`, what the file system says that others share (snapshots, clones). LVM's sharing is not its."""
    encoded: int
    """Extents that are compressed or encrypted."""
    extents: int
    """As filefrag counts them: neighbours that touch are merged, or lie as far apart as in the file."""
    gaps: int
    """Physical jumps of who reads the file from its beginning to its end."""
    runs: tuple[tuple[int, int, int], ...]
    """Pieces without a jump between them: (logical, physical, length)."""
    mapped: bool = False
    """Whether a device-mapper volume is below the file system."""

    @property
    def gaps_per_gib(self) -> float:
        """Physical jumps per GiB that is there to be read; compares compressed files too."""
        return self.gaps * _GIB / self.mapped_bytes if self.mapped_bytes else 0.0

    def caveats(self) -> list[str]:
        """Return what the figures do not say, as sentences."""
        said = []
        if self.encoded:
            said.append(
                f"{self.encoded} extents are compressed or encrypted: btrfs makes them of 128 KiB each, so their number"
                " says little; a jump between two of them is counted where the next does not begin within the room that"
                " the former may take at most"
            )
        if self.mapped:
            said.append(
                "the file system is on a device-mapper volume: this is its view, not where LVM's CoW table or thin pool"
                " has put the blocks"
            )
        if self.unwritten_bytes:
            said.append(f"{self.unwritten_bytes} bytes are allocated and not written: they are read without the device")
        return said

    def document(self) -> dict[str, Any]:
        """Return it for a sample: what is above, and at most `POINTS` pieces for a map, evenly over the file."""
        return {
            "size_bytes": self.size_bytes,
            "mapped_bytes": self.mapped_bytes,
            "unwritten_bytes": self.unwritten_bytes,
            "shared_bytes": self.shared_bytes,
            "encoded": self.encoded,
            "extents": self.extents,
            "gaps": self.gaps,
            "gaps_per_gib": self.gaps_per_gib,
            "runs": len(self.runs),
            "points": [list(run) for run in thin(self.runs, POINTS)],
            "caveats": self.caveats(),
        }


def read_layout(path: Path) -> BlockLayout:
    """Flush a file and return where its blocks are. Nobody writes to it meanwhile.

    Raises StorageError if its file system does not tell (tmpfs), OSError if it cannot be opened.
    """
    with open(path, "rb", buffering=0) as file:
        extents = read_extents(file.fileno())
        status = os.fstat(file.fileno())
    # btrfs has no device of its own here, but a number with the major 0.
    device = Path(f"/sys/dev/block/{os.major(status.st_dev)}:{os.minor(status.st_dev)}/dm")
    return lay_out(extents, size_bytes=status.st_size, mapped=device.exists())


def read_extents(fd: int) -> list[Extent]:
    """Flush a file and return its extents as the file system tells them, by their place in the file.

    Raises StorageError where it does not tell.
    """
    found: list[Extent] = []
    start, flags = 0, _SYNC
    buffer = bytearray(_HEADER.size + _AT_ONCE * _EXTENT.size)
    while True:
        _HEADER.pack_into(buffer, 0, start, (1 << 64) - 1 - start, flags, 0, _AT_ONCE, 0)
        try:
            fcntl.ioctl(fd, _FIEMAP, buffer)
        except OSError as error:
            if error.errno in {errno.EOPNOTSUPP, errno.ENOTTY, errno.EBADR}:
                raise StorageError("this file system does not tell where a file's blocks are (FIEMAP)") from None
            raise
        count = _HEADER.unpack_from(buffer)[3]
        view = memoryview(buffer)[_HEADER.size : _HEADER.size + count * _EXTENT.size]
        for logical, physical, length, _, _, extent_flags, _, _, _ in _EXTENT.iter_unpack(view):
            found.append(Extent(logical=logical, physical=physical, length=length, flags=extent_flags))
        if not count or found[-1].flags & _LAST:
            return found
        start, flags = found[-1].logical + found[-1].length, 0


def lay_out(extents: Sequence[Extent], *, size_bytes: int, mapped: bool = False) -> BlockLayout:
    """Given a file's extents in order, return its layout."""
    written = [one for one in extents if not one.flags & _UNWRITTEN]
    runs = _runs([one for one in written if one.placed])
    return BlockLayout(
        size_bytes=size_bytes,
        mapped_bytes=sum(one.length for one in extents),
        unwritten_bytes=sum(one.length for one in extents if one.flags & _UNWRITTEN),
        shared_bytes=sum(one.length for one in extents if one.flags & _SHARED),
        encoded=sum(1 for one in extents if one.encoded),
        extents=_filefrag_extents(extents),
        gaps=max(len(runs) - 1, 0),
        runs=tuple(runs),
        mapped=mapped,
    )


def _touch(before: Extent, after: Extent) -> bool:
    """Whether the device goes on where it was, or jumps only as far as the file does (a hole in place)."""
    distance = after.physical - before.physical
    return distance in {before.length, after.logical - before.logical}


def _filefrag_extents(extents: Sequence[Extent]) -> int:
    """Count as filefrag(8): the first counts, and each that is not where the one before lets expect it."""
    if not extents:
        return 0
    return 1 + sum(1 for before, after in pairwise(extents) if not _touch(before, after))


def _runs(extents: Sequence[Extent]) -> list[tuple[int, int, int]]:
    """Join what is read without a jump."""
    runs: list[tuple[int, int, int]] = []
    before: Extent | None = None
    for one in extents:
        if before is not None and (_touch(before, one) or _follows(before, one)):
            logical, physical, _ = runs[-1]
            runs[-1] = (logical, physical, one.logical + one.length - logical)
        else:
            runs.append((one.logical, one.physical, one.length))
        before = one
    return runs


def _follows(before: Extent, after: Extent) -> bool:
    """Whether a compressed extent may end just where the next begins: it takes less room than its length says."""
    return before.encoded and 0 < after.physical - before.physical <= before.length


def thin(runs: Sequence[tuple[int, int, int]], count: int) -> list[tuple[int, int, int]]:
    """Return at most `count` of the runs, spread evenly over the file: all of them if they are few enough."""
    if len(runs) <= count:
        return list(runs)
    end = runs[-1][0] + runs[-1][2]
    chosen: list[tuple[int, int, int]] = []
    at = 0
    for number in range(count):
        place = end * number // count
        while at + 1 < len(runs) and runs[at + 1][0] <= place:
            at += 1
        if not chosen or chosen[-1] != runs[at]:
            chosen.append(runs[at])
    return chosen
