"""Locates a job's source: its server and lock, its layout, its backend and volumes. Changes nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.contract.errors import StorageError
from snapmgr.mysql.connect.client import connect
from snapmgr.mysql.datadir.layout import DataPlace, read_files
from snapmgr.mysql.datadir.tablespace import tablespaces_elsewhere
from snapmgr.mysql.lock.freeze import refuse_unsafe
from snapmgr.mysql.lock.levels import LockChoice, LockNeeds, choose
from snapmgr.mysql.lock.replication import name_problems
from snapmgr.source.server import probe_server, refuse_new_folders
from snapmgr.source.toolbackup import staging_root
from snapmgr.source.volumes import SourceNeeds, choose_backend, is_held, refuse_excluded

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import ServerRecord
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.contract.backend import Backend
    from snapmgr.contract.records import Volume
    from snapmgr.mysql.datadir.layout import ServerLayout
    from snapmgr.source.server import LiveServer
    from snapmgr.source.toolbackup import ToolBackup
    from snapmgr.source.volumes import BackendChoice, VolumeShare


class SnapshotSource(Struct, frozen=True, kw_only=True):
    """The source of a job, located on its storage."""

    path: str
    backend: Backend
    shares: tuple[VolumeShare, ...]
    """One for each volume; the first holds `path`."""
    live: LiveServer | None
    """None for directories, tool backups and stopped servers."""
    choice: LockChoice | None
    """The lock for the live server; None without one."""
    server: ServerRecord | None
    """The manifest's record of the server; None if we could not ask it."""
    layout: ServerLayout | None = None
    """For a server, running or not: all files that the snapshot must hold."""
    absent: tuple[str, ...] = ()
    """Folders of logs that the backend cannot snapshot, and that the snapshot does not need."""
    tool_backup: ToolBackup | None = None
    """The finished backup at `path`."""

    @property
    def volumes(self) -> tuple[Volume, ...]:
        """The volumes of `shares`."""
        return tuple(share.volume for share in self.shares)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of all volumes and of replication, and about open files of unknown kind outside the snapshot."""
        unknown_files = () if self.layout is None else self.layout.unknown_files
        return (
            *(name_problems(self.live.channels) if self.live is not None else ()),
            *(warning for volume in self.volumes for warning in volume.warnings),
            *(
                f"the server has {path} open for writing, which is not in a snapshot"
                for path in unknown_files
                if not is_held(self.shares, path)
            ),
        )

    def refuse_new_places(self) -> None:
        """Raise NotQuiescedError if the server's files lead to places outside the snapshot.

        Call it after the snapshot: a table made elsewhere between our last read of the layout and the lock is not in
        it. MySQL leaves no trace of such a table in the datadir; but there DDL was blocked at that read, unless the
        level has no such lock.
        """
        if self.layout is None:
            return
        held = {path for share in self.shares for path in share.places}
        refuse_new_folders(read_files(self.layout.datadir).folders() - held - {*self.absent, *self.layout.scratch})
        if self.live is not None and self.choice is not None and self.choice.level == "global-read-lock":
            with connect(self.live.credentials) as connection:
                self.live.check(connection)


def locate_source(ctx: Context, job: Job, tool_backup: ToolBackup | None = None) -> SnapshotSource:
    """Given a job, return its source; for a physical job `tool_backup`, or its staging folder without one.

    Raises NotQuiescedError for a server that cannot be locked safely (wrong process, files that the snapshot would not
    hold, several volumes without a common instant), StorageError if no backend can snapshot the source,
    MissingRequirementError if a requirement is missing on this machine.
    """
    if job.source != "mysql":
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
    freeze = job.quiesce == "freeze-process"
    if job.quiesce == "stopped":
        live, layout = None, _read_stopped(os.path.realpath(str(job.datadir)))
    else:
        live = probe_server(job)
        live.abilities.refuse_cluster()
        if freeze:
            refuse_unsafe(live.process, job.lock_hold_s)
        layout = live.layout
    # If the server does not write, file-by-file copies and one volume after another are consistent.
    still = live is None or freeze
    taken = choose_backend(
        ctx,
        job,
        SourceNeeds(path=layout.datadir, places=layout.places, one_instant=not still, logs_needed=live is None),
    )
    refuse_excluded(taken, layout.scratch)
    choice = None
    if live is not None:
        choice = choose(job.quiesce, live.abilities, _needs(job, live, taken, still=still))
        live = replace(live, lockless=choice.level == "crash-consistent")
    return SnapshotSource(
        path=layout.datadir,
        backend=taken.backend,
        shares=taken.shares,
        live=live,
        choice=choice,
        server=live.record() if live is not None else None,
        layout=layout,
        absent=taken.absent,
    )


def _read_stopped(datadir: str) -> ServerLayout:
    layout = read_files(datadir)
    elsewhere = {place.path for place in layout.places}
    found = [DataPlace(what="tablespace", path=path) for path in tablespaces_elsewhere(datadir) - elsewhere]
    return replace(layout, places=tuple(sorted((*layout.places, *found), key=lambda place: place.path)))


def _needs(job: Job, live: LiveServer, taken: BackendChoice, *, still: bool) -> LockNeeds:
    apart = () if still else tuple(folder for share in taken.shares[1:] for folder in share.places)
    return LockNeeds(
        position=job.position == "exact",
        engines=live.layout.engines,
        atomic=taken.atomic,
        logs_apart=(*apart, *taken.absent),
        settings=live.durability,
        replica=bool(live.channels),
        applies=any(channel.applies for channel in live.channels) and not job.stop_replica,
        parallel_applier=live.parallel_applier and not job.stop_replica,
    )
