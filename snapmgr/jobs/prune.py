"""Deleting what no retention rule keeps, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from snapmgr.errors import InUseError, SnapmgrError
from snapmgr.jobs.sweep import delete, sweep
from snapmgr.retention import Candidate, Policy, plan

if TYPE_CHECKING:
    from snapmgr.catalog import Entry
    from snapmgr.config import Job
    from snapmgr.jobs.context import Context
    from snapmgr.retention import Plan

# A BROKEN manifest has no storage; it stays for people to read, but not for ever.
_BROKEN_KEPT = timedelta(days=30)


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What a prune did (or would do)."""

    plan: Plan
    deleted: tuple[str, ...]
    kept_in_use: tuple[str, ...]
    failures: tuple[SnapmgrError, ...]


def plan_prune(ctx: Context, job: Job, now: datetime) -> Plan:
    """Return what the job's policy keeps and deletes, with reasons; changes nothing."""
    in_use = {lease.record.ref.snapshot_id for lease in ctx.catalog.leases()[0]}
    candidates = [
        Candidate(
            id=entry.manifest.id,
            taken_at=entry.manifest.taken_at or entry.manifest.created_at,
            ready=True,
            verified=entry.verified,
            pinned=entry.manifest.pinned,
            in_use=entry.manifest.id in in_use,
        )
        for entry in _ready(ctx, job)
    ]
    return plan(candidates, Policy(**msgspec.structs.asdict(job.retention)), now)


def prune(ctx: Context, job: Job) -> Pruned:
    """Delete what the job's policy does not keep, newest rule first; what is in use by then is kept and named.

    Raises BusyError if a run of the job is active. A failed deletion does not stop the others.
    """
    ctx.catalog.make()
    now = datetime.now(UTC)
    deleted: list[str] = []
    in_use: list[str] = []
    with ctx.catalog.job_lock(job.name):
        failures = list(sweep(ctx, job.name))
        planned = plan_prune(ctx, job, now)
        for number, decision in enumerate(planned.delete):
            ctx.progress("pruning", number, len(planned.delete))
            try:
                delete(ctx, ctx.catalog.load(decision.id).manifest)
                deleted.append(decision.id)
            except InUseError as error:
                ctx.tell(f"keeping {decision.id}: {error.message}")
                in_use.append(decision.id)
            except SnapmgrError as error:
                failures.append(error)
        for entry in ctx.catalog.entries(job.name)[0]:
            if entry.manifest.state == "broken" and entry.manifest.created_at < now - _BROKEN_KEPT:
                ctx.catalog.forget(entry.manifest.id)
    return Pruned(plan=planned, deleted=tuple(deleted), kept_in_use=tuple(in_use), failures=tuple(failures))


def _ready(ctx: Context, job: Job) -> list[Entry]:
    return [entry for entry in ctx.catalog.entries(job.name)[0] if entry.manifest.state == "ready"]
