"""Talks to device-mapper through the kernel's ioctls (linux/dm-ioctl.h) and sysfs.

It avoids ``dmsetup create``, which sends udev's rules a cookie: they probe the device, and /dev/disk/by-uuid then leads
to it, because it has the file system UUID of the origin; an fstab would mount it instead of the origin. The rules only
make the link in /dev/mapper for a device created without a cookie. This also works without udevd.
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
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.api import InUseError, MissingRequirementError, StorageError
from snapmgr_lvm.report import hyphenate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import Mount

SYSFS = Path("/sys")
NODES = Path("/dev")
SECTOR_BYTES = 512
_PATIENCE_S = 5.0
_POLL_S = 0.1
# If udevd runs, it makes the link in /dev/mapper.
_UDEV = Path("/run/udev/control")
_UDEV_S = 2.0
_UDEV_POLL_S = 0.005

_CONTROL = "/dev/mapper/control"
_DM_IOCTL = 0xC138FD00  # _IOWR(0xfd, …, struct dm_ioctl)
_LIST_DEVICES, _DEV_CREATE, _DEV_REMOVE, _DEV_SUSPEND, _DEV_STATUS, _TABLE_LOAD, _TABLE_STATUS = 2, 3, 4, 6, 7, 9, 12
_VERSION = (4, 0, 0)
# struct dm_ioctl: version, data_size, data_start, target_count, open_count, flags, event_nr, padding, dev, name, uuid,
# data. An event_nr of 0 is "no cookie".
_HEAD = struct.Struct("=3I3Ii3IQ128s129s7x")
_DATA_START, _FLAGS, _NUMBER = 4, 7, 10
_SUSPENDED, _BUFFER_FULL = 1 << 1, 1 << 8
# struct dm_target_spec: sector_start, length, status, next, target_type.
_SPEC = struct.Struct("=QQiI16s")
_KIND_BYTES = 16
_NAME_LIST = struct.Struct("=QI")
_ROOM_BYTES = 16 << 10
_LVM_UUID = re.compile(r"LVM-([A-Za-z0-9]{32})([A-Za-z0-9]{32})")


class Device(Struct, frozen=True, kw_only=True):
    """A device-mapper device, also a half-made one."""

    kernel_name: str
    """"dm-4"."""
    number: str
    """Major and minor: "254:4"."""
    name: str
    uuid: str
    """"" for a device made without a UUID."""
    suspended: bool
    size_bytes: int
    """0 while it has no table."""
    below: tuple[str, ...]
    """Kernel names of the devices directly below it."""


class Target(Struct, frozen=True, kw_only=True):
    """One line of a device's table, from sector 0 on."""

    sectors: int
    kind: str
    """"snapshot"."""
    parameters: str


class SnapshotStatus(Struct, frozen=True, kw_only=True):
    """The status line of a "snapshot" target (Documentation/admin-guide/device-mapper/snapshot.rst)."""

    used_bytes: int
    total_bytes: int
    """Both sizes are 0 after a failure."""
    failure: str | None
    """"Invalid" (an exception could not be stored), "Overflow", "Merge failed" or "Unknown"; None if all is well."""


def devices(prefix: str) -> tuple[Device, ...]:
    """Return the devices whose names begin with `prefix`, also those without a table, which sysfs does not list."""
    found = (_look(name=name) for name in _names() if name.startswith(prefix))
    return tuple(device for device in found if device is not None)


def find(uuid: str) -> Device | None:
    """Return the device with this device-mapper UUID."""
    return _look(uuid=uuid)


def find_name(name: str) -> Device | None:
    """Return the device with this name."""
    return _look(name=name)


def has_device_mapper() -> bool:
    """Whether the kernel has device-mapper, or can load it."""
    if os.path.exists("/sys/class/misc/device-mapper"):
        return True
    listed = Path("/lib/modules") / os.uname().release / "modules.dep"
    with suppress(OSError):
        return "/dm-mod.ko" in listed.read_text()
    return False


def lvm_uuid(group_uuid: str, volume_uuid: str) -> str:
    """Return the device-mapper UUID of a logical volume."""
    return "LVM-" + f"{group_uuid}{volume_uuid}".replace("-", "")


def volume_of(uuid: str) -> tuple[str, str] | None:
    """Given a device-mapper UUID, return those of volume group and logical volume, as LVM writes them.

    None if it does not belong to a logical volume; the layers below one have a suffix.
    """
    found = _LVM_UUID.fullmatch(uuid)
    return (hyphenate(found[1]), hyphenate(found[2])) if found else None


def below(device: Device) -> tuple[Device, ...]:
    """Return the device-mapper devices directly below `device`."""
    names = []
    for name in device.below:
        with suppress(OSError):
            names.append((SYSFS / "block" / device.kernel_name / "slaves" / name / "dm" / "name").read_text().strip())
    found = (_look(name=name) for name in names)
    return tuple(one for one in found if one is not None)


def everything_below(number: str) -> Iterator[str]:
    """Yield the sysfs folder of a block device, given by its number ("8:1"), and then of each device below it.

    Follows partitions, device-mapper, MD, and loop devices to the file system of their file.
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
    """Make a device with a table of one target. Raises StorageError; leftovers of a failure can be found by `uuid`.

    Raises MissingRequirementError without the right.
    """
    try:
        _ask(_DEV_CREATE, name=name, uuid=uuid)
        _ask(_TABLE_LOAD, uuid=uuid, target=target)
        # Without the suspend flag, this call resumes the device with the new table.
        _ask(_DEV_SUSPEND, uuid=uuid)
    except OSError as error:
        raise StorageError(
            f"cannot make the device {name} ({target.kind} {target.parameters}): {error.strerror}", hint="see: dmesg"
        ) from None
    made = find(uuid)
    if made is None:
        raise StorageError(f"the device {name} was made and is not there", hint="is /sys mounted?")
    return made


def require_unmounted(device: Device, mounts: tuple[Mount, ...]) -> None:
    """Raise InUseError with the mount point if a device is mounted."""
    points = [mount.point for mount in mounts if mount.device == device.number]
    if points:
        raise InUseError(f"the device {device.name} is mounted at {', '.join(points)}", hint=f"umount {points[0]}")


def remove(device: Device) -> None:
    """Remove a device of ours; idempotent. Waits a few seconds for programs that briefly open it (blkid, udev).

    Raises InUseError, StorageError otherwise.
    """
    path = NODES / "mapper" / device.name
    # The node from `node`; udev removes its own. Remove it first: no code looks for a node that a kill leaves.
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
    """Return the node of a device in /dev/mapper, whose name mount tables show. Raises StorageError."""
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


def snapshot_status(device: Device) -> SnapshotStatus:
    """Return the state of a "snapshot" target. Raises StorageError if the device has another target, or is gone."""
    try:
        answer = _ask(_TABLE_STATUS, uuid=device.uuid, room=_ROOM_BYTES)
    except OSError as error:
        raise StorageError(f"device-mapper does not say how {device.name} is: {error.strerror}") from None
    start = _data_start(answer)
    kind = _text(answer[start + _SPEC.size - _KIND_BYTES : start + _SPEC.size])
    return parse_snapshot_status(kind, _text(answer[start + _SPEC.size :]))


def parse_snapshot_status(kind: str, text: str) -> SnapshotStatus:
    """Parse a target's kind and status, "USED/TOTAL METADATA" in sectors or "Invalid", into its state."""
    found = re.fullmatch(r"(\d+)/(\d+) \d+|([A-Z][A-Za-z ]*)", text.strip())
    if kind != "snapshot" or found is None:
        raise StorageError(f"this is not the status of a snapshot: {kind} {text!r}")
    return SnapshotStatus(
        used_bytes=int(found[1] or 0) * SECTOR_BYTES,
        total_bytes=int(found[2] or 0) * SECTOR_BYTES,
        failure=found[3],
    )


def _names() -> list[str]:
    room = _ROOM_BYTES
    while True:
        try:
            answer = _ask(_LIST_DEVICES, room=room)
        except FileNotFoundError:  # no device-mapper, no devices
            return []
        except OSError as error:
            raise StorageError(f"device-mapper does not say what devices it has: {error.strerror}") from None
        if not _HEAD.unpack_from(answer)[_FLAGS] & _BUFFER_FULL:
            break
        room *= 4
    names, start = list[str](), _data_start(answer)
    while True:
        # struct dm_name_list: dev, next, name. The first one's dev is 0 without any device.
        number, following = _NAME_LIST.unpack_from(answer, start)
        if number:
            names.append(_text(answer[start + _NAME_LIST.size :]))
        if not following:
            return names
        start += following


def _look(*, name: str = "", uuid: str = "") -> Device | None:
    try:
        fields = _HEAD.unpack_from(_ask(_DEV_STATUS, name=name, uuid=uuid))
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):  # no such device, or no device-mapper
            return None
        raise StorageError(f"device-mapper does not say what {name or uuid} is: {error.strerror}") from None
    number, its_name, its_uuid = fields[_NUMBER:]
    folder = SYSFS / "block" / f"dm-{os.minor(number)}"
    size_sectors, names = 0, tuple[str, ...]()
    # The entry does not exist while the device is without a table.
    with suppress(OSError):
        size_sectors = int((folder / "size").read_text())
        names = tuple(sorted(os.listdir(folder / "slaves")))
    return Device(
        kernel_name=folder.name,
        number=device_number(number),
        name=_text(its_name),
        uuid=_text(its_uuid),
        suspended=bool(fields[_FLAGS] & _SUSPENDED),
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


def _ask(command: int, *, name: str = "", uuid: str = "", target: Target | None = None, room: int = 0) -> bytes:
    """Do one ioctl of device-mapper, with `room` bytes for the answer after its header; return header and answer.

    An existing device is identified by its UUID alone. Raises OSError, MissingRequirementError without the right.
    """
    body = bytes(room)
    if target is not None:
        parameters = target.parameters.encode() + b"\0"
        parameters += bytes(-len(parameters) % 8)
        body = _SPEC.pack(0, target.sectors, 0, 0, target.kind.encode()) + parameters
    sizes = (_HEAD.size + len(body), _HEAD.size, int(target is not None))
    question = bytearray(_HEAD.pack(*_VERSION, *sizes, 0, 0, 0, 0, 0, name.encode(), uuid.encode()) + body)
    try:
        fd = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _DM_IOCTL | command, question, True)  # noqa: FBT003 - it has no keywords
        finally:
            os.close(fd)
    except PermissionError:
        raise MissingRequirementError("no right to ask device-mapper", hint="run as root") from None
    return bytes(question)


def _data_start(answer: bytes) -> int:
    return int(_HEAD.unpack_from(answer)[_DATA_START])


def _text(data: bytes) -> str:
    return os.fsdecode(data.partition(b"\0")[0])
