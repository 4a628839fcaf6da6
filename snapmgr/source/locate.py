"""Locates a job's source on its storage: its backend and volumes, and its server if it has one. Changes nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.contract.errors import StorageError
from snapmgr.source.located import SnapshotSource
from snapmgr.source.toolbackup import staging_root
from snapmgr.source.volumes import SourceNeeds, choose_backend

if TYPE_CHECKING:
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.source.toolbackup import ToolBackup


def locate_source(ctx: Context, job: Job, tool_backup: ToolBackup | None = None) -> SnapshotSource:
    """Given a job, return its source; for a physical job `tool_backup`, or its staging folder without one.

    Raises NotQuiescedError for a server that cannot be locked safely (wrong process, files that the snapshot would not
    hold, several volumes without a common instant), StorageError if no backend can snapshot the source,
    MissingRequirementError if a requirement is missing on this machine.
    """
    if job.source == "mysql":
        from snapmgr.source.locate_mysql import locate_mysql  # noqa: PLC0415 - a directory has no server

        return locate_mysql(ctx, job)
    if tool_backup is not None:
        path = tool_backup.path
    else:
        path = str(job.path) if job.source == "directory" else staging_root(job)
    try:
        taken = choose_backend(ctx, job, SourceNeeds(path=path))
    except StorageError as error:
        if tool_backup is not None or job.source == "directory" or not os.path.ismount(path):
            raise
        # Tool backups are in a folder below it, which has no store either before it exists.
        raise StorageError(
            error.message,
            hint=f"make a folder in {path} and set staging to it: then a missing mount is noticed too",
        ) from error
    return SnapshotSource(
        path=path,
        backend=taken.backend,
        shares=taken.shares,
        live=None,
        choice=None,
        server=tool_backup.server if tool_backup is not None else None,
        tool_backup=tool_backup,
    )
