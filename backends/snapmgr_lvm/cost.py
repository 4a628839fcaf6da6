"""Measures the cost of a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.api import CommandError, MissingRequirementError, Usage
from snapmgr_lvm.removal import device_name

if TYPE_CHECKING:
    from snapmgr.api import Runner
    from snapmgr_lvm.report import Group, LogicalVolume


def usage(runner: Runner, group: Group, volume: LogicalVolume, *, exact: bool) -> Usage:
    """Return the bytes that a snapshot has for itself, and whether it is still one."""
    if volume.is_thin:
        return Usage(exclusive_bytes=_thin_exclusive(runner, group, volume) if exact else None)
    percent = volume.snap_percent
    used = int(volume.size_bytes * percent / 100) if percent is not None else None
    return Usage(exclusive_bytes=used, valid=not volume.invalid)


def _thin_exclusive(runner: Runner, group: Group, volume: LogicalVolume) -> int | None:
    """Ask the pool's own metadata (a snapshot of them, thin_ls(8)); None if another program is doing that now."""
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
