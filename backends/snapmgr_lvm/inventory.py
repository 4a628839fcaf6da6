"""Lists everything of ours in a volume group: snapshots, clones, and half-made volumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.api import Found, NotFoundError, Pool, SnapshotRef
from snapmgr_lvm import marks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr_lvm.report import Group, LogicalVolume

INTERRUPTED = "lvcreate was interrupted before it was a snapshot"
SUSPENDED = "it is suspended, and whatever writes to it hangs: a command of LVM was interrupted"


def pool_of(group: Group) -> Pool:
    """Return a group as a pool."""
    return Pool(backend="lvm", id=group.uuid, hint=group.name)


def snapshot_ref(group: Group, volume: LogicalVolume) -> SnapshotRef:
    """Return the reference of a volume with a snapshot's mark."""
    return SnapshotRef(
        backend="lvm",
        snapshot_id=marks.value(volume, "id") or "",
        pool=pool_of(group),
        volume_id=marks.value(volume, "origin") or "",
        name=volume.name,
        native_id=volume.uuid,
    )


def require_snapshot(group: Group, ref: SnapshotRef) -> LogicalVolume:
    """Return the volume that `ref` names. Raises NotFoundError if it is gone, or does not bear the snapshot's mark."""
    volume = group.by_uuid(ref.native_id)
    if volume is None or marks.value(volume, "id") != ref.snapshot_id:
        raise NotFoundError(
            f"the LVM snapshot {ref.name} ({ref.native_id}) is not in the volume group {group.name}",
            hint="snapmgr doctor compares the catalog with the storage",
        )
    return volume


def read(group: Group) -> Iterator[Found]:
    """Return everything with our mark, suspended volumes first: they must be resumed before anything is removed.

    The process that suspended a volume is gone: a process holds the group's lock while it changes the group, and we
    read it under that lock. A volume is resumed even without any snapshot of ours: the removal of the last one may have
    been interrupted.
    """
    marked = [volume for volume in group.volumes if marks.MARK in volume.tags]
    yield from _suspended(group, marked)
    for volume in marked:
        found = describe(group, volume)
        if found is not None:
            yield found


def _suspended(group: Group, marked: list[LogicalVolume]) -> Iterator[Found]:
    for volume in group.volumes:
        if volume.suspended and volume not in marked and "private" not in volume.roles:
            # The interrupted run made the newest snapshot of it; LVM's times have whole seconds.
            of_it = [one for one in marked if marks.value(one, "origin") == volume.uuid]
            last = max(of_it, key=lambda one: (one.made_at, marks.value(one, "state") == "made"), default=None)
            yield Found(
                kind="debris",
                pool=pool_of(group),
                name=volume.name,
                snapshot_id=marks.value(last, "id") if last is not None else None,
                why=SUSPENDED,
                cure="lets it go on, with what LVM's metadata say",
            )


def describe(group: Group, volume: LogicalVolume) -> Found | None:
    """Describe a volume with our mark; None for one that we never make."""
    pool, snapshot_id = pool_of(group), marks.value(volume, "id")
    record_id = marks.value(volume, "attachment")
    if snapshot_id is None:
        return None
    if record_id is not None:
        return _describe_clone(group, volume, snapshot_id, record_id)
    problem = _problem(volume)
    if problem is not None and marks.value(volume, "state") != "made":
        return None  # a former snapshot, or a user copied the tags
    if problem is not None:
        return Found(kind="debris", pool=pool, name=volume.name, snapshot_id=snapshot_id, why=problem)
    ref, note = snapshot_ref(group, volume), marks.read_note(volume.tags)
    if volume.writable:
        why = "it was made writable by hand, and is not to be trusted"
        return Found(kind="debris", pool=pool, name=volume.name, snapshot_id=snapshot_id, ref=ref, note=note, why=why)
    return Found(kind="snapshot", pool=pool, name=volume.name, snapshot_id=snapshot_id, ref=ref, note=note)


def _problem(volume: LogicalVolume) -> str | None:
    """Return why a volume with a snapshot's mark is not a snapshot; None if it is."""
    origin = marks.value(volume, "origin")
    if volume.is_thin:
        return None if origin else "it has the mark of a snapshot, but does not name its origin"
    if not volume.is_classic_snapshot:
        return INTERRUPTED
    return None if volume.origin_uuid == origin else "it is a snapshot of another volume than its mark says"


def _describe_clone(group: Group, volume: LogicalVolume, snapshot_id: str, record_id: str) -> Found:
    parent_uuid = marks.value(volume, "of") or ""
    parent = group.by_uuid(parent_uuid)
    return Found(
        kind="attachment",
        pool=pool_of(group),
        name=volume.name,
        snapshot_id=snapshot_id,
        # Nothing else is known about a missing snapshot, but its clone must still be removed.
        ref=snapshot_ref(group, parent)
        if parent is not None
        else SnapshotRef(
            backend="lvm", snapshot_id=snapshot_id, pool=pool_of(group), volume_id="", name="", native_id=parent_uuid
        ),
        record_id=record_id,
    )
