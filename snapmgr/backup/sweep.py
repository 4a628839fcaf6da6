"""Converging after crashes: what a dead run left is completed if its proof is on disk, and removed if not."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from snapmgr.access.attach import release
from snapmgr.access.deletion import delete, intended_pools, remove_traces
from snapmgr.backup.publish import publish
from snapmgr.capacity.lost import mark_all_lost
from snapmgr.catalog.inplace import refuse_unfinished_inplace
from snapmgr.catalog.manifest import Manifest
from snapmgr.contract.errors import SnapmgrError, StorageError
from snapmgr.system.host import is_alive

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.context import Context

SETTLE_S = 300.0


def sweep(ctx: Context, job: str) -> tuple[SnapmgrError, ...]:
    """Clear up after dead runs of `job`; its lock must be held. Return why some of it could not be done now.

    Snapshots that were lost since, because their room ran full, become BROKEN: a LostError for each. Raises
    StorageError if the helper of an earlier run still hangs in its storage call: another one would join it; BusyError
    if a restore in place of the job's source was cut short.
    """
    refuse_unfinished_inplace(ctx.catalog, job)
    manifests = [entry.manifest for entry in ctx.catalog.entries(job)[0]]
    for manifest in manifests:
        _refuse_hanging(manifest)
    failures: list[SnapmgrError] = []

    def attempt(step: Callable[[], None]) -> None:
        # Something foreign in the way, or storage that is gone, must not stop every backup from then on.
        try:
            step()
        except SnapmgrError as error:
            ctx.tell(f"could not be cleared up now, and will be tried again: {error.message}")
            failures.append(error)

    for lease in ctx.catalog.leases()[0]:
        if not lease.stays and not is_alive(lease.holder) and lease.snapshot_id.startswith(job + "."):
            ctx.tell(f"removing what a killed {lease.why} had attached ({lease.snapshot_id})")
            attempt(partial(release, ctx, lease))
    for manifest in manifests:
        if manifest.state == "pending":
            attempt(partial(finish_pending, ctx, manifest))
        elif manifest.state == "deleting":
            ctx.tell(f"{manifest.id}: finishing its deletion")
            attempt(partial(delete, ctx, manifest.id))
    lost = mark_all_lost(ctx, [entry.manifest for entry in ctx.catalog.entries(job)[0]])
    return (*failures, *lost)


def _refuse_hanging(manifest: Manifest) -> None:
    if manifest.state == "pending" and manifest.helper is not None and is_alive(manifest.helper):
        raise StorageError(
            f"the storage call of an earlier run still hangs (helper pid {manifest.helper.pid}, {manifest.id})",
            hint="look at its state in /proc/PID/stack and at the kernel log; a frozen file system? (fsfreeze -u)",
        )


def finish_pending(ctx: Context, manifest: Manifest) -> None:
    """Complete a PENDING snapshot of a dead run if its proof is on disk and its storage is there; else remove it."""
    if manifest.proved_at is not None:
        ctx.tell(f"{manifest.id}: completing what was proven before the crash")
        backend = ctx.backend(manifest.backend)
        found = backend.inventory(intended_pools(manifest))
        there = {one.ref.identity for one in found if one.kind == "snapshot" and one.ref is not None}
        if all(member.ref.identity in there for member in manifest.members):
            publish(ctx, manifest, settle_timeout_s=SETTLE_S)
            return
        remove_traces(ctx, manifest)  # a set without one of its members
        ctx.catalog.write(manifest.with_state("broken", reason="its storage is gone after a crash"))
        return
    ctx.tell(f"{manifest.id}: removing what an interrupted run left")
    remove_traces(ctx, manifest)
    ctx.catalog.write(manifest.with_state("broken", reason="interrupted before its proof"))
