"""From a job to what has to be held still and snapshotted: server, layout, backend, volume. Changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from snapmgr.catalog.manifest import ServerRecord
from snapmgr.contract.errors import NotQuiescedError, StorageError
from snapmgr.mysql.connect.abilities import Abilities, probe_abilities
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import identify, program_of
from snapmgr.mysql.datadir.layout import DataPlace, read_files, read_layout
from snapmgr.mysql.datadir.tablespace import tablespaces_elsewhere
from snapmgr.mysql.lock.freeze import refuse_unsafe
from snapmgr.mysql.lock.levels import DURABILITY, REDO_AT_COMMIT, LockChoice, LockNeeds, choose
from snapmgr.mysql.lock.position import one_line
from snapmgr.mysql.lock.replication import applies_in_parallel, name_problems, read_channels
from snapmgr.source.toolbackup import staging_root
from snapmgr.source.volumes import SourceNeeds, choose_backend, folder_of, is_held, refuse_excluded
from snapmgr.system.blockdev import find_target
from snapmgr.system.boot import boot_id
from snapmgr.system.host import Process

if TYPE_CHECKING:
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.contract.backend import Backend
    from snapmgr.contract.records import Volume
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.connect.identity import ServerIdentity
    from snapmgr.mysql.datadir.layout import ServerLayout
    from snapmgr.mysql.lock.replication import Channel
    from snapmgr.source.toolbackup import ToolBackup
    from snapmgr.source.volumes import BackendChoice, VolumeShare

_PROBE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class LiveServer:
    """A running server: who it is, what it can do, what it writes where."""

    credentials: Credentials
    identity: ServerIdentity
    abilities: Abilities
    layout: ServerLayout
    channels: tuple[Channel, ...]
    """What it replicates from."""
    parallel_applier: bool
    """Whether several threads execute what comes from there."""
    durability: dict[str, str]
    """Its variables named by `snapmgr.mysql.lock.levels.DURABILITY`."""
    gtid_purged: str = ""
    """MySQL's, without whitespace: executed, and in none of its binary logs."""
    lockless: bool = False
    """Whether it gets no lock: then its engines and these variables matter, too."""

    @property
    def process(self) -> Process:
        """The server's process."""
        return Process(pid=self.identity.pid, start_ticks=self.identity.start_ticks, boot_id=boot_id())

    def check(self, connection: Connection) -> None:
        """Raise NotQuiescedError unless `connection` leads to this very server with this very layout."""
        connection.set_read_timeout(_PROBE_S)
        now = identify(connection)
        if now != self.identity:
            raise NotQuiescedError("the server was restarted or exchanged since it was looked at", hint="try again")
        layout = read_layout(connection, now)
        _refuse_new(_folders(layout) - _folders(self.layout))
        new = sorted({*layout.engines} - {*self.layout.engines}) if self.lockless else []
        settings = connection.variables(*(DURABILITY if self.lockless else (REDO_AT_COMMIT,)))
        new += sorted(name for name in settings if settings[name] != self.durability.get(name))
        if new:
            raise NotQuiescedError(f"new since the server was looked at: {', '.join(new)}", hint="try again")

    def record(self) -> ServerRecord:
        """Return what a later restore has to know of the server."""
        return ServerRecord(
            flavor=self.identity.flavor,
            version=self.identity.version,
            server_id=self.identity.server_id,
            server_uuid=self.identity.server_uuid,
            datadir=self.identity.datadir,
            log_bin=self.layout.settings.get("log_bin_basename") if self.layout.log_bin_basename else None,
            settings=dict(self.layout.settings),
            program=program_of(self.identity.pid),
            gtid_purged=self.gtid_purged,
        )


@dataclass(frozen=True, kw_only=True)
class SnapshotSource:
    """What a job snapshots, located on its storage."""

    path: str
    backend: Backend
    shares: tuple[VolumeShare, ...]
    """One for each volume; the first holds `path`."""
    live: LiveServer | None
    """None for directories and stopped servers."""
    choice: LockChoice | None
    """How the live server is held still; None where there is none."""
    server: ServerRecord | None
    """What the manifest says of the live server."""
    layout: ServerLayout | None = None
    """Of a server, running or not: all that the snapshot must hold."""
    absent: tuple[str, ...] = ()
    """Folders of logs that no backend can take, and that the snapshot does not need."""
    staged: ToolBackup | None = None
    """The finished backup that `path` is."""

    @property
    def volumes(self) -> tuple[Volume, ...]:
        """The volumes of `shares`."""
        return tuple(share.volume for share in self.shares)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of all volumes and of replication, and files of the server of which nobody knows whether a snapshot
        needs them.
        """
        strangers = () if self.layout is None else self.layout.strangers
        return (
            *(name_problems(self.live.channels) if self.live is not None else ()),
            *(warning for volume in self.volumes for warning in volume.warnings),
            *(
                f"the server has {path} open for writing, which is not in a snapshot"
                for path in strangers
                if not is_held(self.shares, path)
            ),
        )

    def refuse_new_places(self) -> None:
        """Raise NotQuiescedError if the server's files lead to places that were not looked at.

        After the snapshot: a table made elsewhere between our last look at the layout and the lock is not in it. MySQL
        leaves no trace of it in the datadir; there DDL was held off when we looked, unless the level has no such lock.
        """
        if self.layout is None:
            return
        held = {path for share in self.shares for path in share.places}
        _refuse_new(_folders(read_files(self.layout.datadir)) - held - {*self.absent, *self.layout.scratch})
        if self.live is not None and self.choice is not None and self.choice.level == "global-read-lock":
            with connect(self.live.credentials) as connection:
                self.live.check(connection)


def _folders(layout: ServerLayout) -> set[str]:
    return {folder_of(place) for place in layout.places}


def _refuse_new(folders: set[str]) -> None:
    # Further tables in a folder that is taken anyhow, or fewer, are no matter.
    if folders:
        raise NotQuiescedError(
            f"the server began to write elsewhere since it was looked at: in {', '.join(sorted(folders))}",
            hint="try again",
        )


def locate_source(ctx: Context, job: Job, staged: ToolBackup | None = None) -> SnapshotSource:
    """Given a job, return its source; for a physical job `staged`, or without it the folder where that is to be.

    Raises NotQuiescedError for a server that cannot be held still safely (wrong process, files that the snapshot would
    not hold, several volumes without a common instant), StorageError if no backend can snapshot it,
    MissingRequirementError if this machine lacks something.
    """
    if job.source != "mysql":
        path = staged.path if staged is not None else str(job.path) if job.source == "directory" else staging_root(job)
        try:
            taken = choose_backend(ctx, job, SourceNeeds(path=path))
        except StorageError as error:
            if staged is not None or job.source == "directory" or not os.path.ismount(path):
                raise
            # What is filled lies in a folder of it, for which there is no store either while it does not exist.
            raise StorageError(
                error.message,
                hint=f"make a folder in {path} and name that as staging: so it is noticed, too, if nothing is mounted",
            ) from error
        return SnapshotSource(
            path=path,
            backend=taken.backend,
            shares=taken.shares,
            live=None,
            choice=None,
            server=staged.server if staged is not None else None,
            staged=staged,
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
    # What neither writes nor moves may be taken file by file, and volume by volume.
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
        parallel_applier=live.parallel_applier and not job.stop_replica,
    )


def probe_server(job: Job) -> LiveServer:
    """Connect, look, disconnect: return the job's server. Takes no lock."""
    credentials = Credentials(socket=job.socket, defaults_file=job.defaults_file, user=job.user)
    with connect(credentials) as connection:
        # No lock is held: a server with 200,000 tables may take its time to list them.
        connection.set_read_timeout(_PROBE_S)
        identity = identify(connection)
        if job.datadir is not None and find_target(job.datadir).path != identity.datadir:
            raise NotQuiescedError(
                f"the server at {identity.socket} has its datadir at {identity.datadir}, the job says {job.datadir}",
                hint="correct the job's socket or datadir",
            )
        abilities = probe_abilities(connection, identity)
        channels = read_channels(connection, abilities)
        return LiveServer(
            credentials=credentials,
            identity=identity,
            abilities=abilities,
            channels=channels,
            parallel_applier=applies_in_parallel(connection, channels),
            layout=read_layout(connection, identity),
            durability=connection.variables(*DURABILITY),
            gtid_purged=one_line(connection.variables("gtid_purged").get("gtid_purged")),
        )
