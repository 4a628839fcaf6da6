"""Finds the logical volume of a target, without changing anything."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from snapmgr.api import NotMine, Pool, StorageError, Volume
from snapmgr_lvm import dm
from snapmgr_lvm.report import read_group

if TYPE_CHECKING:
    from snapmgr.api import BlockDevice, Runner, Target
    from snapmgr_lvm.config import LvmConfig
    from snapmgr_lvm.report import Group, LogicalVolume

Kind = Literal["classic", "thin"]
FSTAB = "/etc/fstab"

# These file systems freeze when LVM suspends the device, and recover on a copy.
_FILE_SYSTEMS = ("ext3", "ext4", "xfs")
_BY_NAME = ("UUID=", "LABEL=", "/dev/disk/by-uuid/", "/dev/disk/by-label/")


class Place(Struct, frozen=True, kw_only=True):
    """The logical volume below a file system."""

    group_uuid: str
    volume_uuid: str
    encrypted: bool
    """Whether a LUKS container lies between the two."""


def find_place(target: Target) -> Place | NotMine:
    """Return the logical volume that holds a target's file system, or why it is not on one."""
    if target.mount.fs_type == "btrfs":
        on_lvm = any(device.kind == "lvm" for device in target.devices)
        return NotMine(
            reason=f"{target.path} is on btrfs"
            + (
                ": a snapshot of its logical volume has the same file system UUID, and mounting it corrupts both"
                if on_lvm
                else ""
            ),
            hint='use btrfs snapshots: a subvolume, and backend = "btrfs"',
            foreign=True,
        )
    if not target.devices:
        reason = f"{target.path} is on {target.mount.fs_type}, which is on no block device"
        return NotMine(reason=reason, foreign=True)
    device, encrypted = target.devices[0], False
    if device.kind == "crypt" and len(device.below) == 1:
        device, encrypted = device.below[0], True
    found = dm.volume_of(device.dm_uuid or "")
    if found is None or len(target.devices) > 1:
        top = target.devices[0]
        reason = f"{target.path} is on {top.path} ({_chain(top)}), which is not a logical volume"
        return NotMine(reason=reason, foreign=True)
    if target.mount.fs_type not in _FILE_SYSTEMS:
        return NotMine(
            reason=f"{target.path} is on {target.mount.fs_type}: snapshots of its logical volume were never tried",
            hint=f"use one of {', '.join(_FILE_SYSTEMS)}",
        )
    group_uuid, volume_uuid = found
    return Place(group_uuid=group_uuid, volume_uuid=volume_uuid, encrypted=encrypted)


def _chain(device: BlockDevice) -> str:
    """Return the kinds of devices from the top down: "part on disk"."""
    return " on ".join((device.kind, *(_chain(lower) for lower in device.below[:1])))


def locate(runner: Runner, config: LvmConfig, target: Target) -> Volume | NotMine:
    """Given a target, return its logical volume, or why it cannot be snapshotted."""
    place = find_place(target)
    if isinstance(place, NotMine):
        return place
    source = target.mount.source
    group = read_group(runner, Pool(backend="lvm", id=place.group_uuid, hint=source))
    volume = group.by_uuid(place.volume_uuid)
    if volume is None:
        raise StorageError(
            f"the logical volume of {target.path} ({place.volume_uuid}) is not in its volume group {group.name}",
            hint="was it removed from the metadata while it was mounted? see: lvs -o +lv_uuid",
        )
    kind = choose_kind(config, volume)
    if isinstance(kind, NotMine):
        return kind
    path, subpath = _where(target)
    return Volume(
        backend="lvm",
        id=volume.uuid,
        pool=Pool(backend="lvm", id=group.uuid, hint=group.name),
        path=path,
        subpath=subpath,
        excluded=tuple(sorted({mount.point for mount in target.submounts})),
        warnings=(*_warnings(target, group, volume), *(_scratch_warnings(config, target) if kind == "classic" else ())),
        label=f"{group.name}/{volume.name} ({kind} snapshot)",
    )


def choose_kind(config: LvmConfig, volume: LogicalVolume) -> Kind | NotMine:
    """Return the kind of snapshot that a volume gets, or why it cannot have one."""
    name = volume.name
    if volume.is_classic_snapshot:
        return NotMine(reason=f"{name} is a classic snapshot itself: LVM makes no snapshot of one")
    if volume.merging or volume.merge_failed:
        return NotMine(reason=f"a snapshot is being merged into {name}", hint="wait until it is done: see lvs -a")
    thin = volume.is_thin
    if config.kind == "thin" and not thin:
        return NotMine(
            reason=f'{name} is not a thin volume, and kind is "thin"', hint='set kind = "auto" in [backend.lvm]'
        )
    return "thin" if thin and config.kind != "classic" else "classic"


def _where(target: Target) -> tuple[str, str]:
    """Return the visible path of the volume's own root folder, and the target's path from there.

    For a bind mount of a part of it, return the target itself: the root may not be visible anywhere.
    """
    below = os.path.relpath(target.path, target.mount.point)
    inner = os.path.normpath(os.path.join(target.mount.root.lstrip("/"), below))
    subpath = "" if inner == "." else inner
    return (target.mount.point if target.mount.root == "/" else target.path), subpath


def _warnings(target: Target, group: Group, volume: LogicalVolume) -> tuple[str, ...]:
    entry = fstab_by_name(target, _read_fstab())
    if entry is None:
        return ()
    said = (
        f"{FSTAB} mounts {target.mount.point} by {entry}: an active snapshot has the same, and may be mounted in its "
        f"place; name /dev/{group.name}/{volume.name} there"
    )
    return (said,)


def _scratch_warnings(config: LvmConfig, target: Target) -> tuple[str, ...]:
    """Report early the reasons for which attaching would fail: at a restore it is too late."""
    folder = Path(config.scratch_dir)
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    if dm.device_number(there.stat().st_dev) != target.mount.device:
        return ()
    return (
        f"the scratch folder {folder} is on the volume itself: its snapshots cannot be mounted, verified or restored "
        "from; set scratch_dir in [backend.lvm] to a folder on another one",
    )


def _read_fstab() -> str:
    try:
        return Path(FSTAB).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def fstab_by_name(target: Target, fstab: str) -> str | None:
    """Return the name of the target's file system in the text of an fstab, unless that is its device."""
    for line in fstab.splitlines():
        words = line.split()
        if len(words) < 2 or line.lstrip().startswith("#") or not words[0].startswith(_BY_NAME):  # noqa: PLR2004 - fstab(5)
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[1])
        if os.path.normpath(point) == target.mount.point:
            return words[0]
    return None
