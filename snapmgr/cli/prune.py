"""``snapmgr prune``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.failures import foreseen
from snapmgr.cli.output import error_document, format_table, print_lines
from snapmgr.cli.params import JobName, dry_run_option, json_option
from snapmgr.contract.errors import EXIT_OK, SnapmgrError, gravest

if TYPE_CHECKING:
    from snapmgr.cli.session import Session
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.contract.records import Found, Pool
    from snapmgr.keep.prune import Pruned
    from snapmgr.retention import PrunePlan

# In a snapshot's id its time and its random part follow the job.
_ID_TAIL = 2


@click.command(
    epilog="""\b
Examples:
  snapmgr prune --dry-run
  snapmgr prune nightly
"""
)
@click.argument("jobs", metavar="[JOB...]", nargs=-1, type=JobName())
@dry_run_option
@json_option
@click.pass_obj
def command(session: Session, jobs: tuple[str, ...], *, dry_run: bool) -> int:
    """Delete snapshots that no retention rule keeps.

    Without JOB all jobs are pruned. Each snapshot is printed with the rules that keep it. Never deleted are the newest
    READY snapshot, the newest VERIFIED one, and those that are pinned, mounted or being read. A job without rules
    keeps everything. A snapshot that somebody changed by hand is left to you.
    """
    chosen = session.jobs(jobs or session.config().jobs)
    ctx = session.context()
    if not jobs:
        _name_orphans(session, ctx)
    seen: dict[Pool, tuple[Found, ...]] = {}
    documents = [_prune(session, ctx, job, seen, dry_run=dry_run) for job in chosen]
    code = gravest([document["exit_code"] for document in documents])
    if session.json:
        session.document(code, dry_run=dry_run, jobs=documents)
    return code


def _name_orphans(session: Session, ctx: Context) -> None:
    orphans: dict[str, int] = {}
    for name in ctx.catalog.names():
        job, *rest = name.rsplit(".", 2)
        if len(rest) == _ID_TAIL and job not in ctx.config.jobs:
            orphans[job] = orphans.get(job, 0) + 1
    for job, count in orphans.items():
        session.console.warn(f"job {job} is no longer configured: its snapshots ({count}) are not changed")


def _prune(
    session: Session, ctx: Context, job: Job, seen: dict[Pool, tuple[Found, ...]], *, dry_run: bool
) -> dict[str, Any]:
    from snapmgr.cli.documents import decisions, pruned
    from snapmgr.keep.prune import plan_prune, prune

    document: dict[str, Any] = {"job": job.name}
    document |= {"keep": [], "delete": [], "deleted": [], "kept_in_use": [], "kept_altered": [], "failures": []}
    errors: list[SnapmgrError] = []
    try:
        if dry_run:
            plan, done = plan_prune(ctx, job, datetime.now(UTC), seen), None
            document |= {"keep": decisions(plan.keep), "delete": decisions(plan.delete)}
        else:
            done = prune(ctx, job)
            plan = done.plan
            document |= pruned(done) or {}
            errors += done.failures
        if not session.json:
            print_lines(_lines(job.name, plan, done))
    except Exception as raised:  # noqa: BLE001 - one job's bug must not stop the others
        errors.append(foreseen(session, raised))
    for error in errors:
        session.console.fail(SnapmgrError(f"job {job.name}: {error.message}", hint=error.hint))
    code = gravest([error.exit_code for error in errors]) if errors else EXIT_OK
    return document | {"exit_code": code, "error": error_document(errors[0] if errors else None)}


def _lines(job: str, plan: PrunePlan, done: Pruned | None) -> list[str]:
    rows = [("keep", decision.id, ", ".join(decision.reasons)) for decision in plan.keep]
    rows += [(_fate(decision.id, done), decision.id, ", ".join(decision.reasons)) for decision in plan.delete]
    if not rows:
        return [f"{job}: no snapshots"]
    return format_table(("", "SNAPSHOT", "WHY"), rows)


def _fate(snapshot_id: str, done: Pruned | None) -> str:
    if done is None:
        return "would delete"
    if snapshot_id in done.deleted:
        return "deleted"
    if snapshot_id in done.kept_altered:
        return "changed"
    return "in use" if snapshot_id in done.kept_in_use else "FAILED"
