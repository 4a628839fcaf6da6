"""The position of a CLONE: only a server that recovers it can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from snapmgr.access.attach import attached, copies, data_path, room_wanted
from snapmgr.catalog.store import Entry
from snapmgr.config.model import Verify
from snapmgr.contract.errors import MissingRequirementError
from snapmgr.mysql.server.program import server_for
from snapmgr.mysql.server.throwaway import run_folder, throwaway
from snapmgr.stage.cloneplugin import read_position

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context


def with_recovered_position(ctx: Context, manifest: Manifest) -> Manifest:
    """Return the manifest of a CLONE's snapshot with the position that a throwaway server on a clone of it tells.

    Without a server's program here it stays absent. Raises VerificationError if no server starts on it, StorageError if
    what it tells does not fit.
    """
    how = Verify()
    # To be attached it has to look READY; on disk it is not yet.
    entry = Entry(manifest=manifest.with_state("ready"), verification=None)
    try:
        with room_wanted(f"read the position of {manifest.id}"), attached(ctx, entry, why="position") as lease:
            binary = server_for(manifest.server, data_path(lease), None)
            ctx.tell(f"starting {binary.flavor} {binary.version} on a clone, to learn its position")
            with (
                run_folder(ctx.config.scratch_dir) as run_dir,
                throwaway(
                    binary,
                    data_path(lease),
                    settings=manifest.server.settings if manifest.server else {},
                    memory_bytes=how.memory_bytes,
                    run_dir=run_dir,
                    options=how.options,
                    originals=copies(lease, manifest),
                    time_limit_s=how.time_limit_s,
                ) as server,
                server.connect() as connection,
            ):
                return replace(manifest, position=read_position(str(data_path(lease)), connection))
    except MissingRequirementError as error:
        ctx.tell(f"warning: no position: {error.message}")
        return manifest
