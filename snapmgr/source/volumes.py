"""Which backend takes a source, and which volumes of it: what must be in one instant, what may be left out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.config.plugins import list_plugins
from snapmgr.contract.errors import ConfigError, MissingRequirementError, NotQuiescedError, SnapmgrError, StorageError
from snapmgr.contract.records import NotMine
from snapmgr.system.blockdev import find_target
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.contract.backend import Backend
    from snapmgr.contract.records import Volume
    from snapmgr.mysql.datadir.layout import DataPlace


_EXCLUDED_SHOWN = 20
_PLACES_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class VolumeShare:
    """One volume, and what of the source is in it."""

    volume: Volume
    places: dict[str, str]
    """As `snapmgr.catalog.manifest.Member.places`."""


def name_excluded(shares: tuple[VolumeShare, ...], absent: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return what a snapshot of these volumes does not hold: first paths, then how many more (snapper makes thousands).

    What is left out of one volume may be in another one. `absent` is named elsewhere.
    """
    held = {path for share in shares for path in share.places} | set(absent)
    excluded = [path for share in shares for path in share.volume.excluded if path not in held]
    more = len(excluded) - _EXCLUDED_SHOWN
    # Names on disk need not be UTF-8; manifests are.
    named = [os.fsencode(path).decode("utf-8", "backslashreplace") for path in excluded[:_EXCLUDED_SHOWN]]
    return (*named, *([f"… and {more} more"] if more > 0 else []))


def refuse_excluded(taken: BackendChoice, scratch: tuple[str, ...] = ()) -> None:
    """Raise NotQuiescedError if a snapshot would lack a folder of the server's; `scratch` are those it may lack."""
    excluded = name_excluded(taken.shares, (*taken.absent, *scratch))
    if excluded:
        raise NotQuiescedError(
            f"inside the server's folders a snapshot would leave out: {', '.join(excluded)}",
            hint="a nested subvolume or mount is an empty folder in the snapshot: make it a plain folder",
        )


@dataclass(frozen=True, kw_only=True)
class SourceNeeds:
    """What the snapshot must hold."""

    path: str
    places: tuple[DataPlace, ...] = ()
    one_instant: bool = False
    """Whether all of it must be taken in one instant, because somebody goes on writing."""
    logs_needed: bool = True
    """Whether logs may not be left out: nobody can flush the engines' logs so that the data are whole without."""


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """What a backend would take."""

    backend: Backend
    shares: tuple[VolumeShare, ...]
    absent: tuple[str, ...]
    """Folders of logs that it cannot take."""

    @property
    def atomic(self) -> bool:
        """Whether all is of one instant by itself."""
        volumes = tuple(share.volume for share in self.shares)
        return len(volumes) == 1 and self.backend.capabilities(volumes).atomicity == "volume"


def choose_backend(ctx: Context, job: Job, wanted: SourceNeeds) -> BackendChoice:
    """Return the job's backend, or with "auto" the best that can: one atomic over a volume before one that is not.

    And the volumes that it finds.
    """
    names = [plugin.name for plugin in list_plugins()] if job.backend == "auto" else [job.backend]
    refusals: dict[str, SnapmgrError] = {}
    fitting: list[tuple[bool, BackendChoice]] = []
    for name in names:
        try:
            fitting.append(_try_backend(ctx, name, wanted))
        except ConfigError:
            raise  # a typo in [backend.NAME] must not end in another backend
        except SnapmgrError as error:
            refusals[name] = _told_apart(ctx, name, wanted, error) if len(names) > 1 else error
            continue
        if fitting[-1][0]:
            break  # none can be better, and another may have to walk through a whole tree before it answers
    if not fitting:
        raise _none_fits(wanted, refusals)
    taken = max(fitting, key=lambda candidate: candidate[0])[1]
    if wanted.one_instant:
        _refuse_set(taken.shares, wanted)
    return taken


def _try_backend(ctx: Context, name: str, wanted: SourceNeeds) -> tuple[bool, BackendChoice]:
    """Return whether the backend is atomic over a volume, and what it would take. Raises why it will not do."""
    backend = ctx.backend(name)
    found = locate_all(ctx, backend, wanted)
    if isinstance(found, NotMine):
        raise StorageError(found.reason, hint=found.hint)
    atomic = backend.capabilities(tuple(share.volume for share in found.shares)).atomicity == "volume"
    if wanted.one_instant and not atomic:
        raise NotQuiescedError(
            f"{name} copies {wanted.path} file by file, which is not consistent under a running server"
            + (f"; elsewhere are {_name_places(wanted.places)}" if wanted.places else ""),
            hint='set quiesce = "freeze-process" in the job (clients wait for the copy: docs/explanation/freeze.md), '
            "move it to a btrfs subvolume or a logical volume, or stop the server",
        )
    return atomic, found


def _told_apart(ctx: Context, name: str, wanted: SourceNeeds, error: SnapmgrError) -> SnapmgrError:
    """Return why a backend will not do: what it could not take anyway is not for want of something on this machine."""
    if not isinstance(error, MissingRequirementError):
        return error
    try:
        found = ctx.unchecked_backend(name).locate(find_target(wanted.path, runner=ctx.runner))
    except MissingRequirementError:
        return error
    except SnapmgrError as other:
        return other  # there is no such folder
    return StorageError(found.reason, hint=found.hint) if isinstance(found, NotMine) else error


def _none_fits(wanted: SourceNeeds, refusals: dict[str, SnapmgrError]) -> SnapmgrError:
    for refusal in refusals.values():
        if isinstance(refusal, NotQuiescedError):
            return refusal
    lacking = any(isinstance(refusal, MissingRequirementError) for refusal in refusals.values())
    if len({one.message for one in refusals.values()}) == 1 < len(refusals):
        return next(iter(refusals.values()))  # it is about the folder, not about a storage
    texts = [f"{name}: {one.message}" + (f" ({one.hint})" if one.hint else "") for name, one in refusals.items()]
    ways = ["move it to a btrfs subvolume or a logical volume"]
    ways += ["stop the server"] if wanted.one_instant else ["to XFS or JuiceFS"]
    return (MissingRequirementError if lacking else StorageError)(
        f"no backend can snapshot {wanted.path}: {'; '.join(texts) or 'none is installed'}",
        hint=None if lacking else ", or ".join(ways),
    )


def locate_all(ctx: Context, backend: Backend, wanted: SourceNeeds) -> BackendChoice | NotMine:
    """Return the volumes that hold the source and its places, or why `backend` cannot snapshot one of them."""
    home = backend.locate(find_target(wanted.path, runner=ctx.runner))
    if isinstance(home, NotMine):
        return home
    shares = [VolumeShare(volume=home, places={wanted.path: home.subpath})]
    absent: list[str] = []
    logs = _log_folders(wanted)
    # An outer folder first: its volume may hold the inner one.
    for folder in sorted({folder_of(place) for place in wanted.places}):
        holder = next((share for share in shares if _subpath(share.volume, folder) is not None), None)
        if holder is not None:
            holder.places[folder] = _subpath(holder.volume, folder) or ""
            continue
        found = backend.locate(find_target(folder, runner=ctx.runner))
        if _would_double(found, home):
            found = NotMine(
                reason="it holds the datadir, which would be taken twice",
                hint="move what is there into a folder of its own",
            )
        if isinstance(found, NotMine) and folder in logs and not wanted.logs_needed:
            absent.append(folder)
            continue
        if isinstance(found, NotMine):
            if wanted.one_instant:
                # Whatever the backend, it is not in the same instant.
                _refuse_strays(tuple(place for place in wanted.places if folder_of(place) == folder), home)
            return NotMine(reason=f"{folder}, which the server writes as well: {found.reason}", hint=found.hint)
        known = next((share for share in shares if share.volume.id == found.id), None)
        if known is None:
            shares.append(VolumeShare(volume=found, places={folder: found.subpath}))
        else:
            known.places[folder] = found.subpath
    return BackendChoice(backend=backend, shares=tuple(shares), absent=tuple(absent))


def _would_double(found: Volume | NotMine, home: Volume) -> bool:
    return not isinstance(found, NotMine) and found.id != home.id and _subpath(found, home.path) is not None


def _log_folders(wanted: SourceNeeds) -> set[str]:
    """Return the folders that hold nothing but logs of the binary log or of replication."""
    return {folder_of(place) for place in wanted.places} - {
        folder_of(place) for place in wanted.places if not place.log
    }


def folder_of(place: DataPlace) -> str:
    """Return the folder that has to be in a snapshot for a place to be in it."""
    return place.path if os.path.isdir(place.path) else os.path.dirname(place.path)


def is_held(shares: tuple[VolumeShare, ...], path: str) -> bool:
    """Return whether a snapshot of these volumes holds `path`, as far as its path tells."""
    return any(_subpath(share.volume, path) is not None for share in shares)


def _subpath(volume: Volume, folder: str) -> str | None:
    """Return where `folder` is in a snapshot of `volume`; None if it is not in it, as far as its path tells."""
    if not lies_in(folder, volume.path) or lies_in(folder, *volume.excluded):
        return None
    return os.path.relpath(folder, volume.path) if folder != volume.path else ""


def _name_places(places: tuple[DataPlace, ...]) -> str:
    more = len(places) - _PLACES_SHOWN
    shown = "; ".join(f"{place.what} at {place.path}" for place in places[:_PLACES_SHOWN])
    return shown + (f"; and {more} more" if more > 0 else "")


def _refuse_set(shares: tuple[VolumeShare, ...], wanted: SourceNeeds) -> None:
    # Logs need not be of the same instant: they stand still under the lock, and the engines' logs are flushed.
    elsewhere = {folder for share in shares[1:] for folder in share.places} - _log_folders(wanted)
    strays = tuple(place for place in wanted.places if folder_of(place) in elsewhere)
    if strays:
        _refuse_strays(strays, shares[0].volume)


def _refuse_strays(strays: tuple[DataPlace, ...], home: Volume) -> None:
    raise NotQuiescedError(
        "a snapshot of the datadir's volume would not hold all that the server writes: " + _name_places(strays),
        hint=f"move it into {home.path}, volume {home.shown}, or let the job take all volumes while the server stands "
        'still: quiesce = "freeze-process" or "stopped"',
    )
