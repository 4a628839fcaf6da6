"""Restores a snapshot to a new directory: copies its folders and compares the copy with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from snapmgr.access.attach import attached, copies, release
from snapmgr.capacity.lost import removing_if_lost, require_sound_reads
from snapmgr.contract.errors import ConfigError, SnapmgrError, VerificationError
from snapmgr.mysql.lock.stopped import server_process
from snapmgr.physical.apply import make_ready
from snapmgr.restore.copy import DIFFERS_FILE, FolderTarget, RestoreResult, TreeRestore, list_targets
from snapmgr.restore.destination import FinishedMeanwhileError, claim_destination
from snapmgr.restore.destination_check import choose_destination
from snapmgr.restore.folder_map import expected_map, map_folders
from snapmgr.system.host import is_alive
from snapmgr.system.probe import require_answer
from snapmgr.tree.walk import deep_trees

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Manifest
    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context
    from snapmgr.restore.destination import Destination

_DIFFERENCES_SHOWN = 5
_PREPARE_BYTES = 512 << 20
_PREPARE_S = 86400.0


class RestoreDiffersError(VerificationError):
    """The restored copy differs from the snapshot; it is not removed."""

    def __init__(self, restored: RestoreResult) -> None:
        found = restored.differences
        more = f"; and {len(found) - _DIFFERENCES_SHOWN} more" if len(found) > _DIFFERENCES_SHOWN else ""
        super().__init__(
            f"{restored.dest} differs from snapshot {restored.snapshot_id}: "
            f"{'; '.join(found[:_DIFFERENCES_SHOWN])}{more}",
            hint=f"the copy stays, with the list in {DIFFERS_FILE}; do not use it before the cause is known",
        )
        self.restored = restored


class RestorePlan(Struct, frozen=True, kw_only=True):
    """The plan of a restore."""

    dest: str
    places: tuple[FolderTarget, ...]
    excluded: tuple[str, ...]


def plan(ctx: Context, entry: Entry, dest: str) -> RestorePlan:
    """Return the plan of `restore`, and raise what `restore` would raise before it begins. Changes nothing."""
    dest = _check_destination(ctx, entry.manifest, dest)
    return RestorePlan(
        dest=dest, places=list_targets(expected_map(entry.manifest), dest), excluded=entry.manifest.excluded
    )


def restore(ctx: Context, entry: Entry, dest: str, *, read_back: bool = True) -> RestoreResult:
    """Copy a READY snapshot of a source to `dest`: an empty folder, or one that does not exist yet.

    The snapshot is only read. Blocks are shared where the file system supports it; `read_back` compares the contents of
    files that were copied with the snapshot, read from the disk (attributes are always compared). `dest` shows nothing
    until everything is copied and compared; a restore that fails or is interrupted leaves nothing.

    Raises ConfigError if `dest` is not suitable, StorageError if it has too little space or the snapshot's storage is
    missing, BusyError if another restore to it is active, RestoreDiffersError.
    """
    manifest = entry.manifest
    dest = _check_destination(ctx, manifest, dest)
    # On a frozen file system the first change would hang, and no signal could end it.
    require_answer(dest if os.path.isdir(dest) else os.path.dirname(dest))
    ctx.catalog.make()
    _release_leftovers(ctx, manifest.id)
    try:
        with (
            removing_if_lost(ctx, manifest),
            deep_trees(),
            claim_destination(ctx.catalog, dest, manifest.id, tell=ctx.tell) as destination,
            attached(ctx, entry, writable=False, why="restore") as lease,
        ):
            tree = TreeRestore(ctx, manifest, destination, map_folders(copies(lease, manifest)))
            restored = tree.make(read_back=read_back)
            require_sound_reads(ctx, lease, manifest)
            if not restored.differences:
                _prepare(ctx, manifest, destination, restored)
            destination.finish(msgspec.json.encode(restored).decode())
    except FinishedMeanwhileError as error:
        if error.record.snapshot_id != manifest.id or not error.record.report:
            raise
        ctx.tell(error.message)
        restored = msgspec.json.decode(error.record.report, type=RestoreResult)
    if restored.differences:
        raise RestoreDiffersError(restored)
    return restored


def _prepare(ctx: Context, manifest: Manifest, destination: Destination, restored: RestoreResult) -> None:
    tree = os.readlink(f"/proc/self/fd/{destination.tree_fd}")
    data = Path(tree, os.path.relpath(restored.data_path, restored.dest))
    make_ready(ctx, manifest, data, memory_bytes=_PREPARE_BYTES, time_limit_s=_PREPARE_S)


def _check_destination(ctx: Context, manifest: Manifest, dest: str) -> str:
    manifest.require_ready("restored")
    sources = {manifest.path, *(path for member in manifest.members for path in member.places)}
    ours = {str(ctx.config.state_dir): "the state directory", str(ctx.config.scratch_dir): "the scratch directory"}
    # A snapshot in a copy folder must not change.
    pools = (member.ref.pool.id for member in manifest.members)
    ours |= {pool: "the folder of copies" for pool in pools if pool.startswith("/")}
    dest = choose_destination(dest, sources=sources, barred=ours)
    if os.path.isdir(dest) and (pid := server_process(dest)) is not None:
        raise ConfigError(
            f"a server (pid {pid}) still runs on {dest}: it would write into the restored data",
            hint="stop it first, or name another folder",
        )
    return dest


def _release_leftovers(ctx: Context, snapshot_id: str) -> None:
    for lease in ctx.catalog.leases()[0]:
        if lease.why == "restore" and lease.snapshot_id == snapshot_id and not is_alive(lease.holder):
            try:
                release(ctx, lease)
            except SnapmgrError as error:
                ctx.tell(f"could not detach a snapshot that a killed restore had attached: {error.message}")
