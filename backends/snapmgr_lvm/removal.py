"""Removes volumes by their UUID, and only while no process has them open."""

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

# udev's rules, and programs that probe a new or closed device, briefly hold it open.
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
                # By its UUID: another volume may have its name now.
                ["lvremove", "--yes", "--select", f'lv_uuid="{volume.uuid}"', group.name],
                timeout_s=_REMOVE_TIMEOUT_S,
                abandon=True,
            )
        except CommandError as error:
            failure = error
        else:
            # LVM leaves behind volumes that a killed command had begun to make for it.
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
    """Resume a suspended volume with the table in LVM's metadata. Raises StorageError if it stays suspended."""
    name = f"{group.name}/{volume.name}"
    failure: CommandError | None = None
    try:
        for device in loaded_ahead(runner, group, volume):
            # The plan of the killed command, for example a merge, which a resume would activate.
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
    """Return the devices of a volume and its snapshots that have a second table loaded in addition to the live one.

    This is the only trace of a command that was killed after loading them and before it suspended anything. Any
    later LVM command that resumes such a device carries out a plan that was given up long ago.
    """
    family = {one.uuid for one in group.volumes if volume.uuid in (one.uuid, one.origin_uuid)}
    uuids = tuple(dm.lvm_uuid(group.uuid, uuid) for uuid in family)
    columns = ("--columns", "--noheadings", "--separator", "|", "--options", "name,uuid,tables_loaded")
    rows = [line.split("|") for line in runner.run(["dmsetup", "info", *columns]).stdout.splitlines()]
    # The lower layers have the same UUID with a suffix.
    return [row[0] for row in rows if len(row) == 3 and row[1].startswith(uuids) and row[2] == "Both"]  # noqa: PLR2004


def device_name(group: Group, name: str) -> str:
    """Return device-mapper's name for the volume `name`, with doubled hyphens (lvm(8))."""
    return f"{group.name.replace('-', '--')}-{name.replace('-', '--')}"


def attached_clones(group: Group, native_id: str) -> list[LogicalVolume]:
    """Return the clones of a thin snapshot."""
    return [volume for volume in group.volumes if marks.value(volume, "of") == native_id]
