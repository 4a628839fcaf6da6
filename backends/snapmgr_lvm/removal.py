"""Removes volumes: by their UUID, and only when no process has them open."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from snapmgr.api import CommandError, InUseError, StorageError
from snapmgr_lvm import dm, marks, orphans
from snapmgr_lvm.inventory import pool_of
from snapmgr_lvm.report import read_group

if TYPE_CHECKING:
    from snapmgr.api import Runner
    from snapmgr_lvm.report import Group, LogicalVolume

# udev's rules, and programs that probe a new or closed device, have it open for a moment.
_PATIENCE_S = 5.0
_POLL_S = 0.2
# Removing a thin snapshot frees its blocks one by one.
_REMOVE_TIMEOUT_S = 600.0


def remove(runner: Runner, group: Group, volume: LogicalVolume) -> None:
    """Remove a volume. Idempotent. Raises InUseError if it is open, StorageError if LVM refuses."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            runner.run(
                # By its UUID: another may have been put under its name since.
                ["lvremove", "--yes", "--select", f'lv_uuid="{volume.uuid}"', group.name],
                timeout_s=_REMOVE_TIMEOUT_S,
                abandon=True,
            )
        except CommandError as error:
            failure = error
        else:
            # LVM leaves volumes that a killed command had begun to make for it.
            orphans.remove_layers(group.uuid, volume.uuid)
            return
        now = read_group(runner, pool_of(group)).by_uuid(volume.uuid)
        if now is None:
            return
        if time.monotonic() >= deadline:
            if now.opened:
                raise InUseError(
                    f"the logical volume {group.name}/{volume.name} is open: mounted, or below another device",
                    hint=f"see: lsblk, fuser -m /dev/{group.name}/{volume.name}",
                )
            raise StorageError(f"cannot remove {group.name}/{volume.name}: {failure.message}")
        time.sleep(_POLL_S)


def resume(runner: Runner, group: Group, volume: LogicalVolume) -> None:
    """Let a suspended volume go on, with the table that LVM's metadata describe. Raises StorageError if it does not."""
    name = f"{group.name}/{volume.name}"
    failure: CommandError | None = None
    try:
        for device in loaded_ahead(runner, group, volume):
            # The plan of the killed command, for example a merge: resumed, it would go live.
            runner.run(["dmsetup", "clear", device])
        runner.run(["lvchange", "--yes", "--refresh", name], abandon=True)
    except CommandError as error:
        failure = error
    now = read_group(runner, pool_of(group)).by_uuid(volume.uuid)
    if now is not None and now.suspended:
        why = f": {failure.message}" if failure is not None else ""
        raise StorageError(
            f"the logical volume {name} is still suspended{why}",
            hint=f"dmsetup resume {device_name(group, volume.name)}",
        )


def loaded_ahead(runner: Runner, group: Group, volume: LogicalVolume) -> list[str]:
    """Return the devices of a volume and its snapshots that have a second table loaded, beside the one in use.

    A command that was killed after it had loaded them, and before it suspended anything, leaves nothing else. Any
    later command of LVM that resumes such a device carries out a plan that was given up long ago.
    """
    family = {one.uuid for one in group.volumes if volume.uuid in (one.uuid, one.origin_uuid)}
    uuids = tuple(dm.lvm_uuid(group.uuid, uuid) for uuid in family)
    columns = ("--columns", "--noheadings", "--separator", "|", "--options", "name,uuid,tables_loaded")
    rows = [line.split("|") for line in runner.run(["dmsetup", "info", *columns]).stdout.splitlines()]
    # The layers below have the same UUID with a suffix.
    return [row[0] for row in rows if len(row) == 3 and row[1].startswith(uuids) and row[2] == "Both"]  # noqa: PLR2004


def device_name(group: Group, name: str) -> str:
    """Return the name that device-mapper has for the volume `name`: hyphens are doubled (lvm(8))."""
    return f"{group.name.replace('-', '--')}-{name.replace('-', '--')}"


def attached_clones(group: Group, native_id: str) -> list[LogicalVolume]:
    """Return the clones of a thin snapshot."""
    return [volume for volume in group.volumes if marks.value(volume, "of") == native_id]
