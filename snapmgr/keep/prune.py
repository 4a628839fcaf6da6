"""Deletes the snapshots that no retention rule keeps, and gives a reason for each."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from snapmgr.access.deletion import await_space, delete_all
from snapmgr.access.storage_check import check_storage, remaining_ids
from snapmgr.backup.sweep import sweep
from snapmgr.contract.abilities import AlterationCheck
from snapmgr.contract.errors import AlteredError, InUseError, SnapmgrError
from snapmgr.retention import Candidate, Decision, Policy, PrunePlan, plan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.catalog.summary import Summary
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.contract.records import Found, Pool

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


def to_candidate(one: Summary, *, in_use: bool = False) -> Candidate:
    """Return a READY snapshot as a candidate for the retention rules."""
    return Candidate(
        id=one.id,
        taken_at=one.at,
        ready=True,
        verified=one.verified,
        failed=one.failed,
        partly=one.partly,
        pinned=one.pinned,
        pin_reason=one.pin_reason,
        in_use=in_use,
        number=one.number,
    )


def plan_prune(ctx: Context, job: Job, now: datetime, seen: dict[Pool, tuple[Found, ...]] | None = None) -> PrunePlan:
    """Return the snapshots that the job's policy keeps and deletes, with reasons; change nothing.

    `seen` is as in `check_storage`: the plans of many jobs need but one look at their storage.

    A snapshot that somebody deleted or changed by hand, or whose storage does not answer, must not count as one to
    keep: the plan for the existing ones is made as if there were no others. One that was changed is left: it may hold
    somebody's work.
    """
    return _plan(ctx, job, ctx.catalog.summaries(job.name)[0], now, {} if seen is None else seen)


def _plan(
    ctx: Context, job: Job, snapshots: Iterable[Summary], now: datetime, seen: dict[Pool, tuple[Found, ...]]
) -> PrunePlan:
    in_use = {lease.snapshot_id for lease in ctx.catalog.leases()[0]}
    ready = [one for one in snapshots if one.state == "ready"]
    candidates = [to_candidate(one, in_use=one.id in in_use) for one in ready]
    policy = Policy(**msgspec.structs.asdict(job.retention))
    presences = check_storage(ctx, ready, seen)
    existing = {snapshot_id for snapshot_id, presence in presences.items() if presence == "complete"}
    of_existing = plan([one for one in candidates if one.id in existing], policy, now)
    of_all = plan(candidates, policy, now) if len(existing) < len(candidates) else of_existing
    altered = {snapshot_id for snapshot_id, presence in presences.items() if presence == "altered"}
    here = existing | altered
    taken_at = {one.id: (one.taken_at, one.id) for one in candidates}

    def merge(of_existing: tuple[Decision, ...], of_all: tuple[Decision, ...]) -> tuple[Decision, ...]:
        missing = [one for one in of_all if one.id not in here]
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
    deleted: list[Manifest] = []
    in_use: list[str] = []
    altered: list[str] = []
    with ctx.catalog.job_lock(job.name):
        failures = list(sweep(ctx, job.name))
        found = ctx.catalog.summaries(job.name)[0]
        planned = _plan(ctx, job, found, now, {})
        due, unread = ctx.catalog.load_many(decision.id for decision in planned.delete)
        failures += unread
        for manifest, error in delete_all(
            ctx, [one.manifest for one in due], refuse=partial(_refuse_altered, ctx), doing="pruning"
        ):
            if error is None:
                deleted.append(manifest)
            elif isinstance(error, AlteredError):
                ctx.tell(f"warning: keeping {manifest.id}: {error.message}")
                altered.append(manifest.id)
            elif isinstance(error, InUseError):
                ctx.tell(f"keeping {manifest.id}: {error.message}")
                in_use.append(manifest.id)
            else:
                failures.append(error)
        _forget_broken(ctx, [one for one in found if one.state == "broken"], now)
    if wait:
        # Without the lock: it may take minutes, and others can work meanwhile.
        failures += dict.fromkeys(await_space(ctx, deleted).values())
    return Pruned(
        plan=planned,
        deleted=tuple(manifest.id for manifest in deleted),
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


def _forget_broken(ctx: Context, broken: Iterable[Summary], now: datetime) -> None:
    """Forget old BROKEN snapshots of which the storage holds nothing more: until then doctor needs the manifest."""
    old = [ctx.catalog.load(one.id).manifest for one in broken if one.created_at < now - _BROKEN_KEPT]
    left = remaining_ids(ctx, old)
    for manifest in old:
        if manifest.id not in left:
            ctx.catalog.forget(manifest.id)
