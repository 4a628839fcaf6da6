"""Examines a device as target before the first write, locks it, and examines it again before each mkfs."""

from __future__ import annotations

import fcntl
import os
import shlex
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from snapmgr.bench.device.blank import FoundSignature, refused_exclusively, signatures, uses
from snapmgr.bench.device.identity import Identity, identify, normal
from snapmgr.bench.device.loopfile import MIB
from snapmgr.bench.device.mark import Mark, ours, read_content, read_mark, usable_bytes, write_mark
from snapmgr.contract.errors import (
    BusyError,
    CommandError,
    ConfigError,
    MissingRequirementError,
    SnapmgrError,
    StorageError,
)
from snapmgr.contract.units import format_size
from snapmgr.system.blockdev import device_stack, udev_properties

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapmgr.contract.backend import Runner
    from snapmgr.contract.records import BlockDevice

MIN_BYTES = 128 * MIB
# linux/fs.h
_BLKFLSBUF = 0x1261
_LOCK_PATIENCE_S = 3.0
_DISCARD_TIMEOUT_S = 900.0
_WIPE_TIMEOUT_S = 120.0


def require_size(what: str, size: int, needed: int | None) -> None:
    """Raise ConfigError unless `size` bytes are enough for the data and for any file system."""
    least = max(MIN_BYTES, needed or 0)
    if size < least:
        raise ConfigError(
            f"{what} is too small: {format_size(max(size, 0))} may be used, and {format_size(least)} are needed",
            hint="choose a larger one, or a smaller --size",
        )


def node_of(path: str) -> str:
    """Given any node of a block device, return the kernel's own: a lock on another node excludes no other program.

    Raises ConfigError if that is missing.
    """
    number = os.stat(path).st_rdev
    own = device_stack(f"{os.major(number)}:{os.minor(number)}").path
    with suppress(OSError):
        if os.stat(own).st_rdev == number:
            return own
    # Without udev device-mapper's devices have only the nodes that LVM made.
    if os.stat(path).st_dev != os.stat("/dev").st_dev:
        raise ConfigError(f"{path} is a device node outside /dev", hint=f"name it {own}")
    return path


class DeviceTarget:
    """A device that was examined and locked."""

    kind: Literal["loop", "device"] = "device"

    def __init__(self, fd: int, device: BlockDevice, identity: Identity, runner: Runner) -> None:
        self.device = device.path
        self.size_bytes = usable_bytes(device.size_bytes)
        self.title = title_of(device, identity)
        self._fd = fd
        self._record = device
        self._identity = identity
        self._sequence = _sequence(device.number)
        self.discard = True
        self._runner = runner
        self._discards = True
        self._noted = True

    def check(self) -> None:
        """Raise StorageError unless the node still leads to the same device and that is unused."""
        why = self._changed()
        if not why and refused_exclusively(self.device):
            why = "; ".join(uses(self._record))
        if why:
            raise StorageError(
                f"{self.title} has changed since the run began: {why}; nothing was formatted",
                hint="see: lsblk, dmesg; then start the run again",
            )

    def _changed(self) -> str:
        try:
            node = os.stat(self.device)
            kept = os.fstat(self._fd)
            if not stat.S_ISBLK(node.st_mode) or node.st_rdev != kept.st_rdev:
                return f"{self.device} leads to another device"
            now = replace(device_stack(self._record.number, properties=udev_properties), path=self.device)
            sequence = _sequence(self._record.number)
        except (OSError, StorageError) as error:
            return f"it is gone ({error})"
        if now.size_bytes != self._record.size_bytes:
            return f"it was {format_size(self._record.size_bytes)} large and is {format_size(now.size_bytes)}"
        if sequence != self._sequence or (identity := identify(now)).text != self._identity.text:
            return "another disk (or another file of a loop device) is there now"
        return "it is a second path to a disk" if identity.twin else ""

    def blank(self) -> None:
        """Remove all signatures, and discard the usable part if the device supports that."""
        self.check()
        _forget_cached(self._fd)
        self._runner.run(["wipefs", "--quiet", "--all", self.device], timeout_s=_WIPE_TIMEOUT_S)
        if self.discard and self._discards and self._can_discard():
            argv = ["blkdiscard", "--offset", "0", "--length", str(self.size_bytes), self.device]
            try:
                self._runner.run(argv, timeout_s=_DISCARD_TIMEOUT_S)
            except CommandError:
                # Some USB bridges claim support for it and fail; `facts` reports that.
                self._discards = False
        self._mark(Mark(identity=self._identity.text, size_bytes=self._record.size_bytes))

    def made(self) -> None:
        """Record the current signatures in the mark."""
        found = signatures(self._record, runner=self._runner)
        own = tuple(one.signature for one in found if not one.partition)
        self._mark(Mark(identity=self._identity.text, size_bytes=self._record.size_bytes, signatures=own))

    def _mark(self, mark: Mark) -> None:
        try:
            write_mark(self.device, mark)
        except OSError:
            # A kernel may forbid writes to a mounted device. Then a run after a SIGKILL requires --wipe.
            self._noted = False

    def facts(self) -> dict[str, Any]:
        """Return its description for the samples: see `docs/reference/benchmark-devices.md`."""
        return {
            "kind": "device",
            "size_bytes": self.size_bytes,
            "device_bytes": self._record.size_bytes,
            "device_kind": self._record.kind,
            "model": self._identity.model,
            "identified_by": self._identity.source,
            "discarded": self.discard and self._discards and self._can_discard(),
            "marked": self._noted,
        }

    def _can_discard(self) -> bool:
        whole = self._record.below[0] if self._record.kind == "part" and self._record.below else self._record
        with suppress(OSError, ValueError):
            return int(Path("/sys/dev/block", whole.number, "queue/discard_max_bytes").read_text()) > 0
        return False

    def leave(self) -> None:
        """Blank it, and record a digest of its contents, so that the next run recognises it."""
        self.discard = True
        self.blank()
        _forget_cached(self._fd)
        content = read_content(self._fd, self._record.size_bytes).digest
        self._mark(Mark(identity=self._identity.text, size_bytes=self._record.size_bytes, content=content))


@contextmanager
def opened_device(
    path: str, *, needed: int | None, wipe: str | None, line: Sequence[str], runner: Runner
) -> Iterator[DeviceTarget]:
    """Yield the device at `path`, blank; see `target.opened_target` for arguments and errors.

    It is left blank as well, however the context ends, unless something still holds it.
    """
    with ExitStack() as unlocked, claimed(path) as fd:
        device, identity, found = examined(path, fd, needed=needed, wipe=wipe, line=line, runner=runner)
        unlocked.callback(_have_udev_look_again, path)
        target = DeviceTarget(fd, device, identity, runner)
        target.blank()
        if any(one.partition for one in found):
            # The kernel forgets partitions with their table, unless they were added manually.
            runner.run(["partx", "--delete", device.path], ok=(0, 1), timeout_s=_WIPE_TIMEOUT_S)
        try:
            yield target
        except BaseException:
            # Report the failure itself, not its consequence that something still holds the device.
            with suppress(SnapmgrError, OSError):
                target.leave()
            raise
        target.leave()


@contextmanager
def claimed(path: str) -> Iterator[int]:
    """Open a device and lock it for us (systemd.io/BLOCK_DEVICE_LOCKING): udev ignores it while it is locked.

    The descriptor also keeps its name from going to another disk when it is pulled out. It is not open for writing,
    because a kernel may refuse to mount a device that is.
    """
    with ExitStack() as stack:
        fd = stack.enter_context(_opened(path))
        _lock(fd, fcntl.LOCK_EX, path)
        number = os.fstat(fd).st_rdev
        device = device_stack(f"{os.major(number)}:{os.minor(number)}")
        if device.kind == "part":
            for disk in device.below:
                # Shared: udev may read the other partitions, but no program may write another table.
                _lock(stack.enter_context(_opened(disk.path)), fcntl.LOCK_SH, disk.path)
        yield fd


def _have_udev_look_again(path: str) -> None:
    """Open it for writing and close it, so that udev examines changes that it ignored during the lock."""
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK))


@contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError:
        hint = "run it as root (sudo)"
        if os.geteuid() == 0:
            hint = "you are root already: the control group of this container or service forbids the device"
        raise MissingRequirementError(f"permission denied: cannot open {path}", hint=hint) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}", hint="check the name: lsblk") from None
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int, how: int, path: str) -> None:
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            # udev holds a device while it examines it, which does not take long.
            if time.monotonic() > deadline:
                raise BusyError(
                    f"{path} is locked: another run of the benchmark, or a partitioning program, is at work on it",
                    hint="wait until it ends; lslocks shows its process",
                ) from None
            time.sleep(0.05)
        else:
            return


def examined(
    path: str, fd: int, *, needed: int | None, wipe: str | None, line: Sequence[str], runner: Runner
) -> tuple[BlockDevice, Identity, tuple[FoundSignature, ...]]:
    """Return the identity and the contents of an open device. Raises ConfigError unless it may be formatted."""
    number = os.fstat(fd).st_rdev
    device = device_stack(f"{os.major(number)}:{os.minor(number)}", properties=udev_properties)
    # Without udev, device-mapper nodes have only the names that LVM gave them.
    device = replace(device, path=path)
    identity = identify(device)
    title = title_of(device, identity)
    used = uses(device)
    if identity.twin:
        used = (f"it is a second path to the same disk as {identity.twin}", *used)
    if used:
        raise ConfigError(
            f"{title} is in use, and was not changed: {'; '.join(used)}",
            hint="choose another device; --wipe does not override this",
        )
    if not identity.text:
        raise ConfigError(
            f"{title} cannot be identified: {identity.why_not}",
            hint="choose another device, or a file: --on loop:SIZE",
        )
    require_size(title, usable_bytes(device.size_bytes), needed)
    if wipe is not None and normal(wipe) != normal(identity.text):
        raise ConfigError(
            f"--wipe {wipe} does not name {title}",
            hint=f"check that it is the right device: --wipe {identity.text} names it",
        )
    found, refusal = _contents(device, fd, identity, runner)
    if refusal and wipe is None:
        raise ConfigError(
            f"{title} is not blank: {refusal}",
            hint="to overwrite it: "
            + shlex.join([*line, *(() if "--on" in line else ("--on", path)), "--wipe", identity.text]),
        )
    return device, identity, found


def _contents(
    device: BlockDevice, fd: int, identity: Identity, runner: Runner
) -> tuple[tuple[FoundSignature, ...], str]:
    """Return the contents of a device, and the reason why they are not just our leftovers ("" if they are)."""
    try:
        _forget_cached(fd)
        found = signatures(device, runner=runner)
        content = read_content(fd, device.size_bytes)
        mark = read_mark(fd, device.size_bytes)
    except OSError as error:
        raise StorageError(f"{device.path} cannot be read: {error.strerror}", hint="see: dmesg, smartctl -a") from None
    own = tuple(one.signature for one in found)
    if ours(mark, identity=identity.text, size_bytes=device.size_bytes, found=own, content=content.digest):
        return found, ""
    if found:
        return found, "; ".join(one.shown for one in found)
    return found, content.shown


def title_of(device: BlockDevice, identity: Identity) -> str:
    """Return path, model, serial number and size of a device, for people."""
    word = "" if identity.source == "loop file" else f"{identity.source} "
    about = [identity.model or "unknown model", f"{word}{identity.text}" if identity.text else "no serial number"]
    return f"{device.path} ({', '.join([*about, format_size(device.size_bytes)])})"


def _sequence(number: str) -> str:
    """Return the kernel's sequence number of a disk, unique until the next boot; "" before Linux 5.15."""
    folder = Path("/sys/dev/block", number).resolve()
    whole = folder.parent if (folder / "partition").exists() else folder
    with suppress(OSError):
        return (whole / "diskseq").read_text().strip()
    return ""


def _forget_cached(fd: int) -> None:
    """Drop the device's own cache, which does not contain the writes of a file system."""
    with suppress(OSError):
        fcntl.ioctl(fd, _BLKFLSBUF, 0)
