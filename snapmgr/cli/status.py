"""``snapmgr status``."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict, replace

from snapmgr.cli.output import format_table, print_lines
from snapmgr.cli.params import JobName, json_option
from snapmgr.contract.errors import EXIT_OK, ConfigError, NotFoundError, StorageError
from snapmgr.contract.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

    from snapmgr.catalog.manifest import Lease
    from snapmgr.catalog.store import Catalog
    from snapmgr.catalog.summary import Summary
    from snapmgr.cli.session import Session
    from snapmgr.doctor.status import JobStatus, Problem

_HEADS = ("JOB", "STATUS", "NEWEST TAKEN", "AGE", "NEWEST VERIFIED TAKEN", "NEXT")


@click.command(
    epilog="""\b
Examples:
  snapmgr status
  snapmgr status nightly --json
  snapmgr status >/dev/null || echo "look at the backups"

\b
Exit codes for monitoring: 0 no problem; 1 a snapshot is overdue or missing, the
newest run or the newest verification failed, storage is running full, a clock
is wrong, a file is damaged, or nothing can be written to the state directory;
2 the configuration is invalid; 7 a requirement is missing: the privilege to
read the state directory.
"""
)
@click.argument("jobs", metavar="[JOB...]", nargs=-1, type=JobName())
@json_option
@click.pass_obj
def command(session: Session, jobs: tuple[str, ...]) -> int:
    """Report whether every job's snapshots are up to date.

    The first line is the verdict. A job is overdue if its schedule or max_age requires a snapshot that does not exist.
    status reads the state directory, tries to write there, and reads how full the snapshots' storage is: it is quick,
    takes no lock, and queries no server. Where the storage does not answer, and without root, it judges the last
    sample. NEWEST VERIFIED TAKEN is when the newest VERIFIED snapshot was taken: no later change is proved to be
    restorable.
    """
    from snapmgr.capacity.read import pools_of, read_capacities, sample_pools
    from snapmgr.cli.documents import mount
    from snapmgr.doctor.status import judge

    chosen = session.jobs(jobs or session.config().jobs)
    if not chosen:
        raise ConfigError(f"no job is configured in {session.config().files[0]}", hint="see: snapmgr config init")
    ctx = session.context()
    catalog = ctx.catalog
    snapshots, damaged = catalog.summaries()
    schedules, damaged_schedules = catalog.schedules()
    leases, damaged_leases = catalog.leases()
    clones = [lease for lease in leases if lease.why == "clone"]
    if jobs and clones:
        from snapmgr.doctor.rebuild import job_of

        clones = [lease for lease in clones if job_of(lease.snapshot_id) in jobs]
    problems = session.damaged([*damaged, *damaged_schedules, *damaged_leases])
    by_job = {schedule.job: schedule for schedule in schedules}
    now, zone = datetime.now(UTC), _zone() if schedules else UTC
    of_job: dict[str, list[Summary]] = {job.name: [] for job in chosen}
    for one in snapshots:
        if one.job in of_job:
            of_job[one.job].append(one)
    ready = [one for listed in of_job.values() for one in listed if one.state == "ready"]
    pools = pools_of(ready)
    capacities = read_capacities(catalog, pools)
    # Without root most storage cannot be read, nor a sample kept.
    if os.access(catalog.path, os.W_OK):
        capacities |= sample_pools(ctx, pools)
    unwritable = list(_unwritable(catalog))
    found = []
    for job in chosen:
        status = judge(job, of_job[job.name], by_job.get(job.name), now, zone, capacities=capacities)
        found.append(replace(status, problems=(*unwritable, *status.problems)))
    orphans = [] if jobs else [name for name in by_job if name not in session.config().jobs]
    bad = [one for one in found if one.problems]
    code = 1 if bad or problems or orphans else EXIT_OK
    if session.json:
        session.document(
            code,
            jobs=[_document(catalog, one, now) for one in found],
            clones=[mount(lease) for lease in clones],
            damaged=problems,
            scheduled_but_not_configured=orphans,
        )
    else:
        filled = [line for one in found for line in _capacity_lines(one, now)]
        print_lines([*_lines(found, bad, len(problems), orphans), *filled, *map(_clone_line, clones)])
    return code


def _zone() -> tzinfo:
    from snapmgr.schedule.times import local_zone

    return local_zone()


def _unwritable(catalog: Catalog) -> Iterator[Problem]:
    """Yield why no job can keep the record of a snapshot."""
    from snapmgr.doctor.status import Problem
    from snapmgr.system.probe import require_writable

    try:
        require_writable(catalog.path)
    except StorageError as error:
        yield Problem(kind="state", what=f"the next backup fails: {error.message}", hint=error.hint or "snapmgr doctor")


def _lines(found: list[JobStatus], bad: list[JobStatus], damaged: int, orphans: list[str]) -> list[str]:
    from snapmgr.cli.documents import show_time

    lines = [_verdict(found, bad, damaged, orphans)]
    for one in bad:
        for problem in one.problems:
            lines += [f"{one.job}: {problem.what}", f"  try: {problem.hint}"]
    for name in orphans:
        lines += [f"{name}: is scheduled, but no longer configured", f"  try: snapmgr schedule remove {name}"]
    rows = [
        (
            one.job,
            "PROBLEM" if one.problems else "ok",
            show_time(one.newest.at) if one.newest else "-",
            format_duration(one.age_s) if one.age_s is not None else "-",
            show_time(one.verified.at) if one.verified else "-",
            show_time(one.next_due) if one.next_due else "-",
        )
        for one in found
    ]
    return [*lines, *format_table(_HEADS, rows)]


def _capacity_lines(one: JobStatus, now: datetime) -> Iterator[str]:
    """Yield how full the storage is that a job's snapshots share, and which snapshot will be full first."""
    from snapmgr.capacity.series import describe

    calm = [reading for reading in one.gauges if reading.alarm is None and reading.series.last is not None]
    own = [reading for reading in calm if reading.series.native_id]
    first = sorted(own, key=lambda reading: reading.forecast.full_at or datetime.max.replace(tzinfo=UTC))
    for reading in (*(reading for reading in calm if not reading.series.native_id), *first[:1]):
        yield f"{one.job}: {describe(reading.series, reading.forecast, now)}"


def _clone_line(lease: Lease) -> str:
    from snapmgr.cli.documents import show_server

    return f"clone of {lease.snapshot_id} at {lease.point}: {show_server(lease)}"


def _verdict(found: list[JobStatus], bad: list[JobStatus], damaged: int, orphans: list[str]) -> str:
    """Return the verdict in one sentence, for a monitoring system."""
    if bad:
        first = bad[0]
        more = f"; {len(bad)} of {len(found)} jobs have problems" if len(bad) > 1 else ""
        return f"PROBLEM: {first.job}: {first.problems[0].what}{more}"
    if damaged:
        return f"PROBLEM: {damaged} {'files' if damaged > 1 else 'file'} of the state directory cannot be read"
    if orphans:
        return f"PROBLEM: {orphans[0]} is scheduled, but no longer configured"
    count = f"{len(found)} {'jobs' if len(found) > 1 else 'job'}"
    oldest_s = max((one.age_s for one in found if one.age_s is not None), default=None)
    age = f", the newest snapshot of each at most {format_duration(oldest_s)} old" if oldest_s is not None else ""
    unwatched = [one.job for one in found if not one.watched]
    but = f"; neither scheduled nor with max_age: {', '.join(unwatched)}" if unwatched else ""
    return f"OK: {count}{age}{but}"


def _snapshot(catalog: Catalog, one: Summary | None) -> dict[str, Any] | None:
    from snapmgr.cli.documents import snapshot

    with suppress(NotFoundError):  # deleted meanwhile
        return snapshot(catalog.load(one.id), ()) if one is not None else None
    return None


def _document(catalog: Catalog, one: JobStatus, now: datetime) -> dict[str, Any]:
    from snapmgr.cli.documents import capacity, iso

    return {
        "job": one.job,
        "ok": not one.problems,
        "watched": one.watched,
        "problems": [asdict(problem) for problem in one.problems],
        "newest_ready": _snapshot(catalog, one.newest),
        "age_s": one.age_s,
        "newest_verified": _snapshot(catalog, one.verified),
        "newest_failed": _snapshot(catalog, one.failed),
        "expression": one.schedule.expression if one.schedule else None,
        "next_due": iso(one.next_due),
        "overdue_since": iso(one.overdue_since),
        "capacity": [capacity(reading, now) for reading in one.gauges],
    }
