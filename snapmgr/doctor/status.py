"""Judges from the state directory alone whether every job has its snapshots, for monitoring."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from snapmgr.capacity.series import capacity_limits, readings_of, was_overflowed
from snapmgr.catalog.inplace import MERGED
from snapmgr.catalog.manifest import GONE
from snapmgr.contract.errors import ConfigError
from snapmgr.contract.units import format_duration
from snapmgr.doctor.overflow import ENLARGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import tzinfo

    from snapmgr.capacity.series import PoolCapacity, Reading
    from snapmgr.catalog.manifest import Schedule
    from snapmgr.catalog.summary import Summary
    from snapmgr.config.model import Job
    from snapmgr.contract.records import PoolKey

# Clocks are adjusted by less than this; a larger difference means that a clock was wrong.
_CLOCK_SLACK = timedelta(minutes=5)
# AccuracySec of our timers.
_ACCURACY_S = 60.0


class Problem(Struct, frozen=True, kw_only=True):
    """A problem that the user should check."""

    kind: Literal[
        "overdue", "never", "failed", "lost", "unfinished", "verification", "capacity", "clock", "schedule", "state"
    ]
    what: str
    hint: str


class JobStatus(Struct, frozen=True, kw_only=True):
    """The status of a job. All times are UTC."""

    job: str
    problems: tuple[Problem, ...]
    watched: bool
    """Whether a schedule or `max_age` says when a snapshot is due; otherwise the job is never overdue."""
    newest: Summary | None
    """The newest READY snapshot; those with a time in the future do not count."""
    age_s: float | None
    """The age of the newest snapshot."""
    verified: Summary | None
    """The newest READY snapshot that is VERIFIED."""
    failed: Summary | None
    """The newest run, if it failed (BROKEN) and no newer one is READY."""
    schedule: Schedule | None
    next_due: datetime | None
    overdue_since: datetime | None
    """The due time that was missed."""
    gauges: tuple[Reading, ...] = ()
    """The last reading of how full the storage of its READY snapshots is, if it can overflow."""


def judge(
    job: Job,
    entries: Iterable[Summary],
    schedule: Schedule | None,
    now: datetime,
    zone: tzinfo,
    *,
    capacities: Mapping[PoolKey, PoolCapacity] | None = None,
) -> JobStatus:
    """Return the status of `job` at `now`. Pure.

    Args:
        job: its configuration: `max_age_s`, `grace_s`, `after_backup`.
        entries: the snapshots of this job, oldest first.
        schedule: its schedule, if it has one.
        now: an aware time.
        zone: the machine's time zone, in which the schedule's times are.
        capacities: how full its storage is.

    A scheduled job is due at the first time of its schedule after its newest READY snapshot, or after the schedule was
    installed. It is overdue when `grace_s` and the timer's possible delay have passed without a newer snapshot. A time
    in the future does not count, so that a clock that was set back hides nothing.
    """
    horizon = now + _CLOCK_SLACK
    entries = list(entries)
    ready = [entry for entry in entries if entry.state == "ready"]
    past = [entry for entry in ready if entry.at <= horizon]
    newest = past[-1] if past else None
    problems: list[Problem] = []
    if len(past) < len(ready):
        ahead = max(ready, key=lambda one: one.at)
        problems.append(_future(f"snapshot {ahead.id} was taken", ahead.at))
    next_due, missed = None, None
    if schedule is not None:
        if schedule.installed_at > horizon:
            problems.append(_future("the schedule was installed", schedule.installed_at))
        try:
            next_due, missed = _due(job, newest, schedule, now, zone)
        except ConfigError as error:
            problems.append(Problem(kind="schedule", what=error.message, hint=f"snapmgr schedule install {job.name} …"))
    if newest is not None and job.max_age_s is not None:
        end = newest.at + timedelta(seconds=job.max_age_s)
        if end < now:
            missed = end if missed is None else min(missed, end)
    problems += _late(job, newest=newest, schedule=schedule, next_due=next_due, missed=missed, now=now)
    failed = _failed(entries, newest)
    if failed is not None:
        problems.append(_failure(job, failed))
    problems += _unfinished(job, entries, newest, now)
    problems += _unverified(job, past, now)
    limits = capacity_limits(job, now, next_due)
    gauges = readings_of(ready, capacities or {}, limits, now)
    problems += [_capacity_problem(job, one) for one in gauges if one.alarm is not None]
    return JobStatus(
        job=job.name,
        problems=tuple(problems),
        watched=schedule is not None or job.max_age_s is not None,
        newest=newest,
        age_s=max((now - newest.at).total_seconds(), 0.0) if newest is not None else None,
        verified=next((entry for entry in reversed(past) if entry.verified), None),
        failed=failed,
        schedule=schedule,
        next_due=next_due,
        overdue_since=missed,
        gauges=gauges,
    )


def _backup_command(job: Job) -> str:
    return f"snapmgr backup {job.name}"


def _due(
    job: Job, newest: Summary | None, schedule: Schedule, now: datetime, zone: tzinfo
) -> tuple[datetime | None, datetime | None]:
    """Return when the job is due next, and the due time that it has missed, if any."""
    from snapmgr.schedule.times import next_time  # noqa: PLC0415 - without a schedule it loads time zones in vain

    known = [schedule.installed_at] if newest is None else [schedule.installed_at, newest.at]
    past = [at for at in known if at <= now + _CLOCK_SLACK]
    # If all times are in the future, count from now; `judge` reports the clock as a problem.
    due = next_time(schedule.expression, max(past, default=now), zone)
    if due is not None and due + timedelta(seconds=job.grace_s + schedule.delay_s + _ACCURACY_S) < now:
        return next_time(schedule.expression, now, zone), due
    return due, None


def _late(
    job: Job,
    *,
    newest: Summary | None,
    schedule: Schedule | None,
    next_due: datetime | None,
    missed: datetime | None,
    now: datetime,
) -> list[Problem]:
    hint = f"{_backup_command(job)}; see also: snapmgr schedule show {job.name}" if schedule else _backup_command(job)
    if newest is None and (missed is not None or next_due is None):
        return [
            Problem(
                kind="never",
                what="there is no snapshot" + (f", and one was due at {_shown(missed)}" if missed else ""),
                # A state directory that was lost looks the same as a new one.
                hint=f"snapmgr doctor {job.name}, in case the state directory was lost; then: {hint}",
            )
        ]
    if missed is None:
        return []
    late = format_duration((now - missed).total_seconds())
    return [Problem(kind="overdue", what=f"a snapshot has been overdue since {_shown(missed)} ({late})", hint=hint)]


def _failed(entries: list[Summary], newest: Summary | None) -> Summary | None:
    # A snapshot that an in-place restore consumed is not a failure.
    broken = [entry for entry in entries if entry.state == "broken" and not (entry.reason or "").startswith(MERGED)]
    # In the order of the runs, which no clock changes.
    last = broken[-1] if broken else None
    if last is None or (newest is not None and entries.index(newest) > entries.index(last)):
        return None
    return last


def _failure(job: Job, failed: Summary) -> Problem:
    if was_overflowed(failed):
        return Problem(
            kind="lost",
            what=f"the newest snapshot ({failed.id}) is lost: {failed.reason}",
            hint=_backup_command(job),
        )
    reason = failed.reason or "the reason is unknown"
    if reason == GONE:
        what = f"the newest snapshot ({failed.id}) was READY, and its storage was removed later"
        return Problem(kind="lost", what=what, hint=_backup_command(job))
    return Problem(kind="failed", what=f"the newest run ({failed.id}) failed: {reason}", hint=_backup_command(job))


def _capacity_problem(job: Job, one: Reading) -> Problem:
    if one.series.full_since is not None and one.series.native_id:
        hint = f"snapmgr doctor {job.name} --fix"
        return Problem(kind="lost", what=f"{one.series.snapshot_id} is lost: {one.alarm}", hint=hint)
    hint = (
        ENLARGE
        if one.series.native_id
        else f"enlarge it, or: snapmgr prune {job.name}; see docs/how-to/watch-capacity.md"
    )
    return Problem(kind="capacity", what=one.alarm or "", hint=hint)


def _unfinished(job: Job, entries: list[Summary], newest: Summary | None, now: datetime) -> list[Problem]:
    """Return runs that should have ended: they hang, or were killed and no later run has cleaned up."""
    patience = timedelta(seconds=job.grace_s + job.settle_timeout_s)
    return [
        Problem(
            kind="unfinished",
            what=f"the run {entry.id} has not ended",
            hint=f"snapmgr doctor {job.name}",
        )
        for entry in entries
        if entry.state == "pending"
        and entry.created_at + patience < now
        and (newest is None or entries.index(newest) < entries.index(entry))
    ]


def _unverified(job: Job, ready: list[Summary], now: datetime) -> list[Problem]:
    tried = [entry for entry in ready if entry.result is not None]
    if tried and not tried[-1].verified:
        snapshot_id = tried[-1].id
        result = "failed" if tried[-1].failed else "could not look at everything"
        return [
            Problem(
                kind="verification",
                what=f"the newest verification, of {snapshot_id}, {result}",
                hint=f"snapmgr show {snapshot_id}; snapmgr verify {snapshot_id}",
            )
        ]
    if "verify" not in job.after_backup or not ready:
        return []
    patience = timedelta(seconds=job.grace_s + job.settle_timeout_s + job.verify.time_limit_s)
    # If the job runs often, its newest snapshot is always too young for a verification.
    due = [entry for entry in ready if entry.at + patience < now]
    if due and not any(entry.result is not None for entry in ready[ready.index(due[-1]) :]):
        snapshot_id = due[-1].id
        return [
            Problem(
                kind="verification",
                what=f"the job verifies each snapshot, but {snapshot_id} is not verified",
                hint=f"snapmgr verify {ready[-1].id}",
            )
        ]
    return []


def _future(what: str, at: datetime) -> Problem:
    return Problem(
        kind="clock",
        what=f"{what} at {_shown(at)}, which is in the future",
        hint="the clock was wrong then, or is wrong now: see `date` and `timedatectl`",
    )


def _shown(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
