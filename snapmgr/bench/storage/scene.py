"""Confines a sample to mounts that no other process sees, and cleans up however the sample ends.

The measuring process and its children live in a mount namespace of their own. A small tmpfs with a unique name is
mounted there, by which all of them can be found. When the measuring process dies, a waiting guard ends the others and
takes the storage down (logical volumes and daemons survive a namespace). If the guard was killed as well, the next run
does this from the record on disk.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.bench.measure.memory import bounded, remove_group
from snapmgr.contract.errors import MissingRequirementError, SnapmgrError, StorageError
from snapmgr.contract.records import ProvisionOrder
from snapmgr.mysql.lock.guard import guarded
from snapmgr.system.blockdev import parse_mountinfo, read_mounts
from snapmgr.system.command import CommandRunner
from snapmgr.system.files import is_abandoned, replace_file, space_hint
from snapmgr.system.host import Process, is_alive, signals_held, this_process
from snapmgr.system.mount import mount_device, remove_point
from snapmgr.system.mountapi import may_mount
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from snapmgr.contract.abilities import Provisioner

RUN = Path("/run/snapmgr/bench")
"""One file ID.json for each sample that is being measured, and its folder ID."""
_POINT = "fs"
_CLONE_NEWNS = 0x00020000
# Programs that are killed may hang in the kernel for a while: a flush that has begun is finished.
_END_S = 30.0
# The guard has no real limit: about ten years.
_NEVER_S = 3e8
_LOCK_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A place for one storage."""

    order: ProvisionOrder
    folder: Path
    """A small private tmpfs; the order's point is a folder in it, and others may be made."""
    memory_bounded: bool
    """Whether a limit below the machine's memory is in force."""


_own_since: int | None = None


def own_mounts() -> None:
    """Move this process into a mount namespace of its own, once: mounts and unmounts elsewhere still propagate to it.

    Raises MissingRequirementError without the right.
    """
    global _own_since  # noqa: PLW0603 - a process has one namespace
    if _own_since == os.getpid():
        return
    if not may_mount():
        raise MissingRequirementError("mounting file systems needs root (CAP_SYS_ADMIN)", hint="run snapmgr as root")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise MissingRequirementError(f"the kernel refuses a mount namespace: {os.strerror(ctypes.get_errno())}")
    CommandRunner().run(["mount", "--make-rslave", "/"])
    _own_since = os.getpid()


@contextmanager
def staged(
    provisioner: Provisioner,
    device: str,
    *,
    backend: str | None,
    size_bytes: int,
    options: Mapping[str, str],
    memory_bytes: int,
    discard: bool,
    restore: Callable[[str], Provisioner],
) -> Iterator[Scene]:
    """Yield a scene for `provisioner`; its storage on `device` is removed even if this process is killed.

    Args:
        provisioner: makes the storage for the caller; the guard only removes it.
        device: as in `Provisioner.provision`.
        backend: name of the backend, for a later run; None: a control.
        size_bytes: as in `ProvisionOrder`.
        options: as in `ProvisionOrder`.
        discard: as in `ProvisionOrder`.
        memory_bytes: memory limit of the whole scene, page cache included.
        restore: given a backend's name ("" for the controls), returns a provisioner to remove earlier runs' leftovers.
    """
    sweep(restore)
    own_mounts()
    name = secrets.token_hex(8)
    folder = RUN / name
    order = ProvisionOrder(
        id=name, point=str(folder / _POINT), size_bytes=size_bytes, options=dict(options), discard=discard
    )
    with (
        _written(order, device, backend) as lock,
        guarded(
            "bench",
            lambda: _clear(provisioner, device, order),
            time.monotonic() + _NEVER_S,
            keep=frozenset({lock}),
        ) as guard,
    ):
        try:
            mount_device("snapmgr-bench", str(folder), fs_type="tmpfs", options=("size=4m", "mode=700"))
            os.mkdir(order.point)
            with bounded(name, memory_bytes) as memory_bounded:
                yield Scene(order=order, folder=folder, memory_bounded=memory_bounded)
        finally:
            # A second Ctrl-C does not leave half of it; the record of a failure remains for a later run.
            with signals_held():
                try:
                    _take_down(provisioner, device, order)
                finally:
                    guard.dismiss()


@contextmanager
def _written(order: ProvisionOrder, device: str, backend: str | None) -> Iterator[int]:
    """Record the storage before it is made, and yield a lock on the record, which the guard will share."""
    try:
        RUN.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {RUN}: {error.strerror}") from None
    me = this_process()
    record = {
        "conductor": {"pid": me.pid, "start_ticks": me.start_ticks, "boot_id": me.boot_id},
        "backend": backend or "",
        "device": device,
        "order": {
            "id": order.id,
            "point": order.point,
            "size_bytes": order.size_bytes,
            "options": dict(order.options),
        },
    }
    path = RUN / f"{order.id}.json"
    try:
        replace_file(path, json.dumps(record, indent=1).encode())
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", hint=space_hint(error)) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def sweep(restore: Callable[[str], Provisioner]) -> tuple[str, ...]:
    """Remove leftovers of runs whose guards were killed too; return the devices. Runs in progress are not touched.

    Raises StorageError if something cannot be removed.
    """
    cleared = []
    for begun in filter(is_abandoned, RUN.glob(".*")):
        begun.unlink(missing_ok=True)
    for path in sorted(RUN.glob("*.json")):
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                conductor, name, device, order = _read(path)
                if is_alive(conductor):
                    continue
                # Its guard may be at work, and has the lock until it is done.
                _wait_for(fd, path)
                if not path.exists():
                    continue
                _clear(restore(name), device, order)
                cleared.append(device)
            finally:
                os.close(fd)
    return tuple(cleared)


def neighbours() -> tuple[str, ...]:
    """Return the devices on which other processes measure now."""
    devices = []
    for path in sorted(RUN.glob("*.json")):
        # It may just have ended; `sweep` reports damaged records.
        with suppress(OSError, StorageError):
            conductor, _, device, _ = _read(path)
            if conductor != this_process() and is_alive(conductor):
                devices.append(device)
    return tuple(devices)


def _read(path: Path) -> tuple[Process, str, str, ProvisionOrder]:
    with suppress(ValueError, TypeError, KeyError):
        record = json.loads(path.read_text(encoding="utf-8"))
        order = ProvisionOrder(**record["order"])
        # All processes that have this folder mounted are killed, and all mounts below it removed: it must be ours.
        if path.name == f"{order.id}.json" and order.point == str(path.parent / order.id / _POINT):
            return Process(**record["conductor"]), record["backend"], record["device"], order
    raise StorageError(
        f"{path}, the record of an earlier run, is damaged",
        hint=f"if no benchmark is running, and losetup, lsblk and mount show none of its devices: rm {path}",
    )


def _wait_for(fd: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"the cleanup of an earlier run is still in progress: {path}",
                    hint="look for a process that hangs (ps -eo pid,stat,args)",
                ) from None
        time.sleep(0.02)


def _clear(provisioner: Provisioner, device: str, order: ProvisionOrder) -> None:
    """End the processes in the dead run's namespace, remove its storage, and delete its record. Idempotent."""
    end_residents(Path(order.point).parent)
    _take_down(provisioner, device, order)


def _take_down(provisioner: Provisioner, device: str, order: ProvisionOrder) -> None:
    folder = Path(order.point).parent
    _unmount_below(folder, but=folder)
    provisioner.unprovision(device, order)
    _unmount_below(folder)
    remove_point(str(folder))
    remove_group(order.id)
    (RUN / f"{folder.name}.json").unlink(missing_ok=True)


def residents(folder: Path) -> tuple[int, ...]:
    """Return the other processes that have `folder` mounted: all in its namespace and in copies of that."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        with suppress(OSError, SnapmgrError):
            mounts = (process / "mountinfo").read_bytes()
            if os.fsencode(str(folder)) in mounts and any(
                mount.point == str(folder) for mount in parse_mountinfo(mounts)
            ):
                found.append(int(process.name))
    return tuple(found)


def end_users(folder: Path) -> None:
    """Kill those `residents` that have something open at or below `folder`: processes left by a sample."""
    deadline = time.monotonic() + _END_S
    while living := [pid for pid in residents(folder) if _uses(pid, folder)]:
        _kill(living, deadline)


def _uses(pid: int, folder: Path) -> bool:
    process = Path(f"/proc/{pid}")
    with suppress(OSError):
        links = [process / "cwd", process / "root", process / "exe", *(process / "fd").iterdir()]
        for link in links:
            with suppress(OSError):
                if lies_in(os.readlink(link).removesuffix(" (deleted)"), str(folder)):
                    return True
        with suppress(OSError):
            return os.fsencode(f"{folder}/") in (process / "maps").read_bytes()
    return False


def end_residents(folder: Path) -> None:
    """Kill all `residents` and wait until they are gone. Raises StorageError if one hangs in the kernel."""
    deadline = time.monotonic() + _END_S
    while living := residents(folder):
        _kill(living, deadline)


def _kill(pids: Sequence[int], deadline: float) -> None:
    if time.monotonic() > deadline:
        raise StorageError(
            f"these processes survived SIGKILL: {', '.join(map(str, pids))}", hint="they hang in the kernel: see dmesg"
        )
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.01)


def _unmount_below(folder: Path, *, but: Path | None = None) -> None:
    """Unmount everything at and below `folder`, the last mount first."""
    deadline = time.monotonic() + _END_S
    while points := [
        mount.point
        for mount in read_mounts()
        if (mount.point == str(folder) or mount.point.startswith(f"{folder}/")) and mount.point != str(but)
    ]:
        try:
            CommandRunner().run(["umount", points[-1]], timeout_s=None)
        except SnapmgrError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
