"""Finds the storage below a path: the mount, the file system's devices, and the devices below these.

Sources, most trusted first: the kernel (/proc/self/mountinfo, sysfs, one btrfs ioctl), udev's database, and ``lsblk``
and ``blkid -p``, which probe devices themselves if udevd does not run (containers, rescue systems).
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import uuid
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from snapmgr.contract.errors import CommandError, ConfigError, MissingRequirementError, NotFoundError, StorageError
from snapmgr.contract.records import BlockDevice, Mount, Target
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from snapmgr.contract.backend import Runner

MOUNTINFO = "/proc/self/mountinfo"
_SYSFS = Path("/sys")
_UDEV_DATA = Path("/run/udev/data")
_ESCAPE = rb"\\([0-3][0-7]{2})"
_SECTOR_BYTES = 512
# linux/btrfs.h: _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args), 1024 bytes: max_id u64, num_devices u64, fsid[16], …
_BTRFS_IOC_FS_INFO = 0x8400941F
_BTRFS_FSID = slice(16, 32)
_PROBE_TIMEOUT_S = 20.0
# Answer of lsblk and udev: file system type and UUID.
_Signature = tuple[str | None, str | None]


def read_mounts(path: str = MOUNTINFO) -> tuple[Mount, ...]:
    """Given a mountinfo file, return its mounts in the kernel's order. Raises StorageError if it cannot be read."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", hint="mount /proc") from error
    return parse_mountinfo(data)


def parse_mountinfo(data: bytes) -> tuple[Mount, ...]:
    r"""Given the bytes of a mountinfo file (proc(5)), return its mounts.

    Octal escapes (``\040`` and the like) are decoded; names that are not UTF-8 survive as os.fsdecode makes them.
    Raises StorageError for an invalid line.
    """
    # Only "\n" ends a line and only " " separates fields: a mount point may contain \r, \v or U+0085 unescaped.
    return tuple(_parse_line(line) for line in data.split(b"\n") if line)


# A run reads its mount table a dozen times, mostly unchanged.
@lru_cache(maxsize=4096)
def _parse_line(line: bytes) -> Mount:
    fields = line.split(b" ")
    try:
        separator = fields.index(b"-", 6)
        fs_type, source, *super_options = fields[separator + 1 :]
        return Mount(
            id=int(fields[0]),
            parent_id=int(fields[1]),
            device=fields[2].decode("ascii"),
            root=_decode(fields[3]),
            point=_decode(fields[4]),
            fs_type=_decode(fs_type),
            source=_decode(source),
            options=_decode_options(fields[5]),
            super_options=_decode_options(b" ".join(super_options)),
        )
    except ValueError as error:
        raise StorageError(f"the mount table has a line that cannot be read: {os.fsdecode(line)!r}") from error


def _decode(field: bytes) -> str:
    return os.fsdecode(re.sub(_ESCAPE, lambda match: bytes([int(match[1], 8)]), field) if b"\\" in field else field)


def _decode_options(field: bytes) -> tuple[str, ...]:
    # Split first: a comma inside a value (overlay's lowerdir) is escaped as \054.
    return tuple(_decode(option) for option in field.split(b",") if option)


class MountTree:
    """A mount table as a tree of parents and children."""

    def __init__(self, mounts: Iterable[Mount]) -> None:
        self.mounts = tuple(mounts)
        ids = {mount.id for mount in self.mounts}
        self.tops: list[Mount] = []
        self.children: dict[int, list[Mount]] = {}
        for mount in self.mounts:
            # The parent of this process's root is not listed; the root of everything is its own parent.
            if mount.parent_id in ids and mount.parent_id != mount.id:
                self.children.setdefault(mount.parent_id, []).append(mount)
            else:
                self.tops.append(mount)

    def find(self, path: str) -> Mount:
        """Given an absolute path without symlinks, return the mount through which the kernel reaches it.

        It walks down as a path lookup does, so it finds no mount that is hidden under a later one, and of several at
        one point the topmost. Raises NotFoundError if no mount covers `path`.
        """
        found = _first_on_the_way(path, self.tops)
        if found is None:
            raise NotFoundError(f"no mount holds {path}", hint="in a chroot, make its root a mount point")
        # An absolute path starts *in* the process's root, not in a mount that was placed over "/" later.
        entered_by_root = found.point == "/"
        while True:
            below = self.children.get(found.id, [])
            if entered_by_root:
                below = [mount for mount in below if mount.point != "/"]
                entered_by_root = False
            following = _first_on_the_way(path, below)
            if following is None:
                return found
            found = following


def _first_on_the_way(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """Return the mount that a lookup of `path` meets first; of equals the later one, which is on top."""
    best: Mount | None = None
    for mount in mounts:
        if lies_in(path, mount.point) and (best is None or len(mount.point) <= len(best.point)):
            best = mount
    return best


def find_target(path: str, *, runner: Runner | None = None) -> Target:
    """Given an absolute path of a directory, return it resolved, with its mount, devices and the mounts below it.

    `runner` runs ``lsblk`` and ``blkid`` if udev knows nothing. Raises NotFoundError if there is nothing at `path`,
    ConfigError if it is relative or no directory, MissingRequirementError if this user may not read it, and
    StorageError if its devices are hidden from us.
    """
    resolved = _resolve(path)
    # The kernel's answer for an open descriptor is safer than the mount table, which others may change meanwhile.
    descriptor = os.open(resolved, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mounts = read_mounts()
        mount_id = mount_id_of(descriptor)
    finally:
        os.close(descriptor)
    tree = MountTree(mounts)
    mount = next((mount for mount in mounts if mount.id == mount_id), None) or tree.find(resolved)
    submounts = tuple(
        other
        for other in mounts
        if other.point != resolved and lies_in(other.point, resolved) and tree.find(other.point).id == other.id
    )
    return Target(path=resolved, mount=mount, devices=_find_devices(resolved, mount, runner), submounts=submounts)


def _resolve(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"{path!r} is not an absolute path", hint="write it with a leading /")
    try:
        resolved = os.path.realpath(path, strict=True)
        status = os.stat(resolved)
    except FileNotFoundError:
        raise NotFoundError(
            f"{path} does not exist", hint="check the path, and whether its file system is mounted"
        ) from None
    except PermissionError:
        raise MissingRequirementError(f"cannot read {path}: permission denied", hint="run snapmgr as root") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}", hint="it must be a directory") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is not a directory", hint="name the directory that holds the data")
    return resolved


def mount_id_of(descriptor: int) -> int | None:
    """Return the id of the mount that a descriptor was opened through; None where the kernel does not tell."""
    for line in Path(f"/proc/self/fdinfo/{descriptor}").read_bytes().decode("ascii").splitlines():
        key, _, value = line.partition(":")
        if key == "mnt_id":
            return int(value)
    return None


def _find_devices(path: str, mount: Mount, runner: Runner | None) -> tuple[BlockDevice, ...]:
    fs_uuid: str | None = None
    if not mount.device.startswith("0:"):
        numbers: tuple[str, ...] = (mount.device,)
    elif mount.fs_type == "btrfs":
        # A subvolume has an anonymous device number (0:NN); sysfs has the real ones.
        fs_uuid = _btrfs_uuid(path, mount)
        numbers = btrfs_devices(fs_uuid)
    else:
        # FUSE, network, overlay and memory file systems.
        return ()
    stacks = [device_stack(number, properties=udev_properties) for number in numbers]
    # fuseblk (ntfs-3g) is a way to mount, not the type on the device.
    fs_type = None if mount.fs_type == "fuseblk" else mount.fs_type
    known = [
        replace(
            device,
            fs_type=fs_type or device.fs_type,
            # udev's record is outdated if it names another file system than the mounted one.
            fs_uuid=fs_uuid or (device.fs_uuid if device.fs_type == fs_type or fs_type is None else None),
        )
        for device in stacks
    ]
    if all(device.fs_uuid for device in known):
        return tuple(known)
    return _probe(known, runner)


def _btrfs_uuid(path: str, mount: Mount) -> str:
    """Return the UUID of the file system, from its ioctl, else from the device in the mount table."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            answer = bytearray(1024)
            fcntl.ioctl(descriptor, _BTRFS_IOC_FS_INFO, answer)
        finally:
            os.close(descriptor)
        return str(uuid.UUID(bytes=bytes(answer[_BTRFS_FSID])))
    with suppress(OSError):
        status = os.stat(mount.source)
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        for folder in (_SYSFS / "fs/btrfs").iterdir():
            if (folder / "devices").is_dir() and number in btrfs_devices(folder.name):
                return folder.name
    raise StorageError(f"cannot find the devices of the btrfs file system at {mount.point}", hint="run this as root")


def btrfs_devices(fs_uuid: str, *, sysfs: Path = _SYSFS) -> tuple[str, ...]:
    """Given the UUID of a mounted btrfs, return its devices' numbers ("7:0"), sorted. Raises StorageError if hidden."""
    folder = sysfs / "fs/btrfs" / fs_uuid / "devices"
    try:
        return tuple(sorted((entry / "dev").read_bytes().decode("ascii").strip() for entry in folder.iterdir()))
    except OSError as error:
        raise StorageError(
            f"cannot read {folder}: {error.strerror}", hint="make /sys visible: a container may hide it"
        ) from error


def device_stack(
    number: str, *, sysfs: Path = _SYSFS, properties: Callable[[str], Mapping[str, str]] | None = None
) -> BlockDevice:
    """Given a device's number ("8:1"), return it with everything below it.

    `properties` is udev's database: from a number to properties such as ID_FS_TYPE. Raises StorageError if the device
    is not in sysfs.
    """
    link = sysfs / "dev/block" / number
    try:
        return _read_device(link.resolve(strict=True), properties or (lambda _number: {}))
    except (OSError, KeyError, ValueError) as error:
        raise StorageError(
            f"the block device {number} cannot be read in {link}: {error}",
            hint="it was removed, or /sys is hidden, as in some containers",
        ) from error


def _read_device(folder: Path, properties: Callable[[str], Mapping[str, str]]) -> BlockDevice:
    uevent = dict(line.split("=", 1) for line in _read(folder / "uevent").splitlines() if "=" in line)
    number = _read(folder / "dev")
    facts = properties(number)
    below = [folder.parent] if (folder / "partition").exists() else _slaves(folder)
    dm_uuid = _read_optional(folder / "dm/uuid")
    return BlockDevice(
        name=folder.name,
        # DEVNAME, as the folder's name writes "cciss!c0d0" for /dev/cciss/c0d0.
        path="/dev/" + uevent["DEVNAME"],
        number=number,
        kind=_kind(folder, dm_uuid),
        size_bytes=int(_read(folder / "size")) * _SECTOR_BYTES,
        fs_type=facts.get("ID_FS_TYPE"),
        fs_uuid=facts.get("ID_FS_UUID"),
        dm_name=_read_optional(folder / "dm/name"),
        dm_uuid=dm_uuid,
        below=tuple(_read_device(lower, properties) for lower in below),
    )


def _slaves(folder: Path) -> list[Path]:
    slaves = folder / "slaves"
    return [entry.resolve(strict=True) for entry in sorted(slaves.iterdir())] if slaves.is_dir() else []


def _kind(folder: Path, dm_uuid: str | None) -> str:
    if (folder / "partition").exists():
        return "part"
    if (folder / "dm").is_dir():
        # "LVM-…", "CRYPT-LUKS2-…", "mpath-…", and kpartx's "part1-mpath-…".
        prefix = (dm_uuid or "").partition("-")[0].lower()
        return "part" if prefix.startswith("part") else prefix or "dm"
    if (folder / "md").is_dir():
        return "raid"
    # Disks link to their hardware, real or emulated; zram, nbd and bcache do not.
    return "disk" if (folder / "device").exists() else folder.name.rstrip("0123456789")


def _read(path: Path) -> str:
    return os.fsdecode(path.read_bytes()).removesuffix("\n")


def _read_optional(path: Path) -> str | None:
    try:
        return _read(path) or None
    except FileNotFoundError:
        return None


def backing_file(device: BlockDevice, *, sysfs: Path = _SYSFS) -> str | None:
    """Given a loop device, return the file behind it ("… (deleted)" if it was unlinked); None for anything else."""
    return _read_optional(sysfs / "dev/block" / device.number / "loop/backing_file")


def udev_properties(number: str) -> dict[str, str]:
    """Given a block device's number, return udev's properties of it; empty if udevd does not run."""
    # Without the database pyudev only repeats sysfs, after 20 ms of imports.
    if not _UDEV_DATA.is_dir():
        return {}
    import pyudev  # noqa: PLC0415 - slow to import, and needs libudev

    major, minor = (int(part) for part in number.split(":"))
    try:
        device = pyudev.Devices.from_device_number(pyudev.Context(), "block", os.makedev(major, minor))
        return {str(key): str(value) for key, value in device.properties.items()}
    except (ImportError, pyudev.DeviceNotFoundError):
        # No libudev, or the device is being removed: lsblk and blkid are used instead.
        return {}


def _probe(stacks: list[BlockDevice], runner: Runner | None) -> tuple[BlockDevice, ...]:
    """Add facts that udev does not have: from ``lsblk`` for whole stacks, then from ``blkid -p`` for the top."""
    from snapmgr.system.command import CommandRunner  # noqa: PLC0415 - only where udev knows nothing

    runner = runner or CommandRunner()
    listed: dict[str, _Signature] = {}
    # A failed probe means only that the UUID is unknown, which is allowed (we may lack the privilege).
    with suppress(CommandError, MissingRequirementError):
        argv = ["lsblk", "--json", "--bytes", "--inverse", "--output", "NAME,MAJ:MIN,FSTYPE,UUID"]
        answer = runner.run([*argv, *(device.path for device in stacks)], ok=(0, 32, 64), timeout_s=_PROBE_TIMEOUT_S)
        listed = parse_lsblk(answer.stdout)
    filled = [_fill(device, listed) for device in stacks]
    return tuple(device if device.fs_uuid else _probe_one(device, runner) for device in filled)


def _fill(device: BlockDevice, signatures: Mapping[str, _Signature]) -> BlockDevice:
    fs_type, fs_uuid = signatures.get(device.number, (None, None))
    return replace(
        device,
        fs_type=device.fs_type or fs_type,
        # The mounted type is right; a signature of another type has the UUID of another file system.
        fs_uuid=device.fs_uuid or (fs_uuid if fs_type == (device.fs_type or fs_type) else None),
        below=tuple(_fill(lower, signatures) for lower in device.below),
    )


def _probe_one(device: BlockDevice, runner: Runner) -> BlockDevice:
    with suppress(CommandError, MissingRequirementError):
        # 2: nothing found, or not allowed to read it; 8: two contradicting signatures.
        answer = runner.run(["blkid", "-p", "-o", "export", device.path], ok=(0, 2, 8), timeout_s=_PROBE_TIMEOUT_S)
        facts = parse_blkid(answer.stdout)
        return _fill(device, {device.number: (facts.get("TYPE"), facts.get("UUID"))})
    return device


def parse_lsblk(text: str) -> dict[str, _Signature]:
    """Given ``lsblk --json --output NAME,MAJ:MIN,FSTYPE,UUID``, return type and UUID by device number.

    Raises CommandError if it is not lsblk's JSON.
    """
    signatures: dict[str, _Signature] = {}

    def add(entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            signatures[entry["maj:min"].strip()] = (entry["fstype"], entry["uuid"])
            add(entry.get("children", []))

    if not text.strip():
        return {}
    try:
        import json  # noqa: PLC0415 - only where udev knows nothing

        add(json.loads(text)["blockdevices"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"the output of lsblk cannot be parsed ({error!r})") from error
    return signatures


def parse_blkid(text: str) -> dict[str, str]:
    r"""Given ``blkid -p -o export`` for one device, return its tags; shell escapes (``\ ``) are removed."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key: re.sub(r"\\(.)", r"\1", value) for key, value in pairs}
