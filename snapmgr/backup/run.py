"""Backs up a job: quiesce → snapshot → release → READY, with the proof on disk before the snapshot is READY."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.access.deletion import remove_traces
from snapmgr.backup.fire import fire
from snapmgr.backup.flush import flush_until_short
from snapmgr.backup.publish import publish
from snapmgr.backup.sweep import sweep
from snapmgr.backup.trigger import Trigger
from snapmgr.capacity.read import examine_room, sample_capacity
from snapmgr.catalog.manifest import Manifest, Member, new_id
from snapmgr.contract.errors import LaterStepError, LostError, SnapmgrError
from snapmgr.source.locate import locate_source
from snapmgr.source.volumes import name_excluded
from snapmgr.system.boot import machine_id
from snapmgr.system.probe import require_answer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from snapmgr.backup.fire import Evidence
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.contract.backend import Armed
    from snapmgr.contract.records import Volume
    from snapmgr.source.located import SnapshotSource
    from snapmgr.source.toolbackup import ToolBackup

# How long to wait for the helper after a failure, when the lock is already released.
_REAP_S = 5.0
_TRIES_WITHOUT_LOCK = 2


class BackupPlan(Struct, frozen=True, kw_only=True):
    """The steps of a backup that --dry-run shows."""

    job: str
    path: str
    backend: str
    volumes: tuple[Volume, ...]
    level: str
    why: str
    excluded: tuple[str, ...]
    absent: tuple[str, ...]
    """Folders of logs that the server writes to and that the snapshot does not contain."""
    warnings: tuple[str, ...]


def plan_backup(ctx: Context, job: Job) -> BackupPlan:
    """Return the plan of `backup`; lock nothing, write nothing."""
    source = locate_source(ctx, job)
    level, why = ("none", "a plain directory") if job.source == "directory" else ("stopped", "asked for by the job")
    if job.source == "physical":
        from snapmgr.physical.run import plan_tool_backup  # noqa: PLC0415 - few jobs need it

        level, why = "none", plan_tool_backup(ctx, job).words
    if source.choice is not None:
        level, why = source.choice.name, source.choice.why
    room = examine_room(ctx, job, source.volumes)
    refusal = () if room.refusal is None else (room.refusal.message,)
    return BackupPlan(
        job=job.name,
        path=source.path,
        backend=source.backend.name,
        volumes=source.volumes,
        level=level,
        why=why,
        excluded=name_excluded(source.shares, source.absent),
        absent=source.absent,
        warnings=(*source.warnings, *room.warnings, *refusal),
    )


def backup(ctx: Context, job: Job) -> Manifest:
    """Take one snapshot for `job` and return its READY manifest.

    First it sweeps after earlier runs of this job that crashed. Raises BusyError if another run is active,
    NotQuiescedError if the source was not provably held still (nothing is kept), StorageError or
    MissingRequirementError if the storage cannot take it. Raises LaterStepError if the snapshot is READY but its note
    could not be stored beside it, the leftovers of an earlier run could not be removed, or an earlier snapshot was lost
    because it overflowed.
    """
    ctx.catalog.make()
    # Not while a tool copies for hours: a private mount keeps its file system busy.
    sharing = ctx.mounter.sharing() if job.source != "physical" else nullcontext()
    with ctx.catalog.job_lock(job.name), sharing:
        failures = sweep(ctx, job.name)
        if job.source == "physical":
            # The tool writes a whole copy before there is anything to snapshot.
            _require_room(ctx, job, locate_source(ctx, job))
        with _tool_backup(ctx, job) as tool_backup:
            source = locate_source(ctx, job, tool_backup)
            for warning in source.warnings:
                ctx.tell(f"warning: {warning}")
            for volume in source.volumes:
                require_answer(volume.path)
            if job.source != "physical":
                _require_room(ctx, job, source)
            manifest = _take_any_way(ctx, job, source)
        # The first sample of its space.
        sample_capacity(ctx, (manifest,))
    if failures:
        raise LaterStepError(
            f"snapshot {manifest.id} is READY, but {_join_messages(failures)}",
            hint=failures[0].hint or "snapmgr doctor",
            snapshot_id=manifest.id,
        )
    return manifest


def _require_room(ctx: Context, job: Job, source: SnapshotSource) -> None:
    """Warn about pools that run full. Raises ShortOfSpaceError if less than the job's `free_min` is free."""
    room = examine_room(ctx, job, source.volumes)
    if room.refusal is not None:
        raise room.refusal
    for warning in room.warnings:
        ctx.tell(f"warning: {warning}")


def _take_any_way(ctx: Context, job: Job, source: SnapshotSource) -> Manifest:
    """Take the snapshot, again if DDL made one without a lock useless; the last time with the lock, however long."""
    choice = source.choice
    if choice is None or choice.instead is None:
        return _take(ctx, job, source)
    from snapmgr.mysql.lock.lockless import StructureChangedError  # noqa: PLC0415 - a directory has no lock

    for _ in range(_TRIES_WITHOUT_LOCK):
        try:
            return _take(ctx, job, source)
        except StructureChangedError as error:
            ctx.tell(f"{error.message}; trying again")
    locking = choice if choice.lock else choice.instead
    return _take(ctx, job, replace(source, choice=replace(locking, instead=None)))


def _tool_backup(ctx: Context, job: Job) -> AbstractContextManager[ToolBackup | None]:
    """Return a context that yields the backup in the staging folder of a physical job; None for other jobs."""
    if job.source != "physical":
        return nullcontext()
    from snapmgr.physical.run import staged  # noqa: PLC0415 - few jobs need it

    return staged(ctx, job)


def _join_messages(failures: tuple[SnapmgrError, ...]) -> str:
    messages = [error.message for error in failures if isinstance(error, LostError)]
    others = [error.message for error in failures if not isinstance(error, LostError)]
    if others:
        messages.append(f"leftovers of an earlier run could not be removed: {'; '.join(others)}")
    return "; ".join(messages)


def _take(ctx: Context, job: Job, source: SnapshotSource) -> Manifest:
    now = datetime.now(UTC)
    manifest = Manifest(
        id=new_id(job.name, now),
        job=job.name,
        source=job.source,
        path=source.path,
        state="pending",
        created_at=now,
        machine_id=machine_id(),
        number=ctx.catalog.next_number(now),
        state_dir=str(ctx.catalog.path.absolute()),
        excluded=name_excluded(source.shares, source.absent),
        absent=source.absent,
        server=source.server,
        physical=source.tool_backup.record if source.tool_backup is not None else None,
    )
    backend = source.backend
    ctx.tell(f"{manifest.id}: arming: {backend.name}, {', '.join(volume.shown for volume in source.volumes)}")
    with (
        # Runs last: the leftovers of a killed helper can be removed only after we have closed the armed snapshot.
        ExitStack() as afterwards,
        backend.arm(source.volumes, manifest.id) as armed,
        # Forked before any connection to the database exists, so that the helper has no copy of its socket.
        Trigger(armed, undo=lambda shot: backend.delete(shot.ref)) as trigger,
    ):
        manifest = replace(manifest, intents=armed.intents, helper=trigger.process)
        ctx.catalog.write(manifest)
        try:
            evidence = _fire(ctx, job, source, armed, trigger)
            manifest = replace(
                manifest,
                members=tuple(
                    Member(
                        ref=shot.ref,
                        subpath=share.volume.subpath,
                        call_s=(shot.finish_ns - shot.start_ns) / 1e9,
                        path=share.volume.path,
                        places=share.places,
                    )
                    for share, shot in zip(source.shares, evidence.shots, strict=True)
                ),
                taken_at=_wall_clock(evidence.shots[-1].finish_ns),
                proved_at=datetime.now(UTC),
                quiesce=evidence.quiesce,
                position=evidence.position,
                sources=evidence.sources,
                helper=None,
            )
            ctx.catalog.write(manifest)
        except BaseException as error:
            afterwards.callback(_clean_up_failure, ctx, manifest, armed, trigger, error)
            raise
        ctx.catalog.keep_tool_log(manifest)
    return publish(ctx, manifest, settle_timeout_s=job.settle_timeout_s)


def _fire(ctx: Context, job: Job, source: SnapshotSource, armed: Armed, trigger: Trigger) -> Evidence:
    """Take the snapshot while the source is held still. Raises NotQuiescedError if it was not, and storage's errors."""
    sync = partial(flush_until_short, armed, job.sync_target_s)
    if job.source != "mysql":
        return fire(source, trigger, sync)
    from snapmgr.backup.fire_mysql import fire_mysql  # noqa: PLC0415 - a directory has no server

    return fire_mysql(ctx, job, source, armed=armed, trigger=trigger, sync=sync)


def _wall_clock(monotonic_ns: int) -> datetime:
    return datetime.now(UTC) - timedelta(microseconds=(time.monotonic_ns() - monotonic_ns) / 1000)


def _clean_up_failure(ctx: Context, manifest: Manifest, armed: Armed, trigger: Trigger, error: BaseException) -> None:
    """After a failure remove the snapshot and record the reason; the next sweep does whatever cannot be done now."""
    reason = error.message if isinstance(error, SnapmgrError) else str(error) or type(error).__name__
    if not armed.launched:
        ctx.catalog.forget(manifest.id)
        return
    if not trigger.reap(timeout_s=_REAP_S):
        ctx.tell(f"{manifest.id}: the storage call still hangs; the next run removes its leftovers")
        return
    try:
        remove_traces(ctx, manifest)
        ctx.catalog.write(manifest.with_state("broken", reason=reason))
    except SnapmgrError as failure:
        ctx.tell(f"{manifest.id}: cleanup failed: {failure.message}; the next run tries again")
