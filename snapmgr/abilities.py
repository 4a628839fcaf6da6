"""Optional abilities of a backend: one that has an ability has all of its methods. The core asks by isinstance.

Plugins import them from `snapmgr.api`.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from snapmgr.errors import CommandError, ConfigError, StorageError
from snapmgr.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from snapmgr.records import (
        AttachRecord,
        ClientOptions,
        Completed,
        Gauge,
        Mount,
        Pool,
        Provisioned,
        ProvisionOrder,
        Reason,
        RevertPlan,
        SnapshotRef,
    )


@runtime_checkable
class Filling(Protocol):
    """A storage whose snapshots are lost, or whose origins cannot be written, when something runs full."""

    def gauges(self, pools: tuple[Pool, ...]) -> tuple[Gauge, ...]:
        """Return how full everything in `pools` is that can run full: first what all share, then each snapshot's own.

        Cheap: a few programs for each pool, whatever it holds. A snapshot that was lost has ``valid=False``. A pool
        that is not there raises StorageError.
        """

    def relieve(self, ref: SnapshotRef) -> str | None:
        """Give a snapshot more room if it is filling up and the configuration allows it; return in words what was done.

        None if nothing was to be done. Raises StorageError if there is no room to give, NotFoundError if it is gone.
        """


@runtime_checkable
class ScratchAttaching(Protocol):
    """A storage whose attachments write to scratch space, which can run full while writes still seem to succeed."""

    def attachment_problem(self, record: AttachRecord) -> Reason | None:
        """Return why what is read through an attachment is not to be believed; None if it is as it should be."""


@runtime_checkable
class FolderCloning(Protocol):
    """A storage that clones any folder in it, in one call, sharing all its data."""

    def clone_folder(self, source: str, target: str) -> None:
        """Clone the folder `source` to `target`, on the same storage: a path that does not exist in a folder that does.

        Nobody writes to `source` meanwhile. What fails or is interrupted leaves no `target`, or one that is removed by
        the same call when it is tried again. Owners, modes, times and holes are the source's. Raises StorageError if
        the storage cannot (full, quota, `target` exists), NotFoundError if there is no `source`.
        """


class ClientMount(Protocol):
    """A mount of a storage's client program that nobody else uses."""

    @property
    def path(self) -> str:
        """The folder that was asked for, seen through this mount."""

    @property
    def point(self) -> str:
        """Where the mount is."""

    @property
    def options(self) -> ClientOptions:
        """What it was mounted with."""

    def counters(self) -> dict[str, float]:
        """Return the client's counters now, since it was mounted; names are the client's ("juicefs_…"), labels in
        braces behind them."""

    def settle(self, timeout_s: float, tell: Callable[[int], None] | None = None) -> None:
        """Return when all that was written through it is in the storage itself; `tell` is called with the bytes that
        are left. Raises StorageError after `timeout_s`."""

    def warm_up(self, path: str) -> None:
        """Read a folder, a path of this mount, into the cache."""


@runtime_checkable
class Remounting(Protocol):
    """A storage behind a client program with a cache of its own: mounted once more, privately, with other options."""

    def client_mount(self, path: str, options: ClientOptions) -> AbstractContextManager[ClientMount]:
        """Mount the storage that holds `path` (a folder in a mount of it) once more until the context ends.

        In a namespace or folder of our own; what a SIGKILL leaves of it is debris that `doctor` clears. Leaving it
        waits until all is uploaded; if that fails the local cache folder is kept, and named in the StorageError.
        """


@runtime_checkable
class Revertible(Protocol):
    """A storage that can put an origin back, in its own place, to one of its snapshots.

    A `token` (16 hex digits) names one such reversion; the core has it on disk before `begin_revert`. The core unmounts
    the origin before and mounts it again afterwards.
    """

    def revert_plan(self, ref: SnapshotRef) -> RevertPlan:
        """Return what it would mean. Changes nothing. Raises NotFoundError if the snapshot or its origin is gone."""

    def begin_revert(self, ref: SnapshotRef, token: str) -> None:
        """Begin to put the origin back, or push on what goes on already; idempotent, and returns soon.

        Raises InUseError if the origin or the snapshot is open, StorageError if the storage refuses.
        """

    def revert_state(self, ref: SnapshotRef, token: str) -> Literal["none", "merging", "done", "failed"]:
        """Return how far it is, in any process and after any crash or reboot; "none": it has not begun."""

    def cancel_revert(self, ref: SnapshotRef, token: str) -> None:
        """Remove what was prepared for one whose state is "none"; idempotent."""

    def finish_revert(self, ref: SnapshotRef, token: str) -> SnapshotRef | None:
        """After "done" remove what is left over, and return the snapshot as it is now; None if it is used up.

        Idempotent: called again it returns the same.
        """


@runtime_checkable
class Provisioner(Protocol):
    """A storage that can be made anew on a blank block device: for the benchmark, and for tests."""

    def provision(self, device: str, order: ProvisionOrder) -> AbstractContextManager[Provisioned]:
        """Make this storage on `device` ("/dev/loop3") and mount it at `order.point`; the context's end takes it down.

        The device holds nothing that anybody wants: the core has made sure. Programs are given all options that decide
        about speed, and `commands` says which. Taking down is idempotent and leaves nothing active; what a SIGKILL
        leaves is removed by `unprovision`. Raises StorageError (too small), LackingError.
        """

    def unprovision(self, device: str, order: ProvisionOrder) -> None:
        """Unmount, deactivate and remove whatever an earlier `provision` with these arguments left; idempotent, in any
        process. The device need not be blank afterwards, but nothing holds it."""


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


class StorageMaker:
    """For backends that are a `Provisioner`: makes and mounts file systems, and keeps what was run for that.

    All programs get an order's size as an option of their own: what lies behind it on the device is not touched.
    """

    def __init__(self, runner: _Running, mounter: _Mounted, order: ProvisionOrder) -> None:
        self._runner = runner
        self._mounter = mounter
        self._order = order
        self._commands: list[tuple[str, ...]] = []

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """What was run until now."""
        return tuple(self._commands)

    def options(self, allowed: Mapping[str, tuple[str, ...] | None]) -> dict[str, str]:
        """Return the order's options. Raises ConfigError for a key or value not in `allowed` (None: any text)."""
        for key, value in self._order.options.items():
            if key not in allowed:
                raise ConfigError(
                    f"there is no option {key!r} for this storage", hint=f"there are: {', '.join(allowed)}"
                )
            values = allowed[key]
            if values is not None and value not in values:
                raise ConfigError(f"{key} cannot be {value!r}", hint=f"allowed are: {', '.join(values)}")
        return dict(self._order.options)

    def run(self, *argv: str, timeout_s: float | None = 60.0) -> Completed:
        """Run a program, and keep what was run. Raises as `Runner.run`."""
        self._commands.append(argv)
        return self._runner.run(argv, timeout_s=timeout_s)

    def discard(self, device: str) -> None:
        """Tell a device that all in the order's size is unused (TRIM), where it can be told.

        Not a loop device: that would punch holes into its file, which was allocated beforehand with intent.
        """
        if _can_discard(device):
            length = str(self._order.size_bytes)
            # Never forced: that would not ask whether somebody has mounted it meanwhile.
            self.run("blkdiscard", "--offset", "0", "--length", length, device, timeout_s=_MKFS_TIMEOUT_S)

    def make_file_system(
        self, fs_type: Literal["btrfs", "ext4", "xfs"], device: str, size_bytes: int, *, extra: tuple[str, ...] = ()
    ) -> None:
        """Make a file system on the first `size_bytes` of a device.

        Nothing is left to be done later, when something is measured. Raises StorageError if that is too small.
        """
        if size_bytes < _LEAST_BYTES[fs_type]:
            raise StorageError(
                f"{format_size(size_bytes)} are too little for {fs_type}",
                hint=f"{format_size(_LEAST_BYTES[fs_type])} is the least",
            )
        size_bytes -= size_bytes % _MIB
        match fs_type:
            case "btrfs":
                layout = ("--data", "single", "--metadata", "dup", "--nodesize", "16k", "--csum", "crc32c")
                size = ("--byte-count", str(size_bytes))
                argv = ("mkfs.btrfs", "--quiet", "--force", "--nodiscard", *layout, *extra, *size, device)
                self.run(*argv, timeout_s=_MKFS_TIMEOUT_S)
            case "ext4":
                now = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
                argv = ("mkfs.ext4", "-q", "-F", "-b", "4096", "-E", now, *extra, device, str(size_bytes // 4096))
                self.run(*argv, timeout_s=_MKFS_TIMEOUT_S)
            case "xfs":
                with self._cut(device, size_bytes) as whole:
                    # Where it is cut the program does not see what the device itself says of its sectors.
                    sector = ("-s", f"size={_sector_bytes(device)}")
                    size = ("-d", f"size={size_bytes}")
                    argv = ("mkfs.xfs", "-q", "-f", "-K", "-m", "crc=1,reflink=1", *sector, *size, *extra, whole)
                    self.run(*argv, timeout_s=_MKFS_TIMEOUT_S)

    @contextmanager
    def _cut(self, device: str, size_bytes: int) -> Iterator[str]:
        """Yield a device that ends after `size_bytes`: mkfs.xfs clears the last 128 KiB of any, whatever its size."""
        if size_bytes + _MIB > device_bytes(device):
            yield device
            return
        argv = ("losetup", "--find", "--show", "--sizelimit", str(size_bytes), device)
        cut = self.run(*argv).stdout.strip()
        try:
            yield cut
        finally:
            self.run("losetup", "--detach", cut)

    def mount(self, device: str, fs_type: str, options: tuple[str, ...]) -> tuple[str, ...]:
        """Mount a device at the order's point; return the options as the kernel reports them."""
        self.run("mount", "-t", fs_type, "-o", ",".join(options), device, self._order.point)
        point = os.path.realpath(self._order.point)
        mount = next(mount for mount in reversed(self._mounter.mounts()) if mount.point == point)
        return tuple(dict.fromkeys((*mount.options, *mount.super_options)))


def unmount_all(runner: _Running, mounter: _Mounted, order: ProvisionOrder) -> None:
    """For `Provisioner.unprovision`: unmount all at the order's point and below it; idempotent.

    What has just ended may hold it for a moment. Raises CommandError that names it if it is held for longer.
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


def release_cut(runner: _Running, device: str, order: ProvisionOrder) -> None:
    """For `Provisioner.unprovision`: detach the loop device that a killed `StorageMaker.make_file_system` left."""
    for folder in Path("/sys/block").glob("loop*/loop"):
        try:
            backing = (folder / "backing_file").read_text().strip()
            limit = int((folder / "sizelimit").read_text())
        except (OSError, ValueError):
            continue
        if backing == device and order.size_bytes - _MIB < limit <= order.size_bytes:
            runner.run(["losetup", "--detach", f"/dev/{folder.parent.name}"], ok=(0, 1))


def device_bytes(device: str) -> int:
    """Return a block device's size. Raises StorageError."""
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
