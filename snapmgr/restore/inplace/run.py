"""Restores in place: a `Revertible` storage puts the origin itself back to a snapshot.

In order: write the record, unmount everywhere, put the origin back, write the manifest, mount again, remove the record.
After an interruption the next call or ``doctor --fix`` continues: it undoes the restore if the storage has not begun,
and completes it otherwise.
"""

from __future__ import annotations

import os
import pwd
import secrets
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

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
# A merge may stop without an error, after a reboot for example: it is started again this often.
_RESTART_S = 15.0
_TELL_S = 30.0


class InplaceResult(Struct, frozen=True, kw_only=True):
    """The result of an in-place restore."""

    snapshot_id: str
    origins: tuple[str, ...]
    mounted: tuple[str, ...]
    """The mount points where they are mounted again."""
    consumed: bool
    merged_at: datetime


def restore_inplace(ctx: Context, plan: InplacePlan, *, force: bool = False) -> InplaceResult:
    """Put the origins back according to `plan`, which is made again under the locks of all jobs that it concerns.

    Raises BusyError if one of them is active, InUseError if a mount is in use (then nothing has changed), the first
    obstacle if there is one, and StorageError if the storage fails or a file system cannot be mounted again: the
    message says how to continue.
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
    """Raise StorageError if the consequences are not those that the user agreed to."""

    def meaning(one: InplacePlan) -> tuple[object, ...]:
        losses = {reason.what for origin in one.origins for reason in origin.storage.loses}
        return (one.jobs, one.consumes, one.rules, len(losses), [origin.beside for origin in one.origins])

    if meaning(plan) != meaning(now):
        raise StorageError(
            "the consequences of the in-place restore have changed since they were shown",
            hint="look at them again with --dry-run, then restore again",
        )


def resume_inplace(ctx: Context, snapshot_id: str) -> InplaceResult | None:
    """Complete or undo an interrupted in-place restore of this snapshot; return None if there is none, or it is undone.

    Raises BusyError if it is active, and the errors of `restore_inplace`.
    """
    for record in inplace_records(ctx.catalog):
        if record.snapshot_id == snapshot_id:
            with ExitStack() as locks:
                for job in record.jobs:
                    locks.enter_context(ctx.catalog.job_lock(job))
                return complete_or_undo(ctx, record)
    return None


def complete_or_undo(ctx: Context, record: InplaceRecord) -> InplaceResult | None:
    """Complete an interrupted restore, or undo it if the storage has not begun; needs the lock of its first job."""
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
    """Undo a restore that the storage has not begun. If that fails, raises StorageError and keeps the record."""
    if record.step == "merging":
        for part in record.parts:
            revertible(ctx, part.ref, record.snapshot_id).cancel_revert(part.ref, record.token)
    _mount_all_again(ctx, record)
    drop_inplace(ctx.catalog, record)


def _advance(ctx: Context, record: InplaceRecord, **changes: object) -> InplaceRecord:
    record = replace(record, **changes)
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
    """Put all origins back and wait until that is done. If it fails before the storage has begun, undo everything."""
    backends = [revertible(ctx, part.ref, record.snapshot_id) for part in record.parts]
    try:
        for backend, part in zip(backends, record.parts, strict=True):
            ctx.tell(f"restoring {part.origin} in place to {record.snapshot_id}")
            # After a reboot it may be mounted during the merge.
            if backend.revert_state(part.ref, record.token) == "none":
                unmount_all(mounts_of(ctx, backend.revert_plan(part.ref).number))
            backend.begin_revert(part.ref, record.token)
    except SnapmgrError:
        if not _begun(ctx, record):
            _undo(ctx, record)
        raise
    started = told = time.monotonic()
    waiting = list(zip(backends, record.parts, strict=True))
    while waiting:
        backend, part = waiting[0]
        state = backend.revert_state(part.ref, record.token)
        if state == "done":
            waiting.pop(0)
            continue
        if state == "failed":
            raise StorageError(
                f"the in-place restore of {part.origin} failed: the storage stopped before the end",
                hint="do not start a server on it; check the kernel log for the cause; then: "
                f"snapmgr restore {record.snapshot_id} --in-place",
            )
        if time.monotonic() - started >= _RESTART_S:
            started = time.monotonic()
            backend.begin_revert(part.ref, record.token)
        if time.monotonic() - told >= _TELL_S:
            told = time.monotonic()
            ctx.tell(f"still restoring {part.origin} in place")
        time.sleep(_POLL_S)


def _record_result(
    ctx: Context, record: InplaceRecord, refs: Sequence[SnapshotRef | None], merged_at: datetime
) -> None:
    """Write the manifest: a consumed snapshot is BROKEN, another one has the storage's new ids."""
    try:
        entry = ctx.catalog.load(record.snapshot_id)
    except NotFoundError:
        return
    if None in refs:
        for ref in refs:
            # The other members are useless once one is consumed.
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
        ctx.tell(f"warning: could not update the note of {record.snapshot_id}: {error.message}")


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
    """Return the in-place restores that are active or were interrupted. Changes nothing."""
    return tuple(_unfinished(ctx, record) for record in inplace_records(ctx.catalog))


def _unfinished(ctx: Context, record: InplaceRecord) -> Unfinished:
    def resolve() -> str:
        done = complete_or_undo(ctx, record)
        if done is None:
            return f"the in-place restore of {record.snapshot_id} is undone: {record.origins} is unchanged"
        return f"the in-place restore of {record.snapshot_id} is completed: {record.origins} is restored"

    done = "was interrupted after the data were restored" if record.step == "merged" else "was interrupted"
    return Unfinished(
        place=record.origins,
        active=is_alive(record.holder),
        what=f"the in-place restore of {record.snapshot_id} {done}",
        repair="completes it, or undoes it if nothing was restored yet",
        job=record.jobs[0],
        resolve=resolve,
    )
