"""Real file systems on loop devices, each in a folder of its own, and nothing left behind.

Everything that is made here lies in or refers to a folder ``snapmgr-test-PID-…``: so what a killed run left can be told
from what a living one uses, and `sweep_dead` removes it at the next start.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.contract.errors import CommandError
from snapmgr.system.command import CommandRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PREFIX = "snapmgr-test-"
_RUNNER = CommandRunner()
# How long something may still be held (the kernel's own lazy work, a child that is just ending) before it is a leak.
_PATIENCE_S = 60.0
_MKFS = {
    "btrfs": ("mkfs.btrfs", "--quiet", "--force"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    # Lazy initialisation would write in the background while a test measures.
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
}


class LeftBehindError(Exception):
    """Something could not be released; the message names what, and who holds it."""


@dataclass(kw_only=True)
class LoopFileSystem:
    """A mounted file system of its own on a loop device."""

    point: Path
    device: str
    """Device node: "/dev/loop3"; another one after `unplugged`."""
    image: Path
    """The sparse file below."""
    fs_type: str

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """Unmount it and take its device away while the context lasts; then it is back, perhaps under another number.

        Another test may get the old one meanwhile. A mount namespace that was copied from ours keeps it mounted, and so
        within reach, until it ends: for that is waited.
        """
        _patiently(lambda: _RUNNER.run(["umount", str(self.point)]))
        _detach(self.device)
        self.device = ""
        try:
            yield
        finally:
            with shielded():
                self.device = _RUNNER.run(["losetup", "--find", "--show", str(self.image)]).stdout.strip()
                _RUNNER.run(["mount", "-t", self.fs_type, self.device, str(self.point)])


@contextmanager
def shielded() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM while something is acquired together with its release, or released.

    They arrive afterwards. Handlers are exchanged, not the signal mask: a mask is inherited by the programs we start,
    and a server with SIGTERM blocked cannot be shut down. Only the main thread gets signals, so elsewhere there is
    nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for held in old:
        signal.signal(held, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)


@contextmanager
def work_folder(base: Path | None = None) -> Iterator[Path]:
    """Make a folder that any user may enter (servers run as another one) and remove it with all that is in it."""
    folder: Path | None = None
    try:
        # Inside the `try`: a signal that waited is raised when the shield ends, and the folder is there then.
        with shielded():
            folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
            folder.chmod(0o711)
        yield folder
    finally:
        with shielded():
            if folder is not None:
                # Emptying a folder that still has a mount in it would empty somebody's file system.
                if held := _mounts_below(folder):
                    raise LeftBehindError(f"still mounted in {folder}: {', '.join(held)}")
                shutil.rmtree(folder)


@contextmanager
def loop_filesystem(
    fs_type: str,
    size_bytes: int,
    mkfs_options: Sequence[str] = (),
    mount_options: Sequence[str] = (),
    *,
    base: Path | None = None,
) -> Iterator[LoopFileSystem]:
    """Make and mount a file system ("btrfs", "xfs" or "ext4") of `size_bytes` on a sparse file.

    Args:
        fs_type: "btrfs", "xfs" or "ext4". XFS wants 300 MiB or more, btrfs 109 MiB or more.
        size_bytes: size of the device.
        mkfs_options: further arguments for mkfs.
        mount_options: for ``mount -o``.
        base: where the image lies; the temporary folder by default. ``/dev/shm`` makes it quick.

    At the end everything mounted from the device is unmounted, the device detached and the image deleted. Raises
    LeftBehindError, naming the processes that hold it, if it cannot be released in time.
    """
    with work_folder(base) as folder:
        image, point = folder / "image", folder / "mnt"
        point.mkdir()
        with image.open("wb") as file:
            file.truncate(size_bytes)
        made = LoopFileSystem(point=point, device="", image=image, fs_type=fs_type)
        try:
            with shielded():
                made.device = _RUNNER.run(["losetup", "--find", "--show", str(image)]).stdout.strip()
            _RUNNER.run([*_MKFS[fs_type], *mkfs_options, made.device])
            options = ["-o", ",".join(mount_options)] if mount_options else []
            with shielded():
                _RUNNER.run(["mount", "-t", fs_type, *options, made.device, str(point)])
            # As a service's data folder would be: its own user makes files in it.
            point.chmod(0o755)
            yield made
        finally:
            with shielded():
                if made.device:
                    _release(made.device)


def _release(device: str) -> None:
    """Unmount everything that is mounted from `device` in this mount namespace, then detach it."""
    complaint = ""
    try:
        unmount_device(device)
    except LeftBehindError as error:
        complaint = str(error)
    try:
        _detach(device)
    except LeftBehindError as error:
        complaint = complaint or str(error)
    if complaint:
        raise LeftBehindError(complaint)


def _detach(device: str) -> None:
    """Detach a loop device. Raises LeftBehindError if something holds it open.

    One that is open (a mount in another namespace, a descriptor: udev's too) is only marked for detaching.
    """
    image = loop_devices().get(device)
    _RUNNER.run(["losetup", "--detach", device])
    # The number may be another one's by now.
    if image is not None and not _eventually(lambda: loop_devices().get(device) != image):
        raise LeftBehindError(f"{device} is still attached: something holds it open")


def unmount_device(device: str) -> None:
    """Unmount everything that is mounted from `device` in this mount namespace, and overlays with folders on it.

    Raises LeftBehindError, naming the processes that hold it, for what stays in use; that is
    unmounted lazily: the next test must not suffer from it.
    """
    complaint = ""
    points = mounts_of(device)
    for point in (*_overlays_on(points), *reversed(points)):
        try:
            _patiently(lambda point=point: _RUNNER.run(["umount", "--recursive", point]))  # type: ignore[misc]
        except CommandError as error:
            complaint = f"{error}; held by {_holders(point) or 'nobody that /proc shows'}"
            _RUNNER.run(["umount", "--recursive", "--lazy", point])
    if complaint:
        raise LeftBehindError(complaint)


def _overlays_on(points: Sequence[str]) -> list[str]:
    """Return where overlays are mounted that keep their changes below one of these mount points."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mounted, _, system = line.partition(" - ")
        if system.startswith("overlay ") and any(f"upperdir={point}/" in system for point in points):
            found.append(mounted.split()[4])
    return found


def _patiently(action: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            action()
        except CommandError as error:
            if "busy" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --------------------------------------------------------------------------------------------- what there is, and whose


def loop_devices() -> dict[str, str]:
    """Return the attached loop devices: node → backing file."""
    devices = {}
    for folder in Path("/sys/block").glob("loop*"):
        # A device may go away between the listing and the reading.
        with suppress(OSError):
            devices[f"/dev/{folder.name}"] = (folder / "loop" / "backing_file").read_text().strip()
    return devices


def _mount_table() -> list[tuple[str, str]]:
    """Return source and mount point of every mount, in mount order."""
    rows = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        rows.append((right.split()[1], point))
    return rows


def mounts_of(device: str) -> list[str]:
    """Return the points where `device` is mounted, in mount order."""
    return [point for source, point in _mount_table() if source == device]


def _mounts_below(folder: Path) -> list[str]:
    return [point for _, point in _mount_table() if Path(point).is_relative_to(folder)]


def _holders(point: str) -> str:
    """Return "PID (name), …": the processes with a file, working folder or root at or below `point`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            links = [process / "cwd", process / "root", process / "exe", *(process / "fd").iterdir()]
            targets = []
            for link in links:
                with suppress(OSError):
                    targets.append(os.readlink(link))
            if any(target == point or target.startswith(point + "/") for target in targets):
                found.append(f"{process.name} ({(process / 'comm').read_text().strip()})")
    return ", ".join(found)


def processes_of(folder: Path | str) -> list[int]:
    """Return the ids of processes (ourselves excepted) whose command line names `folder` or something in it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(folder).encode() in (process / "cmdline").read_bytes() and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found


def _folders(owner: int | None = None) -> list[Path]:
    """Return the work folders of the run `owner`, or of all runs."""
    bases = {Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm"), Path("/var/tmp")}
    pattern = f"{_PREFIX}{owner or '[0-9]*'}-*"
    return sorted(folder for base in bases for folder in base.glob(pattern))


def leftovers(owner: int | None = None) -> list[str]:
    """Return what the run with process id `owner` (ourselves by default) has left, one sentence each."""
    mark = f"{_PREFIX}{owner or os.getpid()}-"
    mounts = [f"mount {point}" for source, point in _mount_table() if mark in point or mark in source]
    loops = [f"loop device {device} on {image}" for device, image in loop_devices().items() if mark in image]
    processes = [f"process {pid}" for pid in processes_of(mark)]
    return processes + mounts + loops + [f"folder {folder}" for folder in _folders(owner or os.getpid())]


def sweep(owner: int) -> None:
    """Remove what the run with process id `owner` has left: end its processes, unmount, detach, delete."""
    mark = f"{_PREFIX}{owner}-"
    for pid in processes_of(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _eventually(lambda: not processes_of(mark))
    # One whose image lies on another one first: its path is longer.
    for device, image in sorted(loop_devices().items(), key=lambda item: len(item[1]), reverse=True):
        if mark in image:
            # What a process of another mount namespace holds goes with that process.
            with suppress(LeftBehindError, CommandError):
                _release(device)
    for _, point in reversed(_mount_table()):
        if mark in point:
            _RUNNER.run(["umount", "--recursive", "--lazy", point])
    for folder in _folders(owner):
        shutil.rmtree(folder, ignore_errors=True)


def sweep_dead() -> None:
    """Sweep after every run whose process is gone (killed, power cut); living ones are left alone."""
    lock = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Two runs that start at once must not take the same thing away.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for owner in {_owner(folder.name) for folder in _folders()}:
            if not Path(f"/proc/{owner}").exists():
                sweep(owner)
    finally:
        os.close(lock)


def _owner(name: str) -> int:
    return int(name.removeprefix(_PREFIX).partition("-")[0])


_CLONE_NEWNS = 0x00020000


def keep_mounts_private() -> None:
    """Move this process into a mount namespace of its own: what it mounts no other run sees, and the other way round.

    Else every namespace that a test makes, or a server that is started in one, holds copies of what tests beside it
    mount: their file systems stay within reach after they were unmounted, and their snapshots "in use elsewhere".
    Nothing is done without the right to.
    """
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        return
    _RUNNER.run(["mount", "--make-rslave", "/"])
    # The copies that we have got ourselves.
    for _, point in reversed(_mount_table()):
        if f"/{_PREFIX}" in point:
            _RUNNER.run(["umount", "--lazy", point], ok=(0, 1, 32))


def fill(folder: Path) -> None:
    """Leave no room on the file system of `folder`: neither for a block nor for an inode."""
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    with suppress(OSError):
        for number in range(100_000):
            (folder / f"filler-{number}").write_bytes(b"x")
    _RUNNER.run(["sync", "-f", str(folder)])
