"""Deletes the snapshots that no retention rule keeps, and gives a reason for each."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from snapmgr.access.deletion import await_space, delete
from snapmgr.access.storage_check import check_storage, remaining_ids
from snapmgr.backup.sweep import sweep
from snapmgr.contract.abilities import AlterationCheck
from snapmgr.contract.errors import AlteredError, InUseError, SnapmgrError
from snapmgr.retention import Candidate, Decision, Policy, PrunePlan, plan

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Manifest
    from snapmgr.catalog.store import Entry
    from snapmgr.config.model import Job
    from snapmgr.context import Context

# A BROKEN snapshot has no storage; its manifest stays so that people can read the reason, but not for ever.
_BROKEN_KEPT = timedelta(days=30)
ALTERED = "changed by hand after it was taken: left to you, see snapmgr doctor"
_MISSING = "not found in its storage"


class Pruned(Struct, frozen=True, kw_only=True):
    """The result of a prune."""

    plan: PrunePlan
    deleted: tuple[str, ...]
    kept_in_use: tuple[str, ...]
    kept_altered: tuple[str, ...]
    """Planned to be deleted, but somebody had changed their data by hand."""
    failures: tuple[SnapmgrError, ...]


def to_candidate(entry: Entry, *, in_use: bool = False) -> Candidate:
    """Return a READY snapshot as a candidate for the retention rules."""
    manifest = entry.manifest
    return Candidate(
        id=manifest.id,
        taken_at=manifest.taken_at or manifest.created_at,
        ready=True,
        verified=entry.verified,
        failed=entry.failed,
        partly=entry.partly,
        pinned=manifest.pinned,
        pin_reason=manifest.pin_reason,
        in_use=in_use,
        number=manifest.number,
    )


def plan_prune(ctx: Context, job: Job, now: datetime) -> PrunePlan:
    """Return the snapshots that the job's policy keeps and deletes, with reasons; change nothing.

    A snapshot that somebody deleted or changed by hand, or whose storage does not answer, must not count as one to
    keep: the plan for the existing ones is made as if there were no others. One that was changed is left: it may hold
    somebody's work.
    """
    in_use = {lease.snapshot_id for lease in ctx.catalog.leases()[0]}
    ready = [entry for entry in ctx.catalog.entries(job.name)[0] if entry.manifest.state == "ready"]
    candidates = [to_candidate(entry, in_use=entry.manifest.id in in_use) for entry in ready]
    policy = Policy(**msgspec.structs.asdict(job.retention))
    presences = check_storage(ctx, (entry.manifest for entry in ready))
    existing = {snapshot_id for snapshot_id, presence in presences.items() if presence == "complete"}
    of_all = plan(candidates, policy, now)
    of_existing = plan([one for one in candidates if one.id in existing], policy, now)
    altered = {snapshot_id for snapshot_id, presence in presences.items() if presence == "altered"}
    taken_at = {one.id: (one.taken_at, one.id) for one in candidates}

    def merge(of_existing: tuple[Decision, ...], of_all: tuple[Decision, ...]) -> tuple[Decision, ...]:
        missing = [one for one in of_all if one.id not in existing | altered]
        missing = [Decision(id=one.id, reasons=(*one.reasons, _MISSING)) for one in missing]
        return tuple(sorted((*of_existing, *missing), key=lambda one: taken_at[one.id], reverse=True))

    left = tuple(Decision(id=one.id, reasons=(ALTERED,)) for one in candidates if one.id in altered)
    keep = merge((*of_existing.keep, *left), of_all.keep)
    return PrunePlan(keep=keep, delete=merge(of_existing.delete, of_all.delete))


def prune(ctx: Context, job: Job, *, wait: bool = False) -> Pruned:
    """Delete the snapshots that the job's policy does not keep; keep and name those that are in use by then.

    With `wait` the space is free at the end. Raises BusyError if a run of the job is active. A failed deletion does not
    stop the others.
    """
    ctx.catalog.make()
    now = datetime.now(UTC)
    deleted: list[str] = []
    waiting: list[Manifest] = []
    in_use: list[str] = []
    altered: list[str] = []
    with ctx.catalog.job_lock(job.name):
        failures = list(sweep(ctx, job.name))
        planned = plan_prune(ctx, job, now)
        for number, decision in enumerate(planned.delete):
            ctx.progress("pruning", number, len(planned.delete))
            try:
                manifest = ctx.catalog.load(decision.id).manifest
                _refuse_altered(ctx, manifest)
                delete(ctx, decision.id)
                deleted.append(decision.id)
                waiting.append(manifest)
            except AlteredError as error:
                ctx.tell(f"warning: keeping {decision.id}: {error.message}")
                altered.append(decision.id)
            except InUseError as error:
                ctx.tell(f"keeping {decision.id}: {error.message}")
                in_use.append(decision.id)
            except SnapmgrError as error:
                failures.append(error)
        _forget_broken(ctx, job, now)
    # Without the lock: it may take minutes, and others can work meanwhile.
    for manifest in waiting if wait else ():
        try:
            await_space(ctx, manifest)
        except SnapmgrError as error:
            failures.append(error)
    return Pruned(
        plan=planned,
        deleted=tuple(deleted),
        kept_in_use=tuple(in_use),
        kept_altered=tuple(altered),
        failures=tuple(failures),
    )


def _refuse_altered(ctx: Context, manifest: Manifest) -> None:
    """Raise AlteredError if a copy of folders was changed: an inventory does not find that out, as it takes a walk."""
    for member in manifest.members:
        backend = ctx.backend(member.ref.backend)
        if isinstance(backend, AlterationCheck):
            backend.refuse_altered(member.ref)


def _forget_broken(ctx: Context, job: Job, now: datetime) -> None:
    """Forget old BROKEN snapshots of which the storage holds nothing more: until then doctor needs the manifest."""
    old = [entry.manifest for entry in ctx.catalog.entries(job.name)[0] if entry.manifest.state == "broken"]
    old = [manifest for manifest in old if manifest.created_at < now - _BROKEN_KEPT]
    left = remaining_ids(ctx, old)
    for manifest in old:
        if manifest.id not in left:
            ctx.catalog.forget(manifest.id)
