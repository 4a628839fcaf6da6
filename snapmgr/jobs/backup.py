"""Taking a snapshot: quiesce → snapshot → release, with the proof on disk before anything is called READY."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from snapmgr.errors import LaterStepError, NotQuiescedError, SnapmgrError
from snapmgr.host import machine_id
from snapmgr.jobs.directory import fingerprint
from snapmgr.jobs.source import locate_source
from snapmgr.jobs.sweep import complete, remove_traces, sweep
from snapmgr.jobs.volumes import name_excluded
from snapmgr.manifest import Manifest, Member, Position, QuiesceRecord, new_id
from snapmgr.mysql.freeze import frozen
from snapmgr.mysql.lockless import lockless
from snapmgr.mysql.quiesce import Bounds, locked
from snapmgr.mysql.replication import name_inexact
from snapmgr.mysql.stopped import stopped
from snapmgr.probe import require_answer
from snapmgr.records import FireError
from snapmgr.trigger import Trigger
from snapmgr.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.api import Armed
    from snapmgr.config import Job
    from snapmgr.jobs.context import Context
    from snapmgr.jobs.source import LiveServer, Source
    from snapmgr.manifest import SourcePosition
    from snapmgr.mysql.levels import Choice
    from snapmgr.records import Shot

_SYNC_TRIES = 8
_SYNC_GAIN = 0.9
# A directory has no lock whose time could run out; this bounds a storage call that hangs.
_DIRECTORY_FIRE_S = 3600.0
# How long a helper may take to come back after a failure, when no lock is held any more.
_REAP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a backup would do, for --dry-run."""

    job: str
    path: str
    backend: str
    volumes: tuple[str, ...]
    level: str
    why: str
    excluded: tuple[str, ...]
    absent: tuple[str, ...]
    """Folders of logs that the server writes and that are not in it."""
    warnings: tuple[str, ...]


def plan_backup(ctx: Context, job: Job) -> Plan:
    """Return what `backup` would do; locks nothing, writes nothing."""
    source = locate_source(ctx, job)
    level, why = ("none", "a plain directory") if job.source == "directory" else ("stopped", "asked for by the job")
    if source.choice is not None:
        level, why = source.choice.name, source.choice.why
    return Plan(
        job=job.name,
        path=source.path,
        backend=source.backend.name,
        volumes=tuple(volume.id for volume in source.volumes),
        level=level,
        why=why,
        excluded=name_excluded(source.shares, source.absent),
        absent=source.absent,
        warnings=source.warnings,
    )


def backup(ctx: Context, job: Job) -> Manifest:
    """Take one snapshot for `job` and return its READY manifest.

    First it clears up after earlier runs of this job that crashed. Raises BusyError if another run is active,
    NotQuiescedError if the source was not provably held still (nothing is kept), StorageError or LackingError if the
    storage cannot. Raises LaterStepError if the snapshot is READY but its note could not be stored beside it, or what
    an earlier run left could not be cleared up.
    """
    ctx.catalog.make()
    with ctx.catalog.job_lock(job.name):
        left = sweep(ctx, job.name)
        source = locate_source(ctx, job)
        for warning in source.warnings:
            ctx.tell(f"warning: {warning}")
        for volume in source.volumes:
            require_answer(volume.path)
        manifest = _take(ctx, job, source)
    if left:
        raise LaterStepError(
            f"snapshot {manifest.id} is READY, but what an earlier run left could not be cleared up: "
            + "; ".join(error.message for error in left),
            hint=left[0].hint or "snapmgr doctor",
            snapshot_id=manifest.id,
        )
    return manifest


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    """What the quiesced section brings back."""

    shots: tuple[Shot, ...]
    quiesce: QuiesceRecord
    position: Position | None
    sources: tuple[SourcePosition, ...] = ()


def _take(ctx: Context, job: Job, source: Source) -> Manifest:
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
    )
    backend = source.backend
    ctx.tell(f"{manifest.id}: arming ({backend.name}, {', '.join(volume.id for volume in source.volumes)})")
    with (
        # Left last: what a killed helper had begun can be removed only when we have let go of it, too.
        ExitStack() as afterwards,
        backend.arm(source.volumes, manifest.id) as armed,
        # Before any connection to the database exists, so that the helper has no copy of it.
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
            afterwards.callback(_give_up, ctx, manifest, armed, trigger, error)
            raise
    return complete(ctx, manifest, settle_timeout_s=job.settle_timeout_s)


def _fire(ctx: Context, job: Job, source: Source, armed: Armed, trigger: Trigger) -> _Evidence:
    sync = partial(_sync_until_short, armed, job.sync_target_s)
    if source.live is not None and source.choice is not None:
        if source.choice.level == "crash-consistent":
            evidence = _fire_unlocked(job, source.live, source.choice, trigger, sync)
        else:
            _refuse_long_stall(armed, job.lock_hold_s)
            evidence = _fire_locked(ctx, job, source.live, source.choice, trigger=trigger, sync=sync)
        source.refuse_new_places()
        return evidence
    sync()
    if job.source == "mysql":
        with stopped(source.path) as still:
            shots = trigger.fire(time.monotonic() + _DIRECTORY_FIRE_S)
            source.refuse_new_places()
            return _Evidence(shots=shots, quiesce=still.record(), position=None)
    atomic = source.backend.capabilities(source.volumes).atomicity == "volume"
    unchanged: AbstractContextManager[None] = nullcontext() if atomic else _unchanged(source.path)
    with unchanged:
        shots = trigger.fire(time.monotonic() + _DIRECTORY_FIRE_S)
    proof = "the storage takes the volume in one instant" if atomic else "no file had changed after the copy"
    return _Evidence(
        shots=shots,
        quiesce=QuiesceRecord(level="none", why="a plain directory", proof=proof, attempts=1, waited_s=0.0, held_s=0.0),
        position=None,
    )


def _fire_unlocked(job: Job, live: LiveServer, choice: Choice, trigger: Trigger, sync: Callable[[], None]) -> _Evidence:
    with lockless(live.credentials, live.abilities, choice, _bounds(job), check=live.check, sync=sync) as free:
        shots = trigger.fire(free.deadline)
        free.prove()
    # Its position comes from its own binlog, once that can be read (`snapmgr.jobs.sweep.complete`).
    return _Evidence(shots=shots, quiesce=free.record(), position=None)


def _fire_locked(
    ctx: Context, job: Job, live: LiveServer, choice: Choice, *, trigger: Trigger, sync: Callable[[], None]
) -> _Evidence:
    with locked(
        live.credentials, live.abilities, choice, _bounds(job), check=live.check, sync=sync, tell=ctx.tell
    ) as lock:
        frozen_s = 0.0
        if choice.freeze:
            shots, frozen_s = _fire_frozen(ctx, live, lock.deadline, trigger)
        else:
            shots = trigger.fire(lock.deadline)
        lock.prove()
        lock.release()
    for problem in name_inexact(lock.sources):
        ctx.tell(f"warning: {problem}")
    record = replace(lock.record(), frozen_s=frozen_s)
    call_s = sum(shot.finish_ns - shot.start_ns for shot in shots) / 1e9
    ctx.tell(
        f"{record.level}: waited {format_duration(record.waited_s)}, held {format_duration(record.held_s)} "
        f"(storage call {format_duration(call_s)})"
        + (f", the server stood still for {format_duration(frozen_s)}" if choice.freeze else "")
    )
    return _Evidence(shots=shots, quiesce=record, position=lock.position, sources=lock.sources)


def _bounds(job: Job) -> Bounds:
    return Bounds(
        lock_wait_s=job.lock_wait_s,
        lock_attempts=job.lock_attempts,
        lock_hold_s=job.lock_hold_s,
        blocker_wait_s=job.blocker_wait_s,
        kill_selects_after_s=job.kill_selects_after_s,
    )


def _fire_frozen(ctx: Context, live: LiveServer, deadline: float, trigger: Trigger) -> tuple[tuple[Shot, ...], float]:
    """Fire while the server process stands still; return the shots and for how long it did, in seconds."""
    with frozen(live.process, deadline - time.monotonic(), ctx.catalog.frozen / str(live.process.pid)) as still:
        shots = trigger.fire(still.deadline)
        still.prove()
    return shots, still.frozen_s or 0.0


@contextmanager
def _unchanged(path: str) -> Iterator[None]:
    before = fingerprint(path)
    failure: FireError | None = None
    try:
        yield
    except FireError as error:
        failure = error  # often only because a file vanished under the copy
    if fingerprint(path) != before:
        raise NotQuiescedError(
            f"{path} changed while it was copied file by file" + (f": {failure.message}" if failure else ""),
            hint="stop what writes there, or move it to storage that snapshots a volume in one instant (btrfs)",
        )
    if failure is not None:
        raise failure


def _refuse_long_stall(armed: Armed, lock_hold_s: float) -> None:
    if armed.stall_s > lock_hold_s:
        raise NotQuiescedError(
            f"the storage call is forecast to take {format_duration(armed.stall_s)}, "
            f"longer than the lock may be held ({format_duration(lock_hold_s)})",
            hint="raise lock_hold in the job if writers can stand it",
        )


def _sync_until_short(armed: Armed, target_s: float) -> None:
    """Flush until a flush is quick: what is dirty at the lock is written under the lock.

    Or until it gets no shorter: then somebody dirties as fast as the storage writes, and further flushes only delay us.
    """
    last_s = float("inf")
    for _ in range(_SYNC_TRIES):
        start = time.monotonic()
        armed.sync()
        took_s = time.monotonic() - start
        if took_s <= target_s or took_s > last_s * _SYNC_GAIN:
            return
        last_s = took_s


def _wall_clock(monotonic_ns: int) -> datetime:
    return datetime.now(UTC) - timedelta(microseconds=(time.monotonic_ns() - monotonic_ns) / 1000)


def _give_up(ctx: Context, manifest: Manifest, armed: Armed, trigger: Trigger, error: BaseException) -> None:
    """After a failure remove what was made and write down why; what cannot be done now is left to the sweep."""
    reason = error.message if isinstance(error, SnapmgrError) else str(error) or type(error).__name__
    if not armed.launched:
        ctx.catalog.forget(manifest.id)
        return
    if not trigger.reap(timeout_s=_REAP_S):
        ctx.tell(f"{manifest.id}: the storage call still hangs; the next run removes what it may leave")
        return
    try:
        remove_traces(ctx, manifest)
        ctx.catalog.write(manifest.with_state("broken", reason=reason))
    except SnapmgrError as failure:
        ctx.tell(f"{manifest.id}: could not clear up now ({failure.message}); the next run will")
