"""Refuses snapshots that are lost because their own space ran out, marks them BROKEN, deletes their storage."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.capacity.read import attachment_problem, sample_capacity, sample_pools
from snapmgr.capacity.series import PoolCapacity, overflow_reason, overflowed_series, was_overflowed
from snapmgr.contract.errors import LostError, MissingRequirementError, SnapmgrError
from snapmgr.contract.records import Pool, PoolKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from snapmgr.catalog.manifest import Lease, Manifest
    from snapmgr.context import Context


def require_not_overflowed(ctx: Context, manifest: Manifest) -> None:
    """Sample the storage of a snapshot; raise LostError if its own space ran out. Change nothing else."""
    reason = overflow_reason(manifest, sample_capacity(ctx, (manifest,)))
    if reason is not None:
        raise _lost_error(manifest, reason)


@contextmanager
def removing_if_lost(ctx: Context, manifest: Manifest) -> Iterator[None]:
    """Mark a snapshot BROKEN and delete its storage if the context ends with LostError.

    Attaching only refuses a lost snapshot; with this step the command that uses it decides to delete it.
    """
    try:
        yield
    except LostError:
        mark_lost(ctx, manifest, sample_capacity(ctx, (manifest,)))
        raise


def mark_lost(ctx: Context, manifest: Manifest, capacities: Mapping[PoolKey, PoolCapacity]) -> LostError | None:
    """If a snapshot's space ran out, mark it BROKEN, delete its storage unless it is in use, and return the error.

    The job's lock is not needed: as a reader we keep deleters away, and nobody else changes a READY manifest except to
    pin it. If the storage is in use now, a later run of the job deletes it.
    """
    reason = overflow_reason(manifest, capacities)
    if reason is None:
        return None
    with ctx.catalog.reading(manifest.id):
        stored = ctx.catalog.load(manifest.id).manifest
        if stored.state in ("ready", "pending") and stored.proved_at is not None:
            ctx.catalog.write(stored.with_state("broken", reason=reason))
    try:
        _delete_lost(ctx, manifest, capacities)
    except SnapmgrError as error:
        ctx.tell(f"{manifest.id}: its storage could not be deleted now: {error.message}")
    return _lost_error(manifest, reason)


def _lost_error(manifest: Manifest, reason: str) -> LostError:
    return LostError(
        f"snapshot {manifest.id} is lost: {reason}",
        hint="use another snapshot; give the next ones more space (cow_size), or keep them for a shorter time",
    )


def _delete_lost(ctx: Context, manifest: Manifest, capacities: Mapping[PoolKey, PoolCapacity]) -> None:
    """Delete the storage of the members whose space ran out; idempotent. Raises InUseError while one is attached.

    The other members of a set stay until somebody deletes them: they may be the last copy of their data.
    """
    with ctx.catalog.deleting(manifest.id):
        for member in manifest.members:
            if overflowed_series((member.ref,), capacities):
                ctx.backend(member.ref.backend).delete(member.ref)


def mark_all_lost(ctx: Context, manifests: Iterable[Manifest]) -> tuple[SnapmgrError, ...]:
    """Sample the storage of a job's snapshots; mark those BROKEN whose space ran out. Return an error for each.

    The job's lock must be held. Also delete the storage of snapshots that were lost earlier and could not be deleted
    then; return an error for each that is still in use.
    """
    manifests = [one for one in manifests if one.state == "ready" or was_overflowed(one)]
    return _mark_all(ctx, manifests, sample_capacity(ctx, manifests))


def mark_lost_in(ctx: Context, job: str, pools: Iterable[Pool]) -> tuple[SnapmgrError, ...]:
    """Sample the pools of a job's snapshots and do as `mark_all_lost` with those that have overflowed there."""
    capacities = sample_pools(ctx, pools)
    full = {one.native_id for capacity in capacities.values() for one in capacity.series if one.full_since is not None}
    # Rarely any: only then look which snapshots they are.
    found = ctx.catalog.summaries(job)[0] if full - {""} else []
    entries = ctx.catalog.load_many(one.id for one in found if any(ref.native_id in full for ref in one.refs))[0]
    manifests = [entry.manifest for entry in entries]
    return _mark_all(ctx, [one for one in manifests if one.state == "ready" or was_overflowed(one)], capacities)


def _mark_all(
    ctx: Context, manifests: Iterable[Manifest], capacities: Mapping[PoolKey, PoolCapacity]
) -> tuple[SnapmgrError, ...]:
    failures: list[SnapmgrError] = []
    for manifest in manifests:
        try:
            if manifest.state == "broken":
                if overflowed_series(manifest.refs, capacities):
                    _delete_lost(ctx, manifest, capacities)
            elif (lost := mark_lost(ctx, manifest, capacities)) is not None:
                ctx.tell(f"warning: {lost.message}")
                failures.append(lost)
        except SnapmgrError as error:
            ctx.tell(f"cleanup failed and will be tried again: {error.message}")
            failures.append(error)
    return tuple(failures)


def require_sound_reads(ctx: Context, lease: Lease, manifest: Manifest) -> None:
    """Raise LostError or MissingRequirementError if data that was read through an attachment cannot be trusted.

    Call it after the use and before its result counts: writes to full scratch space seem to succeed.
    """
    problem = attachment_problem(ctx, lease)
    if problem is not None:
        require_not_overflowed(ctx, manifest)
        raise MissingRequirementError(f"{manifest.id}: {problem.what}", hint=problem.hint)
