"""From a job to what has to be held still and snapshotted: server, layout, backend, volume. Changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.blockdev import find_target
from snapmgr.errors import ConfigError, LackingError, NotQuiescedError, SnapmgrError, StorageError
from snapmgr.manifest import ServerRecord
from snapmgr.mysql.client import Credentials, connect
from snapmgr.mysql.identity import identify
from snapmgr.mysql.layout import outside, read_files, read_layout
from snapmgr.mysql.quiesce import Choice, choose
from snapmgr.plugins import list_plugins
from snapmgr.records import NotMine

if TYPE_CHECKING:
    from snapmgr.api import Backend
    from snapmgr.config import Job
    from snapmgr.jobs.context import Context
    from snapmgr.mysql.client import Connection
    from snapmgr.mysql.identity import ServerIdentity
    from snapmgr.mysql.layout import Layout
    from snapmgr.records import Volume


_EXCLUDED_SHOWN = 20
_PROBE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class LiveServer:
    """A running server that has to be locked: who it is, what it writes where, and the lock to take."""

    credentials: Credentials
    identity: ServerIdentity
    layout: Layout
    choice: Choice

    def check(self, connection: Connection) -> None:
        """Raise NotQuiescedError unless `connection` leads to this very server with this very layout."""
        connection.set_read_timeout(_PROBE_S)
        now = identify(connection)
        if now != self.identity:
            raise NotQuiescedError("the server was restarted or exchanged since it was looked at", hint="try again")
        if read_layout(connection, now).places != self.layout.places:
            raise NotQuiescedError("the server's files moved since they were looked at", hint="try again")

    def record(self, places: dict[str, str]) -> ServerRecord:
        """Return what a later restore has to know of the server; `places` as in `ServerRecord`."""
        return ServerRecord(
            flavor=self.identity.flavor,
            version=self.identity.version,
            server_id=self.identity.server_id,
            server_uuid=self.identity.server_uuid,
            datadir=self.identity.datadir,
            log_bin=self.layout.settings.get("log_bin_basename") if self.layout.log_bin_basename else None,
            settings=dict(self.layout.settings),
            places=places,
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a job snapshots, located on its storage."""

    path: str
    backend: Backend
    volume: Volume
    live: LiveServer | None
    """None for directories and stopped servers."""
    server: ServerRecord | None
    """What the manifest says of the live server."""
    layout: Layout | None = None
    """Of a server, running or not: all that the snapshot must hold."""

    def refuse_new_places(self) -> None:
        """Raise NotQuiescedError if the server's files lead to places that were not looked at.

        After the snapshot: a table made elsewhere between our look at the layout and the lock is not in it.
        """
        if self.layout is None:
            return
        known = {place.path for place in self.layout.places}
        new = [place for place in read_files(self.layout.datadir).places if place.path not in known]
        if new:
            raise NotQuiescedError(
                "the server's files moved since they were looked at: "
                + "; ".join(f"{place.what} at {place.path}" for place in new),
                hint="try again",
            )


def locate_source(ctx: Context, job: Job) -> Source:
    """Given a job, return its source.

    Raises NotQuiescedError for a server that cannot be locked safely (wrong process, files outside the volume),
    StorageError if no backend can snapshot it, LackingError if this machine lacks something.
    """
    if job.source == "directory":
        backend, volume = _choose_backend(ctx, job, str(job.path), need_volume=False)
        return Source(path=str(job.path), backend=backend, volume=volume, live=None, server=None)
    if job.quiesce == "stopped":
        backend, volume = _choose_backend(ctx, job, str(job.datadir), need_volume=False)
        _refuse_excluded(volume)
        layout = read_files(os.path.realpath(str(job.datadir)))
        _refuse_outside(ctx, layout, backend, volume)
        return Source(path=str(job.datadir), backend=backend, volume=volume, live=None, server=None, layout=layout)
    live = probe_server(job)
    datadir = live.identity.datadir
    backend, volume = _choose_backend(ctx, job, datadir, need_volume=not live.choice.freeze)
    _refuse_excluded(volume)
    subpaths = _refuse_outside(ctx, live.layout, backend, volume)
    return Source(
        path=datadir, backend=backend, volume=volume, live=live, server=live.record(subpaths), layout=live.layout
    )


def _refuse_outside(ctx: Context, layout: Layout, backend: Backend, volume: Volume) -> dict[str, str]:
    """Raise NotQuiescedError if the server writes outside of `volume`; return its folders' paths inside the volume."""
    subpaths: dict[str, str] = {}

    def volume_of(path: str) -> str | None:
        found = backend.locate(find_target(path, runner=ctx.runner))
        if isinstance(found, NotMine):
            return None
        subpaths[path] = found.subpath
        return found.id

    strays = outside(layout, volume_of)
    if strays:
        raise NotQuiescedError(
            "a snapshot of the datadir's volume would not hold all that the server writes: "
            + "; ".join(f"{place.what} at {place.path}" for place in strays),
            hint=f"move it into {volume.path} (volume {volume.id})",
        )
    return subpaths


def probe_server(job: Job) -> LiveServer:
    """Connect, look, disconnect: return the job's server and the lock it needs. Takes no lock."""
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
        choice = choose(job.quiesce, identity.flavor)
        layout = read_layout(connection, identity)
    return LiveServer(credentials=credentials, identity=identity, layout=layout, choice=choice)


def name_excluded(volume: Volume) -> tuple[str, ...]:
    """Return what a snapshot of `volume` does not hold: first paths, then how many more (snapper makes thousands)."""
    more = len(volume.excluded) - _EXCLUDED_SHOWN
    # Names on disk need not be UTF-8; manifests are.
    named = [os.fsencode(path).decode("utf-8", "backslashreplace") for path in volume.excluded[:_EXCLUDED_SHOWN]]
    return (*named, *([f"… and {more} more"] if more > 0 else []))


def _refuse_excluded(volume: Volume) -> None:
    if volume.excluded:
        raise NotQuiescedError(
            f"inside the datadir a snapshot would leave out: {', '.join(name_excluded(volume))}",
            hint="a nested subvolume or mount is an empty folder in the snapshot: make it a plain folder",
        )


def _choose_backend(ctx: Context, job: Job, path: str, *, need_volume: bool) -> tuple[Backend, Volume]:
    """Return the job's backend, or with "auto" the best that can: one atomic over the volume before one that is not."""
    target = find_target(path, runner=ctx.runner)
    names = [plugin.name for plugin in list_plugins()] if job.backend == "auto" else [job.backend]
    refusals: list[str] = []
    lacking = False
    fitting: list[tuple[bool, Backend, Volume]] = []
    for name in names:
        try:
            backend = ctx.backend(name)
            found = backend.locate(target)
        except ConfigError:
            raise  # a typo in [backend.NAME] must not end in another backend
        except SnapmgrError as error:
            lacking = lacking or isinstance(error, LackingError)
            refusals.append(f"{name}: {error.message}" + (f" ({error.hint})" if error.hint else ""))
            continue
        if isinstance(found, NotMine):
            refusals.append(f"{name}: {found.reason}" + (f" ({found.hint})" if found.hint else ""))
            continue
        atomic = backend.capabilities((found,)).atomicity == "volume"
        if need_volume and not atomic:
            refusals.append(
                f"{name}: it copies file by file, which is not consistent under a running server; "
                'quiesce = "freeze-process" makes it so, at the price of a stall'
            )
            continue
        fitting.append((atomic, backend, found))
    if not fitting:
        kind = LackingError if lacking else StorageError
        raise kind(
            f"no backend can snapshot {path}: {'; '.join(refusals) or 'none is installed'}",
            hint=None if lacking else "move it to a btrfs subvolume" + (", or stop the server" if need_volume else ""),
        )
    _, backend, volume = max(fitting, key=lambda candidate: candidate[0])
    return backend, volume
