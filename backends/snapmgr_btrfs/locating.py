"""Finds the subvolume of a target, without mounting or changing anything."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.api import MissingRequirementError, NotMine, Pool, StorageError, Volume
from snapmgr.api.kernel import is_nocow
from snapmgr_btrfs import kernel, library

if TYPE_CHECKING:
    from snapmgr.api import Target
    from snapmgr_btrfs.library import Library

# How many files are looked at for the NOCOW flag: a server's own are the first few levels.
_FILES_LOOKED_AT = 500
# Not even the access times change.
_LOOKING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOATIME
_PLACEHOLDER_INODE = 2  # BTRFS_EMPTY_SUBVOL_DIR_OBJECTID


def locate(lib: Library, target: Target, folder_name: str) -> Volume | NotMine:
    """Given a target on btrfs, return its subvolume or why it cannot be snapshotted.

    Raises MissingRequirementError without root.
    """
    try:
        fd = os.open(target.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"cannot open {target.path}: {error.strerror}") from None
    try:
        return _locate(lib, target, folder_name, fd)
    except OSError as error:
        if error.errno in {errno.EPERM, errno.EACCES}:
            raise MissingRequirementError(
                f"finding the btrfs subvolume of {target.path} needs root (CAP_SYS_ADMIN)", hint="run it as root"
            ) from None
        raise StorageError(f"cannot find the btrfs subvolume of {target.path}: {error.strerror or error}") from None
    finally:
        os.close(fd)


def _locate(lib: Library, target: Target, folder_name: str, fd: int) -> Volume | NotMine:
    if os.fstat(fd).st_ino == _PLACEHOLDER_INODE:
        return NotMine(
            reason=f"{target.path} is the empty place of a subvolume that a snapshot left out",
            hint="name the folder on the live file system",
        )
    fs_uuid = kernel.fs_uuid(fd)
    info = lib.subvolume_info(fd, lib.subvolume_id(fd))
    volume_id = library.volume_id(info, fs_uuid)
    subpath = kernel.path_in_subvolume(fd)
    if volume_id is None:
        return NotMine(
            reason=f"the btrfs subvolume {info.id} of {target.path} has no UUID (made by a very old kernel)",
            hint="make a snapshot of it with btrfs subvolume snapshot, and use that in its place: it has one",
        )
    if any(info.received_uuid):
        # The kernel copies the mark to read-only snapshots, and we never touch a subvolume with it.
        return NotMine(
            reason=f"the subvolume of {target.path} has the mark of btrfs receive, and so would its snapshots",
            hint="use a writable snapshot of it (btrfs subvolume snapshot) in its place: that has none",
        )
    if info.id == library.TOP_LEVEL_ID and not subpath:
        return NotMine(
            reason=f"{target.path} is the top level of its btrfs file system: the folder {folder_name} with the "
            "snapshots would lie inside of it, and a server would take it for a database",
            hint="move the data into a subvolume or folder of this file system",
        )
    if os.fsencode(subpath).decode("utf-8", "ignore") != subpath:
        # It is part of what manifests hold, and they are UTF-8.
        return NotMine(reason=f"the path of {target.path!a} in its subvolume is not UTF-8", hint="rename the folder")
    nested = [
        os.path.join(target.path, os.path.relpath(path, subpath) if subpath else path)
        for path, _ in lib.SubvolumeIterator(fd, top=info.id)
        if not subpath or path.startswith(subpath + "/")
    ]
    excluded = sorted({*nested, *(mount.point for mount in target.submounts)})
    known = kernel.devices(fd)
    device = target.devices[0].path if target.devices else known[0].path
    return Volume(
        backend="btrfs",
        id=volume_id,
        pool=Pool(backend="btrfs", id=fs_uuid, hint=device),
        path=_visible_root(target, subpath),
        subpath=subpath,
        excluded=tuple(excluded),
        warnings=_warnings(target, fd),
    )


def _visible_root(target: Target, subpath: str) -> str:
    """Return where the subvolume's own folder is seen; the target's path where only a part of it is mounted."""
    root = target.path.removesuffix("/" + subpath) if subpath else target.path
    point = target.mount.point.rstrip("/")
    seen = root == point or root.startswith(point + "/")
    return (root or "/") if seen else target.path


def _warnings(target: Target, fd: int) -> tuple[str, ...]:
    if "nodatacow" in target.mount.super_options:
        what = f"the file system of {target.path} is mounted with nodatacow"
    else:
        count = _count_nocow(fd)
        if count == 0:
            return ()
        what = f"{count} files or folders of {target.path} are NOCOW (chattr +C)"
    said = (
        f"{what}: snapshots are consistent all the same, but after each one the first write to every block is a copy "
        "(fragments, slower writes until all is rewritten), and btrfs keeps no checksums of this data, so that damage "
        "to it goes unnoticed"
    )
    return (said,)


def _count_nocow(fd: int) -> int:
    """Count NOCOW files and folders at the target, on the next level and the one below, as far as the limit goes."""
    count, looked_at, level = int(is_nocow(fd)), 0, ["."]
    for _ in range(2):
        below: list[str] = []
        for folder in level:
            with suppress(OSError):
                inner = os.open(folder, _LOOKING | os.O_DIRECTORY, dir_fd=fd)
                try:
                    names = sorted(os.listdir(inner))
                    for name in names[: max(_FILES_LOOKED_AT - looked_at, 0)]:
                        looked_at += 1
                        found = os.stat(name, dir_fd=inner, follow_symlinks=False)
                        if stat.S_ISDIR(found.st_mode):
                            below.append(os.path.join(folder, name))
                        if stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode):
                            count += _nocow_at(inner, name)
                finally:
                    os.close(inner)
        level = below
    return count


def _nocow_at(folder: int, name: str) -> bool:
    with suppress(OSError):
        fd = os.open(name, _LOOKING, dir_fd=folder)
        try:
            return is_nocow(fd)
        finally:
            os.close(fd)
    return False
