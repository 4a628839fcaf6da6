"""Restores an origin in place from one of its snapshots with ``lvconvert --merge``, which consumes the snapshot.

- Classic: the kernel writes the chunks of the CoW table back to the origin, and LVM only watches. The merge
  continues after any process is killed, and after a reboot. It consumes the snapshot.
- Thin: the origin gets the snapshot's blocks immediately. To keep a snapshot, we first make a copy of it (a thin
  snapshot of the snapshot), which takes its place afterwards: same data, name and tags, but a new UUID. Merging the
  copy instead would not work: LVM merges into the origin of a snapshot, and the copy's origin is the snapshot.

The origin keeps its name, UUID, tags and flags. Its tag ``snapmgr.reverting=TOKEN.KIND`` shows that the restore began,
and so distinguishes a consumed snapshot from a removed one. The copy has ``snapmgr.copy=TOKEN`` until it becomes the
snapshot, and then ``snapmgr.copied=TOKEN``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from snapmgr.api import InUseError, NotFoundError, Reason, RevertPlan, StorageError, format_size
from snapmgr_lvm import arming, marks
from snapmgr_lvm.inventory import require_snapshot, snapshot_ref
from snapmgr_lvm.removal import device_name, loaded_ahead, remove, resume
from snapmgr_lvm.report import change, read_group

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import Runner, SnapshotRef
    from snapmgr_lvm.report import Group, LogicalVolume

State = Literal["none", "merging", "done", "failed"]

# Size of one exception in the CoW table (dm-snap-persistent.c: struct disk_exception).
_EXCEPTION_BYTES = 16
# lvs prints percentages with two decimals.
_PERCENT_ERROR = 0.0001
# udev's rules briefly hold a device open after its unmount.
_PATIENCE_S = 5.0
_POLL_S = 0.2


class Reverting:
    """The part of the backend that is `snapmgr.api.Revertible`."""

    _runner: Runner

    def revert_plan(self, ref: SnapshotRef) -> RevertPlan:
        """Return the consequences of a merge."""
        group = read_group(self._runner, ref.pool)
        snapshot, origin = require_snapshot(group, ref), _require_origin(group, ref)
        classic = snapshot.is_classic_snapshot
        return RevertPlan(
            origin=f"{group.name}/{origin.name}",
            device=f"/dev/mapper/{device_name(group, origin.name)}",
            number=origin.device or "",
            consumes=classic,
            write_bytes=_chunk_data_bytes(snapshot) if classic else 0,
            loses=tuple(missing_room(group, origin, snapshot)) if classic else (),
            blocked=tuple(_obstacles(group, origin, snapshot)),
            remarks=tuple(_remarks(group, origin, snapshot)),
        )

    def begin_revert(self, ref: SnapshotRef, token: str) -> None:
        """Start the merge, or continue a started one; a thin merge is complete when this returns."""
        state = self.revert_state(ref, token)
        if state in ("done", "failed"):
            return
        group = read_group(self._runner, ref.pool)
        origin, snapshot = _require_origin(group, ref), group.by_uuid(ref.native_id)
        if snapshot is None:
            raise NotFoundError(f"the LVM snapshot {ref.name} is gone")
        if state == "merging":
            self._push(group, origin)
            return
        self._require_closed(ref, origin, snapshot)
        kind = "classic" if snapshot.is_classic_snapshot else "thin"
        try:
            self._make_usable(group, origin)
            if _tag_of(origin, token) is None:
                change(
                    self._runner, ["lvchange", "--yes", "--addtag", _tag(token, kind), f"{group.name}/{origin.name}"]
                )
            if kind == "thin" and _copy(group, token) is None:
                change(self._runner, _copy_command(group, snapshot, token))
            # In the background: the kernel copies, and we wait for it. By default LVM checks every 15 s and would
            # notice the end late.
            background = ("--background", "--interval", "1")
            change(self._runner, ["lvconvert", "--yes", "--merge", *background, f"{group.name}/{snapshot.name}"])
        except StorageError:
            if self.revert_state(ref, token) == "none":
                self.cancel_revert(ref, token)
                raise

    def revert_state(self, ref: SnapshotRef, token: str) -> State:
        """Return the state of a merge."""
        group = read_group(self._runner, ref.pool)
        origin, snapshot = _require_origin(group, ref), group.by_uuid(ref.native_id)
        if snapshot is not None:
            if not snapshot.merging:
                return "none"
            return "failed" if snapshot.merge_failed or origin.merge_failed or snapshot.invalid else "merging"
        tag = _tag_of(origin, token)
        if tag is None and _copy(group, token) is None:
            raise NotFoundError(
                f"the LVM snapshot {ref.name} is gone, and not by being merged into {group.name}/{origin.name}"
            )
        return "failed" if tag == _tag(token, "thin") and _copy(group, token) is None else "done"

    def cancel_revert(self, ref: SnapshotRef, token: str) -> None:
        """Remove the copy and the tag of a merge that has not begun."""
        if self.revert_state(ref, token) != "none":
            raise StorageError(f"the snapshot {ref.name} is being merged: that cannot be stopped")
        group = read_group(self._runner, ref.pool)
        origin, copy = _require_origin(group, ref), _copy(group, token)
        self._make_usable(group, origin)
        if copy is not None:
            remove(self._runner, group, copy)
        self._forget(group, origin, token)

    def finish_revert(self, ref: SnapshotRef, token: str) -> SnapshotRef | None:
        """Put the copy of a thin snapshot in its place, and remove all traces of the merge."""
        group = read_group(self._runner, ref.pool)
        origin, copy = _require_origin(group, ref), _copy(group, token)
        if group.by_uuid(ref.native_id) is not None:
            raise StorageError(f"the snapshot {group.name}/{ref.name} is not merged yet")
        self._make_usable(group, origin)
        kept: SnapshotRef | None = None
        if copy is not None:
            kept = self._replace(group, copy, ref, token)
        self._forget(group, origin, token)
        return kept

    # ------------------------------------------------------------------------------------------------------- commands

    def _make_usable(self, group: Group, origin: LogicalVolume) -> None:
        """Repair an origin that a killed lvconvert left suspended, missing in the kernel, or about to merge."""
        if not origin.active:
            change(self._runner, ["lvchange", "--yes", "--activate", "y", f"{group.name}/{origin.name}"])
        elif origin.suspended or loaded_ahead(self._runner, group, origin):
            resume(self._runner, group, origin)

    def _push(self, group: Group, origin: LogicalVolume) -> None:
        """Continue a merge that was postponed because the origin was open, or that no process watches any longer."""
        name = f"{group.name}/{origin.name}"
        if not origin.active:
            change(self._runner, ["lvchange", "--yes", "--activate", "y", name])
        elif origin.suspended or not origin.opened:
            # This also resumes devices that a killed lvconvert left suspended.
            change(self._runner, ["lvchange", "--yes", "--refresh", name])
        change(self._runner, ["lvchange", "--yes", "--poll", "y", name])

    def _require_closed(self, ref: SnapshotRef, origin: LogicalVolume, snapshot: LogicalVolume) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while origin.opened or snapshot.opened:
            if time.monotonic() >= deadline:
                name = origin.name if origin.opened else snapshot.name
                raise InUseError(
                    f"the logical volume {name} is open: mounted in another namespace, or below another device",
                    hint="see: lsblk, dmsetup info -c, fuser",
                )
            time.sleep(_POLL_S)
            group = read_group(self._runner, ref.pool)
            origin, snapshot = _require_origin(group, ref), group.by_uuid(ref.native_id) or snapshot

    def _replace(self, group: Group, copy: LogicalVolume, ref: SnapshotRef, token: str) -> SnapshotRef:
        if marks.value(copy, "copied") is None:
            gone = marks.removing(f"snapmgr.{key}={marks.value(copy, key)}" for key in ("copy", "of"))
            own = (f"snapmgr.copied={token}", f"snapmgr.id={ref.snapshot_id}", f"snapmgr.origin={ref.volume_id}")
            new = marks.adding((*own, marks.state_tag("settled")))
            change(self._runner, ["lvchange", "--yes", *gone, *new, f"{group.name}/{copy.name}"])
        if copy.name != ref.name and group.by_name(ref.name) is None:
            change(self._runner, ["lvrename", "--yes", group.name, copy.name, ref.name])
        group = read_group(self._runner, ref.pool)
        now = group.by_uuid(copy.uuid)
        if now is None:
            raise StorageError(f"the copy of the snapshot {ref.name} vanished from {group.name}")
        return snapshot_ref(group, now)

    def _forget(self, group: Group, origin: LogicalVolume, token: str) -> None:
        tag = _tag_of(origin, token)
        if tag is not None:
            change(self._runner, ["lvchange", "--yes", "--deltag", tag, f"{group.name}/{origin.name}"])


def _require_origin(group: Group, ref: SnapshotRef) -> LogicalVolume:
    origin = group.by_uuid(ref.volume_id)
    if origin is None:
        raise NotFoundError(
            f"the origin of {ref.name} ({ref.volume_id}) is not in the volume group {group.name} any more",
            hint=f"restore to a folder: snapmgr restore {ref.snapshot_id} DEST",
        )
    return origin


def _tag(token: str, kind: str) -> str:
    return f"snapmgr.reverting={token}.{kind}"


def _tag_of(origin: LogicalVolume, token: str) -> str | None:
    return next((tag for kind in ("classic", "thin") if (tag := _tag(token, kind)) in origin.tags), None)


def _copy(group: Group, token: str) -> LogicalVolume | None:
    """Return the copy that was made for `token`, whether or not it has become the snapshot."""
    return next(
        (one for one in group.volumes if token in (marks.value(one, "copy"), marks.value(one, "copied"))),
        None,
    )


def _copy_command(group: Group, snapshot: LogicalVolume, token: str) -> list[str]:
    # Without ``snapmgr.id`` it has not become a snapshot.
    own = (marks.MARK, f"snapmgr.copy={token}", f"snapmgr.of={snapshot.uuid}", *marks.old_note_tags(snapshot.tags))
    flags = ("--permission", "r", "--setactivationskip", "y")
    name = f"snapmgr.revert.{token}"
    return [
        "lvcreate",
        "--yes",
        "--snapshot",
        *flags,
        *marks.adding(own),
        "--name",
        name,
        f"{group.name}/{snapshot.name}",
    ]


# ------------------------------------------------------------------------------------------------------------ judgement


def _obstacles(group: Group, origin: LogicalVolume, snapshot: LogicalVolume) -> Iterator[Reason]:
    name, its = f"{group.name}/{snapshot.name}", f"{group.name}/{origin.name}"
    elsewhere = f"restore to a folder: snapmgr restore {marks.value(snapshot, 'id')} DEST"
    try:
        arming.check_group(group)
    except StorageError as error:
        yield Reason(what=error.message, hint=error.hint or "see: vgs")
    if snapshot.invalid:
        yield Reason(what=f"{name} is lost: its CoW table ran full", hint="take another snapshot")
    if snapshot.writable:
        yield Reason(what=f"{name} was made writable by hand, and is not to be trusted", hint=elsewhere)
    if snapshot.opened:
        yield Reason(what=f"{name} is open: mounted, or below another device", hint=f"see: lsblk /dev/{name}")
    if origin.suspended or not origin.writable or origin.health:
        how = "suspended" if origin.suspended else origin.health or "read-only"
        yield Reason(what=f"{its} is {how}", hint=f"see: lvs -a {its}")
    for other in group.volumes:
        if other.merging and other.origin_uuid == origin.uuid:
            yield Reason(what=f"{other.name} is being merged into {its}", hint="wait until it is done: see lvs -a")
    if snapshot.origin_uuid != origin.uuid:
        what = f"LVM does not have {name} as a snapshot of {its} any more, since another one was put back"
        yield Reason(what=what, hint=elsewhere)


def _remarks(group: Group, origin: LogicalVolume, snapshot: LogicalVolume) -> Iterator[str]:
    if snapshot.is_classic_snapshot:
        return
    others = sum(one.origin_uuid == origin.uuid and one.uuid != snapshot.uuid for one in group.volumes)
    if others:
        yield (
            f"other snapshots of {group.name}/{origin.name}: {others}; they stay, but LVM takes them for snapshots of "
            "the former volume: they cannot be put back in place any more, only restored to a folder"
        )
    if snapshot.size_bytes != origin.size_bytes:
        yield (
            f"{group.name}/{origin.name} has {format_size(origin.size_bytes)}, and will have "
            f"{format_size(snapshot.size_bytes)} again, as then"
        )


def _chunk_data_bytes(snapshot: LogicalVolume) -> int:
    """Return an upper bound of the data in a CoW table without its own entries; allows for the rounded percentage."""
    used = ((snapshot.snap_percent or 0.0) / 100 + _PERCENT_ERROR) * snapshot.size_bytes
    return int(used * snapshot.chunk_bytes / (snapshot.chunk_bytes + _EXCEPTION_BYTES))


def needed_bytes(snapshot: LogicalVolume, sibling: LogicalVolume) -> int:
    """Return an upper bound of the growth of `sibling`'s CoW table when `snapshot`, of the same origin, is merged.

    The merge writes back the chunks that changed since `snapshot`; the sibling holds those that changed since it was
    made. A later sibling holds some of them, an earlier one all of them: in both cases it needs the difference. This
    holds if the snapshot's chunks are not larger than the sibling's; the merge also writes back the untouched parts of
    larger chunks.
    """
    chunks = -(-_chunk_data_bytes(snapshot) // max(snapshot.chunk_bytes, 1))
    has = int(max(0.0, (sibling.snap_percent or 0.0) / 100 - _PERCENT_ERROR) * sibling.size_bytes)
    has_chunks = has // (sibling.chunk_bytes + _EXCEPTION_BYTES)
    if sibling.chunk_bytes >= snapshot.chunk_bytes:
        more = max(0, chunks - has_chunks)
    else:
        more = -(-chunks * snapshot.chunk_bytes // max(sibling.chunk_bytes, 1))
    # The table's entries have their own chunks, of which one may be partly used.
    return more * (sibling.chunk_bytes + _EXCEPTION_BYTES) + (sibling.chunk_bytes if more else 0)


def missing_room(group: Group, origin: LogicalVolume, snapshot: LogicalVolume) -> Iterator[Reason]:
    """Return the snapshots of the same origin, ours or not, whose CoW tables a merge might overflow."""
    for sibling in group.volumes:
        if sibling.uuid == snapshot.uuid or not sibling.is_classic_snapshot or sibling.origin_uuid != origin.uuid:
            continue
        # A table with room for every chunk of the origin cannot overflow.
        whole = origin.size_bytes // max(sibling.chunk_bytes, 1) * (sibling.chunk_bytes + _EXCEPTION_BYTES)
        if sibling.invalid or sibling.size_bytes >= whole + 2 * sibling.chunk_bytes:
            continue
        used = ((sibling.snap_percent or 0.0) / 100 + _PERCENT_ERROR) * sibling.size_bytes
        free, needed = max(0, int(sibling.size_bytes - used)), needed_bytes(snapshot, sibling)
        if needed > free:
            name = f"{group.name}/{sibling.name}"
            short = -(-(needed - free) // group.extent_bytes) * group.extent_bytes
            yield Reason(
                what=f"the snapshot {name} may need up to {format_size(needed)} of room in its CoW table, and has "
                f"{format_size(free)}: without it it is lost",
                hint=f"lvextend --size +{short}b {name} (free in {group.name}: {format_size(group.free_bytes)}), or "
                "delete it",
            )
