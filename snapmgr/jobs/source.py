"""From a job to what has to be held still and snapshotted: server, layout, backend, volume. Changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.blockdev import find_target
from snapmgr.errors import ConfigError, LackingError, NotQuiescedError, SnapmgrError, StorageError
from snapmgr.host import boot_id
from snapmgr.manifest import Process, ServerRecord
from snapmgr.mysql.abilities import Abilities, probe_abilities
from snapmgr.mysql.client import Credentials, connect
from snapmgr.mysql.freeze import refuse_unsafe
from snapmgr.mysql.identity import identify, program_of
from snapmgr.mysql.layout import read_files, read_layout
from snapmgr.mysql.levels import DURABILITY, Choice, Needs, choose
from snapmgr.plugins import list_plugins
from snapmgr.records import NotMine

if TYPE_CHECKING:
    from snapmgr.api import Backend
    from snapmgr.config import Job
    from snapmgr.jobs.context import Context
    from snapmgr.mysql.client import Connection
    from snapmgr.mysql.identity import ServerIdentity
    from snapmgr.mysql.layout import Layout, Place
    from snapmgr.records import Volume


_EXCLUDED_SHOWN = 20
_PROBE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class LiveServer:
    """A running server: who it is, what it can do, what it writes where."""

    credentials: Credentials
    identity: ServerIdentity
    abilities: Abilities
    layout: Layout
    durability: dict[str, str]
    """Its variables named by `snapmgr.mysql.levels.DURABILITY`."""

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
        _refuse_new(_folders(read_layout(connection, now)) - _folders(self.layout))

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
        )


@dataclass(frozen=True, kw_only=True)
class Share:
    """One volume, and what of the source is in it."""

    volume: Volume
    places: dict[str, str]
    """As `snapmgr.manifest.Member.places`."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a job snapshots, located on its storage."""

    path: str
    backend: Backend
    shares: tuple[Share, ...]
    """One for each volume; the first holds `path`."""
    live: LiveServer | None
    """None for directories and stopped servers."""
    choice: Choice | None
    """How the live server is held still; None where there is none."""
    server: ServerRecord | None
    """What the manifest says of the live server."""
    layout: Layout | None = None
    """Of a server, running or not: all that the snapshot must hold."""
    absent: tuple[str, ...] = ()
    """Folders of logs that no backend can take, and that the snapshot does not need."""

    @property
    def volumes(self) -> tuple[Volume, ...]:
        """The volumes of `shares`."""
        return tuple(share.volume for share in self.shares)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of all volumes."""
        return tuple(warning for volume in self.volumes for warning in volume.warnings)

    def refuse_new_places(self) -> None:
        """Raise NotQuiescedError if the server's files lead to places that were not looked at.

        After the snapshot: a table made elsewhere between our look at the layout and the lock is not in it.
        """
        if self.layout is None:
            return
        held = {path for share in self.shares for path in share.places}
        _refuse_new(_folders(read_files(self.layout.datadir)) - held - set(self.absent))


def _folders(layout: Layout) -> set[str]:
    return {_folder(place) for place in layout.places}


def _refuse_new(folders: set[str]) -> None:
    # Further tables in a folder that is taken anyhow, or fewer, are no matter.
    if folders:
        raise NotQuiescedError(
            f"the server began to write elsewhere since it was looked at: in {', '.join(sorted(folders))}",
            hint="try again",
        )


def locate_source(ctx: Context, job: Job) -> Source:
    """Given a job, return its source.

    Raises NotQuiescedError for a server that cannot be held still safely (wrong process, files that the snapshot would
    not hold, several volumes without a common instant), StorageError if no backend can snapshot it, LackingError if
    this machine lacks something.
    """
    if job.source == "directory":
        taken = _choose_backend(ctx, job, _Wanted(path=str(job.path)))
        return Source(
            path=str(job.path), backend=taken.backend, shares=taken.shares, live=None, choice=None, server=None
        )
    freeze = job.quiesce == "freeze-process"
    if job.quiesce == "stopped":
        live, layout = None, read_files(os.path.realpath(str(job.datadir)))
    else:
        live = probe_server(job)
        live.abilities.refuse_cluster()
        if freeze:
            refuse_unsafe(live.process, job.lock_hold_s)
        layout = live.layout
    # What neither writes nor moves may be taken file by file, and volume by volume.
    still = live is None or freeze
    taken = _choose_backend(
        ctx,
        job,
        _Wanted(path=layout.datadir, places=layout.places, one_instant=not still, logs_needed=live is None),
    )
    _refuse_excluded(taken)
    return Source(
        path=layout.datadir,
        backend=taken.backend,
        shares=taken.shares,
        live=live,
        choice=choose(job.quiesce, live.abilities, _needs(job, live, taken, still=still)) if live is not None else None,
        server=live.record() if live is not None else None,
        layout=layout,
        absent=taken.absent,
    )


def _needs(job: Job, live: LiveServer, taken: _Taken, *, still: bool) -> Needs:
    apart = () if still else tuple(folder for share in taken.shares[1:] for folder in share.places)
    return Needs(
        position=job.position == "exact",
        engines=live.layout.engines,
        atomic=taken.atomic,
        logs_apart=(*apart, *taken.absent),
        settings=live.durability,
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
        return LiveServer(
            credentials=credentials,
            identity=identity,
            abilities=probe_abilities(connection, identity),
            layout=read_layout(connection, identity),
            durability=connection.variables(*DURABILITY),
        )


def name_excluded(shares: tuple[Share, ...], absent: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return what a snapshot of these volumes does not hold: first paths, then how many more (snapper makes thousands).

    What is left out of one volume may be in another one. `absent` is named elsewhere.
    """
    held = {path for share in shares for path in share.places} | set(absent)
    excluded = [path for share in shares for path in share.volume.excluded if path not in held]
    more = len(excluded) - _EXCLUDED_SHOWN
    # Names on disk need not be UTF-8; manifests are.
    named = [os.fsencode(path).decode("utf-8", "backslashreplace") for path in excluded[:_EXCLUDED_SHOWN]]
    return (*named, *([f"… and {more} more"] if more > 0 else []))


def _refuse_excluded(taken: _Taken) -> None:
    excluded = name_excluded(taken.shares, taken.absent)
    if excluded:
        raise NotQuiescedError(
            f"inside the server's folders a snapshot would leave out: {', '.join(excluded)}",
            hint="a nested subvolume or mount is an empty folder in the snapshot: make it a plain folder",
        )


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What the snapshot must hold."""

    path: str
    places: tuple[Place, ...] = ()
    one_instant: bool = False
    """Whether all of it must be taken in one instant, because somebody goes on writing."""
    logs_needed: bool = True
    """Whether logs may not be left out: nobody can flush the engines' logs so that the data are whole without."""


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """What a backend would take."""

    backend: Backend
    shares: tuple[Share, ...]
    absent: tuple[str, ...]
    """Folders of logs that it cannot take."""

    @property
    def atomic(self) -> bool:
        """Whether all is of one instant by itself."""
        volumes = tuple(share.volume for share in self.shares)
        return len(volumes) == 1 and self.backend.capabilities(volumes).atomicity == "volume"


class _FileByFileError(StorageError):
    """A backend could, if the server stood still."""


def _choose_backend(ctx: Context, job: Job, wanted: _Wanted) -> _Taken:
    """Return the job's backend, or with "auto" the best that can: one atomic over a volume before one that is not.

    And the volumes that it finds.
    """
    names = [plugin.name for plugin in list_plugins()] if job.backend == "auto" else [job.backend]
    refusals: dict[str, SnapmgrError] = {}
    fitting: list[tuple[bool, _Taken]] = []
    for name in names:
        try:
            fitting.append(_try_backend(ctx, name, wanted))
        except ConfigError:
            raise  # a typo in [backend.NAME] must not end in another backend
        except SnapmgrError as error:
            refusals[name] = error
            continue
        if fitting[-1][0]:
            break  # none can be better, and another may have to walk through a whole tree before it answers
    if not fitting:
        raise _none_fits(wanted, refusals)
    taken = max(fitting, key=lambda candidate: candidate[0])[1]
    if wanted.one_instant:
        _refuse_set(taken.shares, wanted)
    return taken


def _try_backend(ctx: Context, name: str, wanted: _Wanted) -> tuple[bool, _Taken]:
    """Return whether the backend is atomic over a volume, and what it would take. Raises why it will not do."""
    backend = ctx.backend(name)
    found = _locate_all(ctx, backend, wanted)
    if isinstance(found, NotMine):
        raise StorageError(found.reason, hint=found.hint)
    atomic = backend.capabilities(tuple(share.volume for share in found.shares)).atomicity == "volume"
    if wanted.one_instant and not atomic:
        raise _FileByFileError("it copies file by file, which is not consistent under a running server")
    return atomic, found


def _none_fits(wanted: _Wanted, refusals: dict[str, SnapmgrError]) -> SnapmgrError:
    for refusal in refusals.values():
        if isinstance(refusal, NotQuiescedError):
            return refusal
    lacking = any(isinstance(refusal, LackingError) for refusal in refusals.values())
    texts = [f"{name}: {one.message}" + (f" ({one.hint})" if one.hint else "") for name, one in refusals.items()]
    ways = ["move it to a btrfs subvolume", *(["stop the server"] if wanted.one_instant else [])]
    if any(isinstance(refusal, _FileByFileError) for refusal in refusals.values()):
        ways.insert(0, 'set quiesce = "freeze-process" in the job (clients wait for the copy: docs/freeze.md)')
    return (LackingError if lacking else StorageError)(
        f"no backend can snapshot {wanted.path}: {'; '.join(texts) or 'none is installed'}",
        hint=None if lacking else ", or ".join(ways),
    )


def _locate_all(ctx: Context, backend: Backend, wanted: _Wanted) -> _Taken | NotMine:
    """Return the volumes that hold the source and its places, or why `backend` cannot snapshot one of them."""
    home = backend.locate(find_target(wanted.path, runner=ctx.runner))
    if isinstance(home, NotMine):
        return home
    shares = [Share(volume=home, places={wanted.path: home.subpath})]
    absent: list[str] = []
    logs = _log_folders(wanted)
    # An outer folder first: its volume may hold the inner one.
    for folder in sorted({_folder(place) for place in wanted.places}):
        holder = next((share for share in shares if _subpath(share.volume, folder) is not None), None)
        if holder is not None:
            holder.places[folder] = _subpath(holder.volume, folder) or ""
            continue
        found = backend.locate(find_target(folder, runner=ctx.runner))
        if isinstance(found, NotMine) and folder in logs and not wanted.logs_needed:
            absent.append(folder)
            continue
        if isinstance(found, NotMine):
            if wanted.one_instant:
                # Whatever the backend, it is not in the same instant.
                _refuse_strays(tuple(place for place in wanted.places if _folder(place) == folder), home)
            return NotMine(reason=f"{folder}, which the server writes as well: {found.reason}", hint=found.hint)
        known = next((share for share in shares if share.volume.id == found.id), None)
        if known is None and _subpath(found, home.path) is not None:
            return NotMine(
                reason=f"{folder}, which the server writes as well, holds the datadir: it would be taken twice",
                hint="move what is there into a folder of its own",
            )
        if known is None:
            shares.append(Share(volume=found, places={folder: found.subpath}))
        else:
            known.places[folder] = found.subpath
    return _Taken(backend=backend, shares=tuple(shares), absent=tuple(absent))


def _log_folders(wanted: _Wanted) -> set[str]:
    """Return the folders that hold nothing but logs of the binary log or of replication."""
    return {_folder(place) for place in wanted.places} - {_folder(place) for place in wanted.places if not place.log}


def _folder(place: Place) -> str:
    return place.path if os.path.isdir(place.path) else os.path.dirname(place.path)


def _subpath(volume: Volume, folder: str) -> str | None:
    """Return where `folder` is in a snapshot of `volume`; None if it is not in it, as far as its path tells."""
    for excluded in volume.excluded:
        if folder == excluded or folder.startswith(excluded.rstrip("/") + "/"):
            return None
    if folder == volume.path:
        return ""
    inside = folder.startswith(volume.path.rstrip("/") + "/")
    return os.path.relpath(folder, volume.path) if inside else None


def _refuse_set(shares: tuple[Share, ...], wanted: _Wanted) -> None:
    # Logs need not be of the same instant: they stand still under the lock, and the engines' logs are flushed.
    elsewhere = {folder for share in shares[1:] for folder in share.places} - _log_folders(wanted)
    strays = tuple(place for place in wanted.places if _folder(place) in elsewhere)
    if strays:
        _refuse_strays(strays, shares[0].volume)


def _refuse_strays(strays: tuple[Place, ...], home: Volume) -> None:
    raise NotQuiescedError(
        "a snapshot of the datadir's volume would not hold all that the server writes: "
        + "; ".join(f"{place.what} at {place.path}" for place in strays),
        hint=f"move it into {home.path} (volume {home.id}), or let the job take all volumes while the server stands "
        'still: quiesce = "freeze-process" or "stopped"',
    )
