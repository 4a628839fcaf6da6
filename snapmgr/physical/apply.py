"""Makes a clone or copy of a physical backup ready for a server: the backup's tool applies the redo log."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.contract.errors import MissingRequirementError, NoRoomError, StorageError, VerificationError

if TYPE_CHECKING:
    from pathlib import Path

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context
    from snapmgr.physical.tools.request import Progress

_MIB = 1 << 20


class ShownProgress:
    """Shows the progress of a tool: in MiB if the total is known, otherwise each phase as it begins."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        """Show the progress."""
        if progress.expected_bytes:
            total = -(-progress.expected_bytes // _MIB)
            self._ctx.progress(f"{progress.phase}, MiB", min(progress.done_bytes // _MIB, total), total)
        elif progress.phase != self._phase:
            self._ctx.tell(progress.phase)
        self._phase = progress.phase


def make_ready(ctx: Context, manifest: Manifest, folder: Path, *, memory_bytes: int, time_limit_s: float) -> bool:
    """Prepare `folder`, a clone or copy of a snapshot, for a server; return whether that was necessary.

    Only snapshots of raw physical backups need it. Raises MissingRequirementError without the tool or without room,
    VerificationError if the tool fails: the backup cannot be restored.
    """
    record, server = manifest.physical, manifest.server
    if record is None or server is None or record.state == "prepared":
        return False
    from snapmgr.physical.tools.choose import choose_tool, require_tool  # noqa: PLC0415
    from snapmgr.physical.tools.request import ApplyRequest, FullError  # noqa: PLC0415
    from snapmgr.physical.tools.stagefolder import give_owner  # noqa: PLC0415 - for physical backups alone

    tool = choose_tool(record.tool, server.flavor, server.version, server_program=server.program)
    require_tool(tool)
    ctx.tell(f"{tool.name} applies the redo log")
    owner = os.stat(folder)
    try:
        tool.apply(
            ApplyRequest(
                folder=str(folder),
                log=str(ctx.catalog.tool_log(manifest.id)),
                increment=None,
                redo_only=False,
                use_memory_bytes=memory_bytes,
                options=(),
                time_limit_s=time_limit_s,
                progress=ShownProgress(ctx),
            )
        )
    except (MissingRequirementError, NoRoomError):
        raise
    except FullError as error:
        # This does not prove that the snapshot is damaged.
        raise MissingRequirementError(
            f"there is no room to apply the redo log: {error.message}", hint=error.hint
        ) from error
    except StorageError as error:
        raise VerificationError(f"the redo log could not be applied: {error.message}", hint=error.hint) from error
    give_owner(folder, owner.st_uid, owner.st_gid)
    ctx.catalog.tool_log(manifest.id).unlink(missing_ok=True)
    return True
