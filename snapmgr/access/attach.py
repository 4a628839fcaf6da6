"""Attaches snapshots and releases them: first the lease goes to disk, then the backend attaches, then we mount."""

from __future__ import annotations

import errno
import os
import pwd
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.access.autoextend import auto_extended
from snapmgr.capacity.lost import require_not_overflowed
from snapmgr.catalog.inplace import refuse_inplace_target
from snapmgr.catalog.manifest import Lease, LeasePart
from snapmgr.contract.errors import (
    ConfigError,
    InUseError,
    MissingRequirementError,
    NotFoundError,
    SnapmgrError,
    StorageError,
)
from snapmgr.contract.records import AttachRecord
from snapmgr.system.boot import boot_id
from snapmgr.system.host import signals_held, this_process
from snapmgr.system.mount import mount_attachment, remove_point, require_own, unmount
from snapmgr.system.paths import lies_in
from snapmgr.system.probe import require_pools_answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from snapmgr.catalog.manifest import Manifest, Purpose
    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context
    from snapmgr.contract.records import Mount

# io_uring closes the open files of a killed server a moment after its end.
_SETTLE_S = 5.0


def attach(
    ctx: Context,
    entry: Entry,
    *,
    writable: bool,
    why: Purpose,
    point: Path | None = None,
    for_s: float | None = None,
    overlay: bool = False,
) -> Lease:
    """Attach a READY snapshot at `point` (by default a fresh folder in the scratch directory) and return its lease.

    Writable means a clone, or with `overlay` what the backend finds quicker for one command (see `AttachRecord`): the
    original never changes. The members of a set are mounted in folders of the point.
    Mounting needs root; without it the point is the clone's own folder. Raises StorageError for a snapshot that is not
    READY or has a symlink on the way to a folder of the source, LostError for one that overflowed (it is not changed
    here: see `snapmgr.capacity.lost.removing_if_lost`), and the backend's errors.
    """
    manifest = entry.manifest
    manifest.require_ready("attached")
    can_mount = os.geteuid() == 0
    if point is not None and not can_mount:
        raise ConfigError("mounting at a folder of your choice needs root", hint="omit DIR, or run as root")
    several = len(manifest.members) > 1
    if several and not can_mount:
        raise MissingRequirementError(
            f"attaching the {len(manifest.members)} members of {manifest.id} needs root", hint="run as root"
        )
    if several and point is not None and point.exists() and any(point.iterdir()):
        raise StorageError(f"the folder {point} is not empty", hint="name an empty or a new folder")
    if point is None:
        require_own(ctx.config.scratch_dir)
    parts = tuple(
        LeasePart(
            record=AttachRecord(
                id=os.urandom(8).hex(),
                ref=member.ref,
                writable=writable or not can_mount,
                boot_id=boot_id(),
                overlay=overlay and can_mount,
            ),
            subpath=member.subpath,
            folder=folder,
        )
        for member, folder in zip(manifest.members, part_folders(manifest), strict=True)
    )
    lease = _new_lease(ctx, manifest, parts, why=why, point=point, for_s=for_s)
    _require_usable(ctx, lease, manifest)
    with ctx.catalog.reading(manifest.id):
        ctx.catalog.write_lease(lease)
        try:
            for number in range(len(parts)):
                lease = _attach_part(ctx, lease, number, mount=can_mount)
            _refuse_symlinks(lease, manifest)
        except BaseException:
            release_or_tell(ctx, lease)
            raise
    return lease


def _new_lease(
    ctx: Context,
    manifest: Manifest,
    parts: tuple[LeasePart, ...],
    *,
    why: Purpose,
    point: Path | None = None,
    for_s: float | None = None,
) -> Lease:
    now = datetime.now(UTC)
    where = point or ctx.config.scratch_dir / f"{manifest.short_id}-{parts[0].record.id[:6]}"
    return Lease(
        parts=parts,
        holder=this_process(),
        user=pwd.getpwuid(os.getuid()).pw_name,
        why=why,
        created_at=now,
        until=now + timedelta(seconds=for_s) if for_s is not None else None,
        point=str(where.absolute()),
    )


def _require_usable(ctx: Context, lease: Lease, manifest: Manifest) -> None:
    _require_answer(ctx, lease)
    refuse_inplace_target(ctx.catalog, manifest.id)
    require_not_overflowed(ctx, manifest)


@contextmanager
def reached(ctx: Context, entry: Entry, *, why: Purpose) -> Iterator[str]:
    """Yield the folder of the storage that holds a snapshot's copy of its source; read-only, for the storage's calls.

    Unlike `attached` this mounts nothing: a storage clones its own folders, but not a bind mount of them. Raises
    StorageError for a snapshot of several volumes, or if the storage has no such folder.
    """
    manifest = entry.manifest
    manifest.require_ready("read")
    if len(manifest.members) > 1:
        raise StorageError(f"{manifest.id} is in {len(manifest.members)} volumes: it has no single folder")
    member = manifest.members[0]
    record = AttachRecord(id=os.urandom(8).hex(), ref=member.ref, writable=False, boot_id=boot_id())
    lease = _new_lease(ctx, manifest, (LeasePart(record=record, subpath=member.subpath),), why=why)
    _require_usable(ctx, lease, manifest)
    with ctx.catalog.reading(manifest.id):
        ctx.catalog.write_lease(lease)
        try:
            folder = ctx.backend(member.ref.backend).attach(record).directory
            if folder is None:
                raise StorageError(f"the {member.ref.backend} storage keeps {manifest.id} on a device, not in a folder")
            yield os.path.join(folder, member.subpath) if member.subpath else folder
        finally:
            release_or_tell(ctx, lease)


def _require_answer(ctx: Context, lease: Lease) -> None:
    """Raise StorageError if the storage or the state directory hangs: even a read-only attachment needs its lease."""
    ctx.catalog.require_answer()
    require_pools_answer((part.record.ref.pool for part in lease.parts), ctx.mounter.mounts())


def part_folders(manifest: Manifest) -> tuple[str, ...]:
    """Return the folder of each member below the point: "" for a single member, else named after its volume."""
    if len(manifest.members) == 1:
        return ("",)
    names: list[str] = []
    for number, member in enumerate(manifest.members):
        name = os.path.basename(member.path) or "volume"
        while name in names:
            name += f"-{number}"
        names.append(name)
    return tuple(names)


def _attach_part(ctx: Context, lease: Lease, number: int, *, mount: bool) -> Lease:
    """Attach and mount one part; return the lease with its mount, after writing it to disk."""
    part = lease.parts[number]
    attachment = ctx.backend(part.record.ref.backend).attach(part.record)
    if mount:
        point = part_point(lease, part)
        mount_attachment(attachment, point, writable=part.record.writable)
        mounted = _mounted_at(ctx, point)
        part = replace(part, mounted=_identity(mounted) if mounted is not None else None)
        lease = replace(lease, parts=(*lease.parts[:number], part, *lease.parts[number + 1 :]))
    else:
        lease = replace(lease, point=str(attachment.directory))
    ctx.catalog.write_lease(lease)
    return lease


def _refuse_symlinks(lease: Lease, manifest: Manifest) -> None:
    """Raise StorageError if the snapshot has a symlink on the way to a folder of the source: it may lead outside.

    The owner of the folder above may have put it there just before the snapshot, or the disk is from elsewhere.
    """
    for number, member in enumerate(manifest.members):
        root = os.path.realpath(part_point(lease, lease.parts[number]))
        for subpath in (member.subpath, *member.places.values()):
            path = os.path.normpath(os.path.join(root, subpath))
            if os.path.realpath(path) != path:
                raise StorageError(
                    f"snapshot {manifest.id} has a symlink on the way to {subpath}, which may lead outside",
                    hint="take another snapshot, of a folder whose path has no symlinks",
                )


def part_point(lease: Lease, part: LeasePart) -> str:
    """Return the mount point of a part, whether it is mounted yet or not."""
    return os.path.join(lease.point, part.folder) if part.folder else lease.point


def _mounted_at(ctx: Context, point: str) -> Mount | None:
    path = os.path.realpath(point)
    return next((mount for mount in reversed(ctx.mounter.mounts()) if mount.point == path), None)


def _identity(mount: Mount) -> str:
    return f"{mount.device} {mount.root}"


def _is_ours(part: LeasePart, mount: Mount) -> bool:
    """Return whether `mount` was made for `part`, and not by somebody else at the same point."""
    if part.mounted is not None:
        return part.mounted == _identity(mount)
    # Nothing was mounted yet, or we were killed right after the mount: a backend's own objects have one of these names.
    record = part.record
    return any(name in mount.root or name in mount.source for name in (record.id, record.ref.name))


def data_path(lease: Lease) -> Path:
    """Return the path of the copy of the source's own folder; in the volume it may lie in a subfolder."""
    return _inside(lease, 0, lease.parts[0].subpath)


def copies(lease: Lease, manifest: Manifest) -> dict[str, Path]:
    """Map the original path of every folder of the source to the path of its copy; the source's own folder is first.

    The others lie outside of it, and the server wrote to them as well: redo log, tablespaces, binary logs.
    """
    found = {manifest.path: data_path(lease)}
    for number, member in enumerate(manifest.members):
        for path, subpath in member.places.items():
            found.setdefault(path, _inside(lease, number, subpath))
    return found


def place_of(path: str, folders: Mapping[str, Path]) -> Path | None:
    """Given a path of the source and the result of `copies`, return the path of its copy, or None if it has none."""
    path = os.path.normpath(path)
    parents = [folder for folder in folders if lies_in(path, folder)]
    if not parents:
        return None
    folder = max(parents, key=len)
    return folders[folder] / os.path.relpath(path, folder)


def _inside(lease: Lease, number: int, subpath: str) -> Path:
    return Path(part_point(lease, lease.parts[number]), subpath)


def release(ctx: Context, lease: Lease) -> None:
    """Undo an attachment, however far it got and whatever boot it is from; the lease is removed last. Idempotent.

    Kills the server of a clone if it still runs: a caller that wants a clean shutdown has done it before. Raises
    InUseError while a process uses the mount. Raises StorageError, with nothing undone, if the storage hangs.
    """
    _require_answer(ctx, lease)
    # A signal in the middle would leave the rest to the next run.
    with signals_held():
        _kill_server(lease)
        for part in reversed(lease.parts):
            point = part_point(lease, part)
            if os.geteuid() == 0 and lease.boot_id == boot_id():
                mounted = _mounted_at(ctx, point)
                if mounted is not None and _is_ours(part, mounted):
                    unmount(point, mount_id=mounted.id, patience_s=_SETTLE_S if lease.server is not None else 0.0)
            ctx.backend(part.record.ref.backend).detach(part.record)
            if part.folder:
                remove_point(point)
        if lease.server is not None:
            from snapmgr.mysql.server.rundir import remove_folder  # noqa: PLC0415 - only a clone has a server

            remove_folder(lease.server.folder)
        # A folder of the user's choice may have existed before.
        if Path(lease.point).parent == ctx.config.scratch_dir.absolute():
            remove_point(lease.point)
        ctx.catalog.drop_lease(lease)


def _kill_server(lease: Lease) -> None:
    process = lease.server.process if lease.server is not None else None
    if process is None:
        return
    from snapmgr.mysql.server.development import end_server  # noqa: PLC0415 - only a clone has a server

    if not end_server(process, kill=True):
        raise InUseError(
            f"the server on {lease.point} (pid {process.pid}) does not end after SIGKILL: it hangs in the kernel",
            hint=f"see /proc/{process.pid}/stack and the kernel log",
        )


def release_or_tell(ctx: Context, lease: Lease) -> None:
    """Undo an attachment after a failure; if that fails too, only say so: the first failure matters more."""
    try:
        release(ctx, lease)
    except SnapmgrError as error:
        ctx.tell(f"cleanup failed: {error.message}; try again later: snapmgr umount {lease.id}")


def find_lease(ctx: Context, name: str) -> Lease:
    """Given a mount point (or a path in it), a lease id or a snapshot's id, return its only lease.

    Raises NotFoundError if it has none, ConfigError if a snapshot has several.
    """
    leases = ctx.catalog.leases()[0]
    path = os.path.realpath(name)
    by_point = [lease for lease in leases if path == lease.point or path.startswith(lease.point + "/")]
    if by_point:
        return by_point[-1]
    by_id = [
        lease
        for lease in leases
        if name in (lease.id, lease.snapshot_id) or (name and lease.snapshot_id.rsplit(".", 1)[-1].startswith(name))
    ]
    if not by_id:
        raise NotFoundError(f"{name} is not mounted by snapmgr", hint="see: snapmgr mount --list")
    if len(by_id) > 1:
        raise ConfigError(
            f"{name} is mounted {len(by_id)} times: {', '.join(lease.point for lease in by_id)}",
            hint="name the mount point",
        )
    return by_id[0]


@contextmanager
def attached(
    ctx: Context, entry: Entry, *, writable: bool = True, why: Purpose = "verify", overlay: bool = False
) -> Iterator[Lease]:
    """Attach a snapshot as `attach` does, by default as a writable clone, for as long as the context lasts.

    Meanwhile its own space is extended if it fills up, where the backend can do that and is configured to.
    """
    lease = attach(ctx, entry, writable=writable, why=why, overlay=overlay)
    try:
        with auto_extended(ctx, entry.manifest):
            yield lease
    finally:
        try:
            release(ctx, lease)
        except Exception:
            raise
        except BaseException:
            # A signal came just before signals were held back. Only the first one is raised, so this runs to its end.
            release_or_tell(ctx, lease)
            raise


@contextmanager
def space_required(task: str) -> Iterator[None]:
    """Turn an OSError for missing space or quota into MissingRequirementError; `task` needs the space."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise MissingRequirementError(
            f"no space left to {task}: {error}",
            hint="a clone needs free space on its own file system, and its server needs some in scratch_dir",
        ) from None
