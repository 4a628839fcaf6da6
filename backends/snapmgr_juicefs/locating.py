"""Finds a volume's mounts, its store and the address of its metadata, and warns about its risks."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.api import Mount, NotMine, Pool, StorageError, Target, Volume, format_duration
from snapmgr.api.copystore import unsuitable
from snapmgr.api.kernel import lies_in, shown
from snapmgr_juicefs import client as clients
from snapmgr_juicefs import private
from snapmgr_juicefs.program import Address, parse_address, read_password, running_address, running_gc
from snapmgr_juicefs.tree import Flushed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr_juicefs.client import Client
    from snapmgr_juicefs.config import JuicefsConfig
    from snapmgr_juicefs.program import Juicefs

_HOUR_S = 3600.0
_DAY_HOURS = 24.0


def address_of(client: Client, config: JuicefsConfig) -> Address | None:
    """Return the address of a volume's metadata: the configured one, or the running client's; None if unknown.

    Raises StorageError for a configured address that contains a password, and for a password file that others can read.
    """
    told = config.meta_urls.get(client.name) or config.meta_urls.get(client.uuid) or config.meta_url
    url, password = parse_address(told or running_address(client) or "")
    if told and password:
        raise StorageError(
            "meta_url in [backend.juicefs] has a password in it",
            hint="leave it out, and give it by password_file or in the environment as META_PASSWORD",
        )
    if not url:
        return None
    if config.password_file is not None:
        password = read_password(config.password_file)
    else:
        password = os.environ.get("META_PASSWORD", "")
    return Address(url=url, environment={"META_PASSWORD": password} if password else {})


def locate(target: Target, mounts: Sequence[Mount], config: JuicefsConfig, backend: str) -> Volume | NotMine:
    """Find the volume that holds a target, and the place for its clones."""
    own = clients.own_mount(target.path, mounts)
    if target.mount.fs_type != clients.FS_TYPE or own is None:
        reason = f"{shown(target.path)} is on {target.mount.fs_type}, not on JuiceFS"
        return NotMine(reason=reason, foreign=True)
    path = clients.translate(target.path, mounts, own)
    try:
        found = clients.recognise(own)
        inode = os.stat(path).st_ino
    except StorageError as error:
        return NotMine(reason=error.message, hint=error.hint)
    except OSError as error:
        return NotMine(reason=f"{shown(target.path)} cannot be looked at: {error.strerror}")
    store = os.path.normpath(os.path.join(own.point, config.store))
    why_not = _unusable(store, path, own, config)
    if why_not is not None:
        return NotMine(
            reason=why_not, hint="name a folder in the mount, outside of the directory, in [backend.juicefs] store"
        )
    if found.read_only:
        return NotMine(reason=f"{shown(own.point)} is mounted read-only")
    return Volume(
        backend=backend,
        id=f"{found.uuid}:{inode}",
        pool=Pool(backend=backend, id=f"{found.uuid}:{found.inside(store)}", hint=shown(own.point)),
        path=target.path,
        subpath="",
        excluded=tuple(sorted({mount.point for mount in target.submounts})),
        label=f"{found.name}:{shown(found.inside(path))}",
    )


def _unusable(store: str, path: str, own: Mount, config: JuicefsConfig) -> str | None:
    if os.path.isabs(config.store) or not lies_in(store, own.point) or store == own.point:
        return f"the store {shown(config.store)} is not a path below the top of the mount"
    if path == own.point:
        return f"{shown(path)} is the whole mount: there is no place beside it for the store"
    return unsuitable(store, path)


def find_store(pool: Pool, mounts: Sequence[Mount]) -> tuple[Client, str]:
    """Return a client whose mount has a pool's store, and the store's path there; tries the hint first.

    Raises StorageError if no mounted volume has it.
    """
    uuid, _, path = pool.id.partition(":")
    for found in clients.clients(mounts, first=pool.hint):
        if found.uuid != uuid or lies_in(found.point, private.root()):
            continue
        store = found.outside(path)
        if store is not None:
            return found, store
    raise StorageError(
        f"no mount shows the volume {uuid} with {shown(path)}; it was last seen at {shown(pool.hint)}",
        hint="mount it there (juicefs mount), then try again",
    )


def warnings(found: Client, config: JuicefsConfig, program: Juicefs, now: float) -> tuple[str, ...]:
    """Return warnings about a volume: no dumps of its metadata, other machines that use it."""
    said = [dumps_warning(found, config, now)]
    if found.trash_days and not config.skip_trash:
        days = f"{found.trash_days} day{'s' if found.trash_days > 1 else ''}"
        said.append(
            f"the volume {found.name} keeps deleted files in its trash for {days}: "
            "space of deleted snapshots comes back only then"
        )
    if running_gc():
        said.append("`juicefs gc` runs on this machine: it slows the volume down")
    said.append(_others(found, config, program) if config.ask_metadata else None)
    return tuple(text for text in said if text)


def dumps_warning(found: Client, config: JuicefsConfig, now: float) -> str | None:
    """Return why losing the metadata engine would lose everything, snapshots included; None if recent dumps exist."""
    alone = f"a JuiceFS volume is one metadata engine: without it all of {found.name} is lost, snapshots included"
    if config.metadata_dumps is None:
        if 0 < found.dumps_every_s <= _DAY_HOURS * _HOUR_S:
            return None
        way = "dump it (juicefs dump, or --backup-meta) and name the folder as metadata_dumps in [backend.juicefs]"
        return f"{alone}; {way}"
    newest = 0.0
    try:
        with os.scandir(config.metadata_dumps) as listed:
            for entry in listed:
                if entry.is_file() and entry.stat().st_size:
                    newest = max(newest, entry.stat().st_mtime)
    except OSError as error:
        return f"{alone}; its dumps in {shown(config.metadata_dumps)} cannot be seen: {error.strerror}"
    if not newest:
        return f"{alone}; {shown(config.metadata_dumps)} holds no dump of it"
    if now - newest > config.metadata_dumps_max_age_hours * _HOUR_S:
        return f"{alone}; its newest dump in {shown(config.metadata_dumps)} is {format_duration(now - newest)} old"
    return None


def _others(found: Client, config: JuicefsConfig, program: Juicefs) -> str | None:
    try:
        address = address_of(found, config)
        if address is None:
            return None
        sessions = clients.sessions(program.status(address))
    except StorageError as error:
        hint = f" ({error.hint})" if error.hint else ""
        return (
            f"the metadata engine of {found.name} cannot be asked for quotas and for other machines that use the "
            f"volume, and prepare gets no private mount: {error.message}{hint}"
        )
    others = sorted(
        {
            f"{session.get('HostName')}:{session.get('MountPoint')}"
            for session in sessions
            if session.get("HostName") != os.uname().nodename and session.get("MountPoint")
        }
    )
    if not others:
        return None
    return (
        f"{found.name} is mounted elsewhere, too ({', '.join(map(shown, others[:3]))}"
        f"{' and others' if len(others) > 3 else ''}): this machine cannot "  # noqa: PLR2004
        "wait for uploads of those clients"
    )


def refuse_full(seen: Flushed, store: str, found: Client, config: JuicefsConfig, program: Juicefs) -> None:
    """Raise StorageError without room for a clone of a flushed tree, which counts in full although it shares data."""
    size, entries = seen.counted_bytes, seen.files + seen.folders
    try:
        room = os.statvfs(store)
    except OSError as error:
        raise StorageError(f"cannot look at {shown(store)}: {error.strerror}") from error
    limits = [(f"the volume {found.name}", room.f_bavail * room.f_frsize, room.f_favail)]
    with suppress(StorageError):  # an unknown limit makes the clone fail later
        address = address_of(found, config) if config.ask_metadata else None
        inside = found.inside(store)
        limits.extend(
            (
                f"the quota of {shown(quota.path)}",
                size if quota.free_bytes is None else quota.free_bytes,
                entries if quota.free_inodes is None else quota.free_inodes,
            )
            for quota in (program.quotas(address) if address is not None else ())
            if lies_in(inside, quota.path)
        )
    for name, free_bytes, free_inodes in limits:
        if free_bytes < size or free_inodes < entries:
            raise StorageError(
                f"{name} has room for {free_bytes} bytes and {free_inodes} files; the clone counts as {size} bytes "
                f"and {entries} files",
                hint="delete older snapshots, or raise the limit; a clone shares its data but counts in full",
            )
