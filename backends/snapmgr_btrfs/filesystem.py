"""Opens a btrfs file system as a pool: its devices, its top level mounted privately, our folder, its other mounts."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.api import Mount, Mounter, Pool, Runner, StorageError
from snapmgr_btrfs import kernel, users

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr_btrfs.users import Users

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
    users: Users

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
            _refuse_read_only(device, users.mounts_of(mounts, pool.id))
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
                fd=private.fd,
                path=private.path,
                uuid=pool.id,
                device=device,
                folder_name=folder_name,
                mounts=mounts,
                users=users.Users(pool.id, mounter.mounts),
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
    known = [f"/dev/{name.replace('!', '/')}" for name in users.device_names(pool.id)]
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


def _refuse_read_only(device: str, ours: tuple[Mount, ...]) -> None:
    for mount in ours:
        if "ro" in mount.super_options:
            raise StorageError(
                f"the btrfs file system on {device} is mounted read-only, at {mount.point}",
                hint=f"mount -o remount,rw {mount.point}, unless the kernel made it so: see dmesg",
            )
