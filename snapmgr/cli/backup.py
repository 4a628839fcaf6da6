"""``snapmgr backup``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.failures import foreseen
from snapmgr.cli.output import end_document, print_lines
from snapmgr.cli.params import JobName, dry_run_option, json_option
from snapmgr.cli.signals import Interrupted
from snapmgr.contract.errors import ConfigError, InterruptedRunError, SnapmgrError, gravest
from snapmgr.contract.units import format_duration, format_size

if TYPE_CHECKING:
    from snapmgr.backup.run import BackupPlan
    from snapmgr.cli.session import Session
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.jobrun import Outcome


@click.command(
    epilog="""\b
Examples:
  snapmgr backup nightly
  snapmgr backup --all --verify --prune
  snapmgr backup nightly --dry-run
  snapmgr --quiet backup --all >/dev/null    # in cron: prints only problems

\b
When one job fails, the others still run. The exit code is the most severe one,
in the order 1, 4, 6, 5, 7, 3; --json has the exit code of each job.
"""
)
@click.argument("jobs", metavar="JOB...", nargs=-1, type=JobName())
@click.option("-a", "--all", "all_jobs", is_flag=True, help="Back up every configured job.")
@click.option("--verify", "with_verify", is_flag=True, help="Verify each snapshot, even if after_backup does not.")
@click.option("--prune", "with_prune", is_flag=True, help="Prune afterwards, even if after_backup does not.")
@dry_run_option
@json_option
@click.pass_obj
def command(
    session: Session,
    jobs: tuple[str, ...],
    *,
    all_jobs: bool,
    with_verify: bool,
    with_prune: bool,
    dry_run: bool,
) -> int:
    """Take a snapshot of each JOB, then run its after_backup steps.

    The database is locked only while the storage takes the snapshot. If snapmgr cannot prove that the lock held, it
    deletes the snapshot and exits with 4.
    """
    if all_jobs == bool(jobs):
        raise click.UsageError(
            "Name at least one job, or give --all." if not jobs else "Name jobs or give --all, not both."
        )
    chosen = session.jobs(session.config().jobs if all_jobs else jobs)
    if not chosen:
        raise ConfigError(f"no job is configured in {session.config().files[0]}", hint="see: snapmgr config init")
    ctx = session.context()
    if dry_run:
        return _plan(session, ctx, chosen)
    return _run(session, ctx, chosen, with_verify=with_verify, with_prune=with_prune)


def _plan(session: Session, ctx: Context, jobs: list[Job]) -> int:
    from snapmgr.backup.run import plan_backup
    from snapmgr.cli.documents import backup_plan

    documents: list[dict[str, Any]] = []
    for job in jobs:
        plan, error = None, None
        try:
            plan = plan_backup(ctx, job)
        except Exception as raised:  # noqa: BLE001 - one job's bug must not hide the other plans
            error = foreseen(session, raised)
            _fail(session, job.name, error, several=len(jobs) > 1)
        documents.append({"job": job.name, **end_document(error), "plan": backup_plan(plan)})
        if plan is not None:
            if not session.json:
                print_lines(_plan_lines(plan))
            for warning in plan.warnings:
                session.console.warn(f"job {job.name}: {warning}")
    return _finish(session, documents, dry_run=True)


def _run(session: Session, ctx: Context, jobs: list[Job], *, with_verify: bool, with_prune: bool) -> int:
    from snapmgr.jobrun import Outcome, run_job

    documents: list[dict[str, Any]] = []
    interruption: InterruptedRunError | None = None
    for job in jobs:
        if interruption is not None:
            documents.append(_run_document(session, Outcome(job=job.name)) | {"exit_code": None})
            continue
        try:
            outcome = run_job(
                ctx,
                job,
                with_verify=with_verify or "verify" in job.after_backup,
                with_prune=with_prune or "prune" in job.after_backup,
            )
        except Interrupted as raised:
            interruption = InterruptedRunError(
                str(raised), hint="unfinished work is undone, or completed by the next run of the job"
            )
            outcome = Outcome(job=job.name, error=interruption)
        except Exception as raised:  # noqa: BLE001 - one job's bug must not keep the others from being backed up
            outcome = Outcome(job=job.name, error=foreseen(session, raised))
        if outcome.error is not None:
            _fail(session, job.name, outcome.error, several=len(jobs) > 1)
        if outcome.manifest is not None and not session.json:
            print_lines([_summary(outcome)])
        documents.append(_run_document(session, outcome))
    return _finish(session, documents, dry_run=False)


def _finish(session: Session, documents: list[dict[str, Any]], *, dry_run: bool) -> int:
    code = gravest([document["exit_code"] for document in documents if document["exit_code"] is not None])
    if session.json:
        session.document(code, dry_run=dry_run, jobs=documents)
    return code


def _fail(session: Session, job: str, error: SnapmgrError, *, several: bool) -> None:
    session.console.fail(SnapmgrError(f"job {job}: {error.message}", hint=error.hint) if several else error)


def _summary(outcome: Outcome) -> str:
    manifest = outcome.manifest
    if manifest is None:
        raise AssertionError("only a snapshot has a summary")
    quiesce = manifest.quiesce
    parts = [f"{outcome.job}: {manifest.id} {manifest.state}"]
    if quiesce is not None and quiesce.level == "crash-consistent":
        parts.append("crash-consistent: without a lock")
    elif quiesce is not None and quiesce.level != "none":
        from snapmgr.cli.documents import show_held

        frozen = f", server frozen {format_duration(quiesce.frozen_s)}" if quiesce.level == "freeze-process" else ""
        held = show_held(quiesce.level, quiesce.held_s)
        parts.append(f"{quiesce.level}: waited {format_duration(quiesce.waited_s)}, held {held}{frozen}")
    if manifest.physical is not None:
        record = manifest.physical
        applied = f", applied in {format_duration(record.apply_s)}" if record.base else ""
        parts.append(
            f"{record.kind}, {format_size(record.fetched_bytes)} fetched in {format_duration(record.copy_s)}{applied}"
        )
    if outcome.verification is not None:
        partly = "partly " if outcome.verification.result == "partly" else ""
        parts.append(f"{partly}verified in {format_duration(outcome.verification.duration_s)}")
    if outcome.pruned is not None:
        parts.append(f"{len(outcome.pruned.deleted)} pruned")
    return "; ".join(parts)


def _run_document(session: Session, outcome: Outcome) -> dict[str, Any]:
    document: dict[str, Any] = {"job": outcome.job, **end_document(outcome.error)}
    if not session.json:
        return document
    from snapmgr.catalog.store import Entry
    from snapmgr.cli.documents import pruned, snapshot

    taken = None
    if outcome.manifest is not None:
        taken = snapshot(Entry(manifest=outcome.manifest, verification=outcome.verification), ())
    return document | {"snapshot": taken, "pruned": pruned(outcome.pruned)}


def _plan_lines(plan: BackupPlan) -> list[str]:
    volumes = ", ".join(volume.shown for volume in plan.volumes)
    lines = [
        f"{plan.job}: would snapshot {plan.path} with {plan.backend}, volume {volumes}",
        f"  level {plan.level}: {plan.why}",
    ]
    lines += [f"  not included: {path}" for path in plan.excluded]
    return lines + [f"  not included: the logs in {path}" for path in plan.absent]
