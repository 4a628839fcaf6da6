"""Makes a proved snapshot READY: durable, with its position, and with its manifest beside it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.access.attach import attached, copies, place_of
from snapmgr.access.deletion import remove_traces, require_storage_answers
from snapmgr.capacity.lost import removing_if_lost, require_sound_reads
from snapmgr.catalog.manifest import Manifest, encode
from snapmgr.catalog.store import Entry
from snapmgr.contract.errors import LaterStepError, NotQuiescedError, SnapmgrError, VerificationError

if TYPE_CHECKING:
    from snapmgr.context import Context


def publish(ctx: Context, manifest: Manifest, *, settle_timeout_s: float) -> Manifest:
    """Make a proved snapshot durable and READY, and store its manifest beside it.

    Raises StorageError if it is not durable in time, or if the storage hangs: it stays PENDING with its proof, and the
    next run tries again.
    Raises LaterStepError if the manifest could not be stored beside it: the snapshot is READY nevertheless.
    """
    require_storage_answers(ctx, manifest)
    backend = ctx.backend(manifest.backend)
    backend.settle(tuple(member.ref for member in manifest.members), settle_timeout_s)
    manifest = _with_position(ctx, manifest).with_state("ready")
    failure: SnapmgrError | None = None
    # The copy beside it goes first: after a crash in between it is PENDING with its proof, and the sweep repeats this.
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
    """Return the manifest with the position at the end of the snapshot's own binlog, if the level takes it from there.

    Raises NotQuiescedError if the binlog does not tell it; the snapshot is BROKEN then.
    """
    quiesce, server = manifest.quiesce, manifest.server
    if manifest.physical is not None and manifest.physical.tool == "clone":
        return _with_clones_position(ctx, manifest)
    if quiesce is None or quiesce.position_from != "binlog" or server is None or not server.log_bin:
        return manifest
    from snapmgr.mysql.binlog.reader import BinlogError  # noqa: PLC0415 - few snapshots need it
    from snapmgr.mysql.binlog.tail import read_tail  # noqa: PLC0415 - the same

    try:
        # Only a READY snapshot can be attached; on disk it is still PENDING.
        entry = Entry(manifest=manifest.with_state("ready"), verification=None)
        with removing_if_lost(ctx, manifest), attached(ctx, entry, writable=False, why="position") as lease:
            folders = copies(lease, manifest)
            base = place_of(os.path.join(server.datadir, server.log_bin), folders)
            index = server.settings.get("log_bin_index", f"{server.log_bin}.index")
            position = None
            if base is not None:
                index_there = place_of(os.path.join(server.datadir, index), folders)
                position = read_tail(base, index=index_there, gtid_purged=server.gtid_purged).position
            require_sound_reads(ctx, lease, manifest)
    except BinlogError as error:
        raise _without_position(ctx, manifest, error.message, error.hint) from error
    if position is None:
        raise _without_position(ctx, manifest, "it has no binary log", None)
    return replace(manifest, position=position)


def _without_position(ctx: Context, manifest: Manifest, why: str, hint: str | None) -> NotQuiescedError:
    """Remove a snapshot whose position must be in its binary logs and is not; return the error."""
    remove_traces(ctx, manifest)
    ctx.catalog.write(manifest.with_state("broken", reason=why))
    return NotQuiescedError(
        f"the snapshot took no lock, and its position cannot be read from it: {why}",
        hint=hint or 'try again, or set quiesce = "backup-lock" in the job',
    )


def _with_clones_position(ctx: Context, manifest: Manifest) -> Manifest:
    from snapmgr.physical.position import with_recovered_position  # noqa: PLC0415 - few snapshots need it

    try:
        return with_recovered_position(ctx, manifest)
    except VerificationError as error:
        remove_traces(ctx, manifest)
        ctx.catalog.write(manifest.with_state("broken", reason=error.message))
        raise
