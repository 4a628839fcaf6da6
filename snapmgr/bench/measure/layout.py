"""Reads the block layout of a file by FIEMAP: its extents as filefrag counts them, and the jumps of a reader."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapmgr.contract.errors import StorageError
from snapmgr.system.kernel import EXTENT_UNWRITTEN, Extent, extents

if TYPE_CHECKING:
    from collections.abc import Sequence

POINTS = 2000
"""Maximum number of extents that a document holds for a map."""

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The layout of a file on its device."""

    size_bytes: int
    """The file's length."""
    mapped_bytes: int
    """Part of `size_bytes` without holes."""
    unwritten_bytes: int
    """Part of `mapped_bytes` that is allocated but never written: it reads as zeros without the device."""
    shared_bytes: int
    """Part of `mapped_bytes` that the file system shares with snapshots or clones; it cannot see sharing by LVM."""
    encoded: int
    """Extents that are compressed or encrypted."""
    extents: int
    """Number of extents, counted as filefrag does: merged if adjacent, or as far apart on the device as in the file."""
    gaps: int
    """Physical jumps of a reader from the beginning to the end of the file."""
    runs: tuple[tuple[int, int, int], ...]
    """Pieces without a jump between them: (logical, physical, length)."""
    mapped: bool = False
    """Whether a device-mapper volume is below the file system."""

    @property
    def gaps_per_gib(self) -> float:
        """Physical jumps per GiB of readable data; compares compressed files too."""
        return self.gaps * _GIB / self.mapped_bytes if self.mapped_bytes else 0.0

    def caveats(self) -> list[str]:
        """Return the limits of the figures, as sentences."""
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
        """Return it for a sample: the figures above, and at most `POINTS` pieces for a map, evenly over the file."""
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
    """Flush a file, which must not change during the call, and return where its blocks are.

    Raises StorageError if its file system cannot report this (tmpfs), OSError if it cannot be opened.
    """
    with open(path, "rb", buffering=0) as file:
        found = read_extents(file.fileno())
        status = os.fstat(file.fileno())
    # On btrfs this is not a real device but a number with the major 0.
    device = Path(f"/sys/dev/block/{os.major(status.st_dev)}:{os.minor(status.st_dev)}/dm")
    return lay_out(found, size_bytes=status.st_size, mapped=device.exists())


def read_extents(fd: int) -> list[Extent]:
    """Flush a file and return its extents as the file system reports them, in the order of the file.

    Raises StorageError if the file system cannot report them.
    """
    try:
        return list(extents(fd))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            raise StorageError("this file system does not tell where a file's blocks are (FIEMAP)") from None
        raise


def lay_out(extents: Sequence[Extent], *, size_bytes: int, mapped: bool = False) -> BlockLayout:
    """Given a file's extents in order, return its layout."""
    written = [one for one in extents if not one.flags & EXTENT_UNWRITTEN]
    runs = _runs([one for one in written if one.placed])
    return BlockLayout(
        size_bytes=size_bytes,
        mapped_bytes=sum(one.length for one in extents),
        unwritten_bytes=sum(one.length for one in extents if one.flags & EXTENT_UNWRITTEN),
        shared_bytes=sum(one.length for one in extents if one.shared),
        encoded=sum(1 for one in extents if one.encoded),
        extents=_filefrag_extents(extents),
        gaps=max(len(runs) - 1, 0),
        runs=tuple(runs),
        mapped=mapped,
    )


def _touch(before: Extent, after: Extent) -> bool:
    """Return whether the device continues, or jumps only as far as the file does (a hole in place)."""
    distance = after.physical - before.physical
    return distance in {before.length, after.logical - before.logical}


def _filefrag_extents(extents: Sequence[Extent]) -> int:
    """Count like filefrag(8): the first extent, and each one that does not follow the previous one as expected."""
    if not extents:
        return 0
    return 1 + sum(1 for before, after in pairwise(extents) if not _touch(before, after))


def _runs(extents: Sequence[Extent]) -> list[tuple[int, int, int]]:
    """Join pieces that a reader reads without a jump."""
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
    """Return whether a compressed extent may end where the next begins: it takes less room than its length."""
    return before.encoded and 0 < after.physical - before.physical <= before.length


def thin(runs: Sequence[tuple[int, int, int]], count: int) -> list[tuple[int, int, int]]:
    """Return at most `count` of the runs, spread evenly over the file."""
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
