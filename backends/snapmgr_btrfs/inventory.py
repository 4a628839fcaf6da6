"""Lists the contents of the folder for the core, and tells which snapshots somebody changed.

`classify` is pure: from names and facts to findings.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.api import Found, SnapshotRef
from snapmgr_btrfs import folder, kernel, library

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapmgr.api import Pool
    from snapmgr_btrfs.filesystem import TopLevel
    from snapmgr_btrfs.folder import Entry
    from snapmgr_btrfs.library import Library

ALTERED = "it was made writable by hand, changed, and made read-only again: it no longer holds what was taken"


def read(lib: Library, folder_fd: int, pool: Pool, top: TopLevel, *, notes: bool) -> tuple[Found, ...]:
    """Return everything of ours in the folder; with `notes` also the notes of the snapshots."""
    # Names first: a snapshot that is made meanwhile is missing together with its note, not without it.
    names = sorted(name for name in os.listdir(folder_fd) if not folder.is_being_written(name))
    entries = folder.subvolumes(lib, folder_fd)
    there = {entry.name for entry in entries}
    # The note of a snapshot that is gone may be all that is left of it.
    noted = {name for name in map(folder.noted_name, names) if name is not None and (notes or name not in there)}
    read_notes = {name: folder.read_note(folder_fd, name) for name in noted}
    top_has_uuid = any(lib.subvolume_info(top.fd).uuid)
    touched = [entry for entry in entries if entry.info.ctransid > entry.info.otransid and entry.read_only]
    altered = frozenset(entry.name for entry in touched if _is_altered(folder_fd, entry))
    return tuple(classify(pool, names, entries, read_notes, top_has_uuid=top_has_uuid, altered=altered))


def classify(
    pool: Pool,
    names: Sequence[str],
    entries: Sequence[Entry],
    notes: dict[str, bytes | None],
    *,
    top_has_uuid: bool,
    altered: frozenset[str] = frozenset(),
) -> Iterator[Found]:
    """Given the folder's names, its subvolumes and the notes, yield everything of ours.

    Args:
        pool: the file system.
        names: all names in the folder.
        entries: the subvolumes in it.
        notes: by the snapshot's name; None where there is none.
        top_has_uuid: False on old file systems: then snapshots of the top level have no parent's UUID.
        altered: names of read-only subvolumes that were changed after they were taken.
    """
    refs: dict[str, SnapshotRef] = {}
    for entry in entries:
        snapshot_id, uuid, parent_uuid = folder.snapshot_id_of(entry.name), entry.uuid, entry.parent_uuid
        # Where the top level has no UUID, its snapshots have no parent.
        if snapshot_id is None or uuid is None or entry.received or (parent_uuid is None and top_has_uuid):
            continue
        ref = SnapshotRef(
            backend="btrfs",
            snapshot_id=snapshot_id,
            pool=pool,
            volume_id=parent_uuid or f"{pool.id}:{library.TOP_LEVEL_ID}",
            name=entry.name,
            native_id=uuid,
        )
        refs[uuid] = ref
        yield Found(
            kind="snapshot" if entry.read_only and entry.name not in altered else "debris",
            pool=pool,
            name=entry.name,
            snapshot_id=snapshot_id,
            ref=ref,
            note=notes.get(entry.name),
            why=_mistrust(entry, altered),
        )
    for entry in entries:
        record_id = folder.record_id_of(entry.name)
        if record_id is None or entry.received or entry.read_only or entry.parent_uuid is None:
            continue
        ref_or_none = refs.get(entry.parent_uuid)
        yield Found(
            kind="attachment" if ref_or_none is not None else "debris",
            pool=pool,
            name=entry.name,
            snapshot_id=None if ref_or_none is None else ref_or_none.snapshot_id,
            ref=ref_or_none,
            record_id=record_id,
            why="" if ref_or_none is not None else "a writable clone whose snapshot is gone",
        )
    subvolume_names = {entry.name for entry in entries}
    for name in names:
        noted = folder.noted_name(name)
        if folder.is_temporary(name):
            yield Found(kind="debris", pool=pool, name=name, why="a note that was not finished")
        elif noted is not None and noted not in subvolume_names and folder.snapshot_id_of(noted) is not None:
            yield Found(
                kind="debris",
                pool=pool,
                name=name,
                snapshot_id=folder.snapshot_id_of(noted),
                note=notes.get(noted),
                why="the note of a snapshot that is gone",
            )


def _mistrust(entry: Entry, altered: frozenset[str]) -> str:
    if not entry.read_only:
        return "it was made writable by hand, or is somebody's own: not a snapshot to trust"
    return ALTERED if entry.name in altered else ""


def is_altered(folder_fd: int, entry: Entry) -> bool:
    """Whether somebody made the snapshot `entry` writable, changed it and closed it again. Raises OSError.

    btrfs itself tells. A subvolume's root notes the transaction that made it (otransid) and the last one that changed
    an inode of it (ctransid); in an untouched snapshot the second is the older one. Deduplication (FIDEDUPERANGE, as
    bees and duperemove do it) changes inodes of read-only snapshots, too, but neither their contents nor their ctime;
    so where the root was touched, the inodes written since are asked for theirs. Balancing rewrites the trees and
    touches no inode.
    """
    if entry.info.ctransid <= entry.info.otransid:
        return False
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(entry.name, flags, dir_fd=folder_fd)
    try:
        made_ns = kernel.made_ns(fd)
        return any(
            changed_ns > made_ns
            for transaction, changed_ns in kernel.inodes_since(fd, entry.info.id, entry.info.otransid + 1)
            if transaction > entry.info.otransid
        )
    finally:
        os.close(fd)


def _is_altered(folder_fd: int, entry: Entry) -> bool:
    with suppress(FileNotFoundError):  # deleted meanwhile
        return is_altered(folder_fd, entry)
    return False
