"""Decides the size of a classic snapshot's CoW table. Pure, except for `measure_writes`.

A CoW table (dm-snapshot's persistent exception store) consists of a header and areas: one chunk of exceptions, 16 bytes
each, and the chunks that they describe. Only the *first* write to a chunk of the origin after the snapshot takes room.
So a table with room for every chunk of the origin can never overflow.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.api import StorageError, format_duration, format_size, parse_duration
from snapmgr_lvm import marks
from snapmgr_lvm.config import size_of

if TYPE_CHECKING:
    from snapmgr_lvm.config import LvmConfig
    from snapmgr_lvm.report import Group, LogicalVolume

_EXCEPTION_BYTES = 16
# LVM's minimum size of a table: the header, the first area's exceptions, and one chunk of data.
_LEAST_CHUNKS = 3
_SECTOR_BYTES = 512
# A forecast knows only the past; the next day may bring a bulk load.
_MARGIN = 2.0
# A forecast from a quiet hour would be almost zero: never use less than this share of the origin.
_LEAST_SHARE = 0.05
# A shorter past says nothing about a day.
_LEAST_AGE_S = 600.0
_SHARE_WITHOUT_PAST = "20%"


class CowPlan(Struct, frozen=True, kw_only=True):
    """The planned CoW table of a classic snapshot."""

    size_bytes: int
    """Size in whole extents."""
    chunk_bytes: int
    why: str

    @property
    def about(self) -> str:
        """A note about it for the user."""
        return f"CoW table {format_size(self.size_bytes)}, chunks of {format_size(self.chunk_bytes)}: {self.why}"


class Writes(Struct, frozen=True, kw_only=True):
    """The bytes written to a device since its creation."""

    written_bytes: int
    age_s: float
    """Age of the device, at most the time since the boot."""


def measure_writes(device: str | None, sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> Writes | None:
    """Given "253:4", return the bytes written to that device since the boot; None if the kernel does not count them."""
    with suppress(OSError, ValueError, IndexError):
        # Documentation/admin-guide/iostats.rst: the 7th field is sectors written.
        sectors = int((sysfs / "dev/block" / str(device) / "stat").read_text().split()[6])
        uptime_s = float((proc / "uptime").read_text().split()[0])
        return Writes(written_bytes=sectors * _SECTOR_BYTES, age_s=uptime_s)
    return None


def plan_cow(
    config: LvmConfig,
    group: Group,
    origin: LogicalVolume,
    *,
    writes: Writes | None,
    now: datetime,
) -> CowPlan:
    """Return the CoW table for a snapshot of `origin` according to `config.cow_size`.

    Args:
        config: `cow_size`, `cow_lifetime` and `chunk_size`.
        group: the origin's, in its present state.
        origin: an active volume.
        writes: the bytes written to it, for a forecast without earlier snapshots.
        now: aware.
    """
    chunk_bytes = config.chunk_bytes
    if config.cow_size == "forecast":
        data_bytes, why = _forecast(config, group, origin, writes, now)
    else:
        data_bytes = size_of(config.cow_size, origin.size_bytes)
        why = f"cow_size {config.cow_size}" + (" of the origin" if "%" in config.cow_size else "")
    most = whole_table_bytes(origin.size_bytes, chunk_bytes, group.extent_bytes)
    size_bytes = table_bytes(data_bytes, chunk_bytes, group.extent_bytes)
    if size_bytes >= most:
        size_bytes, why = most, f"{why}; room for the whole origin, so it cannot overflow"
    return CowPlan(size_bytes=size_bytes, chunk_bytes=chunk_bytes, why=why)


def require_room(group: Group, origin: LogicalVolume, plan: CowPlan, *, promised_bytes: int = 0) -> None:
    """Raise StorageError if the group does not have room for a CoW table.

    Other members of the same snapshot need `promised_bytes` of its free space.
    """
    free_bytes = max(group.free_bytes - promised_bytes, 0)
    if plan.size_bytes > free_bytes:
        raise StorageError(
            f"no room for a classic snapshot of {group.name}/{origin.name}: its CoW table needs "
            f"{format_size(plan.size_bytes)} ({plan.why}), and {format_size(free_bytes)} are free in {group.name}",
            hint=f"prune snapshots, set a smaller cow_size in [backend.lvm], or: vgextend {group.name} DEVICE",
        )


def table_bytes(data_bytes: int, chunk_bytes: int, extent_bytes: int) -> int:
    """Return the size of a table that holds `data_bytes` of chunks, in whole extents."""
    chunks = max(-(-data_bytes // chunk_bytes), 1)
    areas = -(-chunks // (chunk_bytes // _EXCEPTION_BYTES))
    return -(-max(1 + areas + chunks, _LEAST_CHUNKS) * chunk_bytes // extent_bytes) * extent_bytes


def whole_table_bytes(origin_bytes: int, chunk_bytes: int, extent_bytes: int) -> int:
    """Return the size of a table that holds every chunk of the origin: the most that LVM makes."""
    # LVM's cow_max_extents includes one chunk more than `table_bytes`.
    return table_bytes(origin_bytes + chunk_bytes, chunk_bytes, extent_bytes)


def growth_bytes(group: Group, origin: LogicalVolume, snapshot: LogicalVolume) -> int:
    """Return the extension of a snapshot's CoW table: half its size, or less up to the need of the whole origin.

    In whole extents; 0 if it already has room for the whole origin.
    """
    most = whole_table_bytes(origin.size_bytes, snapshot.chunk_bytes, group.extent_bytes)
    half = max(snapshot.size_bytes // 2 // group.extent_bytes, 1) * group.extent_bytes
    return max(min(half, most - snapshot.size_bytes), 0)


def _forecast(
    config: LvmConfig, group: Group, origin: LogicalVolume, writes: Writes | None, now: datetime
) -> tuple[int, str]:
    """Return the amount of data to make room for, and why."""
    lifetime_s = parse_duration(config.cow_lifetime)
    least = int(origin.size_bytes * _LEAST_SHARE)
    measured = _first_touches(group, origin, now) or _all_writes(origin, writes, now)
    if measured is None:
        size = size_of(_SHARE_WITHOUT_PAST, origin.size_bytes)
        return size, f"{_SHARE_WITHOUT_PAST} of the origin, as no write rate is known yet"
    rate, how = measured
    wanted = int(rate * lifetime_s * _MARGIN)
    why = f"{format_size(round(rate * 3600))} an hour ({how}) for {format_duration(lifetime_s)}, times {_MARGIN:g}"
    return (wanted, why) if wanted >= least else (least, f"{why}; at least {_LEAST_SHARE:.0%} of the origin")


def _first_touches(group: Group, origin: LogicalVolume, now: datetime) -> tuple[float, str] | None:
    """Return the fill rate of the CoW tables of the origin's present snapshots, in bytes per second.

    A new table will fill at this rate, because repeated writes to a chunk take no room. The fastest one counts.
    """
    rates = []
    for volume in group.volumes:
        age_s = age_of(volume, now)
        if (
            volume.is_classic_snapshot
            and volume.origin_uuid == origin.uuid
            and marks.MARK in volume.tags
            and volume.snap_percent is not None
            and not volume.invalid
            and age_s is not None
            and age_s >= _LEAST_AGE_S
        ):
            rates.append(volume.size_bytes * volume.snap_percent / 100 / age_s)
    count = f"{len(rates)} snapshot{'s' if len(rates) > 1 else ''}"
    return (max(rates), f"measured by the CoW tables of {count}") if rates else None


def _all_writes(origin: LogicalVolume, writes: Writes | None, now: datetime) -> tuple[float, str] | None:
    """Return the rate of all writes in bytes per second; repeated writes to one place count each time."""
    if writes is None:
        return None
    ages = [writes.age_s]
    made_s = age_of(origin, now)
    if made_s is not None and made_s > 0:
        ages.append(made_s)
    age_s = min(ages)
    if age_s < _LEAST_AGE_S:
        return None
    return writes.written_bytes / age_s, f"all writes of the last {format_duration(age_s)}"


def age_of(volume: LogicalVolume, now: datetime) -> float | None:
    """Return the age of a volume in seconds; None if LVM is configured with another time format."""
    with suppress(ValueError):
        return (now - datetime.strptime(volume.made_at, "%Y-%m-%d %H:%M:%S %z")).total_seconds()
    return None
