"""Checks a volume before a snapshot, and composes the command that takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.api import StorageError, format_size
from snapmgr_lvm import marks

if TYPE_CHECKING:
    from snapmgr_lvm.config import LvmConfig
    from snapmgr_lvm.report import Group, LogicalVolume
    from snapmgr_lvm.sizing import CowPlan

# Tags of a snapshot and its note, and LVM's own data: during a change the metadata area holds two copies.
_METADATA_BYTES = 64 << 10


def check_group(group: Group) -> None:
    """Raise StorageError if LVM would refuse, or should refuse, to change the volume group."""
    if group.missing_pvs:
        raise StorageError(
            f"the volume group {group.name} misses {group.missing_pvs} of its physical volumes",
            hint="see: pvs, vgs -o +vg_missing_pv_count",
        )
    if group.exported or not group.writable:
        what = "exported" if group.exported else "read-only"
        raise StorageError(f"the volume group {group.name} is {what}", hint=f"see: vgs -o +vg_attr {group.name}")
    if group.lock_type:
        raise StorageError(
            f"the volume group {group.name} is shared between machines ({group.lock_type}), which was never tried",
            hint="use a volume group of this machine's own",
        )
    if group.metadata_free_bytes < _METADATA_BYTES:
        raise StorageError(
            f"the metadata area of the volume group {group.name} is nearly full: "
            f"{format_size(group.metadata_free_bytes)} free",
            hint="prune snapshots (their manifests are kept in it), or use a group made with a larger --metadatasize",
        )


def check_origin(group: Group, origin: LogicalVolume) -> None:
    """Raise StorageError for an origin that cannot be snapshotted now."""
    name = f"{group.name}/{origin.name}"
    if origin.suspended:
        raise StorageError(
            f"the logical volume {name} is suspended: whatever writes to it hangs",
            hint="was a snapshot interrupted? snapmgr doctor --fix",
        )
    if not origin.active:
        raise StorageError(f"the logical volume {name} is not active", hint=f"lvchange -ay {name}")
    if origin.health:
        raise StorageError(f"the logical volume {name} is not healthy: {origin.health}", hint="see: lvs -a")


def check_pool(config: LvmConfig, group: Group, origin: LogicalVolume) -> None:
    """Raise StorageError if the thin pool of `origin` is too full for another snapshot, or damaged."""
    pool = group.by_uuid(origin.pool_uuid)
    if pool is None or pool.data_percent is None or pool.metadata_percent is None:
        raise StorageError(
            f"LVM does not say how full the thin pool of {group.name}/{origin.name} is", hint="see: lvs -a"
        )
    name = f"{group.name}/{pool.name}"
    if pool.check_needed or pool.health:
        why = pool.health or "its metadata must be checked"
        raise StorageError(
            f"the thin pool {name} is damaged or full: {why}", hint="see lvmthin(7), and: lvs -a -o +lv_health_status"
        )
    for what, percent, size_bytes, limit, option in (
        ("data are", pool.data_percent, pool.size_bytes, config.data_share, "--size"),
        ("metadata are", pool.metadata_percent, pool.metadata_bytes or 0, config.metadata_share, "--poolmetadatasize"),
    ):
        if percent >= limit * 100:
            # Half as much more, in whole extents.
            more = max(size_bytes // 2 // group.extent_bytes, 1) * group.extent_bytes
            fail = "fail immediately" if pool.when_full == "error" else "stall for 60 s and then fail"
            then = (
                f"once they are full, writes to all its volumes {fail}"
                if option == "--size"
                else "once they are full, all its volumes become read-only and need a repair"
            )
            raise StorageError(
                f"the {what} {percent:.1f} % full in the thin pool {name} ({format_size(size_bytes)}; "
                f"the limit is {limit:.0%}): {then}",
                hint=f"prune snapshots, or: lvextend {option} +{more}b {name} (free in {group.name}: "
                f"{format_size(group.free_bytes)})",
            )


def command(
    group: Group, origin: LogicalVolume, *, name: str, snapshot_id: str, cow: CowPlan | None
) -> tuple[str, ...]:
    """Return the command that takes a snapshot: a classic one with the CoW table `cow`, or a thin one."""
    own = ["--setactivationskip", "y"]
    if cow is not None:
        own = ["--size", f"{cow.size_bytes}b", "--chunksize", f"{cow.chunk_bytes}b"]
    return (
        "lvcreate",
        "--yes",
        "--snapshot",
        "--permission",
        "r",
        *own,
        *marks.adding(marks.snapshot_tags(snapshot_id, origin.uuid)),
        "--name",
        name,
        f"{group.name}/{origin.name}",
    )
