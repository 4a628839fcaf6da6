"""Finds who shows a subvolume: the mounts of this process's namespace, and those of others (containers, services)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.api.kernel import lies_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.api import Mount

SYSFS = Path("/sys/fs/btrfs")
# Reading every process's namespace takes 10 ms, so that a batch of deletions shares one look; but somebody may mount a
# snapshot meanwhile.
_FRESH_S = 0.1


def device_names(fs_uuid: str) -> list[str]:
    """Return the names in sysfs of the devices of a mounted file system; empty if it is not mounted."""
    try:
        return sorted(os.listdir(SYSFS / fs_uuid / "devices"))
    except OSError:
        return []


def device_numbers(fs_uuid: str) -> frozenset[int]:
    """Return the device numbers (as st_rdev) of a mounted file system's devices; empty if it is not mounted."""
    numbers = set()
    for name in device_names(fs_uuid):
        with suppress(OSError, ValueError):
            major, minor = (SYSFS / fs_uuid / "devices" / name / "dev").read_text().split(":")
            numbers.add(os.makedev(int(major), int(minor)))
    return frozenset(numbers)


def mounts_of(mounts: tuple[Mount, ...], fs_uuid: str) -> tuple[Mount, ...]:
    """Return those of `mounts` that show (a part of) the btrfs file system `fs_uuid`."""
    numbers = device_numbers(fs_uuid)
    return tuple(mount for mount in mounts if mount.fs_type == "btrfs" and _is_on(mount.source, numbers))


def _is_on(source: str, numbers: frozenset[int]) -> bool:
    try:
        return os.stat(source).st_rdev in numbers
    except OSError:
        return False


class Users:
    """The mounts that show subvolumes of the file system `fs_uuid`, for many questions; never older than 0.1 s.

    Args:
        fs_uuid: the file system's.
        read_mounts: returns the mounts of this process's namespace.
    """

    def __init__(self, fs_uuid: str, read_mounts: Callable[[], tuple[Mount, ...]]) -> None:
        self._fs_uuid = fs_uuid
        self._read_mounts = read_mounts
        self._read_at = float("-inf")

    def of(self, path: str, subvolume_id: int, *, idle: bool) -> tuple[str, ...]:
        """Return where the subvolume at `path` ("/.snapmgr/x", from the top level) or a part of it is shown, or
        something is mounted in it; in other namespaces only where they show the subvolume itself.

        With `idle` also where no process of another namespace has anything of it open.
        """
        if time.monotonic() >= self._read_at + _FRESH_S:
            self._read()
        found = [mount.point for mount in self._ours if _shows(mount, path, subvolume_id)]
        found += [point for inside, point in self._inner if lies_in(inside, path)]
        return (*dict.fromkeys(found), *self._elsewhere(subvolume_id, idle=idle))

    def _read(self) -> None:
        mounts = self._read_mounts()
        self._ours = mounts_of(mounts, self._fs_uuid)
        by_id = {mount.id: mount for mount in self._ours}
        self._inner: list[tuple[str, str]] = []
        for mount in mounts:
            parent = by_id.get(mount.parent_id)
            if parent is not None:
                inside = os.path.relpath(mount.point, parent.point)
                self._inner.append((os.path.normpath(os.path.join(parent.root, inside)), mount.point))
        numbers = device_numbers(self._fs_uuid)
        self._shown: dict[str, dict[int, str]] = {}
        self._processes: list[tuple[str, str]] = []
        for process, space in _strangers():
            with suppress(OSError):  # it ended
                if space not in self._shown:
                    self._shown[space] = _points_in(f"/proc/{process}/mountinfo", numbers)
                if self._shown[space]:
                    self._processes.append((process, space))
        self._read_at = time.monotonic()

    def _elsewhere(self, subvolume_id: int, *, idle: bool) -> Iterator[str]:
        named: set[str] = set()
        for process, space in self._processes:
            point = self._shown[space].get(subvolume_id)
            if point is None or space in named or not (idle or _has_open(process, point)):
                continue
            if idle:
                named.add(space)
            yield f"{point} (in the mount namespace of process {process})"


def _strangers() -> Iterator[tuple[str, str]]:
    """Yield each process in another mount namespace, with that."""
    own = os.readlink("/proc/self/ns/mnt")
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it ended
                space = os.readlink(f"/proc/{name}/ns/mnt")
                if space != own:
                    yield name, space


def _points_in(mountinfo: str, numbers: frozenset[int]) -> dict[int, str]:
    """Return where a mount table shows subvolumes of a file system, by their ids. Raises OSError."""
    found: dict[int, str] = {}
    # As bytes and by "\n": a mount point may hold any other character that str.splitlines takes for a line's end.
    for line in Path(mountinfo).read_bytes().split(b"\n"):
        # proc(5): … mount point (field 5) … " - " type source super-options
        left, _, right = line.partition(b" - ")
        kind, _, rest = right.partition(b" ")
        if kind != b"btrfs":
            continue
        source, _, options = rest.partition(b" ")
        for option in options.split(b","):
            if option.startswith(b"subvolid=") and _is_on(os.fsdecode(source), numbers):
                found.setdefault(int(option[9:]), os.fsdecode(left).split(" ")[4])
    return found


def _has_open(process: str, point: str) -> bool:
    """Whether a process works in `point`, a path of its namespace. Links are read, never followed: that can hang."""
    folder = Path("/proc", process)
    links = [folder / "cwd", folder / "root", folder / "exe"]
    for name in ("fd", "map_files"):
        with suppress(OSError):
            links += (folder / name).iterdir()
    for link in links:
        with suppress(OSError):
            if lies_in(os.readlink(link), point):
                return True
    return False


def _shows(mount: Mount, path: str, subvolume_id: int) -> bool:
    return f"subvolid={subvolume_id}" in mount.super_options or lies_in(mount.root, path)
