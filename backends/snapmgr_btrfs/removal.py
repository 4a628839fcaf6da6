"""Deletes subvolumes: by UUID and subvolume id, never by a name alone, and never a mounted one."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.api import InUseError, StorageError, format_duration
from snapmgr_btrfs import folder, kernel, library

if TYPE_CHECKING:
    from collections.abc import Collection

    from snapmgr.api import Found, SnapshotRef
    from snapmgr_btrfs.filesystem import TopLevel
    from snapmgr_btrfs.folder import Entry
    from snapmgr_btrfs.library import Library

# How often the cleaner is woken: by itself it looks only at every periodic commit (30 s).
_WAKE_EVERY_S = 2.0
_POLL_S = 0.1


class Removal:
    """Deletes snapshots of one file system; what it has to look up for one of them serves the others, too."""

    def __init__(self, lib: Library, top: TopLevel, folder_fd: int | None) -> None:
        self._lib = lib
        self._top = top
        self._folder_fd = folder_fd
        self._clones: dict[str | None, list[str]] | None = None
        self._paths: dict[str | None, str] | None = None

    def remove(self, ref: SnapshotRef) -> int | None:
        """Delete the snapshot `ref` with its note; return its subvolume id, or None if it was gone.

        Raises StorageError if something else has its name or it was moved out of the folder, InUseError if it is
        mounted or has writable clones.
        """
        entry = None if self._folder_fd is None else self._find(self._folder_fd, ref)
        if self._folder_fd is None or entry is None:
            elsewhere = self._path_of(ref.native_id)
            if elsewhere is not None:
                raise StorageError(
                    f"the snapshot {ref.name} was moved to /{elsewhere} on {self._top.device}: it is yours then, not "
                    "deleted",
                    hint="delete it with `btrfs subvolume delete`, or move it back into the folder "
                    f"{self._top.folder_name}",
                )
            if self._folder_fd is not None:
                folder.remove_note(self._folder_fd, ref.name)
            return None
        clones = self._clones_of(self._folder_fd, ref.native_id)
        if clones:
            raise InUseError(
                f"the snapshot {ref.name} is attached: {', '.join(clones)} on {self._top.device}",
                hint="`snapmgr umount` it first; `snapmgr doctor --fix` removes leftovers of a crash",
            )
        destroy(self._top, entry, idle=True)
        folder.remove_note(self._folder_fd, entry.name)
        return entry.info.id

    def _find(self, folder_fd: int, ref: SnapshotRef) -> Entry | None:
        named = folder.look(self._lib, folder_fd, ref.name)
        if named is None:
            # Only one that was renamed by hand is worth a look at all that is there.
            place, name = os.path.split(self._path_of(ref.native_id) or "")
            renamed = folder.look(self._lib, folder_fd, name) if place == self._top.folder_name else None
            return renamed if renamed is not None and renamed.uuid == ref.native_id else None
        if named.uuid != ref.native_id:
            raise StorageError(
                f"{ref.name} in snapmgr's folder is not the snapshot {ref.native_id} but {named.uuid}: not deleted",
                hint="another subvolume took its place; move it away and run `snapmgr doctor`",
            )
        return named

    def _clones_of(self, folder_fd: int, native_id: str) -> list[str]:
        if self._clones is None:
            self._clones = folder.clones(self._lib, folder_fd)
        return self._clones.get(native_id, [])

    def _path_of(self, native_id: str) -> str | None:
        """Return the path of the subvolume with this UUID from the top level, None if there is none."""
        if self._paths is None:
            self._paths = {}
            for path, subvolume_id in self._lib.SubvolumeIterator(self._top.fd, top=library.TOP_LEVEL_ID):
                with suppress(OSError):  # deleted meanwhile
                    info = self._lib.subvolume_info(self._top.fd, subvolume_id)
                    self._paths[library.uuid_text(info.uuid)] = path
        return self._paths.get(native_id)


def remove_clone(lib: Library, top: TopLevel, folder_fd: int, record_id: str, native_id: str) -> None:
    """Delete the writable clone of `record_id` if its parent is the snapshot `native_id`; idempotent."""
    clone = folder.look(lib, folder_fd, folder.clone_name(record_id))
    if clone is not None:
        if clone.parent_uuid != native_id:
            raise StorageError(
                f"{clone.name} in snapmgr's folder is not a clone of the snapshot {native_id}: not deleted",
                hint="somebody put it there; delete or move it by hand",
            )
        _unlock(lib, folder_fd, clone)
        # A mount that another mount namespace merely inherited (it was made while we had it mounted) does not count.
        destroy(top, clone, idle=False)
    commit(top)


def _unlock(lib: Library, folder_fd: int, clone: Entry) -> None:
    """Take the flags from a clone's own folder that it has from the origin's (chattr +i) and that would keep it."""
    with suppress(OSError):  # then deleting it says why
        fd = os.open(clone.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        try:
            if lib.subvolume_info(fd).id == clone.info.id:
                kernel.unlock(fd)
        finally:
            os.close(fd)


def destroy(top: TopLevel, entry: Entry, *, idle: bool) -> None:
    """Delete a subvolume of the folder. InUseError while it is mounted or sent, StorageError if it holds others.

    `idle`: whether an unused mount in another namespace keeps it, too.
    """
    path = f"/{top.folder_name}/{entry.name}"
    points = top.users.of(path, entry.info.id, idle=idle)
    if points:
        message = f"{entry.name} on {top.device} is mounted: {', '.join(points)}"
        raise InUseError(message, hint="unmount it first; in another namespace (a container) end its users")
    try:
        kernel.destroy(top.fd, entry.info.id)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return
        if error.errno == errno.ENOTEMPTY:
            raise StorageError(
                f"{entry.name} on {top.device} has subvolumes in it that snapmgr did not make: not deleted",
                hint=f"mount -o subvolid=5 {top.device} /mnt, find them (btrfs subvolume list -o /mnt{path}), delete "
                "or move them, umount /mnt, and try again",
            ) from None
        if error.errno == errno.EPERM:
            raise InUseError(
                f"{entry.name} on {top.device} cannot be deleted now: it is being sent, is the default subvolume, or "
                "its own folder is immutable",
                hint="wait for `btrfs send`; see `btrfs subvolume get-default`; or make it writable and chattr -i it",
            ) from None
        raise StorageError(f"cannot delete {entry.name} on {top.device}: {error.strerror}") from None


def commit(top: TopLevel) -> None:
    """Commit, so that a deletion survives a power cut."""
    try:
        kernel.commit(top.fd)
    except OSError as error:
        raise StorageError(f"cannot commit on {top.device}: {error.strerror}") from None


def wait_for_space(lib: Library, top: TopLevel, deleted: Collection[int | None], timeout_s: float) -> None:
    """Wait until the cleaner has freed deleted subvolumes (with a None among them: all).

    Raises StorageError when it has freed none for `timeout_s`.
    """
    left: set[int] | None = None
    deadline = wake_at = 0.0
    while True:
        waiting = set(lib.deleted_subvolumes(top.fd))
        if None not in deleted:
            waiting &= set(deleted)
        if not waiting:
            # Space that the cleaner released can be used after one more commit.
            commit(top)
            return
        now = time.monotonic()
        if left is None or len(waiting) < len(left):
            left, deadline = waiting, now + timeout_s
        elif now >= deadline:
            message = f"the space of a deleted snapshot on {top.device} was not free after {format_duration(timeout_s)}"
            raise StorageError(message, hint="btrfs continues in the background: `btrfs subvolume sync` waits for it")
        if now >= wake_at:
            commit(top)
            wake_at = now + _WAKE_EVERY_S
        time.sleep(_POLL_S)


def clear(lib: Library, top: TopLevel, folder_fd: int, found: Found) -> None:
    """Remove debris, after looking again whether it still is some: a left-over note, or a clone without its snapshot.

    Raises StorageError for a snapshot that was made writable: it may hold somebody's work; no crash of ours leaves it.
    """
    noted = folder.noted_name(found.name)
    if folder.is_temporary(found.name):
        with suppress(FileNotFoundError):
            os.unlink(found.name, dir_fd=folder_fd)
    elif noted is not None:
        if folder.look(lib, folder_fd, noted) is None:
            folder.remove_note(folder_fd, noted)
    elif folder.record_id_of(found.name) is not None:
        _clear_clone(lib, top, folder_fd, found.name)
    else:
        entry = folder.look(lib, folder_fd, found.name)
        if entry is not None and not entry.read_only:
            raise StorageError(
                f"{found.name} in {top.folder_name} on {top.device} was made writable by hand: not deleted",
                hint="it may hold somebody's work: move it out of the folder to keep it, or delete it with "
                "`btrfs subvolume delete`",
            )
    commit(top)


def _clear_clone(lib: Library, top: TopLevel, folder_fd: int, name: str) -> None:
    clone = folder.look(lib, folder_fd, name)
    if clone is None or clone.read_only or clone.received or clone.parent_uuid is None:
        return
    if any(one.uuid == clone.parent_uuid for one in folder.subvolumes(lib, folder_fd)):
        return
    _unlock(lib, folder_fd, clone)
    destroy(top, clone, idle=True)
