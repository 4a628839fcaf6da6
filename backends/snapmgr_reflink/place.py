"""Decides where the copies of a directory go, and what is mounted where."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.api import Mount, NotMine, StorageError, Target
from snapmgr_reflink import kernel, tree

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_FOLDER = ".snapmgr-reflink"
_NAME_ANOTHER = "name a folder on the same file system, outside of the directory, in [backend.reflink] store"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A store that suits a directory."""

    store: str
    """Real path; it need not exist yet, its parent does."""
    warnings: tuple[str, ...]

    @staticmethod
    def holder(path: str, mounts: Sequence[Mount]) -> Mount:
        """Given a real path and the mount table, return the mount that holds it: longest point, latest of equals.

        Raises StorageError if the table is empty.
        """
        held = [mount for mount in mounts if _is_inside(path, mount.point)]
        if not held:
            raise StorageError(f"no mount holds {tree.shown(path)}", hint="is /proc mounted?")
        longest = max(len(mount.point) for mount in held)
        return [mount for mount in held if len(mount.point) == longest][-1]


def choose_place(
    target: Target, file_system: kernel.FileSystem, mounts: Sequence[Mount], configured: str | None, *, plain: bool
) -> Place | NotMine:
    """Given a directory and its file system, return the store for its copies, or why there is none.

    Args:
        target: the directory.
        file_system: what holds it.
        mounts: the mount table.
        configured: the store that the user named, or None for the default.
        plain: whether data may be copied where blocks cannot be shared.
    """
    wanted = configured or os.path.join(target.mount.point, DEFAULT_FOLDER)
    store = os.path.realpath(wanted)
    why_not = _unusable(wanted, store, target)
    if why_not is not None:
        return NotMine(reason=why_not, hint=_NAME_ANOTHER)
    if file_system.reflinks:
        if not _shares_file_system(store, target, file_system, mounts):
            return NotMine(
                reason=f"the store {tree.shown(store)} is not on the file system of {tree.shown(target.path)}",
                hint=_NAME_ANOTHER,
            )
        return Place(store=store, warnings=())
    if not plain:
        return NotMine(
            reason=f"{target.mount.fs_type} at {tree.shown(target.mount.point)} cannot share blocks between files",
            hint="use XFS (made with reflink=1) or btrfs, or set allow_plain_copy in [backend.reflink]",
        )
    return Place(
        store=store,
        warnings=(f"no shared blocks on {target.mount.fs_type}: every snapshot is a full copy of the data",),
    )


def _unusable(wanted: str, store: str, target: Target) -> str | None:
    if not os.path.isabs(wanted):
        return f"the store {tree.shown(wanted)} is not an absolute path"
    try:
        store.encode()
    except UnicodeEncodeError:
        # It is part of what manifests hold, and they are UTF-8.
        return f"the store {tree.shown(store)} has a name that is not UTF-8"
    if _is_inside(target.path, store):
        return f"{tree.shown(target.path)} lies inside the store {tree.shown(store)}"
    if store == os.path.join(target.path, DEFAULT_FOLDER):
        return f"{tree.shown(target.path)} is a whole file system: there is no place beside it for the store"
    if _is_inside(store, target.path):
        return f"the store {tree.shown(store)} lies inside {tree.shown(target.path)}"
    return _unwritable(store)


def _unwritable(store: str) -> str | None:
    if os.path.isdir(store):
        if os.stat(store).st_uid != os.geteuid():
            return f"the store {tree.shown(store)} belongs to another user"
        return None
    if os.path.lexists(store):
        return f"the store {tree.shown(store)} is not a folder"
    parent = os.path.dirname(store)
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"the store {tree.shown(store)} does not exist and cannot be created"
    return None


def _shares_file_system(store: str, target: Target, file_system: kernel.FileSystem, mounts: Sequence[Mount]) -> bool:
    nearest = store if os.path.isdir(store) else os.path.dirname(store)
    if Place.holder(nearest, mounts).fs_type != target.mount.fs_type:
        return False
    fd = os.open(nearest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Not st_dev: each btrfs subvolume has its own.
        return kernel.identify(fd, target.mount.fs_type, None).id == file_system.id
    finally:
        os.close(fd)


def mounted_inside(path: str, mounts: Sequence[Mount]) -> str | None:
    """Return where something is mounted at or below the real path `path`, or to where a part of it is mounted.

    A bind mount shows in the table as the same device with the folder as its root.
    """
    held = Place.holder(path, mounts)
    inner = os.path.normpath(os.path.join(held.root, os.path.relpath(path, held.point)))
    for mount in mounts:
        if _is_inside(mount.point, path):
            return mount.point
        if mount.device == held.device and mount is not held and _is_inside(mount.root, inner):
            return mount.point
    return None


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
