"""Creates, mounts and removes file systems, for backends with the ability `Provisioner`.

Plugins import all of it from `snapmgr.api`.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from snapmgr.contract.errors import CommandError, ConfigError, StorageError
from snapmgr.contract.records import Provisioned
from snapmgr.contract.units import format_size
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from snapmgr.contract.abilities import Provisioner
    from snapmgr.contract.records import Completed, Mount, ProvisionOrder

_FOLDER = "volume"
# Without discards, which would punch holes into the file of a loop device.
_MOUNT = ("rw", "relatime", "nodiscard")
_MKFS_TIMEOUT_S = 1800.0
_UNMOUNT_PATIENCE_S = 20.0
_MIB = 1 << 20
_SECTOR_BYTES = 512
# Minimum sizes of mkfs, and for useful measurements.
_LEAST_BYTES = {"btrfs": 256 * _MIB, "ext4": 64 * _MIB, "xfs": 300 * _MIB}


class _Running(Protocol):
    """The part of `snapmgr.api.Runner` that is needed."""

    def run(self, argv: Sequence[str], *, ok: tuple[int, ...] = (0,), timeout_s: float | None = 60.0) -> Completed: ...


class _Mounted(Protocol):
    """The part of `snapmgr.api.Mounter` that is needed."""

    def mounts(self) -> tuple[Mount, ...]: ...


@contextmanager
def provisioned(
    provisioner: Provisioner, device: str, order: ProvisionOrder, make: Callable[[], Provisioned]
) -> Iterator[Provisioned]:
    """For `Provisioner.provision`: create the storage, and remove it at the end, even if only partly created."""
    try:
        yield make()
    finally:
        provisioner.unprovision(device, order)


class StorageMaker:
    """Creates and mounts file systems for an order, and records the commands.

    All programs get the order's size as an option, so that the rest of the device is not touched.
    """

    def __init__(self, runner: _Running, mounter: _Mounted, device: str, order: ProvisionOrder) -> None:
        self._runner = runner
        self._mounter = mounter
        self._commands: list[tuple[str, ...]] = []
        self.device = device
        self.order = order
        self.path = os.path.join(order.point, _FOLDER)
        """Path of the volume, in the file system mounted at the order's point."""

    def options(self, allowed: Mapping[str, tuple[str, ...] | None]) -> dict[str, str]:
        """Return the order's options. Raises ConfigError for a key or value not in `allowed` (None: any text).

        ``mount_options`` are always allowed.
        """
        allowed = {**allowed, "mount_options": None}
        for key, value in self.order.options.items():
            if key not in allowed:
                raise ConfigError(f"this storage has no option {key!r}", hint=f"its options are: {', '.join(allowed)}")
            values = allowed[key]
            if values is not None and value not in values:
                raise ConfigError(f"{key} cannot be {value!r}", hint=f"allowed are: {', '.join(values)}")
        return dict(self.order.options)

    def run(self, *argv: str, timeout_s: float | None = 60.0) -> Completed:
        """Run a program and record the command. Raises as `Runner.run`."""
        self._commands.append(argv)
        return self._runner.run(argv, timeout_s=timeout_s)

    def discard(self) -> None:
        """Discard (TRIM) the device up to the order's size, if the order says so and the device supports it.

        Not on a loop device, where it would punch holes into its file, which was allocated on purpose.
        """
        if self.order.discard and _can_discard(self.device):
            length = str(self.order.size_bytes)
            # Without --force, which would not check whether it has been mounted meanwhile.
            self.run("blkdiscard", "--offset", "0", "--length", length, self.device, timeout_s=_MKFS_TIMEOUT_S)

    def make_folder(self, fs_type: str, device: str, size_bytes: int) -> None:
        """Create ext4 or xfs on the first `size_bytes` of a device, mount it as ordered, and create `path` in it."""
        self.make_file_system(fs_type, device, size_bytes)
        self.mount(device, fs_type)
        self.run("mkdir", self.path)

    def make_file_system(self, fs_type: str, device: str, size_bytes: int) -> None:
        """Create a file system (btrfs, ext4 or xfs) on the first `size_bytes` of a device.

        Nothing is deferred (lazy initialisation would disturb measurements). Raises StorageError if it is too small.
        """
        if size_bytes < _LEAST_BYTES[fs_type]:
            raise StorageError(
                f"{format_size(size_bytes)} are too little for {fs_type}",
                hint=f"the minimum is {format_size(_LEAST_BYTES[fs_type])}",
            )
        size_bytes -= size_bytes % _MIB
        argv: tuple[str, ...]
        match fs_type:
            case "btrfs":
                layout = ("--data", "single", "--metadata", "dup", "--nodesize", "16k", "--csum", "crc32c")
                size = ("--byte-count", str(size_bytes))
                argv = ("mkfs.btrfs", "--quiet", "--force", "--nodiscard", *layout, *size, device)
                self.run(*argv, timeout_s=_MKFS_TIMEOUT_S)
            case "ext4":
                now = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
                argv = ("mkfs.ext4", "-q", "-F", "-b", "4096", "-E", now, device, str(size_bytes // 4096))
                self.run(*argv, timeout_s=_MKFS_TIMEOUT_S)
            case "xfs":
                with self._cut(device, size_bytes) as whole:
                    # Behind the loop device mkfs does not see the sector size of the device.
                    sector = ("-s", f"size={_sector_bytes(device)}")
                    size = ("-d", f"size={size_bytes}")
                    argv = ("mkfs.xfs", "-q", "-f", "-K", "-m", "crc=1,reflink=1", *sector, *size, whole)
                    self.run(*argv, timeout_s=_MKFS_TIMEOUT_S)

    @contextmanager
    def _cut(self, device: str, size_bytes: int) -> Iterator[str]:
        """Yield a device that ends after `size_bytes`, as mkfs.xfs clears the last 128 KiB of a device."""
        if size_bytes + _MIB > _device_bytes(device):
            yield device
            return
        argv = ("losetup", "--find", "--show", "--sizelimit", str(size_bytes), device)
        cut = self.run(*argv).stdout.strip()
        try:
            yield cut
        finally:
            self.run("losetup", "--detach", cut)

    def mount(self, device: str, fs_type: str, *further: str, as_ordered: bool = True) -> None:
        """Mount a device at the order's point, with `further` options and (`as_ordered`) its ``mount_options``."""
        ordered = self.order.options.get("mount_options", "").split(",") if as_ordered else ()
        options = ",".join((*_MOUNT, *further, *filter(None, ordered)))
        self.run("mount", "-t", fs_type, "-o", options, device, self.order.point)

    def free_bytes(self) -> int:
        """Return the free space in the file system at the order's point."""
        room = os.statvfs(self.order.point)
        return room.f_bavail * room.f_frsize

    def mounted(self, path: str) -> Mount:
        """Return the mount whose root holds `path`. Raises StorageError if there is none."""
        point = os.path.dirname(os.path.realpath(path))
        mount = next((mount for mount in reversed(self._mounter.mounts()) if mount.point == point), None)
        if mount is None:
            raise StorageError(f"nothing is mounted at {point}", hint="see the kernel log: dmesg")
        return mount

    def made(self, path: str, *, capacity_bytes: float, cache_dirs: tuple[str, ...] = ()) -> Provisioned:
        """Return the created storage; for the arguments see `Provisioned`.

        Raises StorageError if `path` is in no mount.
        """
        mount = self.mounted(path)
        return Provisioned(
            path=path,
            # The lowest device, as only it counts the writes of snapshots.
            devices=(self.device,),
            capacity_bytes=int(capacity_bytes),
            commands=tuple(self._commands),
            mount_options=tuple(dict.fromkeys((*mount.options, *mount.super_options))),
            cache_dirs=cache_dirs,
        )


def unmake(runner: _Running, mounter: _Mounted, device: str, order: ProvisionOrder) -> None:
    """For `Provisioner.unprovision`: undo what a `StorageMaker` with these arguments did, killed or not; idempotent.

    Everything at the order's point and below it is unmounted; a mount in use is tried again for a while. Raises
    CommandError that names it if it stays in use.
    """
    point = os.path.realpath(order.point)
    deadline = time.monotonic() + _UNMOUNT_PATIENCE_S
    while held := [mount.point for mount in mounter.mounts() if lies_in(mount.point, point)]:
        try:
            runner.run(["umount", held[-1]], timeout_s=_MKFS_TIMEOUT_S)
        except CommandError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    for folder in Path("/sys/block").glob("loop*/loop"):
        try:
            backing = (folder / "backing_file").read_text().strip()
            limit = int((folder / "sizelimit").read_text())
        except (OSError, ValueError):
            continue
        # The loop device of mkfs, see `StorageMaker._cut`.
        if backing == device and order.size_bytes - _MIB < limit <= order.size_bytes:
            runner.run(["losetup", "--detach", f"/dev/{folder.parent.name}"], ok=(0, 1))


def _device_bytes(device: str) -> int:
    try:
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.lseek(fd, 0, os.SEEK_END)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(f"cannot read the size of {device}: {error.strerror}") from None


def _queue(device: str) -> Path:
    """Return sysfs's folder of a device's queue: a partition's is its disk's."""
    number = os.stat(device).st_rdev
    folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return (folder if (folder / "queue").exists() else folder.parent) / "queue"


def _can_discard(device: str) -> bool:
    queue = _queue(device)
    try:
        return not (queue.parent / "loop").exists() and int((queue / "discard_max_bytes").read_text()) > 0
    except (OSError, ValueError):
        return False


def _sector_bytes(device: str) -> int:
    try:
        physical = int((_queue(device) / "physical_block_size").read_text())
    except (OSError, ValueError):
        physical = _SECTOR_BYTES
    return min(max(physical, _SECTOR_BYTES), 4096)
