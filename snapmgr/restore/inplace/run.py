"""``restore --in-place``: the origin itself is put back to a snapshot, by a storage that is `Revertible`.

In order: record on disk → unmounted everywhere → put back → manifest → mounted again → record gone. What is killed in
between is taken up by the next call, or by ``doctor --fix``: until the storage has begun all of it is undone, from then
on it is completed.
"""

from __future__ import annotations

import os
import pwd
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from snapmgr.access.note import store_note
from snapmgr.catalog.inplace import MERGED, InplaceRecord, OriginRecord, drop_inplace, inplace_records, write_inplace
from snapmgr.contract.errors import NotFoundError, SnapmgrError, StorageError
from snapmgr.restore.inplace.plan import plan_inplace, revertible
from snapmgr.restore.inplace.remount import describe, mount_again, mounts_of, unmount_all
from snapmgr.restore.unfinished import Unfinished
from snapmgr.system.host import is_alive, this_process
from snapmgr.system.probe import require_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.context import Context
    from snapmgr.contract.records import SnapshotRef
    from snapmgr.restore.inplace.plan import InplacePlan

_POLL_S = 0.3
# A merge that nobody watches any more, after a reboot say, is set going again.
_PUSH_S = 15.0
_TELL_S = 30.0


@dataclass(frozen=True, kw_only=True)
class InplaceResult:
    """What an in-place restore did."""

    snapshot_id: str
    origins: tuple[str, ...]
    mounted: tuple[str, ...]
    """Where they are mounted again."""
    consumed: bool
    merged_at: datetime


def restore_inplace(ctx: Context, plan: InplacePlan, *, force: bool = False) -> InplaceResult:
    """Put the origins back, as `plan` said. All is looked at again under the locks of all jobs that are concerned.

    Raises BusyError if one of them is active, InUseError if a mount is in use (all is as before then), what stands in
    the way, and StorageError if the storage fails or a file system cannot be mounted again: the message says how to go
    on.
    """
    ctx.catalog.make()
    with ExitStack() as locks:
        for job in plan.jobs:
            locks.enter_context(ctx.catalog.job_lock(job))
        now = plan_inplace(ctx, ctx.catalog.load(plan.entry.manifest.id), force=force)
        if now.obstacles:
            raise now.obstacles[0]
        _refuse_changed(plan, now)
        record = InplaceRecord(
            token=secrets.token_hex(8),
            snapshot_id=now.entry.manifest.id,
            jobs=now.jobs,
            holder=this_process(),
            user=pwd.getpwuid(os.getuid()).pw_name,
            began_at=datetime.now(UTC),
            parts=tuple(
                OriginRecord(
                    ref=origin.member.ref,
                    origin=origin.storage.origin,
                    device=origin.storage.device,
                    mounts=describe(origin.mounts),
                )
                for origin in now.origins
            ),
        )
        for origin in now.origins:
            for mount in origin.mounts:
                require_answer(mount.point)
        write_inplace(ctx.catalog, record)
        try:
            for origin in now.origins:
                unmount_all(origin.mounts)
        except BaseException:
            _undo(ctx, record)
            raise
        return _complete(ctx, _advance(ctx, record, step="merging"))


def _refuse_changed(plan: InplacePlan, now: InplacePlan) -> None:
    """Raise StorageError if it would mean more than what somebody agreed to."""

    def meaning(one: InplacePlan) -> tuple[object, ...]:
        losses = {reason.what for origin in one.origins for reason in origin.storage.loses}
        return (one.jobs, one.consumes, one.rules, len(losses), [origin.beside for origin in one.origins])

    if meaning(plan) != meaning(now):
        raise StorageError("what it would mean has changed just now", hint="look again: --dry-run")


def resume_inplace(ctx: Context, snapshot_id: str) -> InplaceResult | None:
    """Go on with an in-place restore of this snapshot that was cut short; None if there is none, or it was undone.

    Raises BusyError if it is under way, and as `restore_inplace`.
    """
    for record in inplace_records(ctx.catalog):
        if record.snapshot_id == snapshot_id:
            with ExitStack() as locks:
                for job in record.jobs:
                    locks.enter_context(ctx.catalog.job_lock(job))
                return complete_or_undo(ctx, record)
    return None


def complete_or_undo(ctx: Context, record: InplaceRecord) -> InplaceResult | None:
    """Complete what was cut short, or undo it if the storage has not begun; the lock of its first job must be held."""
    current = next((one for one in inplace_records(ctx.catalog) if one.token == record.token), None)
    if current is None:
        return None
    if current.step == "unmounting" or (current.step == "merging" and not _begun(ctx, current)):
        _undo(ctx, current)
        return None
    return _complete(ctx, current)


def _begun(ctx: Context, record: InplaceRecord) -> bool:
    return any(
        revertible(ctx, part.ref, record.snapshot_id).revert_state(part.ref, record.token) != "none"
        for part in record.parts
    )


def _undo(ctx: Context, record: InplaceRecord) -> None:
    """Leave everything as it was before. Raises StorageError, with the record still there, if that fails."""
    if record.step == "merging":
        for part in record.parts:
            revertible(ctx, part.ref, record.snapshot_id).cancel_revert(part.ref, record.token)
    _mount_all_again(ctx, record)
    drop_inplace(ctx.catalog, record)


def _advance(ctx: Context, record: InplaceRecord, **changes: object) -> InplaceRecord:
    record = replace(record, **changes)  # type: ignore[arg-type] # fields of its own
    write_inplace(ctx.catalog, record)
    return record


def _complete(ctx: Context, record: InplaceRecord) -> InplaceResult:
    if record.step == "merging":
        _merge(ctx, record)
        record = _advance(ctx, record, step="merged", merged_at=datetime.now(UTC))
    merged_at = record.merged_at or datetime.now(UTC)
    refs = [
        revertible(ctx, part.ref, record.snapshot_id).finish_revert(part.ref, record.token) for part in record.parts
    ]
    _record_result(ctx, record, refs, merged_at)
    _mount_all_again(ctx, record)
    drop_inplace(ctx.catalog, record)
    return InplaceResult(
        snapshot_id=record.snapshot_id,
        origins=tuple(part.origin for part in record.parts),
        mounted=tuple(mount.point for part in record.parts for mount in part.mounts),
        consumed=None in refs,
        merged_at=merged_at,
    )


def _merge(ctx: Context, record: InplaceRecord) -> None:
    """Return when all origins are put back. Raises with all as before if none of them was begun."""
    backends = [revertible(ctx, part.ref, record.snapshot_id) for part in record.parts]
    try:
        for backend, part in zip(backends, record.parts, strict=True):
            ctx.tell(f"{record.snapshot_id}: putting back {part.origin}")
            # After a reboot it may be mounted, while it is being merged.
            if backend.revert_state(part.ref, record.token) == "none":
                unmount_all(mounts_of(ctx, backend.revert_plan(part.ref).number))
            backend.begin_revert(part.ref, record.token)
    except SnapmgrError:
        if not _begun(ctx, record):
            _undo(ctx, record)
        raise
    pushed = told = time.monotonic()
    waiting = list(zip(backends, record.parts, strict=True))
    while waiting:
        backend, part = waiting[0]
        state = backend.revert_state(part.ref, record.token)
        if state == "done":
            waiting.pop(0)
            continue
        if state == "failed":
            raise StorageError(
                f"{part.origin} could not be put back: the storage gave up in the middle",
                hint="start no server on it; the kernel log says why; then again: "
                f"snapmgr restore {record.snapshot_id} --in-place",
            )
        if time.monotonic() - pushed >= _PUSH_S:
            pushed = time.monotonic()
            backend.begin_revert(part.ref, record.token)
        if time.monotonic() - told >= _TELL_S:
            told = time.monotonic()
            ctx.tell(f"{part.origin}: still being put back")
        time.sleep(_POLL_S)


def _record_result(
    ctx: Context, record: InplaceRecord, refs: Sequence[SnapshotRef | None], merged_at: datetime
) -> None:
    """Let the manifest say what has become of the snapshot."""
    try:
        entry = ctx.catalog.load(record.snapshot_id)
    except NotFoundError:
        return
    if None in refs:
        for ref in refs:
            # Of a set that lost a member nothing else is of use.
            if ref is not None:
                ctx.backend(ref.backend).delete(ref)
        reason = f"{MERGED} at {merged_at:%Y-%m-%dT%H:%M:%SZ}: {record.origins}"
        ctx.catalog.write(entry.manifest.with_state("broken", reason=reason))
        return
    fresh = {part.ref.identity: ref for part, ref in zip(record.parts, refs, strict=True)}
    members = tuple(
        replace(member, ref=fresh.get(member.ref.identity) or member.ref) for member in entry.manifest.members
    )
    entry = replace(entry, manifest=replace(entry.manifest, members=members))
    ctx.catalog.write(entry.manifest)
    try:
        store_note(ctx, entry)
    except SnapmgrError as error:
        ctx.tell(f"warning: the note of {record.snapshot_id} stays as it is: {error.message}")


def _mount_all_again(ctx: Context, record: InplaceRecord) -> None:
    failure: SnapmgrError | None = None
    for part in record.parts:
        try:
            mount_again(ctx, part)
        except SnapmgrError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def unfinished_inplace(ctx: Context) -> tuple[Unfinished, ...]:
    """Return the in-place restores that are under way or were cut short, for doctor. Looks only."""
    return tuple(_unfinished(ctx, record) for record in inplace_records(ctx.catalog))


def _unfinished(ctx: Context, record: InplaceRecord) -> Unfinished:
    def resolve() -> str:
        done = complete_or_undo(ctx, record)
        if done is None:
            return f"the restore in place of {record.snapshot_id} is undone: {record.origins} is as it was"
        return f"the restore in place of {record.snapshot_id} is completed: {record.origins} is put back"

    done = "was cut short; the data are back" if record.step == "merged" else "was cut short"
    return Unfinished(
        place=record.origins,
        active=is_alive(record.holder),
        what=f"the restore in place of {record.snapshot_id} {done}",
        repair="completes it, or undoes it if nothing was put back yet",
        job=record.jobs[0],
        resolve=resolve,
    )
