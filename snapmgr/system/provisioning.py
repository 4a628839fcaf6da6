"""Makes, mounts and removes file systems, for backends that are a `snapmgr.contract.abilities.Provisioner`.

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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from snapmgr.contract.abilities import Provisioner
    from snapmgr.contract.records import Completed, Mount, ProvisionOrder

_FOLDER = "volume"
# Without discards: on a loop device they would punch holes into its file.
_MOUNT = ("rw", "relatime", "nodiscard")
_MKFS_TIMEOUT_S = 1800.0
_UNMOUNT_PATIENCE_S = 20.0
_MIB = 1 << 20
_SECTOR_BYTES = 512
# What mkfs refuses to go below, and what leaves nothing to measure.
_LEAST_BYTES = {"btrfs": 256 * _MIB, "ext4": 64 * _MIB, "xfs": 300 * _MIB}


class _Running(Protocol):
    """What is needed of a `snapmgr.api.Runner`."""

    def run(self, argv: Sequence[str], *, ok: tuple[int, ...] = (0,), timeout_s: float | None = 60.0) -> Completed: ...


class _Mounted(Protocol):
    """What is needed of a `snapmgr.api.Mounter`."""

    def mounts(self) -> tuple[Mount, ...]: ...


@contextmanager
def provisioned(
    provisioner: Provisioner, device: str, order: ProvisionOrder, make: Callable[[], Provisioned]
) -> Iterator[Provisioned]:
    """For `Provisioner.provision`: make it, and take it down at the end, however far that came."""
    try:
        yield make()
    finally:
        provisioner.unprovision(device, order)


class StorageMaker:
    """Makes and mounts file systems for an order, and keeps what was run for that.

    All programs get an order's size as an option of their own: what lies behind it on the device is not touched.
    """

    def __init__(self, runner: _Running, mounter: _Mounted, device: str, order: ProvisionOrder) -> None:
        self._runner = runner
        self._mounter = mounter
        self._commands: list[tuple[str, ...]] = []
        self.device = device
        self.order = order
        self.path = os.path.join(order.point, _FOLDER)
        """Where the volume is to be, in the file system that is mounted at the order's point."""

    def options(self, allowed: Mapping[str, tuple[str, ...] | None]) -> dict[str, str]:
        """Return the order's options. Raises ConfigError for a key or value not in `allowed` (None: any text).

        ``mount_options`` are always allowed.
        """
        allowed = {**allowed, "mount_options": None}
        for key, value in self.order.options.items():
            if key not in allowed:
                raise ConfigError(
                    f"there is no option {key!r} for this storage", hint=f"there are: {', '.join(allowed)}"
                )
            values = allowed[key]
            if values is not None and value not in values:
                raise ConfigError(f"{key} cannot be {value!r}", hint=f"allowed are: {', '.join(values)}")
        return dict(self.order.options)

    def run(self, *argv: str, timeout_s: float | None = 60.0) -> Completed:
        """Run a program, and keep what was run. Raises as `Runner.run`."""
        self._commands.append(argv)
        return self._runner.run(argv, timeout_s=timeout_s)

    def discard(self) -> None:
        """Tell the device that all in the order's size is unused (TRIM), where that is ordered and it can be told.

        Not a loop device: that would punch holes into its file, which was allocated beforehand with intent.
        """
        if self.order.discard and _can_discard(self.device):
            length = str(self.order.size_bytes)
            # Never forced: that would not ask whether somebody has mounted it meanwhile.
            self.run("blkdiscard", "--offset", "0", "--length", length, self.device, timeout_s=_MKFS_TIMEOUT_S)

    def make_folder(self, fs_type: str, device: str, size_bytes: int) -> None:
        """Make ext4 or xfs on the first `size_bytes` of a device, mount it as the order says, and make `path` in it."""
        self.make_file_system(fs_type, device, size_bytes)
        self.mount(device, fs_type)
        self.run("mkdir", self.path)

    def make_file_system(self, fs_type: str, device: str, size_bytes: int) -> None:
        """Make a file system (btrfs, ext4 or xfs) on the first `size_bytes` of a device.

        Nothing is left to be done later, when something is measured. Raises StorageError if that is too small.
        """
        if size_bytes < _LEAST_BYTES[fs_type]:
            raise StorageError(
                f"{format_size(size_bytes)} are too little for {fs_type}",
                hint=f"{format_size(_LEAST_BYTES[fs_type])} is the least",
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
                    # Where it is cut the program does not see what the device itself says of its sectors.
                    sector = ("-s", f"size={_sector_bytes(device)}")
                    size = ("-d", f"size={size_bytes}")
                    argv = ("mkfs.xfs", "-q", "-f", "-K", "-m", "crc=1,reflink=1", *sector, *size, whole)
                    self.run(*argv, timeout_s=_MKFS_TIMEOUT_S)

    @contextmanager
    def _cut(self, device: str, size_bytes: int) -> Iterator[str]:
        """Yield a device that ends after `size_bytes`: mkfs.xfs clears the last 128 KiB of any, whatever its size."""
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
        """Return what is free in the file system at the order's point."""
        room = os.statvfs(self.order.point)
        return room.f_bavail * room.f_frsize

    def mounted(self, path: str) -> Mount:
        """Return the mount whose root holds `path`. Raises StorageError if there is none."""
        point = os.path.dirname(os.path.realpath(path))
        mount = next((mount for mount in reversed(self._mounter.mounts()) if mount.point == point), None)
        if mount is None:
            raise StorageError(f"what was to be mounted at {point} is not there", hint="see: dmesg")
        return mount

    def made(self, path: str, *, capacity_bytes: float, cache_dirs: tuple[str, ...] = ()) -> Provisioned:
        """Return what was made; for the arguments see `Provisioned`. Raises StorageError if `path` is in no mount."""
        mount = self.mounted(path)
        return Provisioned(
            path=path,
            # The lowest one: what snapshots write is seen there alone.
            devices=(self.device,),
            capacity_bytes=int(capacity_bytes),
            commands=tuple(self._commands),
            mount_options=tuple(dict.fromkeys((*mount.options, *mount.super_options))),
            cache_dirs=cache_dirs,
        )


def unmake(runner: _Running, mounter: _Mounted, device: str, order: ProvisionOrder) -> None:
    """For `Provisioner.unprovision`: undo what a `StorageMaker` with these arguments did, killed or not; idempotent.

    All at the order's point and below it is unmounted. What has just ended may hold it for a moment. Raises
    CommandError that names it if it is held for longer.
    """
    point = os.path.realpath(order.point)
    deadline = time.monotonic() + _UNMOUNT_PATIENCE_S
    while held := [mount.point for mount in mounter.mounts() if _is_below(mount.point, point)]:
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
        # What mkfs was given instead of the whole device.
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


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point + "/")


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
