"""Snapshots that were lost because their space ran out: marked BROKEN, their storage deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.capacity.read import attachment_problem, look_at_gauges
from snapmgr.capacity.series import PoolFill, loss_of, lost_series, was_lost
from snapmgr.contract.errors import LostError, MissingRequirementError, SnapmgrError
from snapmgr.contract.records import PoolKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from snapmgr.catalog.manifest import Lease, Manifest
    from snapmgr.context import Context


def refuse_lost(ctx: Context, manifest: Manifest) -> None:
    """Raise LostError if a snapshot ran full; it is BROKEN then."""
    error = lose(ctx, manifest, look_at_gauges(ctx, (manifest,)))
    if error is not None:
        raise error


def lose(ctx: Context, manifest: Manifest, fills: Mapping[PoolKey, PoolFill]) -> LostError | None:
    """If a snapshot ran full, mark it BROKEN, remove what is lost unless it is in use, and return the error.

    The job's lock is not needed: as a reader we keep deleters away, and nobody else changes a READY manifest but who
    pins it. What is in use is removed by a later run of the job.
    """
    why = loss_of(manifest, fills)
    if why is None:
        return None
    with ctx.catalog.reading(manifest.id):
        there = ctx.catalog.load(manifest.id).manifest
        if there.state in ("ready", "pending") and there.proved_at is not None:
            ctx.catalog.write(there.with_state("broken", reason=why))
    try:
        _remove_lost(ctx, manifest, fills)
    except SnapmgrError as error:
        ctx.tell(f"{manifest.id}: what is left of it could not be removed now: {error.message}")
    return LostError(
        f"snapshot {manifest.id} is lost: {why}",
        hint="use another one; give the next one more room (cow_size), or keep it for a shorter time",
    )


def _remove_lost(ctx: Context, manifest: Manifest, fills: Mapping[PoolKey, PoolFill]) -> None:
    """Remove the storage of what ran full; idempotent. Raises InUseError while somebody has it attached.

    Other members of a set stay until somebody deletes them: they may be the last copy of what they hold.
    """
    with ctx.catalog.deleting(manifest.id):
        for member in manifest.members:
            if lost_series((member,), fills):
                ctx.backend(member.ref.backend).delete(member.ref)


def settle_losses(ctx: Context, manifests: Iterable[Manifest]) -> tuple[SnapmgrError, ...]:
    """Look at the storage of a job's snapshots; those that ran full become BROKEN. Return an error for each.

    The job's lock must be held. What was lost earlier and could not be removed is removed; an error for what is still
    in use.
    """
    manifests = [one for one in manifests if one.state == "ready" or was_lost(one)]
    fills = look_at_gauges(ctx, manifests)
    failures: list[SnapmgrError] = []
    for manifest in manifests:
        try:
            if manifest.state == "broken":
                if lost_series(manifest.members, fills):
                    _remove_lost(ctx, manifest, fills)
            elif (lost := lose(ctx, manifest, fills)) is not None:
                ctx.tell(f"warning: {lost.message}")
                failures.append(lost)
        except SnapmgrError as error:
            ctx.tell(f"could not be cleared up now, and will be tried again: {error.message}")
            failures.append(error)
    return tuple(failures)


def require_believable(ctx: Context, lease: Lease, manifest: Manifest) -> None:
    """Raise LostError or MissingRequirementError if what was read through an attachment is not to be believed.

    Asked after the use and before its result counts: writes to scratch space that is full still seem to succeed.
    """
    problem = attachment_problem(ctx, lease)
    if problem is not None:
        refuse_lost(ctx, manifest)
        raise MissingRequirementError(f"{manifest.id}: {problem.what}", hint=problem.hint)
