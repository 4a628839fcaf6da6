"""Reads the usage of snapshots and of the spaces that they can fill, and enlarges a classic snapshot's CoW table.

Consequences of full storage: if a classic snapshot's CoW table is full, the snapshot is lost and the origin continues.
If a thin pool's data are full, writes to all its volumes, including the origin, stall for 60 s (dm-thin-pool's
no_space_timeout) and then fail; with ``--errorwhenfull y`` they fail immediately. If its metadata are full, all its
volumes become read-only, and the pool must be repaired. A full volume group cannot hold or enlarge classic snapshots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.api import CommandError, Gauge, MissingRequirementError, NotFoundError, StorageError, Usage, format_size
from snapmgr_lvm import marks
from snapmgr_lvm.inventory import pool_of, snapshot_ref
from snapmgr_lvm.removal import device_name
from snapmgr_lvm.report import read_group
from snapmgr_lvm.sizing import growth_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from snapmgr.api import Reservoir, Runner, SnapshotRef
    from snapmgr_lvm.config import LvmConfig
    from snapmgr_lvm.report import Group, LogicalVolume

# Where LVM's own example of automatic extension begins, snapshot_autoextend_threshold = 70.
_RELIEVED_PERCENT = 70.0
_EXTEND_TIMEOUT_S = 120.0


def of_group(group: Group) -> tuple[Gauge, ...]:
    """Return the usage of each space that our snapshots in a group can fill: thin pools, free space, CoW tables."""
    ours = [volume for volume in group.volumes if marks.value(volume, "origin") is not None]
    classic = [volume for volume in ours if volume.is_classic_snapshot]
    thin_pools = {volume.pool_uuid: group.by_uuid(volume.pool_uuid) for volume in ours if volume.is_thin}
    found = []
    for pool in (pool for pool in thin_pools.values() if pool is not None):
        # Also origins whose snapshots are classic: the origins themselves are in the pool.
        concerned = _origins(volume for volume in ours if pool.uuid in _pools(group, volume))
        found += [replace(gauge, volume_ids=concerned) for gauge in _thin_pool(group, pool)]
    if classic:
        # The next snapshot will have about the same size.
        space = _space(group, wanted_bytes=max(volume.size_bytes for volume in classic))
        found.append(replace(space, volume_ids=_origins(classic)))
    found += [gauge for volume in classic for gauge in _cow_table(group, volume)]
    return tuple(found)


def _origins(snapshots: Iterable[LogicalVolume]) -> tuple[str, ...]:
    return tuple(sorted({marks.value(volume, "origin") or "" for volume in snapshots}))


def _pools(group: Group, snapshot: LogicalVolume) -> tuple[str | None, ...]:
    origin = group.by_uuid(marks.value(snapshot, "origin"))
    return (snapshot.pool_uuid, origin.pool_uuid if origin is not None else None)


def of_volume(group: Group, origin: LogicalVolume, *, cow_bytes: int | None) -> tuple[Reservoir, ...]:
    """Return the spaces that snapshots of a volume can fill: a thin volume's pool, otherwise the group's free space.

    Args:
        group: the volume's.
        origin: the volume to snapshot.
        cow_bytes: the part of the group's free space that its snapshot takes; None for a thin snapshot.
    """
    reservoirs: list[Reservoir] = []
    pool = group.by_uuid(origin.pool_uuid) if origin.is_thin else None
    if pool is not None:
        reservoirs += _thin_pool(group, pool)
    if cow_bytes is not None:
        reservoirs.append(_space(group, wanted_bytes=cow_bytes))
    return tuple(reservoirs)


def auto_extend(config: LvmConfig, runner: Runner, ref: SnapshotRef) -> str | None:
    """Extend the CoW table of a classic snapshot that is filling up, if `config.auto_extend`; see `AutoExtending`.

    Raises NotFoundError if it is gone, StorageError if the room is missing or LVM refuses.
    """
    if not config.auto_extend:
        return None
    group = read_group(runner, ref.pool)
    volume = group.by_uuid(ref.native_id)
    if volume is None:
        raise NotFoundError(f"the snapshot {ref.name} is not in {group.name} any more")
    origin = group.by_uuid(volume.origin_uuid)
    percent = volume.snap_percent
    # More room does not save a lost snapshot.
    if not volume.is_classic_snapshot or origin is None or volume.invalid or percent is None:
        return None
    more = growth_bytes(group, origin, volume)
    if percent < _RELIEVED_PERCENT or more == 0:
        return None
    name = f"{group.name}/{volume.name}"
    if more > group.free_bytes:
        # A smaller extension is better than nothing.
        more = group.free_bytes // group.extent_bytes * group.extent_bytes
    if more == 0:
        raise StorageError(
            f"the CoW table of {name} is {percent:.0f} % full, and nothing is free in {group.name} to enlarge it",
            hint=f"vgextend {group.name} DEVICE, or delete other snapshots",
        )
    try:
        runner.run(["lvextend", "--yes", "--size", f"+{more}b", name], timeout_s=_EXTEND_TIMEOUT_S, abandon=True)
    except CommandError as error:
        raise StorageError(f"the CoW table of {name} could not be enlarged: {error.message}") from error
    return (
        f"the CoW table of {name} was {percent:.0f} % full: enlarged from {format_size(volume.size_bytes)} "
        f"to {format_size(volume.size_bytes + more)}"
    )


def usage(runner: Runner, group: Group, volume: LogicalVolume, *, exact: bool) -> Usage:
    """Return the exclusive bytes of a snapshot, and whether it is still valid."""
    if volume.is_thin:
        return Usage(exclusive_bytes=_thin_exclusive(runner, group, volume) if exact else None)
    percent = volume.snap_percent
    used = int(volume.size_bytes * percent / 100) if percent is not None else None
    return Usage(exclusive_bytes=used, valid=not volume.invalid)


def _thin_exclusive(runner: Runner, group: Group, volume: LogicalVolume) -> int | None:
    """Read it from a snapshot of the pool's own metadata (thin_ls(8)); None while another program does the same."""
    pool = group.by_uuid(volume.pool_uuid)
    if pool is None or volume.thin_id is None:
        return None
    name = device_name(group, pool.name)
    try:
        runner.run(["dmsetup", "message", f"{name}-tpool", "0", "reserve_metadata_snap"])
    except CommandError:
        return None
    try:
        options = ["--metadata-snap", "--no-headers", "-o", "DEV,EXCLUSIVE_BYTES"]
        answer = runner.run(["thin_ls", *options, f"/dev/mapper/{name}_tmeta"])
    except (CommandError, MissingRequirementError):
        return None
    finally:
        runner.run(["dmsetup", "message", f"{name}-tpool", "0", "release_metadata_snap"])
    costs = dict(line.split() for line in answer.stdout.splitlines() if line.strip())
    found = costs.get(str(volume.thin_id))
    return int(found) if found is not None else None


def _thin_pool(group: Group, pool: LogicalVolume) -> tuple[Gauge, ...]:
    name = f"the thin pool {group.name}/{pool.name}"
    # LVM knows neither value while the pool is inactive.
    return tuple(
        Gauge(
            name=f"{what} of {name}",
            size_bytes=size_bytes,
            used_bytes=_part(percent, size_bytes),
            when_full="origin_errors",
            pool=pool_of(group),
            valid=not (pool.health or pool.check_needed),
        )
        for what, percent, size_bytes in (
            ("data", pool.data_percent, pool.size_bytes),
            ("metadata", pool.metadata_percent, pool.metadata_bytes),
        )
        if percent is not None and size_bytes is not None
    )


def _space(group: Group, *, wanted_bytes: int) -> Gauge:
    return Gauge(
        name=f"the volume group {group.name}",
        size_bytes=group.size_bytes,
        used_bytes=max(group.size_bytes - group.free_bytes, 0),
        when_full="no_snapshots",
        wanted_bytes=wanted_bytes,
        pool=pool_of(group),
    )


def _cow_table(group: Group, volume: LogicalVolume) -> Iterator[Gauge]:
    lost = volume.invalid
    if marks.value(volume, "id") is None or (volume.snap_percent is None and not lost):
        return  # inactive: an overflow shows only on an active one
    yield Gauge(
        name=f"CoW table of {group.name}/{volume.name}",
        size_bytes=volume.size_bytes,
        used_bytes=volume.size_bytes if lost else _part(volume.snap_percent or 0.0, volume.size_bytes),
        when_full="snapshot_lost",
        pool=pool_of(group),
        ref=snapshot_ref(group, volume),
        valid=not lost,
    )


def _part(percent: float, whole_bytes: int) -> int:
    return min(round(percent / 100 * whole_bytes), whole_bytes)
