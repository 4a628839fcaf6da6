"""Opens a btrfs file system as a pool: its devices, its top level mounted privately, our folder, its other mounts."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.api import Mount, Mounter, Pool, Runner, StorageError
from snapmgr.api.kernel import lies_in
from snapmgr_btrfs import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSFS = Path("/sys/fs/btrfs")
_FOLDER_MODE = 0o700


class TopLevel(Struct, frozen=True, kw_only=True):
    """The top level of a file system (subvolid=5), mounted privately."""

    fd: int
    path: str
    uuid: str
    """The file system's."""
    device: str
    """A device node that mounts it."""
    folder_name: str
    mounts: tuple[Mount, ...]
    """The mounts of this process's namespace, as of opening."""

    def open_folder(self, *, create: bool = False) -> int | None:
        """Return a descriptor of the folder with our snapshots, None if it is not there.

        Raises StorageError if it is a symlink, or if others than root may look into it (old data, setuid programs) or
        write there (what lies in it is believed to be ours).
        """
        name = self.folder_name
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        if create:
            with suppress(FileExistsError):
                os.mkdir(name, _FOLDER_MODE, dir_fd=self.fd)
        try:
            fd = os.open(name, flags, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(
                f"{name} at the top of {self.device} is not a folder that snapmgr can use: {error.strerror}",
                hint="remove it, or choose another name: [backend.btrfs] folder",
            ) from None
        found = os.fstat(fd)
        if found.st_uid != 0 or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(fd)
            raise StorageError(
                f"the folder {name} at the top of {self.device} is open to others than root "
                f"(owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o})",
                hint="look at its contents, then: chown root and chmod 0700",
            )
        return fd


@contextmanager
def opened_folder(top: TopLevel) -> Iterator[int | None]:
    """Yield a descriptor of our folder, or None if it is missing."""
    fd = top.open_folder()
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


@contextmanager
def open_top(mounter: Mounter, runner: Runner, pool: Pool, folder_name: str, *, write: bool) -> Iterator[TopLevel]:
    """Mount the top level of the file system `pool.id` privately, without `write` read-only.

    Raises StorageError if the file system is not there, or is mounted read-only and `write` is asked: mounting it
    read-write beside that would make all of it writable.
    """
    mounts = mounter.mounts()
    options = ("subvolid=5",) if write else ("subvolid=5", "ro")
    tried: list[str] = []
    for device, mates in _candidates(runner, pool):
        if write:
            _refuse_read_only(device, mounts_of(mounts, pool.id))
        with ExitStack() as stack:
            try:
                private = stack.enter_context(mounter.private(device, "btrfs", (*options, *mates)))
            except StorageError as error:
                tried.append(str(error))
                continue
            # A copy of the device (an LV's snapshot, dd) has the same UUID; the mounted one counts.
            if kernel.fs_uuid(private.fd) != pool.id:
                tried.append(f"{device} holds another file system")
                continue
            yield TopLevel(
                fd=private.fd, path=private.path, uuid=pool.id, device=device, folder_name=folder_name, mounts=mounts
            )
            return
    raise StorageError(
        f"the btrfs file system {pool.id} (last seen at {pool.hint}) is not there"
        + (f": {'; '.join(tried)}" if tried else ""),
        hint="attach its disk; `btrfs filesystem show` lists the file systems",
    )


def _candidates(runner: Runner, pool: Pool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield device nodes to try: the kernel's word if it is mounted anywhere, the hint, then a search.

    The nodes that a search finds come with options that name all of them: without udev the kernel knows only the
    devices that were registered with it.
    """
    known = [f"/dev/{name.replace('!', '/')}" for name in _sysfs_devices(pool.id)]
    for path in dict.fromkeys((*known, pool.hint)):
        if _is_device(path):
            yield path, ()
    # -c /dev/null: probe now instead of believing a cache; exit code 2 is "none".
    found = runner.run(["blkid", "-c", "/dev/null", "-t", f"UUID={pool.id}", "-o", "device"], ok=(0, 2))
    paths = [path for path in found.stdout.split() if _is_device(path)]
    for path in paths:
        yield path, tuple(f"device={mate}" for mate in paths if mate != path)


def _is_device(path: str) -> bool:
    with suppress(OSError):
        return stat.S_ISBLK(os.stat(path).st_mode)
    return False


def _sysfs_devices(fs_uuid: str) -> list[str]:
    try:
        return sorted(os.listdir(SYSFS / fs_uuid / "devices"))
    except OSError:
        return []


def _refuse_read_only(device: str, ours: tuple[Mount, ...]) -> None:
    for mount in ours:
        if "ro" in mount.super_options:
            raise StorageError(
                f"the btrfs file system on {device} is mounted read-only, at {mount.point}",
                hint=f"mount -o remount,rw {mount.point}, unless the kernel made it so: see dmesg",
            )


def device_numbers(fs_uuid: str) -> frozenset[int]:
    """Return the device numbers (as st_rdev) of a mounted file system's devices; empty if it is not mounted."""
    numbers = set()
    for name in _sysfs_devices(fs_uuid):
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


def users(mounts: tuple[Mount, ...], fs_uuid: str, path: str, subvolume_id: int) -> tuple[str, ...]:
    """Return mount points that show the subvolume at `path` ("/.snapmgr/x", from the top level) or lie in it."""
    ours = mounts_of(mounts, fs_uuid)
    found = [place.point for place in ours if _shows(place, path, subvolume_id)]
    by_id = {mount.id: mount for mount in ours}
    for mount in mounts:
        parent = by_id.get(mount.parent_id)
        if parent is not None:
            inside = os.path.relpath(mount.point, parent.point)
            if lies_in(os.path.normpath(os.path.join(parent.root, inside)), path):
                found.append(mount.point)
    return tuple(dict.fromkeys(found))


def users_elsewhere(fs_uuid: str, subvolume_id: int, *, idle: bool) -> tuple[str, ...]:
    """Return where other mount namespaces (containers, services with a private /tmp) show the subvolume itself.

    With `idle` also where no process of theirs has anything of it open.
    """
    numbers = device_numbers(fs_uuid)
    shown: dict[str, str] = {}
    found: list[str] = []
    own = os.readlink("/proc/self/ns/mnt")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended
            space = os.readlink(process / "ns/mnt")
            if space == own:
                continue
            if space not in shown:
                shown[space] = _point_in(process / "mountinfo", numbers, subvolume_id)
            point = shown[space]
            if point and (idle or _has_open(process, point)):
                found.append(f"{point} (in the mount namespace of process {process.name})")
                if idle:
                    shown[space] = ""
    return tuple(found)


def _point_in(mountinfo: Path, numbers: frozenset[int], subvolume_id: int) -> str:
    """Return where a mount table shows the subvolume; "" if it does not."""
    # As bytes and by "\n": a mount point may hold any other character that str.splitlines takes for a line's end.
    for line in mountinfo.read_bytes().split(b"\n"):
        # proc(5): … mount point (field 5) … " - " type source super-options
        left, _, right = os.fsdecode(line).partition(" - ")
        fields = right.split(" ")
        if fields[0] == "btrfs" and f"subvolid={subvolume_id}" in fields[-1].split(",") and _is_on(fields[1], numbers):
            return left.split(" ")[4]
    return ""


def _has_open(process: Path, point: str) -> bool:
    """Whether a process works in `point`, a path of its namespace. Links are read, never followed: that can hang."""
    links = [process / "cwd", process / "root", process / "exe"]
    for folder in ("fd", "map_files"):
        with suppress(OSError):
            links += (process / folder).iterdir()
    for link in links:
        with suppress(OSError):
            if lies_in(os.readlink(link), point):
                return True
    return False


def _shows(mount: Mount, path: str, subvolume_id: int) -> bool:
    return f"subvolid={subvolume_id}" in mount.super_options or lies_in(mount.root, path)
