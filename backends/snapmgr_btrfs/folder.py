"""Defines the entries of our folder: snapshots, writable clones, notes; their names, and how they prove to be ours.

    ID                 a snapshot of one volume; ID@1, ID@2 … when it covers several volumes of this file system
    ID.json            its note (the manifest)
    attach.RECORD      a writable clone for an attachment
    .NAME.PID.tmp      a note being written

Names only say where to look. A snapshot is ours if it is in the folder (which only root can write), read-only, a
snapshot of something and not received; which one it is, its UUID says.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.api import Intent, SnapshotRef, StorageError
from snapmgr_btrfs import kernel, library

if TYPE_CHECKING:
    from snapmgr.api import Volume
    from snapmgr_btrfs.library import Library, SubvolumeInfo

NOTE_MAX_BYTES = 64 << 10
_ATTACH = "attach."
_RECORD = r"[0-9a-f]{16}"
_SNAPSHOT = re.compile(r"(?P<id>[A-Za-z0-9][A-Za-z0-9._-]{0,199})(@\d+)?")
_NOTE_SUFFIX = ".json"
_TEMPORARY = r"\..+\.(?P<pid>[0-9]+)\.tmp"


class Entry(Struct, frozen=True, kw_only=True):
    """A subvolume in the folder."""

    name: str
    info: SubvolumeInfo

    @property
    def uuid(self) -> str | None:
        """Its UUID."""
        return library.uuid_text(self.info.uuid)

    @property
    def parent_uuid(self) -> str | None:
        """The UUID of its origin."""
        return library.uuid_text(self.info.parent_uuid)

    @property
    def received(self) -> bool:
        """Whether it came by ``btrfs receive``."""
        return any(self.info.received_uuid)

    @property
    def read_only(self) -> bool:
        """Whether the subvolume is read-only."""
        return library.read_only(self.info)


def check_snapshot_id(snapshot_id: str) -> None:
    """Raise StorageError for an id whose name could be taken for something else in the folder."""
    clash = snapshot_id.startswith(_ATTACH) or snapshot_id.endswith(_NOTE_SUFFIX)
    match = _SNAPSHOT.fullmatch(snapshot_id)
    if clash or match is None or match["id"] != snapshot_id:
        raise StorageError(
            f"{snapshot_id!r} cannot name a snapshot",
            hint='use letters, digits, ".", "-" and "_"; not "attach.…", not "….json", no dot in front',
        )


def intents(volumes: tuple[Volume, ...], snapshot_id: str) -> tuple[Intent, ...]:
    """Return the intents of a snapshot of `volumes`: its own id as the name, numbered where a pool has several."""
    found = []
    for volume in volumes:
        mates = [other.id for other in volumes if other.pool.id == volume.pool.id]
        name = snapshot_id if len(mates) == 1 else f"{snapshot_id}@{mates.index(volume.id) + 1}"
        found.append(Intent(pool=volume.pool, volume_id=volume.id, name=name))
    return tuple(found)


def snapshot_id_of(name: str) -> str | None:
    """Given a name in the folder, return the snapshot's id, or None if it is another name."""
    match = _SNAPSHOT.fullmatch(name)
    return None if match is None or record_id_of(name) is not None or name.endswith(_NOTE_SUFFIX) else match["id"]


def record_id_of(name: str) -> str | None:
    """Given a name in the folder, return the attachment's record id, or None."""
    record = name.removeprefix(_ATTACH)
    return record if record != name and re.fullmatch(_RECORD, record) else None


def clone_name(record_id: str) -> str:
    """Return the name of an attachment's writable clone."""
    return f"{_ATTACH}{record_id}"


def note_name(name: str) -> str:
    """Return the name of a snapshot's note."""
    return name + _NOTE_SUFFIX


def is_temporary(name: str) -> bool:
    """Return whether a name is that of a note being written."""
    return name.startswith(".") and re.fullmatch(_TEMPORARY, name) is not None


def is_being_written(name: str) -> bool:
    """Return whether a name is that of a note whose writer still runs; after a reboot its pid may be another's."""
    match = re.fullmatch(_TEMPORARY, name) if name.startswith(".") else None
    return match is not None and os.path.exists(f"/proc/{match['pid']}")


def noted_name(name: str) -> str | None:
    """Given a note's name, return its snapshot's; None for other names."""
    return name.removesuffix(_NOTE_SUFFIX) if name.endswith(_NOTE_SUFFIX) else None


def look(lib: Library, folder: int, name: str) -> Entry | None:
    """Return the subvolume called `name` in the folder, or None. Raises StorageError if it is something else."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:
            raise StorageError(f"{name} in snapmgr's folder is a file or symlink, no snapshot") from None
        raise
    try:
        if os.fstat(fd).st_ino != kernel.SUBVOLUME_INODE:
            raise StorageError(f"{name} in snapmgr's folder is a plain folder, no snapshot")
        return Entry(name=name, info=lib.subvolume_info(fd))
    finally:
        os.close(fd)


def subvolumes(lib: Library, folder: int) -> list[Entry]:
    """Return every subvolume in the folder, sorted by name."""
    found = kernel.subvolumes_in(folder, lib.subvolume_id(folder), os.fstat(folder).st_ino)
    return sorted((Entry(name=name, info=info) for name, info in found), key=lambda one: one.name)


def clones(lib: Library, folder: int) -> dict[str | None, list[str]]:
    """Return the names of the writable clones, by their snapshots' UUIDs; entries with other names are not opened."""
    found: dict[str | None, list[str]] = {}
    for name in sorted(os.listdir(folder)):
        if record_id_of(name) is not None:
            with suppress(StorageError):  # a foreign file or folder
                entry = look(lib, folder, name)
                if entry is not None:
                    found.setdefault(entry.parent_uuid, []).append(name)
    return found


def find(lib: Library, folder: int, ref: SnapshotRef) -> Entry | None:
    """Return the snapshot `ref` in the folder, under its name or (renamed by hand) under another one."""
    with suppress(StorageError):
        entry = look(lib, folder, ref.name)
        if entry is not None and entry.uuid == ref.native_id:
            return entry
    return next((entry for entry in subvolumes(lib, folder) if entry.uuid == ref.native_id), None)


def read_note(folder: int, name: str) -> bytes | None:
    """Return the note of the snapshot called `name`, or None."""
    try:
        fd = os.open(note_name(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        # Not the most that is allowed: to reserve 64 KiB for each takes longer than to read it.
        return os.read(fd, min(status.st_size, NOTE_MAX_BYTES)) if stat.S_ISREG(status.st_mode) else None
    finally:
        os.close(fd)


def write_note(folder: int, name: str, note: bytes) -> None:
    """Write the note of the snapshot called `name` durably: whole or not at all. Raises OSError."""
    temporary = f".{name}.{os.getpid()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(note)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, note_name(name), src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)


def remove_note(folder: int, name: str) -> None:
    """Remove a snapshot's note, if there is one."""
    with suppress(FileNotFoundError):
        os.unlink(note_name(name), dir_fd=folder)
