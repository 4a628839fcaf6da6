"""Cleans up after a crash: completes a killed run's snapshot if its proof is on disk, otherwise removes it."""

from __future__ import annotations

import time
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from snapmgr.access.attach import release
from snapmgr.access.deletion import delete_all, intended_pools, remove_traces
from snapmgr.backup.publish import publish
from snapmgr.capacity.lost import mark_lost_in
from snapmgr.capacity.series import was_overflowed
from snapmgr.catalog.inplace import refuse_unfinished_inplace
from snapmgr.catalog.manifest import UNFINISHED, Manifest
from snapmgr.config.model import Job
from snapmgr.contract.errors import SnapmgrError, StorageError
from snapmgr.system.host import is_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.context import Context
    from snapmgr.contract.records import Pool

# For a snapshot that is durable already: enough to see that.
_LEAST_S = 1.0


def job_settle_timeout_s(ctx: Context, job: str) -> float:
    """Return how long a snapshot of `job` may take to become durable: the job's own limit, if it is configured."""
    known = ctx.config.jobs.get(job)
    return (known or Job(source="directory")).settle_timeout_s


def sweep(ctx: Context, job: str) -> tuple[SnapmgrError, ...]:
    """Clean up after killed runs of `job`; its lock must be held. Return an error for each step that failed.

    Snapshots that overflowed since the last run become BROKEN, with a LostError for each. Raises StorageError if the
    helper of an earlier run still hangs in its storage call: a new one would hang as well. Raises BusyError if an
    in-place restore of the job's source is unfinished.
    """
    refuse_unfinished_inplace(ctx.catalog, job)
    manifests, pools, count = _look(ctx, job)
    for manifest in manifests:
        _refuse_hanging(manifest)
    failures: list[SnapmgrError] = []
    for error in chain(_release_abandoned(ctx, job), _finish_pendings(ctx, job, manifests), _delete(ctx, manifests)):
        # A foreign object in the way, or storage that is gone, must not prevent every backup from then on.
        if error is not None:
            ctx.tell(f"cleanup failed and will be tried again: {error.message}")
            failures.append(error)
    if not failures:
        ctx.catalog.leave_swept(job, pools, count)
    return (*failures, *mark_lost_in(ctx, job, pools))


def _look(ctx: Context, job: str) -> tuple[list[Manifest], tuple[Pool, ...], int | None]:
    """Return the unfinished snapshots of a job, the pools of those whose storage is of use, and how many there are.

    If the last run left a mark, there is none unfinished, and how many there are is not known.
    """
    pools = ctx.catalog.swept_pools(job)
    if pools is not None:
        return [], pools, None
    found, damaged = ctx.catalog.summaries(job)
    entries, errors = ctx.catalog.load_many(one.id for one in found if one.state in UNFINISHED)
    stored = dict.fromkeys(ref.pool for one in found if one.state == "ready" or was_overflowed(one) for ref in one.refs)
    # What cannot be read may be unfinished: the next run must look again.
    count = 0 if damaged or errors else len(found)
    return [entry.manifest for entry in entries], tuple(stored), count


def _release_abandoned(ctx: Context, job: str) -> Iterator[SnapmgrError | None]:
    for lease in ctx.catalog.leases()[0]:
        if not lease.stays and not is_alive(lease.holder) and lease.snapshot_id.startswith(job + "."):
            ctx.tell(f"releasing {lease.snapshot_id}, which a killed {lease.why} had attached")
            yield _failure(partial(release, ctx, lease))


def _finish_pendings(ctx: Context, job: str, manifests: list[Manifest]) -> Iterator[SnapmgrError | None]:
    # One limit for all of them: after a week without the store, seven would delay every backup.
    until = time.monotonic() + job_settle_timeout_s(ctx, job)
    for manifest in manifests:
        if manifest.state == "pending":
            left_s = max(until - time.monotonic(), _LEAST_S)
            yield _failure(partial(finish_pending, ctx, manifest, settle_timeout_s=left_s))


def _delete(ctx: Context, manifests: list[Manifest]) -> Iterator[SnapmgrError | None]:
    deleting = [manifest for manifest in manifests if manifest.state == "deleting"]
    for manifest in deleting:
        ctx.tell(f"{manifest.id}: finishing its deletion")
    yield from (error for _, error in delete_all(ctx, deleting))


def _failure(step: Callable[[], None]) -> SnapmgrError | None:
    try:
        step()
    except SnapmgrError as error:
        return error
    return None


def _refuse_hanging(manifest: Manifest) -> None:
    if manifest.state == "pending" and manifest.helper is not None and is_alive(manifest.helper):
        raise StorageError(
            f"the storage call of an earlier run still hangs (helper pid {manifest.helper.pid}, {manifest.id})",
            hint="see /proc/PID/stack and the kernel log; is a file system frozen (fsfreeze -u)?",
        )


def finish_pending(ctx: Context, manifest: Manifest, *, settle_timeout_s: float) -> None:
    """Complete a killed run's PENDING snapshot if its proof is on disk and its storage exists; otherwise remove it."""
    if manifest.proved_at is not None:
        ctx.tell(f"{manifest.id}: completing it: its proof is from before the crash")
        backend = ctx.backend(manifest.backend)
        found = backend.inventory(intended_pools(manifest), notes=False)
        held = {one.ref.identity for one in found if one.kind == "snapshot" and one.ref is not None}
        if all(member.ref.identity in held for member in manifest.members):
            publish(ctx, manifest, settle_timeout_s=settle_timeout_s)
            return
        remove_traces(ctx, manifest)  # a set that lost a member
        ctx.catalog.write(manifest.with_state("broken", reason="its storage is gone after a crash"))
        return
    ctx.tell(f"{manifest.id}: removing the leftovers of an interrupted run")
    remove_traces(ctx, manifest)
    ctx.catalog.write(manifest.with_state("broken", reason="interrupted before its proof"))
