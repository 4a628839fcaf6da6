"""Device-mapper: what there is by sysfs, changes by dmsetup. Works with and without udevd.

Our own devices are made and removed with DM_DISABLE_UDEV: libdevmapper makes their nodes itself and waits for nobody,
and udev's rules take a device without a cookie for none of theirs. So nobody probes it, holds it open, or lets
/dev/disk/by-uuid lead to it, although it has the file system UUID of the origin.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.api import CommandError, InUseError, StorageError
from snapmgr_lvm.report import hyphenate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import Mount, Runner

SYSFS = Path("/sys")
NODES = Path("/dev")
SECTOR_BYTES = 512
NO_UDEV = {"DM_DISABLE_UDEV": "1"}
_TIMEOUT_S = 60.0
_SEPARATORS = 3
# What is killed half-way leaves a device that `find` finds: it must not outlive us and go on after a clean-up.
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
_LVM_UUID = re.compile(r"LVM-([A-Za-z0-9]{32})([A-Za-z0-9]{32})")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device-mapper device, also a half-made one."""

    kernel_name: str
    """"dm-4"."""
    number: str
    """Major and minor: "254:4"."""
    name: str
    uuid: str
    """"" for one that was made without."""
    suspended: bool
    size_bytes: int
    """0 while it has no table."""
    below: tuple[str, ...]
    """Kernel names of the devices that it stands on."""


@dataclass(frozen=True, kw_only=True)
class SnapshotStatus:
    """The status line of a "snapshot" target (Documentation/admin-guide/device-mapper/snapshot.rst)."""

    used_bytes: int
    total_bytes: int
    """Both 0 after a failure."""
    failure: str | None
    """"Invalid" (an exception could not be stored), "Overflow", "Merge failed" or "Unknown"; None if all is well."""


def devices(runner: Runner) -> tuple[Device, ...]:
    """Return all device-mapper devices of this machine, also those without a table, which sysfs does not have."""
    argv = ["dmsetup", "info", "-c", "--noheadings", "--separator", "|", "-o", "major,minor,uuid,name"]
    try:
        lines = runner.run(argv, timeout_s=_TIMEOUT_S).stdout.splitlines()
    except CommandError as error:
        raise StorageError(f"device-mapper does not say what devices it has: {error.message}") from None
    found = []
    # Without any device it says so, in words.
    for major, minor, uuid, name in (line.split("|", 3) for line in lines if line.count("|") >= _SEPARATORS):
        folder = SYSFS / "block" / f"dm-{minor}"
        half_made = Device(
            kernel_name=folder.name,
            number=f"{major}:{minor}",
            name=name,
            uuid=uuid,
            suspended=False,
            size_bytes=0,
            below=(),
        )
        found.append(_read(folder) or half_made)
    return tuple(found)


def find(uuid: str) -> Device | None:
    """Return the device with this device-mapper UUID, if it has had a table."""
    found = (_read(folder) for folder in (SYSFS / "block").glob("dm-*"))
    return next((device for device in found if device is not None and device.uuid == uuid), None)


def lvm_uuid(group_uuid: str, volume_uuid: str) -> str:
    """Return the device-mapper UUID of a logical volume."""
    return f"LVM-{group_uuid}{volume_uuid}".replace("-", "").replace("LVM", "LVM-", 1)


def volume_of(device: Device) -> tuple[str, str] | None:
    """Return the UUIDs of volume group and logical volume, as LVM writes them; None if it is no logical volume's."""
    found = _LVM_UUID.fullmatch(device.uuid)
    return (hyphenate(found[1]), hyphenate(found[2])) if found else None


def below(device: Device) -> tuple[Device, ...]:
    """Return the device-mapper devices that `device` stands on directly."""
    found = (_read(SYSFS / "block" / name) for name in device.below if name.startswith("dm-"))
    return tuple(one for one in found if one is not None)


def everything_below(number: str) -> Iterator[str]:
    """Given a block device's number ("8:1"), yield the sysfs folder of each device that it stands on, itself first.

    Through partitions, device-mapper, MD, and loop devices to the file system that their file is on.
    """
    waiting, seen = [number], set[str]()
    while waiting:
        number = waiting.pop()
        folder = SYSFS / "dev" / "block" / number
        if number in seen or not folder.exists():
            continue
        seen.add(number)
        yield str(folder)
        neighbours = list(folder.glob("slaves/*/dev"))
        if (folder / "partition").exists():
            neighbours.append(folder.resolve().parent / "dev")
        for file in neighbours:
            with suppress(OSError):
                waiting.append(file.read_text(encoding="ascii").strip())
        with suppress(OSError):
            status = os.stat((folder / "loop" / "backing_file").read_text().rstrip("\n"))
            waiting.append(device_number(status.st_dev))


def device_number(device: int) -> str:
    """Given st_dev or st_rdev, return "MAJOR:MINOR"."""
    return f"{os.major(device)}:{os.minor(device)}"


def create(runner: Runner, name: str, uuid: str, table: str) -> Device:
    """Make a device with a table of one line. Raises StorageError; what a failure left is found by `uuid`."""
    argv = [*_DIES_WITH_US, "dmsetup", "create", name, "--uuid", uuid, "--table", table]
    try:
        runner.run(argv, timeout_s=_TIMEOUT_S, env=NO_UDEV)
    except CommandError as error:
        raise StorageError(f"cannot make the device {name}: {error.message}", hint="see: dmsetup info, dmesg") from None
    made = find(uuid)
    if made is None:
        raise StorageError(f"the device {name} was made and is not there", hint="is /sys mounted?")
    return made


def require_unmounted(device: Device, mounts: tuple[Mount, ...]) -> None:
    """Raise InUseError that says where a device is mounted, if it is."""
    points = [mount.point for mount in mounts if mount.device == device.number]
    if points:
        raise InUseError(f"the device {device.name} is mounted at {', '.join(points)}", hint=f"umount {points[0]}")


def remove(runner: Runner, device: Device) -> None:
    """Remove a device of ours; idempotent. Somebody's brief look at it (blkid, udev) is waited for, some seconds.

    Raises InUseError that names who has it, StorageError otherwise.
    """
    argv = [*_DIES_WITH_US, "dmsetup", "remove", "--retry", device.name]
    try:
        runner.run(argv, timeout_s=_TIMEOUT_S, env=NO_UDEV)
    except CommandError as error:
        there = next((one for one in devices(runner) if one.uuid == device.uuid), None)
        if there is None:
            return
        users = _users(there)
        if users or _is_open(runner, there):
            raise InUseError(
                f"the device {device.name} is in use" + (f" by {', '.join(users)}" if users else ""),
                hint=f"see: findmnt {node(runner, there)}, fuser -v {node(runner, there)}",
            ) from None
        raise StorageError(f"cannot remove the device {device.name}: {error.message}", hint="see: dmesg") from None


def node(runner: Runner, device: Device) -> str:
    """Return the node of a device: in /dev/mapper, or /dev/dm-N where nobody makes those. Raises StorageError."""
    named, plain = NODES / "mapper" / device.name, NODES / device.kernel_name
    if not _is_node(named, device):
        with suppress(CommandError):
            runner.run(["dmsetup", "mknodes", device.name], timeout_s=_TIMEOUT_S)
    for path in (named, plain):
        if _is_node(path, device):
            return str(path)
    raise StorageError(f"there is no node for the device {device.name} ({device.number})", hint="is /dev a devtmpfs?")


def _is_node(path: Path, device: Device) -> bool:
    with suppress(OSError):
        status = path.stat()
        return stat.S_ISBLK(status.st_mode) and device_number(status.st_rdev) == device.number
    return False


def snapshot_status(runner: Runner, device: Device) -> SnapshotStatus:
    """Return the state of a "snapshot" target. Raises StorageError if the device is no such thing."""
    try:
        line = runner.run(["dmsetup", "status", device.name], timeout_s=_TIMEOUT_S).stdout
    except CommandError as error:
        raise StorageError(f"device-mapper does not say how {device.name} is: {error.message}") from None
    return parse_snapshot_status(line)


def parse_snapshot_status(line: str) -> SnapshotStatus:
    """Given "0 SECTORS snapshot USED/TOTAL METADATA" or "0 SECTORS snapshot Invalid", return what it says."""
    found = re.fullmatch(r"\d+ \d+ snapshot (?:(\d+)/(\d+) \d+|([A-Z][A-Za-z ]+?))\s*", line)
    if found is None:
        raise StorageError(f"this is no status of a snapshot: {line.strip()!r}")
    return SnapshotStatus(
        used_bytes=int(found[1] or 0) * SECTOR_BYTES,
        total_bytes=int(found[2] or 0) * SECTOR_BYTES,
        failure=found[3],
    )


def _read(folder: Path) -> Device | None:
    """Return the device of a folder in /sys/block; None if it goes just now."""
    try:
        texts = {name: (folder / name).read_text().strip() for name in ("dev", "dm/name", "dm/uuid", "dm/suspended")}
        size_sectors = int((folder / "size").read_text())
        names = tuple(sorted(os.listdir(folder / "slaves")))
    except OSError:
        return None
    return Device(
        kernel_name=folder.name,
        number=texts["dev"],
        name=texts["dm/name"],
        uuid=texts["dm/uuid"],
        suspended=texts["dm/suspended"] == "1",
        size_bytes=size_sectors * SECTOR_BYTES,
        below=names,
    )


def _users(device: Device) -> list[str]:
    with suppress(OSError):
        above = os.listdir(SYSFS / "block" / device.kernel_name / "holders")
        return [f"the device {name}" for name in sorted(above)]
    return []


def _is_open(runner: Runner, device: Device) -> bool:
    argv = ["dmsetup", "info", "-c", "--noheadings", "-o", "open", device.name]
    with suppress(CommandError):
        return int(runner.run(argv, timeout_s=_TIMEOUT_S).stdout) > 0
    return False
