"""Device-mapper: what there is by sysfs and dmsetup; our own devices by the kernel's ioctls (linux/dm-ioctl.h).

Not by ``dmsetup create``: that sends udev's rules a cookie, they probe the device, and /dev/disk/by-uuid leads to it
from then on, as it has the file system UUID of the origin; an fstab would mount it in the origin's place. A device that
is made without a cookie is none of theirs, but for its link in /dev/mapper. Works without udevd as well.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.api import CommandError, InUseError, LackingError, StorageError
from snapmgr_lvm.report import hyphenate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import Mount, Runner

SYSFS = Path("/sys")
NODES = Path("/dev")
SECTOR_BYTES = 512
_TIMEOUT_S = 60.0
_SEPARATORS = 3
_PATIENCE_S = 5.0
_POLL_S = 0.1
# udevd makes the link in /dev/mapper, if it runs.
_UDEV = Path("/run/udev/control")
_UDEV_S = 2.0
_UDEV_POLL_S = 0.005

_CONTROL = "/dev/mapper/control"
_DM_IOCTL = 0xC138FD00  # _IOWR(0xfd, …, struct dm_ioctl)
_DEV_CREATE, _DEV_REMOVE, _DEV_SUSPEND, _TABLE_LOAD = 3, 4, 6, 9
_VERSION = (4, 0, 0)
# struct dm_ioctl: version, data_size, data_start, target_count, open_count, flags, event_nr, padding, dev, name, uuid,
# data. An event_nr of 0 is "no cookie".
_HEAD = struct.Struct("=3I3Ii3IQ128s129s7x")
# struct dm_target_spec: sector_start, length, status, next, target_type.
_SPEC = struct.Struct("=QQiI16s")
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
class Target:
    """One line of a device's table, from sector 0 on."""

    sectors: int
    kind: str
    """"snapshot"."""
    parameters: str


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


def create(name: str, uuid: str, target: Target) -> Device:
    """Make a device with a table of one target. Raises StorageError; what a failure left is found by `uuid`.

    Raises LackingError without the right.
    """
    try:
        _ask(_DEV_CREATE, name=name, uuid=uuid)
        _ask(_TABLE_LOAD, uuid=uuid, target=target)
        # Without the flag that asks to suspend it: goes on, with the new table.
        _ask(_DEV_SUSPEND, uuid=uuid)
    except PermissionError:
        raise LackingError(f"no right to make the device {name}", hint="run as root") from None
    except OSError as error:
        raise StorageError(
            f"cannot make the device {name} ({target.kind} {target.parameters}): {error.strerror}", hint="see: dmesg"
        ) from None
    made = find(uuid)
    if made is None:
        raise StorageError(f"the device {name} was made and is not there", hint="is /sys mounted?")
    return made


def require_unmounted(device: Device, mounts: tuple[Mount, ...]) -> None:
    """Raise InUseError that says where a device is mounted, if it is."""
    points = [mount.point for mount in mounts if mount.device == device.number]
    if points:
        raise InUseError(f"the device {device.name} is mounted at {', '.join(points)}", hint=f"umount {points[0]}")


def remove(device: Device) -> None:
    """Remove a device of ours; idempotent. Somebody's brief look at it (blkid, udev) is waited for, some seconds.

    Raises InUseError, StorageError otherwise.
    """
    path = NODES / "mapper" / device.name
    # As `node` makes it; udev takes its own away. First: killed in between, nothing must be left that nobody looks for.
    if not path.is_symlink() and _is_node(path, device):
        path.unlink(missing_ok=True)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            _ask(_DEV_REMOVE, uuid=device.uuid)
        except OSError as error:
            if error.errno == errno.ENXIO:  # it is gone
                return
            if error.errno == errno.EBUSY and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            node(device)
            if error.errno == errno.EBUSY:
                raise _in_use(device) from None
            raise StorageError(f"cannot remove the device {device.name}: {error.strerror}", hint="see: dmesg") from None
        else:
            return


def node(device: Device) -> str:
    """Return the node of a device in /dev/mapper, where its name is seen in mount tables. Raises StorageError."""
    path = NODES / "mapper" / device.name
    deadline = time.monotonic() + _UDEV_S
    while not _is_node(path, device) and _UDEV.exists() and time.monotonic() < deadline:
        time.sleep(_UDEV_POLL_S)
    if not _is_node(path, device):
        try:
            major, minor = device.number.split(":")
            os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(int(major), int(minor)))
        except OSError as error:
            raise StorageError(
                f"cannot make the node {path}: {error.strerror}", hint="is something else there by that name?"
            ) from None
    return str(path)


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


def _in_use(device: Device) -> InUseError:
    users: list[str] = []
    with suppress(OSError):
        users = sorted(os.listdir(SYSFS / "block" / device.kernel_name / "holders"))
    return InUseError(
        f"the device {device.name} is in use" + (f" by {', '.join(users)}" if users else ""),
        hint=f"see: lsblk /dev/{device.kernel_name}, fuser -v /dev/{device.kernel_name}",
    )


def _ask(command: int, *, name: str = "", uuid: str = "", target: Target | None = None) -> None:
    """Do one ioctl of device-mapper. Raises OSError."""
    body = b""
    if target is not None:
        parameters = target.parameters.encode() + b"\0"
        parameters += bytes(-len(parameters) % 8)
        body = _SPEC.pack(0, target.sectors, 0, 0, target.kind.encode()) + parameters
    # Once a device is there it is asked for by its UUID alone.
    head = _HEAD.pack(
        *_VERSION,
        _HEAD.size + len(body),
        _HEAD.size,
        int(target is not None),
        0,
        0,
        0,
        0,
        0,
        name.encode(),
        uuid.encode(),
    )
    fd = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _DM_IOCTL | command, bytearray(head + body), True)  # noqa: FBT003 - it has no keywords
    finally:
        os.close(fd)
