"""``snapmgr schedule``."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.output import print_lines, write_result
from snapmgr.cli.params import DurationText, JobName, dry_run_option, json_option
from snapmgr.contract.errors import EXIT_OK, ConfigError, MissingRequirementError, SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from snapmgr.catalog.manifest import Schedule
    from snapmgr.cli.session import Session
    from snapmgr.schedule.machine import Kind, Machine, SchedulePlan

_SHOWN_TIMES = 3


@click.group(
    epilog="""\b
Examples:
  snapmgr schedule install nightly --on-calendar 02:30
  snapmgr schedule show
  snapmgr schedule remove nightly
"""
)
def command() -> None:
    """Run jobs at given times, with systemd or cron."""


@command.command(
    epilog="""\b
Examples:
  snapmgr schedule install nightly --on-calendar 02:30 --dry-run
  snapmgr schedule install nightly --on-calendar "Mon..Fri 02:30" --random-delay 15m
  snapmgr schedule install hourly --on-calendar hourly --cron --yes

\b
EXPRESSION has systemd's syntax, for cron too: see systemd.time(7), CALENDAR EVENTS.
Exit code 7: a requirement is missing: a program (neither systemd nor cron is
here), or the privilege to write the files.
"""
)
@click.argument("job", type=JobName())
@click.option(
    "--on-calendar",
    "expression",
    metavar="EXPRESSION",
    required=True,
    help='When to run, as in "02:30" or "Mon..Fri 22:00".',
)
@click.option(
    "--random-delay", "delay_s", type=DurationText(), default=0.0, help="Start up to this much later (systemd only)."
)
@click.option(
    "--systemd", "kind", flag_value="systemd", help="Write a systemd timer, even if systemd does not run now."
)
@click.option("--cron", "kind", flag_value="cron", help="Write a file in /etc/cron.d, even if systemd runs.")
@click.option("--unchecked", is_flag=True, help="Do not test the command line in an empty environment.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@dry_run_option
@json_option
@click.pass_obj
def install(
    session: Session,
    job: str,
    *,
    expression: str,
    delay_s: float,
    kind: Kind | None,
    unchecked: bool,
    yes: bool,
    dry_run: bool,
) -> int:
    """Run a job at given times.

    Writes a systemd timer, or a cron file if systemd does not run. The files are shown before they are written. Their
    command line is tested with --dry-run in an empty environment, and systemd-analyze checks the units. An existing
    schedule of the job is replaced.
    """
    machine = _machine(session)
    wanted = kind or machine.choose()
    now = datetime.now(UTC)
    plan = _plan(session, machine, job, expression=expression, delay_s=delay_s, kind=wanted, now=now)
    _show_files(session, plan)
    error: SnapmgrError | None = None
    if wanted is None:
        error = MissingRequirementError(
            "no scheduler found: systemd does not run, and there is no cron with /etc/cron.d",
            hint=f"apt-get install cron; or use another scheduler for this command, and set max_age in the job: "
            f"{shlex.join(plan.command)}",
        )
    elif not dry_run:
        _do_install(session, machine, plan, unchecked=unchecked, yes=yes)
    if session.json:
        session.document(
            error.exit_code if error else EXIT_OK,
            error,
            dry_run=dry_run,
            schedule=_schedule(plan.schedule, now),
            files=[{"path": str(path), "text": text} for path, text in plan.files.items()],
            arguments=list(plan.command),
        )
    if error is not None:
        raise error
    return EXIT_OK


def _do_install(session: Session, machine: Machine, plan: SchedulePlan, *, unchecked: bool, yes: bool) -> None:
    from snapmgr.contract.units import format_duration
    from snapmgr.schedule.machine import check_command, install

    _ask(plan, yes=yes)
    if not unchecked:
        session.console.tell("testing the command line in an empty environment")
        check_command(machine, plan)
    install(machine, session.catalog(), plan)
    job = session.config().job(plan.schedule.job)
    absent = {"systemd": not machine.runs_systemd, "cron": not machine.has_cron}
    if absent[plan.schedule.kind]:
        session.console.warn(f"{plan.schedule.kind} does not run here: the job does not start until it does")
    session.console.tell(f"installed; `snapmgr status` reports the job when it is {format_duration(job.grace_s)} late")


def _plan(
    session: Session,
    machine: Machine,
    job: str,
    *,
    expression: str,
    delay_s: float,
    kind: Kind | None,
    now: datetime,
) -> SchedulePlan:
    from snapmgr.catalog.manifest import Schedule
    from snapmgr.schedule.machine import plan_install
    from snapmgr.schedule.times import local_zone, next_time, read_expression

    configured = session.jobs([job])[0]
    expression = read_expression(expression)
    if next_time(expression, now, local_zone()) is None:
        raise ConfigError(f"{expression!r} is always in the past", hint="leave out the year, or name a later one")
    if kind == "cron" and delay_s:
        raise ConfigError("cron has no random delay", hint="leave out --random-delay, or choose another time")
    schedule = Schedule(job=job, kind=kind or "systemd", expression=expression, installed_at=now, delay_s=delay_s)
    return plan_install(machine, configured, schedule, session.config().files[0])


def _show_files(session: Session, plan: SchedulePlan) -> None:
    if session.json:
        return
    # The files are the result, so they go to stdout unchanged.
    for path, text in plan.files.items():
        print_lines([f"# {path}"])
        write_result(text)
        print_lines([""])


def _ask(plan: SchedulePlan, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask", hint="add --yes, or use --dry-run to see only the files")
    paths = " and ".join(str(path) for path in plan.files)
    if not click.confirm(f"Write {paths}?", err=True):
        raise SnapmgrError("nothing was written: you declined")


@command.command(
    epilog="""\b
Examples:
  snapmgr schedule remove nightly
  snapmgr schedule remove nightly --dry-run
"""
)
@click.argument("job", type=JobName())
@dry_run_option
@json_option
@click.pass_obj
def remove(session: Session, job: str, *, dry_run: bool) -> int:
    """Remove a job's schedule. An active run continues; files of others are not touched.

    JOB may be a job that is no longer configured.
    """
    from snapmgr.schedule.machine import installed_files, remove

    machine, catalog = _machine(session), session.catalog()
    known = [schedule.job for schedule in catalog.schedules()[0]]
    if job not in session.config().jobs and job not in known:
        # Only the name of a job may become a path.
        session.jobs([job])
    files = installed_files(machine, job) if dry_run else remove(machine, catalog, job)
    if session.json:
        session.document(EXIT_OK, dry_run=dry_run, job=job, removed=[str(path) for path in files])
    elif files:
        print_lines([f"{'would remove' if dry_run else 'removed'} {path}" for path in files])
    else:
        session.console.tell(f"job {job} has no schedule here")
    return EXIT_OK


@command.command(
    epilog="""\b
Examples:
  snapmgr schedule show
  snapmgr schedule show nightly --json
"""
)
@click.argument("job", required=False, type=JobName())
@json_option
@click.pass_obj
def show(session: Session, job: str | None) -> int:
    """Show schedules, their next times and how the last run ended.

    Only systemd knows how the last run ended. Exit code 1: files are missing, the timer was stopped, or the state
    directory does not know a schedule whose files exist.
    """
    from snapmgr.schedule.machine import installed_files

    machine, catalog = _machine(session), session.catalog()
    if job is not None and job not in session.config().jobs and job not in {one.job for one in catalog.schedules()[0]}:
        session.jobs([job])
    schedules, damaged = catalog.schedules()
    problems = session.damaged(damaged)
    now = datetime.now(UTC)
    documents = [_shown(machine, one, now) for one in schedules if job in {None, one.job}]
    failures = [failure for document in documents for failure in _failures(document)]
    for name in [job] if job is not None else session.config().jobs:
        if name not in {one.job for one in schedules}:
            failures += _unknown(name, installed_files(machine, name))
    for failure in failures:
        session.console.fail(failure)
    code = 1 if problems or failures else EXIT_OK
    if session.json:
        session.document(code, schedules=documents, damaged=problems)
    elif documents:
        print_lines(_lines(documents))
    else:
        session.console.tell(f"job {job} has no schedule here" if job else "no job has a schedule here")
    return code


def _shown(machine: Machine, schedule: Schedule, now: datetime) -> dict[str, Any]:
    from snapmgr.schedule.machine import installed_files, is_waiting, last_result

    there = installed_files(machine, schedule.job)
    missing = [path for path in machine.paths(schedule.job)[schedule.kind] if path not in there]
    return _schedule(schedule, now) | {
        "files": [str(path) for path in there],
        "missing_files": [str(path) for path in missing],
        "waiting": is_waiting(machine, schedule.job) if schedule.kind == "systemd" else None,
        "last_result": last_result(machine, schedule.job) if schedule.kind == "systemd" else None,
    }


def _again(job: str) -> str:
    return f"snapmgr schedule install {job} …, or: snapmgr schedule remove {job}"


def _unknown(job: str, files: list[Path]) -> list[SnapmgrError]:
    """Return the errors for files of a schedule that the state directory does not know."""
    what = "exists, but the state directory does not know it: `snapmgr status` does not watch its runs"
    return [SnapmgrError(f"job {job}: {path} {what}", hint=_again(job)) for path in files[-1:]]


def _failures(document: dict[str, Any]) -> list[SnapmgrError]:
    name = document["job"]
    again = _again(name)
    missing = [
        SnapmgrError(f"job {name}: {path} is missing, or was not written by snapmgr", hint=again)
        for path in document["missing_files"]
    ]
    if missing or document["waiting"] is not False:
        return missing
    return [SnapmgrError(f"job {name}: its timer is stopped, so the job will not run", hint=again)]


def _lines(documents: Iterable[dict[str, Any]]) -> list[str]:
    from snapmgr.cli.documents import show_time

    lines = []
    for one in documents:
        lines += [
            f"{one['job']}: {one['expression']} ({one['kind']})",
            *(f"  file  {path}" for path in one["files"]),
            *(f"  next  {show_time(datetime.fromisoformat(at))}" for at in one["next_times"]),
        ]
        if one["last_result"]:
            lines.append(f"  last  {one['last_result']}")
    return lines


def _schedule(schedule: Schedule, now: datetime) -> dict[str, Any]:
    from snapmgr.cli.documents import fields, iso
    from snapmgr.schedule.times import local_zone, next_times

    return {
        **fields(schedule, "job", "kind", "expression"),
        "random_delay_s": schedule.delay_s,
        "installed_at": iso(schedule.installed_at),
        "next_times": [iso(at) for at in next_times(schedule.expression, now, local_zone(), _SHOWN_TIMES)],
    }


def _machine(session: Session) -> Machine:
    from snapmgr.cli.running import VerboseRunner
    from snapmgr.schedule.machine import Machine

    return Machine(runner=VerboseRunner(session.console.detail))
