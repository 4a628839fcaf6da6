"""Deletes the snapshots that somebody names, unless they are protected; `force` overrules most protections."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.access.deletion import await_space, delete_all, remove_traces
from snapmgr.access.storage_check import check_storage
from snapmgr.capacity.series import was_overflowed
from snapmgr.catalog.inplace import refuse_unfinished_inplace
from snapmgr.catalog.manifest import GONE
from snapmgr.catalog.store import attached_error
from snapmgr.contract.errors import InUseError, SnapmgrError, StorageError
from snapmgr.keep.prune import to_candidate
from snapmgr.retention import protect

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from snapmgr.access.storage_check import Presence
    from snapmgr.catalog.manifest import Lease, Manifest
    from snapmgr.catalog.store import Entry
    from snapmgr.catalog.summary import Summary
    from snapmgr.context import Context
    from snapmgr.contract.records import Found, Pool

_ALTERED = "somebody changed it after it was taken, so it may hold work of theirs"
_LEFT = "its remaining data may be the last copy"


class Verdict(Struct, frozen=True, kw_only=True):
    """The protections of one snapshot against deletion."""

    entry: Entry
    presence: Presence | None
    """None for a snapshot that was never READY: its remains are of no use."""
    rules: tuple[str, ...]
    """The protections: "newest READY", "newest VERIFIED", "pinned"; `_ALTERED`; or `_LEFT`. Force overrules them."""
    obstacle: SnapmgrError | None
    """Why it cannot be deleted now, even with force."""

    @property
    def id(self) -> str:
        """The snapshot's id."""
        return self.entry.manifest.id

    def refusal(self, *, force: bool) -> SnapmgrError | None:
        """Return why it must not be deleted, or None."""
        if self.obstacle is not None:
            return self.obstacle
        if self.rules and not force:
            return InUseError(
                f"snapshot {self.id} is protected: {', '.join(self.rules)}",
                hint=f"to delete it nevertheless: snapmgr delete --force {self.entry.manifest.short_id}",
            )
        return None


class Deletion(Struct, frozen=True, kw_only=True):
    """The result for one snapshot."""

    verdict: Verdict
    deleted: bool = False
    error: SnapmgrError | None = None
    """Why it was not deleted; or why its space is not free yet, if the caller wanted to wait for that."""


def examine(
    ctx: Context, names: Iterable[str], seen: dict[Pool, tuple[Found, ...]] | None = None
) -> tuple[Verdict, ...]:
    """Given names of snapshots, return one verdict for each snapshot. Change and lock nothing.

    `seen` is as in `check_storage`. Raises the errors of `Catalog.resolve` for a name that matches no snapshot, or
    several.
    """
    chosen = {entry.manifest.id: entry for entry in (ctx.resolve(name) for name in names)}
    leases = ctx.catalog.leases()[0]
    rules: dict[str, tuple[str, ...]] = {}
    presences: dict[str, Presence] = {}
    seen = {} if seen is None else seen
    for job in {entry.manifest.job for entry in chosen.values()}:
        of_job = [one for one in ctx.catalog.summaries(job)[0] if one.job == job]
        ready = [one for one in of_job if one.state == "ready"]
        lost = [one for one in of_job if _was_ready(one)]
        presences |= check_storage(ctx, (*ready, *lost), seen)
        rules |= _protections(ready, presences)
        rules |= {one.id: (_LEFT,) for one in lost if _may_be_wanted(one, presences[one.id])}
    return tuple(
        Verdict(
            entry=entry,
            presence=presences.get(snapshot_id),
            rules=rules.get(snapshot_id, ()),
            obstacle=_obstacle(entry.manifest, leases),
        )
        for snapshot_id, entry in chosen.items()
    )


def _was_ready(manifest: Summary) -> bool:
    """Return whether a BROKEN snapshot was READY until its storage, or a part of that, was gone or overflowed."""
    gone = manifest.state == "broken" and (manifest.reason or "").startswith(GONE)
    return gone or was_overflowed(manifest)


def _may_be_wanted(manifest: Summary, presence: Presence) -> bool:
    """Return whether such a snapshot may still have data of value."""
    alone = len(manifest.refs) == 1
    return presence != "gone" and not (alone and was_overflowed(manifest))


def _protections(ready: list[Summary], presences: dict[str, Presence]) -> dict[str, tuple[str, ...]]:
    """Return what protects each READY snapshot of one job.

    One that the storage does not hold any more cannot be the newest; but its pin is shown, for whoever pinned it.
    """
    held = [one for one in ready if presences[one.id] in ("complete", "unknown")]
    rules = {one.id: ("pinned",) for one in ready if one.pinned}
    altered = [one.id for one in ready if presences[one.id] == "altered"]
    rules |= {snapshot_id: (*rules.get(snapshot_id, ()), _ALTERED) for snapshot_id in altered}
    return rules | protect(map(to_candidate, held), datetime.now(UTC))


def _obstacle(manifest: Manifest, leases: list[Lease]) -> SnapmgrError | None:
    for lease in leases:
        if lease.snapshot_id == manifest.id:
            return attached_error(lease)
    if manifest.state == "pending":
        return StorageError(
            f"snapshot {manifest.id} is PENDING: a run is taking it, or was interrupted",
            hint="if no run is active, the next run of its job or `snapmgr doctor --fix` completes or removes it",
        )
    return None


def delete_snapshots(
    ctx: Context,
    verdicts: Sequence[Verdict],
    *,
    force: bool,
    wait: bool = False,
    seen: dict[Pool, tuple[Found, ...]] | None = None,
) -> tuple[Deletion, ...]:
    """Delete snapshots that `examine` found deletable; with `force` also protected ones.

    All are examined again under the locks of their jobs. If any is refused then, also for a protection that `verdicts`
    did not show, nothing is deleted. After that a failed deletion does not affect the others. A snapshot whose deletion
    fails in the middle stays DELETING, and the next run of its job continues it. With `wait` the space is free at the
    end. Without `seen` the storage is read again, too; with what `examine` has just seen only the catalog is, where
    whatever snapmgr did meanwhile is found.

    Raises BusyError if a run of one of the jobs is active, or an in-place restore is unfinished; NotFoundError if a
    snapshot is gone meanwhile.
    """
    ctx.catalog.make()
    shown = {verdict.id: verdict.rules for verdict in verdicts}
    with ExitStack() as locks:
        for job in sorted({verdict.entry.manifest.job for verdict in verdicts}):
            locks.enter_context(ctx.catalog.job_lock(job))
            refuse_unfinished_inplace(ctx.catalog, job)
        now = examine(ctx, shown, seen)
        refusals = [_refusal_now(ctx, verdict, shown[verdict.id], force=force) for verdict in now]
        if any(refusals):
            return tuple(Deletion(verdict=one, error=why) for one, why in zip(now, refusals, strict=True))
        done = _delete(ctx, now, force=force)
    if not wait:
        return done
    # Without the locks: it may take minutes, and others can work meanwhile.
    late = await_space(ctx, [one.verdict.entry.manifest for one in done if one.deleted])
    return tuple(replace(one, error=late.get(one.verdict.id)) if one.deleted else one for one in done)


def _refusal_now(ctx: Context, verdict: Verdict, shown: tuple[str, ...], *, force: bool) -> SnapmgrError | None:
    refusal = verdict.refusal(force=force)
    new = [rule for rule in verdict.rules if rule not in shown]
    if refusal is None and new:
        # It was pinned or verified, or became the newest, while the user read the verdicts.
        refusal = InUseError(
            f"snapshot {verdict.id} became protected meanwhile: {', '.join(new)}", hint="examine it again: --dry-run"
        )
    if refusal is None:
        try:
            with ctx.catalog.deleting(verdict.id):
                pass
        except SnapmgrError as error:
            refusal = error
    return refusal


def _delete(ctx: Context, verdicts: Sequence[Verdict], *, force: bool) -> tuple[Deletion, ...]:
    errors: dict[str, SnapmgrError | None] = {}
    others: list[Manifest] = []
    for manifest in (verdict.entry.manifest for verdict in verdicts):
        if manifest.state != "broken":
            others.append(manifest)
            continue
        errors[manifest.id] = None
        try:
            with ctx.catalog.deleting(manifest.id):
                remove_traces(ctx, manifest)
                ctx.catalog.forget(manifest.id)
        except SnapmgrError as error:
            errors[manifest.id] = error
    errors |= {manifest.id: error for manifest, error in delete_all(ctx, others, pinned=force)}
    return tuple(Deletion(verdict=one, deleted=errors[one.id] is None, error=errors[one.id]) for one in verdicts)
