"""Reads the position of a CLONE with a throwaway server: only a server that recovers the clone knows it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from snapmgr.catalog import Entry
from snapmgr.config import Verify
from snapmgr.errors import LackingError
from snapmgr.jobs.attach import attached, copies, data_path, room_wanted
from snapmgr.mysql.server import copy_server
from snapmgr.physical.tools.cloneplugin import read_position

if TYPE_CHECKING:
    from snapmgr.jobs.context import Context
    from snapmgr.manifest import Manifest


def with_recovered_position(ctx: Context, manifest: Manifest) -> Manifest:
    """Return the manifest of a CLONE's snapshot with its position, read by a throwaway server on a clone of it.

    The position stays absent without a server program. Raises VerificationError if no server starts on the clone,
    StorageError if its positions contradict each other.
    """
    how = Verify()
    # Only READY snapshots can be attached; on disk it is not READY yet.
    entry = Entry(manifest=manifest.with_state("ready"), verification=None)
    try:
        with (
            room_wanted(f"read the position of {manifest.id}"),
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
    except LackingError as error:
        ctx.tell(f"warning: no position: {error.message}")
        return manifest
