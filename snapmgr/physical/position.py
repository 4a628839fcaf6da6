"""Reads the position of a CLONE with a throwaway server: only a server that recovers the clone knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.access.attach import attached, copies, data_path, space_required
from snapmgr.capacity.lost import removing_if_lost
from snapmgr.catalog.store import Entry
from snapmgr.config.model import Verify
from snapmgr.contract.errors import MissingRequirementError
from snapmgr.mysql.server.throwaway import copy_server
from snapmgr.physical.tools.cloneplugin import read_position

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context


def with_recovered_position(ctx: Context, manifest: Manifest) -> Manifest:
    """Return the manifest of a CLONE's snapshot with its position, which a throwaway server reads on a clone of it.

    Without a server program the position remains unset. Raises VerificationError if the server does not start on the
    clone, StorageError if its positions contradict each other.
    """
    how = Verify()
    # Only READY snapshots can be attached; on disk it is not READY yet.
    entry = Entry(manifest=manifest.with_state("ready"), verification=None)
    try:
        with (
            removing_if_lost(ctx, manifest),
            space_required(f"read the position of {manifest.id}"),
            attached(ctx, entry, why="position") as lease,
            copy_server(
                data_path(lease),
                manifest.server,
                memory_bytes=how.memory_bytes,
                options=how.options,
                originals=copies(lease, manifest),
                scratch_dir=ctx.config.scratch_dir,
                time_limit_s=how.time_limit_s,
                tell=ctx.tell,
                purpose=", to learn its position",
            ) as server,
            server.connect() as connection,
        ):
            return replace(manifest, position=read_position(str(data_path(lease)), connection))
    except MissingRequirementError as error:
        ctx.tell(f"warning: no position: {error.message}")
        return manifest
