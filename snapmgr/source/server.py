"""Probes a live server: its identity, abilities, layout and replication. Takes no lock, changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.catalog.manifest import ServerRecord
from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.abilities import ABILITIES, Abilities, probe_abilities
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import IDENTITY, identify, program_of
from snapmgr.mysql.datadir.engines import count_tables
from snapmgr.mysql.datadir.layout import LAYOUT, read_layout, read_places
from snapmgr.mysql.lock.levels import DURABILITY, REDO_AT_COMMIT
from snapmgr.mysql.lock.position import one_line
from snapmgr.mysql.lock.replication import applies_in_parallel, name_problems, read_channels
from snapmgr.system.blockdev import find_target
from snapmgr.system.boot import boot_id
from snapmgr.system.host import Process

if TYPE_CHECKING:
    from snapmgr.config.model import Job
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.connect.identity import ServerIdentity
    from snapmgr.mysql.datadir.layout import ServerLayout
    from snapmgr.mysql.lock.replication import Channel

_PROBE_S = 60.0
# Read at once: the server lists all its variables for each question.
_CHECKED = (*IDENTITY, *LAYOUT, *DURABILITY)
_PROBED = (*_CHECKED, *ABILITIES, "gtid_purged")


class LiveServer(Struct, frozen=True, kw_only=True):
    """A running server: its identity, abilities, layout and replication."""

    credentials: Credentials
    identity: ServerIdentity
    abilities: Abilities
    layout: ServerLayout
    channels: tuple[Channel, ...]
    """Its sources, if it is a replica."""
    parallel_applier: bool
    """Whether several threads apply their transactions."""
    durability: dict[str, str]
    """Its variables in `snapmgr.mysql.lock.levels.DURABILITY`."""
    gtid_purged: str = ""
    """MySQL's, without whitespace: transactions that it executed and that are in none of its binary logs."""
    lockless: bool = False
    """Whether it gets no lock: then its engines and these variables matter too."""

    @property
    def process(self) -> Process:
        """The server's process."""
        return Process(pid=self.identity.pid, start_ticks=self.identity.start_ticks, boot_id=boot_id())

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with its replication, in words."""
        return name_problems(self.channels)

    def check(self, connection: Connection) -> None:
        """Raise NotQuiescedError unless `connection` leads to the same server with the same layout."""
        connection.set_read_timeout(_PROBE_S)
        values = connection.variables(*_CHECKED)
        now = identify(connection, values)
        if now != self.identity:
            raise NotQuiescedError("the server was restarted or replaced since it was probed", hint="try again")
        layout = read_places(connection, now, values)
        refuse_new_folders(layout.folders() - self.layout.folders())
        new: list[str] = []
        if self.lockless:
            new = sorted({*count_tables(connection, layout.engines)} - {*self.layout.engines})
        decisive = DURABILITY if self.lockless else (REDO_AT_COMMIT,)
        new += sorted(name for name in decisive if values.get(name) != self.durability.get(name))
        if new:
            raise NotQuiescedError(f"new or changed since the server was probed: {', '.join(new)}", hint="try again")

    def record(self) -> ServerRecord:
        """Return the record of the server that a later restore needs."""
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


def probe_server(job: Job) -> LiveServer:
    """Connect to the job's server, probe it and disconnect. Takes no lock.

    Raises NotQuiescedError if it is not the server of the job's datadir, or is not provably the owner of its own.
    """
    credentials = Credentials(socket=job.socket, defaults_file=job.defaults_file, user=job.user)
    with connect(credentials) as connection:
        # No lock is held: a server with 200,000 tables may take long to list them.
        connection.set_read_timeout(_PROBE_S)
        values = connection.variables(*_PROBED)
        identity = identify(connection, values)
        if job.datadir is not None and find_target(job.datadir).path != identity.datadir:
            raise NotQuiescedError(
                f"the server at {identity.socket} has its datadir at {identity.datadir}, the job says {job.datadir}",
                hint="correct the job's socket or datadir",
            )
        abilities = probe_abilities(connection, identity, values)
        channels = read_channels(connection, abilities)
        return LiveServer(
            credentials=credentials,
            identity=identity,
            abilities=abilities,
            channels=channels,
            parallel_applier=applies_in_parallel(connection, channels),
            layout=read_layout(connection, identity, values),
            durability={name: values[name] for name in DURABILITY if name in values},
            gtid_purged=one_line(values.get("gtid_purged")),
        )


def refuse_new_folders(folders: set[str]) -> None:
    """Raise NotQuiescedError if `folders`, which appeared since the probe, has members."""
    if folders:
        raise NotQuiescedError(
            f"the server began to write elsewhere since it was probed: in {', '.join(sorted(folders))}",
            hint="try again",
        )
