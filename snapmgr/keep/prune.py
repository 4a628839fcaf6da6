"""Deleting what no retention rule keeps, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from snapmgr.access.deletion import delete
from snapmgr.access.storage_check import look
from snapmgr.backup.sweep import sweep
from snapmgr.contract.errors import InUseError, SnapmgrError
from snapmgr.retention import Candidate, Decision, Policy, PrunePlan, plan

if TYPE_CHECKING:
    from snapmgr.catalog.store import Entry
    from snapmgr.config.model import Job
    from snapmgr.context import Context

# A BROKEN manifest has no storage; it stays for people to read, but not for ever.
_BROKEN_KEPT = timedelta(days=30)
_MISSING = "not found in its storage"


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What a prune did (or would do)."""

    plan: PrunePlan
    deleted: tuple[str, ...]
    kept_in_use: tuple[str, ...]
    failures: tuple[SnapmgrError, ...]


def to_candidate(entry: Entry, *, in_use: bool = False) -> Candidate:
    """Return a READY snapshot as retention sees it."""
    manifest = entry.manifest
    return Candidate(
        id=manifest.id,
        taken_at=manifest.taken_at or manifest.created_at,
        ready=True,
        verified=entry.verified,
        failed=entry.verification is not None and not entry.verified,
        pinned=manifest.pinned,
        pin_reason=manifest.pin_reason,
        in_use=in_use,
        number=manifest.number,
    )


def plan_prune(ctx: Context, job: Job, now: datetime) -> PrunePlan:
    """Return what the job's policy keeps and deletes, with reasons; changes nothing.

    A snapshot that somebody deleted by hand, or whose storage does not answer, takes nobody's place: those that are
    there are planned as if they were all.
    """
    in_use = {lease.snapshot_id for lease in ctx.catalog.leases()[0]}
    ready = [entry for entry in ctx.catalog.entries(job.name)[0] if entry.manifest.state == "ready"]
    candidates = [to_candidate(entry, in_use=entry.manifest.id in in_use) for entry in ready]
    policy = Policy(**msgspec.structs.asdict(job.retention))
    presences = look(ctx, (entry.manifest for entry in ready))
    there = {snapshot_id for snapshot_id, presence in presences.items() if presence == "there"}
    lost = plan(candidates, policy, now)
    held = plan([one for one in candidates if one.id in there], policy, now)
    taken_at = {one.id: (one.taken_at, one.id) for one in candidates}

    def merge(held: tuple[Decision, ...], lost: tuple[Decision, ...]) -> tuple[Decision, ...]:
        missing = [Decision(id=one.id, reasons=(*one.reasons, _MISSING)) for one in lost if one.id not in there]
        return tuple(sorted((*held, *missing), key=lambda one: taken_at[one.id], reverse=True))

    return PrunePlan(keep=merge(held.keep, lost.keep), delete=merge(held.delete, lost.delete))


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
                delete(ctx, decision.id)
                deleted.append(decision.id)
            except InUseError as error:
                ctx.tell(f"keeping {decision.id}: {error.message}")
                in_use.append(decision.id)
            except SnapmgrError as error:
                failures.append(error)
        _forget_broken(ctx, job, now)
    return Pruned(plan=planned, deleted=tuple(deleted), kept_in_use=tuple(in_use), failures=tuple(failures))


def _forget_broken(ctx: Context, job: Job, now: datetime) -> None:
    """Forget BROKEN snapshots after a while; what is left of a set that lost a member needs its manifest."""
    old = [entry.manifest for entry in ctx.catalog.entries(job.name)[0] if entry.manifest.state == "broken"]
    old = [manifest for manifest in old if manifest.created_at < now - _BROKEN_KEPT]
    presences = look(ctx, (manifest for manifest in old if manifest.members))
    for manifest in old:
        if presences.get(manifest.id, "gone") == "gone":
            ctx.catalog.forget(manifest.id)
