"""Locates the source of a job with a server: the server and its lock, its layout, its backend and volumes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.mysql.datadir.layout import DataPlace, read_files
from snapmgr.mysql.lock.levels import LockNeeds, choose
from snapmgr.source.located import SnapshotSource
from snapmgr.source.server import probe_server, refuse_new_folders
from snapmgr.source.volumes import SourceNeeds, choose_backend, refuse_excluded

if TYPE_CHECKING:
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.mysql.datadir.layout import ServerLayout
    from snapmgr.source.server import LiveServer
    from snapmgr.source.volumes import BackendChoice


def locate_mysql(ctx: Context, job: Job) -> SnapshotSource:
    """Given a job with a server, return its source; the errors are those of `snapmgr.source.locate.locate_source`."""
    freeze = job.quiesce == "freeze-process"
    if job.quiesce == "stopped":
        live, layout = None, _read_stopped(os.path.realpath(str(job.datadir)))
    else:
        live = probe_server(job)
        live.abilities.refuse_cluster()
        if freeze:
            from snapmgr.mysql.lock.freeze import refuse_unsafe  # noqa: PLC0415 - few jobs freeze their server

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


def refuse_new_places(source: SnapshotSource) -> None:
    """Raise NotQuiescedError if the server's files lead to places outside the snapshot.

    Call it after the snapshot: a table made elsewhere between our last read of the layout and the lock is not in
    it. MySQL leaves no trace of such a table in the datadir; but there DDL was blocked at that read, or the server is
    asked again (`snapmgr.backup.fire_mysql`).
    """
    if source.layout is None:
        return
    held = {path for share in source.shares for path in share.places}
    refuse_new_folders(read_files(source.layout.datadir).folders() - held - {*source.absent, *source.layout.scratch})


def _read_stopped(datadir: str) -> ServerLayout:
    from snapmgr.mysql.datadir.tablespace import tablespaces_elsewhere  # noqa: PLC0415 - a live server tells them

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
