"""Chooses the backend of a source, and finds the volumes that a snapshot of it must hold."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.config.plugins import backend_names
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


class VolumeShare(Struct, frozen=True, kw_only=True):
    """One volume, and the parts of the source in it."""

    volume: Volume
    places: dict[str, str]
    """As `snapmgr.catalog.manifest.Member.places`."""


def name_excluded(shares: tuple[VolumeShare, ...], absent: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the paths that a snapshot of these volumes leaves out: first the paths, then how many more (snapper makes
    thousands).

    A path that one volume leaves out may be in another. `absent` is reported elsewhere.
    """
    held = {path for share in shares for path in share.places} | set(absent)
    excluded = [path for share in shares for path in share.volume.excluded if path not in held]
    more = len(excluded) - _EXCLUDED_SHOWN
    # Names on disk need not be UTF-8, but manifests are.
    named = [os.fsencode(path).decode("utf-8", "backslashreplace") for path in excluded[:_EXCLUDED_SHOWN]]
    return (*named, *([f"… and {more} more"] if more > 0 else []))


def refuse_excluded(taken: BackendChoice, scratch: tuple[str, ...] = ()) -> None:
    """Raise NotQuiescedError if a snapshot would lack a folder of the server, other than `scratch`."""
    excluded = name_excluded(taken.shares, (*taken.absent, *scratch))
    if excluded:
        raise NotQuiescedError(
            f"a snapshot would leave out these paths in the server's folders: {', '.join(excluded)}",
            hint="a nested subvolume or mount is an empty folder in the snapshot: make it a plain folder",
        )


class SourceNeeds(Struct, frozen=True, kw_only=True):
    """The requirements of a source: the paths that a snapshot must hold, and how."""

    path: str
    places: tuple[DataPlace, ...] = ()
    one_instant: bool = False
    """Whether all of it must be from one instant, because a server keeps writing."""
    logs_needed: bool = True
    """Whether the snapshot must hold the logs: without a running server, nobody can flush the engines' logs."""


class BackendChoice(Struct, frozen=True, kw_only=True):
    """A backend, and the volumes that it would snapshot."""

    backend: Backend
    shares: tuple[VolumeShare, ...]
    absent: tuple[str, ...]
    """Folders of logs that it cannot snapshot."""

    @property
    def atomic(self) -> bool:
        """Whether one snapshot call makes all of it from one instant."""
        volumes = tuple(share.volume for share in self.shares)
        return len(volumes) == 1 and self.backend.capabilities(volumes).atomicity == "volume"


def choose_backend(ctx: Context, job: Job, wanted: SourceNeeds) -> BackendChoice:
    """Return the job's backend, or with "auto" the best one that can, and the volumes that it finds.

    A backend that is atomic over a volume comes before one that is not. Raises NotQuiescedError, StorageError or
    MissingRequirementError if none can, ConfigError for a mistake in a backend's configuration.
    """
    names = backend_names() if job.backend == "auto" else (job.backend,)
    refusals: dict[str, SnapmgrError] = {}
    fitting: list[tuple[bool, BackendChoice]] = []
    for name in names:
        try:
            fitting.append(_try_backend(ctx, name, wanted))
        except ConfigError:
            raise  # a typo in [backend.NAME] must not end in another backend
        except SnapmgrError as error:
            refusals[name] = _true_refusal(ctx, name, wanted, error)
            continue
        if fitting[-1][0]:
            break  # no other can be better, and another might walk through a whole tree first
    if not fitting:
        raise _none_fits(ctx, wanted, refusals)
    taken = max(fitting, key=lambda candidate: candidate[0])[1]
    if wanted.one_instant:
        _refuse_set(taken.shares, wanted)
    return taken


def _try_backend(ctx: Context, name: str, wanted: SourceNeeds) -> tuple[bool, BackendChoice]:
    """Return whether the backend is atomic over a volume, and its volumes. Raises the reason if it cannot."""
    backend = ctx.backend(name)
    found = locate_all(ctx, backend, wanted)
    if isinstance(found, NotMine):
        raise _refusal(found)
    atomic = backend.capabilities(tuple(share.volume for share in found.shares)).atomicity == "volume"
    if wanted.one_instant and not atomic:
        raise _ByFileError(
            f"{name} copies {wanted.path} file by file, which is not consistent under a running server"
            + (f"; other places: {_name_places(wanted.places)}" if wanted.places else ""),
            hint='set quiesce = "freeze-process" in the job (clients wait for the copy: docs/explanation/freeze.md), '
            "move it to a btrfs subvolume or a logical volume, or stop the server",
        )
    return atomic, found


def _true_refusal(ctx: Context, name: str, wanted: SourceNeeds, error: SnapmgrError) -> SnapmgrError:
    """Return why a backend cannot: a missing requirement is not the reason if it could not snapshot the path anyway."""
    if not isinstance(error, MissingRequirementError):
        return error
    try:
        found = ctx.unchecked_backend(name).locate(find_target(wanted.path, runner=ctx.runner))
    except MissingRequirementError:
        return error
    except SnapmgrError as other:
        return other  # the folder does not exist
    return _refusal(found) if isinstance(found, NotMine) else error


class _ForeignError(StorageError):
    """The source is on another kind of storage than the backend's."""


class _ByFileError(NotQuiescedError):
    """The backend copies file by file, and a server writes meanwhile."""


def _refusal(found: NotMine) -> StorageError:
    return (_ForeignError if found.foreign else StorageError)(found.reason, hint=found.hint)


def _none_fits(ctx: Context, wanted: SourceNeeds, refusals: dict[str, SnapmgrError]) -> SnapmgrError:
    """Return the error to raise: the reason of the backend that is nearest to being able."""
    if len({one.message for one in refusals.values()}) == 1 < len(refusals):
        return next(iter(refusals.values()))  # the folder is the reason, not a storage
    near = {name: one for name, one in refusals.items() if not isinstance(one, _ForeignError)}
    if not near and len(refusals) > 1:
        return _of_no_backend(ctx, wanted)
    near = near or refusals
    least = min((_distance(one) for one in near.values()), default=0)
    told = {name: one for name, one in near.items() if _distance(one) == least}
    first = next(iter(told.values()), StorageError("no backend is installed"))
    if isinstance(first, NotQuiescedError):
        return first
    if len(told) <= 1:
        which = f" by {next(iter(told))}" if told else ""
        return type(first)(f"cannot snapshot {wanted.path}{which}: {first.message}", hint=first.hint)
    texts = [f"{name}: {one.message}" + (f" ({one.hint})" if one.hint else "") for name, one in told.items()]
    return type(first)(f"no backend can snapshot {wanted.path}: {'; '.join(texts)}")


def _distance(refusal: SnapmgrError) -> int:
    """Return how far a backend is from being able: 0 after an installation, 1 after a move or change of the source."""
    if isinstance(refusal, MissingRequirementError):
        return 0
    if isinstance(refusal, NotQuiescedError):
        return 3 if isinstance(refusal, _ByFileError) else 1
    return 2


def _of_no_backend(ctx: Context, wanted: SourceNeeds) -> StorageError:
    target = find_target(wanted.path, runner=ctx.runner)
    mounted = target.mount.point + (f" on {target.devices[0].path}" if target.devices else "")
    return StorageError(
        f"no backend can snapshot {wanted.path}: it is on {target.mount.fs_type}, mounted at {mounted}",
        hint=(
            "move the data to a btrfs subvolume or a logical volume (LVM); or leave them and set "
            'source = "physical": the server\'s own tool then copies to a staging folder on btrfs, LVM, XFS or '
            "JuiceFS. Stopping the server would not help"
            if wanted.one_instant
            else "move the data to btrfs, a logical volume (LVM), XFS or JuiceFS; or set allow_plain_copy in "
            "[backend.reflink]: each snapshot is then a full copy"
        ),
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
    for folder in sorted({place.folder for place in wanted.places}):
        holder = next((share for share in shares if _subpath(share.volume, folder) is not None), None)
        if holder is not None:
            holder.places[folder] = _subpath(holder.volume, folder) or ""
            continue
        found = backend.locate(find_target(folder, runner=ctx.runner))
        if _would_double(found, home):
            found = NotMine(
                reason="it holds the datadir, which would be snapshotted twice",
                hint="move the files there into a separate folder",
            )
        if isinstance(found, NotMine) and folder in logs and not wanted.logs_needed:
            absent.append(folder)
            continue
        if isinstance(found, NotMine):
            if wanted.one_instant:
                # With any backend, it is not from the same instant.
                _refuse_strays(tuple(place for place in wanted.places if place.folder == folder), home)
            return NotMine(reason=f"{folder}, which the server also writes: {found.reason}", hint=found.hint)
        known = next((share for share in shares if share.volume.id == found.id), None)
        if known is None:
            shares.append(VolumeShare(volume=found, places={folder: found.subpath}))
        else:
            known.places[folder] = found.subpath
    return BackendChoice(backend=backend, shares=tuple(shares), absent=tuple(absent))


def _would_double(found: Volume | NotMine, home: Volume) -> bool:
    return not isinstance(found, NotMine) and found.id != home.id and _subpath(found, home.path) is not None


def _log_folders(wanted: SourceNeeds) -> set[str]:
    """Return the folders that hold only binary logs and replication logs."""
    return {place.folder for place in wanted.places} - {place.folder for place in wanted.places if not place.log}


def is_held(shares: tuple[VolumeShare, ...], path: str) -> bool:
    """Return whether a snapshot of these volumes holds `path`, judging by the path."""
    return any(_subpath(share.volume, path) is not None for share in shares)


def _subpath(volume: Volume, folder: str) -> str | None:
    """Return the path of `folder` in a snapshot of `volume`; None if it is not in it, judging by the path."""
    if not lies_in(folder, volume.path) or lies_in(folder, *volume.excluded):
        return None
    return os.path.relpath(folder, volume.path) if folder != volume.path else ""


def _name_places(places: tuple[DataPlace, ...]) -> str:
    more = len(places) - _PLACES_SHOWN
    shown = "; ".join(f"{place.what} at {place.path}" for place in places[:_PLACES_SHOWN])
    return shown + (f"; and {more} more" if more > 0 else "")


def _refuse_set(shares: tuple[VolumeShare, ...], wanted: SourceNeeds) -> None:
    # Logs need not be from the same instant: under the lock they do not grow, and the engines' logs are flushed.
    elsewhere = {folder for share in shares[1:] for folder in share.places} - _log_folders(wanted)
    strays = tuple(place for place in wanted.places if place.folder in elsewhere)
    if strays:
        _refuse_strays(strays, shares[0].volume)


def _refuse_strays(strays: tuple[DataPlace, ...], home: Volume) -> None:
    raise NotQuiescedError(
        "a snapshot of the datadir's volume would not hold all files of the server: " + _name_places(strays),
        hint=f"move them into {home.path}, volume {home.shown}, or snapshot all volumes while the server does not run: "
        'set quiesce = "freeze-process" or "stopped"',
    )
