"""Takes the snapshot of a server's data while they are held still: locked, frozen, stopped, or watched."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.backup.fire import UNLOCKED_FIRE_S, Evidence
from snapmgr.contract.errors import NotQuiescedError
from snapmgr.contract.units import format_duration
from snapmgr.mysql.connect.client import ConnectionLostError, connect
from snapmgr.mysql.lock.quiesce import LockBounds, NotGrantedError, locked
from snapmgr.mysql.lock.replication import name_inexact
from snapmgr.source.locate_mysql import refuse_new_places

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.backup.trigger import Trigger
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.contract.backend import Armed
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.lock.heldlock import HeldLock
    from snapmgr.mysql.lock.levels import LockChoice
    from snapmgr.source.located import SnapshotSource
    from snapmgr.source.server import LiveServer

# Time for one attempt to lock beside waiting for the lock: checking the server, flushing dirty data.
_TRY_S = 30.0


def fire_mysql(
    ctx: Context,
    job: Job,
    source: SnapshotSource,
    *,
    armed: Armed,
    trigger: Trigger,
    sync: Callable[[], None],
) -> Evidence:
    """Hold the server still in the way that it needs, let the helper take the snapshot, and release the server.

    `sync` flushes dirty data. Raises NotQuiescedError if the server was not provably held still,
    MissingRequirementError, and the storage's errors.
    """
    if source.live is None or source.choice is None:
        from snapmgr.mysql.lock.stopped import stopped  # noqa: PLC0415 - few jobs have a stopped server

        sync()
        with stopped(source.path) as stop:
            trigger.fire(time.monotonic() + UNLOCKED_FIRE_S)
            refuse_new_places(source)
            return Evidence(shots=trigger.shots(), quiesce=stop.record(), position=None)
    with _stopped_applier(ctx, job, source.live):
        if source.choice.level == "crash-consistent":
            evidence = _fire_unlocked(job, source.live, source.choice, trigger, sync)
        else:
            evidence = _fire_locked(ctx, job, source.live, source.choice, armed=armed, trigger=trigger, sync=sync)
    refuse_new_places(source)
    return evidence


def _fire_unlocked(
    job: Job, live: LiveServer, choice: LockChoice, trigger: Trigger, sync: Callable[[], None]
) -> Evidence:
    from snapmgr.mysql.lock.lockless import lockless  # noqa: PLC0415 - most snapshots have a lock

    # Then a new engine's table or another durability counts as well.
    live = replace(live, lockless=True)
    with lockless(live.credentials, live.abilities, choice, _bounds(job), check=live.check, sync=sync) as free:
        trigger.fire(free.deadline)
        free.prove()
    # The position comes from the binlog in the snapshot, later (`snapmgr.backup.publish.publish`).
    return Evidence(shots=trigger.shots(), quiesce=free.record(), position=None)


def _fire_locked(
    ctx: Context,
    job: Job,
    live: LiveServer,
    choice: LockChoice,
    *,
    armed: Armed,
    trigger: Trigger,
    sync: Callable[[], None],
) -> Evidence:
    """Fire under the lock; if that is not free at once and none is needed, without one."""
    bounds = _bounds(job) if choice.instead is None else _bounds(job).brief
    refused_s = None
    with ExitStack() as stack:
        try:
            _refuse_long_stall(armed, job.lock_hold_s)
            lock = stack.enter_context(
                locked(live.credentials, live.abilities, choice, bounds, check=live.check, sync=sync, tell=ctx.tell)
            )
        except NotQuiescedError as error:
            if choice.instead is None:
                raise
            refused_s = error.stall_s if isinstance(error, NotGrantedError) else 0.0
        else:
            return _fire_under(ctx, job, live, lock, trigger)
    ctx.tell(f"the {choice.level} is not free now; none is needed: all tables are InnoDB on one volume")
    evidence = _fire_unlocked(job, live, choice.instead, trigger, sync)
    return replace(evidence, quiesce=replace(evidence.quiesce, attempts=2, stall_s=refused_s))


def _fire_under(ctx: Context, job: Job, live: LiveServer, lock: HeldLock, trigger: Trigger) -> Evidence:
    choice = lock.choice
    if job.position == "exact":
        if inexact := name_inexact(lock.sources):
            raise NotQuiescedError(
                f'position = "exact": {"; ".join(inexact)}',
                hint='set stop_replica = true in the job, or position = "best"',
            )
        if lock.position is None and live.abilities.binlog:
            raise NotQuiescedError(
                'position = "exact": no position is exact now',
                hint='set stop_replica = true in the job (on a replica), or position = "best"',
            )
    frozen_s = 0.0
    if choice.freeze:
        lock.expect_freeze()
        frozen_s = _fire_frozen(ctx, live, lock.deadline, trigger)
    else:
        trigger.fire(lock.deadline)
    lock.prove()
    lock.release()
    if choice.level == "global-read-lock":
        _check_again(live, lock.connection)
    for problem in name_inexact(lock.sources):
        ctx.tell(f"warning: {problem}")
    record = replace(lock.record(), frozen_s=frozen_s)
    shots = trigger.shots()
    call_s = sum(shot.finish_ns - shot.start_ns for shot in shots) / 1e9
    ctx.tell(
        f"{record.level}: waited {format_duration(record.waited_s)}, held {format_duration(record.held_s)} "
        f"(storage call {format_duration(call_s)})"
        + (f", the server was frozen for {format_duration(frozen_s)}" if choice.freeze else "")
    )
    return Evidence(shots=shots, quiesce=record, position=lock.position, sources=lock.sources)


def _check_again(live: LiveServer, connection: Connection) -> None:
    """Check the layout after a lock that did not block DDL while the layout was read before it."""
    try:
        live.check(connection)
    except ConnectionLostError:
        with connect(live.credentials) as another:
            live.check(another)


def _stopped_applier(ctx: Context, job: Job, live: LiveServer) -> AbstractContextManager[None]:
    if not job.stop_replica or not live.channels:
        return nullcontext()
    # Only for replicas that are to be stopped; and while one is stopped, nothing is to be read from a slow disk.
    import random  # noqa: F401, PLC0415

    from snapmgr.mysql.lock import lockless, probe_mariadb, probe_mysql  # noqa: F401, PLC0415
    from snapmgr.mysql.lock.applier import applier_stopped  # noqa: PLC0415

    # All waiting before the lock is granted, and the lock itself.
    tries_s = job.lock_attempts * (job.max_stall_s + _TRY_S)
    return applier_stopped(
        live.credentials,
        live.abilities,
        time_limit_s=job.blocker_wait_s + tries_s + job.lock_hold_s,
        record=ctx.catalog.appliers / str(live.process.pid),
        check=live.check,
    )


def _bounds(job: Job) -> LockBounds:
    return LockBounds(
        max_stall_s=job.max_stall_s,
        lock_attempts=job.lock_attempts,
        lock_hold_s=job.lock_hold_s,
        blocker_wait_s=job.blocker_wait_s,
        kill_selects_after_s=job.kill_selects_after_s,
        blocker_age_s=job.blocker_age_s,
    )


def _fire_frozen(ctx: Context, live: LiveServer, deadline: float, trigger: Trigger) -> float:
    """Fire while the server process is frozen; return for how long it was, in seconds."""
    # Loaded long before the lock, by `locate_mysql`.
    from snapmgr.mysql.lock.freeze import frozen  # noqa: PLC0415

    with frozen(live.process, deadline - time.monotonic(), ctx.catalog.frozen / str(live.process.pid)) as freeze:
        trigger.fire(freeze.deadline)
        freeze.prove()
    return freeze.frozen_s or 0.0


def _refuse_long_stall(armed: Armed, lock_hold_s: float) -> None:
    if armed.stall_s > lock_hold_s:
        raise NotQuiescedError(
            f"the storage call is forecast to take {format_duration(armed.stall_s)}, "
            f"longer than the lock may be held ({format_duration(lock_hold_s)})",
            hint="raise lock_hold in the job if writers can wait that long",
        )
