"""Reads the usage of a btrfs file system, whose data and metadata can run out apart, and of a single snapshot."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.api import Gauge, StorageError, format_size
from snapmgr_btrfs import kernel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from snapmgr.api import Pool

# A snapshot needs a few metadata blocks, but every block that the origin overwrites from then on needs a new place:
# on a fuller file system than this the snapshot would soon make the server fail.
_MIN_DATA_BYTES = 16 << 20
_MIN_METADATA_BYTES = 4 << 20
_NAMES = ("data", "metadata", "mixed")
# How many devices hold a copy of each block; the other profiles need no particular number of them.
_MIRRORS = {"raid1": 2, "raid10": 2, "raid1c3": 3, "raid1c4": 4}
# The beginning of each device is never allocated.
_RESERVED_BYTES = 1 << 20


class Space(Struct, frozen=True, kw_only=True):
    """One kind of block groups; sizes are what fits in, before duplication by the profile."""

    name: str
    size_bytes: int
    """Allocated, with the unallocated space that could be added."""
    used_bytes: int
    """In use or set aside."""

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be written."""
        return max(self.size_bytes - self.used_bytes, 0)


def read_spaces(folder: Path, devices: Sequence[kernel.Device]) -> tuple[Space, ...]:
    """Given /sys/fs/btrfs/UUID and the devices, return data and metadata (or "mixed").

    Raises StorageError if sysfs does not know the file system: it is not mounted.
    """
    allocation = f"{folder}/allocation"

    def number(*parts: str) -> int:
        # Thirty files, twice in a backup: pathlib would take most of the time.
        with open("/".join((allocation, *parts)), "rb", buffering=0) as file:
            return int(file.read())

    try:
        kinds = os.listdir(allocation)
        unallocated = [max(one.size_bytes - one.allocated_bytes - _RESERVED_BYTES, 0) for one in devices]
        reserve = number("global_rsv_size")
        spaces = []
        for name in (name for name in _NAMES if name in kinds):
            total, disk_total = number(name, "total_bytes"), number(name, "disk_total")
            copies = disk_total / total if total else 1.0
            mirrors = max((_MIRRORS.get(profile, 1) for profile in os.listdir(f"{allocation}/{name}")), default=1)
            more = int(sum(unallocated) / copies) if mirrors == 1 else mirrored_bytes(unallocated, mirrors)
            aside = sum(number(name, part) for part in ("bytes_pinned", "bytes_reserved", "bytes_readonly"))
            # Data that waits to be written has its space reserved; metadata's reservations are mostly never used, only
            # the global reserve is really out of reach.
            aside += number(name, "bytes_may_use") if name == "data" else reserve
            used = number(name, "bytes_used") + aside
            spaces.append(Space(name=name, size_bytes=total + more, used_bytes=used))
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read how full the file system is, from {allocation}: {error}") from error
    return tuple(spaces)


def mirrored_bytes(unallocated: Sequence[int], mirrors: int) -> int:
    """Return how much data fits into the unallocated bytes of each device, if `mirrors` devices hold each block.

    What one device has beyond the others' share cannot be used: 10 GiB and 1 GiB hold 1 GiB twice.
    """
    left = sorted(unallocated)
    if len(left) < mirrors:
        return 0
    # The largest device holds one copy of everything at most: take it out while it has more than its share.
    while mirrors > 1 and left[-1] > sum(left[:-1]) // (mirrors - 1):
        left.pop()
        mirrors -= 1
    return sum(left) // mirrors


def gauges(spaces: tuple[Space, ...], devices: Sequence[kernel.Device], where: str, pool: Pool) -> tuple[Gauge, ...]:
    """Return as gauges the spaces, and how much of the devices is allocated to them.

    A full btrfs fails the origin's writes, snapshots stay intact. One that is allocated completely is not full yet.
    """
    allocation = Gauge(
        name=f"allocation of the btrfs file system at {where}",
        size_bytes=sum(one.size_bytes for one in devices),
        used_bytes=sum(min(one.allocated_bytes, one.size_bytes) for one in devices),
        when_full="no_growth",
        pool=pool,
    )
    own = tuple(
        Gauge(
            name=f"{space.name} of the btrfs file system at {where}",
            size_bytes=space.size_bytes,
            used_bytes=min(space.used_bytes, space.size_bytes),
            when_full="origin_errors",
            pool=pool,
        )
        for space in spaces
    )
    return (*own, allocation)


def check_room(spaces: tuple[Space, ...], where: str) -> None:
    """Raise StorageError if a snapshot, or the origin's first writes after it, would find no room."""
    for space in spaces:
        least = _MIN_METADATA_BYTES if space.name == "metadata" else _MIN_DATA_BYTES
        if space.free_bytes < least:
            message = (
                f"only {format_size(space.free_bytes)} of {space.name} space are free on {where}: no snapshot is taken"
            )
            raise StorageError(
                message, hint="prune snapshots, delete files or add a device; `btrfs filesystem usage` shows the rest"
            )


def quota_exclusive(folder: Path, subvolume_id: int) -> int | None:
    """Given /sys/fs/btrfs/UUID, return the quota group's exclusive bytes (data and metadata); None if not known.

    Simple quotas ("squota") charge a block to its first writer, which does not tell what a deletion frees.
    """
    groups = folder / "qgroups"
    try:
        if (groups / "inconsistent").read_text().strip() != "0":
            return None
        mode = groups / "mode"  # Linux 6.7
        if mode.exists() and mode.read_text().strip() != "qgroup":
            return None
        return int((groups / f"0_{subvolume_id}" / "exclusive").read_text())
    except (OSError, ValueError):
        return None


def exact_exclusive(fd: int, subvolume_id: int) -> int:
    """Return the bytes on disk of all extents that nothing but this subvolume refers to.

    A compressed extent counts with its size on disk, one that is only partly referred to counts whole: that is what a
    deletion frees. Extents shared among files of the snapshot only are its own. Metadata (a fraction of a percent for
    database files) is not counted. One tree search per 256 KiB of items and one look-up per extent. Raises OSError.
    """
    sizes = dict(kernel.data_extents(fd, subvolume_id))
    own = frozenset({subvolume_id})
    total = 0
    for address, size in sizes.items():
        try:
            if kernel.extent_owners(fd, address) <= own:
                total += size
        except OSError as error:
            if error.errno != errno.ENOENT:  # gone since: the subvolume was deleted meanwhile
                raise
    return total
