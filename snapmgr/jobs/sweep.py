"""Converging after crashes: what a dead run left is completed if its proof is on disk, and removed if not."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from snapmgr.catalog import Entry
from snapmgr.errors import InUseError, LaterStepError, NoRoomError, SnapmgrError, StorageError, VerificationError
from snapmgr.host import is_alive
from snapmgr.jobs.attach import attached, copies, place_of, release
from snapmgr.jobs.filling import require_believable, settle_losses
from snapmgr.jobs.reversion import refuse_reverting
from snapmgr.manifest import Manifest, encode
from snapmgr.probe import require_pools_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.jobs.context import Context
    from snapmgr.records import Pool

SETTLE_S = 300.0


def sweep(ctx: Context, job: str) -> tuple[SnapmgrError, ...]:
    """Clear up after dead runs of `job`; its lock must be held. Return why some of it could not be done now.

    Snapshots that were lost since, because their room ran full, become BROKEN: a LostError for each. Raises
    StorageError if the helper of an earlier run still hangs in its storage call: another one would join it; BusyError
    if a restore in place of the job's source was cut short.
    """
    refuse_reverting(ctx.catalog, job)
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
    lost = settle_losses(ctx, [entry.manifest for entry in ctx.catalog.entries(job)[0]])
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
        found = backend.inventory(_pools(manifest))
        there = {one.ref.identity for one in found if one.kind == "snapshot" and one.ref is not None}
        if all(member.ref.identity in there for member in manifest.members):
            complete(ctx, manifest, settle_timeout_s=SETTLE_S)
            return
        remove_traces(ctx, manifest)  # a set without one of its members
        ctx.catalog.write(manifest.with_state("broken", reason="its storage is gone after a crash"))
        return
    ctx.tell(f"{manifest.id}: removing what an interrupted run left")
    remove_traces(ctx, manifest)
    ctx.catalog.write(manifest.with_state("broken", reason="interrupted before its proof"))


def remove_traces(ctx: Context, manifest: Manifest) -> None:
    """Remove all that exists in the storage of an unproven snapshot, by asking the storage itself."""
    if not manifest.intents:
        return
    _require_answer(ctx, manifest)
    backend = ctx.backend(manifest.backend)
    for found in backend.inventory(_pools(manifest)):
        if found.snapshot_id != manifest.id:
            continue
        if found.ref is not None and found.kind == "snapshot":
            backend.delete(found.ref)
        elif found.kind == "debris":
            backend.repair(found)


def complete(ctx: Context, manifest: Manifest, *, settle_timeout_s: float) -> Manifest:
    """Make a proven snapshot durable and READY, and store its manifest beside it.

    Raises StorageError if it is not durable in time, or if the storage hangs: it stays PENDING with its proof, and the
    next run tries again.
    Raises LaterStepError if the copy beside it could not be stored: the snapshot is READY all the same.
    """
    _require_answer(ctx, manifest)
    backend = ctx.backend(manifest.backend)
    backend.settle(tuple(member.ref for member in manifest.members), settle_timeout_s)
    manifest = _with_position(ctx, manifest).with_state("ready")
    failure: SnapmgrError | None = None
    # The copy first: a crash in between leaves it PENDING with its proof, and all of this is done again.
    for member in manifest.members:
        try:
            backend.annotate(member.ref, encode(manifest))
        except SnapmgrError as error:
            failure = error
    ctx.catalog.write(manifest)
    if failure is not None:
        raise LaterStepError(
            f"snapshot {manifest.id} is READY, but its manifest could not be stored beside it: {failure.message}",
            hint=failure.hint,
            snapshot_id=manifest.id,
        )
    return manifest


def _with_position(ctx: Context, manifest: Manifest) -> Manifest:
    """Return the manifest with the position at the end of its own binlog, if it is to come from there.

    Raises BinlogError if that cannot be read: the snapshot is BROKEN then.
    """
    from snapmgr.mysql.binlog import read_tail  # noqa: PLC0415 - for few snapshots
    from snapmgr.mysql.binlog_reader import BinlogError  # noqa: PLC0415

    quiesce, server = manifest.quiesce, manifest.server
    if manifest.physical is not None and manifest.physical.tool == "clone":
        return _with_clones_position(ctx, manifest)
    if quiesce is None or quiesce.position_from != "binlog" or server is None or not server.log_bin:
        return manifest
    try:
        # To be attached it has to look READY; on disk it is not yet.
        entry = Entry(manifest=manifest.with_state("ready"), verification=None)
        with attached(ctx, entry, writable=False, why="position") as lease:
            there = copies(lease, manifest)
            base = place_of(os.path.join(server.datadir, server.log_bin), there)
            index = server.settings.get("log_bin_index", f"{server.log_bin}.index")
            if base is None:
                return manifest
            tail = read_tail(
                base, index=place_of(os.path.join(server.datadir, index), there), gtid_purged=server.gtid_purged
            )
            require_believable(ctx, lease, manifest)
            return replace(manifest, position=tail.position)
    except BinlogError as error:
        remove_traces(ctx, manifest)
        ctx.catalog.write(manifest.with_state("broken", reason=error.message))
        raise


def _with_clones_position(ctx: Context, manifest: Manifest) -> Manifest:
    from snapmgr.jobs.recovered import with_recovered_position  # noqa: PLC0415 - for few snapshots

    try:
        return with_recovered_position(ctx, manifest)
    except VerificationError as error:
        remove_traces(ctx, manifest)
        ctx.catalog.write(manifest.with_state("broken", reason=error.message))
        raise


def delete(ctx: Context, snapshot_id: str, *, pinned: bool = False) -> None:
    """Delete a snapshot's storage and then its manifest; one that is pinned only if `pinned` allows it.

    Raises InUseError while somebody uses it, or if it is pinned. What fails in the middle leaves it DELETING.
    """
    with ctx.catalog.deleting(snapshot_id):
        # Read under this lock, under which it is pinned: whatever was planned, somebody may have pinned it since.
        manifest = ctx.catalog.load(snapshot_id).manifest
        if manifest.pinned and manifest.state == "ready" and not pinned:
            raise InUseError(f"snapshot {manifest.id} is pinned", hint=f"snapmgr unpin {manifest.short_id}")
        _require_answer(ctx, manifest)
        deleting = manifest.with_state("deleting", reason=manifest.reason)
        try:
            ctx.catalog.write(deleting)
        except NoRoomError as error:
            # Deleting is what makes room. Killed now, it is READY without its storage: doctor and prune see that.
            ctx.tell(f"{manifest.id}: is deleted all the same: {error.message}")
        backend = ctx.backend(manifest.backend)
        for number, member in enumerate(manifest.members):
            try:
                backend.delete(member.ref)
            except SnapmgrError as error:
                # In use, and nothing is gone yet: it is as good as before. Else there may be the room by now.
                untouched = number == 0 and isinstance(error, InUseError)
                with suppress(NoRoomError):
                    ctx.catalog.write(manifest if untouched else deleting)
                raise
        ctx.catalog.forget(manifest.id)


def _require_answer(ctx: Context, manifest: Manifest) -> None:
    """Raise StorageError if the storage of a snapshot hangs."""
    pools = (*_pools(manifest), *(member.ref.pool for member in manifest.members))
    require_pools_answer(pools, ctx.mounter.mounts())


def _pools(manifest: Manifest) -> tuple[Pool, ...]:
    return tuple(dict.fromkeys(intent.pool for intent in manifest.intents))
