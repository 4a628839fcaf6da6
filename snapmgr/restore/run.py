"""Restoring: a snapshot's folders copied to a folder of their own, compared at the end."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

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
    """What was restored is not what the snapshot holds; it is left where it is."""

    def __init__(self, restored: RestoreResult) -> None:
        found = restored.differences
        more = f"; and {len(found) - _DIFFERENCES_SHOWN} more" if len(found) > _DIFFERENCES_SHOWN else ""
        super().__init__(
            f"{restored.dest} is not what snapshot {restored.snapshot_id} holds: "
            f"{'; '.join(found[:_DIFFERENCES_SHOWN])}{more}",
            hint=f"it is left there, with the list in {DIFFERS_FILE}; do not use it before this is understood",
        )
        self.restored = restored


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """What a restore would do."""

    dest: str
    places: tuple[FolderTarget, ...]
    excluded: tuple[str, ...]


def plan(ctx: Context, entry: Entry, dest: str) -> RestorePlan:
    """Say what `restore` would do, and refuse what it would refuse at once. Looks only."""
    where = _destination(ctx, entry.manifest, dest)
    return RestorePlan(
        dest=where, places=list_targets(expected_map(entry.manifest), where), excluded=entry.manifest.excluded
    )


def restore(ctx: Context, entry: Entry, dest: str, *, read_back: bool = True) -> RestoreResult:
    """Copy all that a READY snapshot holds of its source to `dest`: an empty folder, or one that does not exist yet.

    The snapshot is only read. Blocks are shared where the file system can; `read_back` compares the contents of what
    had to be copied with the snapshot, read from the disk (attributes are always compared). Until all of it is copied
    and compared, `dest` shows nothing of it; what fails or is interrupted leaves nothing.

    Raises ConfigError for a `dest` that will not do, StorageError (no room, no such snapshot's storage), BusyError if
    another restore is at work there, RestoreDiffersError.
    """
    manifest = entry.manifest
    where = _destination(ctx, manifest, dest)
    # On a frozen file system the first change would hang, where no signal reaches it.
    require_answer(where if os.path.isdir(where) else os.path.dirname(where))
    ctx.catalog.make()
    _release_dead(ctx, manifest.id)
    try:
        with (
            removing_if_lost(ctx, manifest),
            deep_trees(),
            claim_destination(ctx.catalog, where, manifest.id, tell=ctx.tell) as place,
            attached(ctx, entry, writable=False, why="restore") as lease,
        ):
            restored = TreeRestore(ctx, manifest, place, map_folders(copies(lease, manifest))).make(read_back=read_back)
            require_sound_reads(ctx, lease, manifest)
            if not restored.differences:
                _make_ready(ctx, manifest, place, restored)
            place.finish(msgspec.json.encode(restored).decode())
    except FinishedMeanwhileError as error:
        if error.record.snapshot_id != manifest.id or not error.record.report:
            raise
        ctx.tell(error.message)
        restored = msgspec.json.decode(error.record.report, type=RestoreResult)
    if restored.differences:
        raise RestoreDiffersError(restored)
    return restored


def _make_ready(ctx: Context, manifest: Manifest, place: Destination, restored: RestoreResult) -> None:
    tree = os.readlink(f"/proc/self/fd/{place.tree_fd}")
    data = Path(tree, os.path.relpath(restored.data_path, restored.dest))
    make_ready(ctx, manifest, data, memory_bytes=_PREPARE_BYTES, time_limit_s=_PREPARE_S)


def _destination(ctx: Context, manifest: Manifest, dest: str) -> str:
    manifest.require_ready("restored")
    sources = {manifest.path, *(path for member in manifest.members for path in member.places)}
    ours = {str(ctx.config.state_dir): "the state directory", str(ctx.config.scratch_dir): "the scratch directory"}
    # A copy that is written to is none any more.
    pools = (member.ref.pool.id for member in manifest.members)
    ours |= {pool: "the folder of copies" for pool in pools if pool.startswith("/")}
    where = choose_destination(dest, sources=sources, barred=ours)
    if os.path.isdir(where) and (pid := server_process(where)) is not None:
        raise ConfigError(
            f"a server (pid {pid}) still runs on {where}: it would write into what is restored",
            hint="stop it first, or name another folder",
        )
    return where


def _release_dead(ctx: Context, snapshot_id: str) -> None:
    for lease in ctx.catalog.leases()[0]:
        if lease.why == "restore" and lease.snapshot_id == snapshot_id and not is_alive(lease.holder):
            try:
                release(ctx, lease)
            except SnapmgrError as error:
                ctx.tell(f"what a killed restore had attached could not be removed now: {error.message}")
