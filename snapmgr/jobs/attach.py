"""Making snapshots reachable: the lease on disk first, then the backend's attachment, then the mount."""

from __future__ import annotations

import os
import pwd
import secrets
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from snapmgr.errors import ConfigError, NotFoundError, SnapmgrError, StorageError
from snapmgr.host import boot_id, signals_held, this_process
from snapmgr.manifest import Lease
from snapmgr.mount import bind, mount_device, remove_point, require_own, unmount
from snapmgr.records import AttachRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog import Entry
    from snapmgr.jobs.context import Context
    from snapmgr.records import Mount


def attach(
    ctx: Context,
    entry: Entry,
    *,
    writable: bool,
    why: Literal["mount", "verify"],
    point: Path | None = None,
    for_s: float | None = None,
) -> Lease:
    """Attach a READY snapshot at `point` (by default a fresh folder in the scratch directory) and return its lease.

    Writable means a clone: the original never changes. Without root nothing can be mounted, so there a clone's own
    folder is the point. Raises StorageError for a snapshot that is not READY, and what the backend raises.
    """
    manifest = entry.manifest
    if manifest.state != "ready":
        raise StorageError(
            f"snapshot {manifest.id} is {manifest.state.upper()}" + (f": {manifest.reason}" if manifest.reason else "")
        )
    if len(manifest.members) != 1:
        raise StorageError(
            f"snapshot {manifest.id} has {len(manifest.members)} members: attaching sets is not supported yet"
        )
    member = manifest.members[0]
    can_mount = os.geteuid() == 0
    if point is not None and not can_mount:
        raise ConfigError("mounting at a folder of your choice needs root", hint="leave DIR away, or run as root")
    record = AttachRecord(
        id=secrets.token_hex(8), ref=member.ref, writable=writable or not can_mount, boot_id=boot_id()
    )
    now = datetime.now(UTC)
    if point is None:
        require_own(ctx.config.scratch_dir)
    where = point or ctx.config.scratch_dir / f"{manifest.short_id}-{record.id[:6]}"
    lease = Lease(
        record=record,
        holder=this_process(),
        user=pwd.getpwuid(os.getuid()).pw_name,
        why=why,
        created_at=now,
        until=now + timedelta(seconds=for_s) if for_s is not None else None,
        point=str(where.absolute()),
        subpath=member.subpath,
    )
    with ctx.catalog.reading(manifest.id):
        ctx.catalog.write_lease(lease)
        try:
            lease = _attach(ctx, lease, mount=can_mount)
        except BaseException:
            try:
                release(ctx, lease)
            except SnapmgrError as error:
                ctx.tell(f"could not clear up ({error.message}); later: snapmgr umount {record.id}")
            raise
    return lease


def _attach(ctx: Context, lease: Lease, *, mount: bool) -> Lease:
    attachment = ctx.backend(lease.record.ref.backend).attach(lease.record)
    read_only = not lease.record.writable
    if not mount:
        lease = replace(lease, point=str(attachment.directory))
        ctx.catalog.write_lease(lease)
        return lease
    if attachment.device is not None:
        options = (*attachment.options, "ro") if read_only else attachment.options
        mount_device(attachment.device, lease.point, fs_type=attachment.fs_type or "auto", options=options)
    else:
        bind(str(attachment.directory), lease.point, read_only=read_only)
    there = _mounted_at(ctx, lease.point)
    lease = replace(lease, mounted=_identity(there) if there is not None else None)
    ctx.catalog.write_lease(lease)
    return lease


def _mounted_at(ctx: Context, point: str) -> Mount | None:
    path = os.path.realpath(point)
    return next((mount for mount in reversed(ctx.mounter.mounts()) if mount.point == path), None)


def _identity(mount: Mount) -> str:
    return f"{mount.device} {mount.root}"


def _is_ours(lease: Lease, mount: Mount) -> bool:
    """Whether `mount` is the one that was made for `lease`, and nothing that somebody mounted there."""
    if lease.mounted is not None:
        return lease.mounted == _identity(mount)
    # Nothing was mounted yet, or we were killed right after it: what a backend makes bears one of these names.
    record = lease.record
    return any(name in mount.root or name in mount.source for name in (record.id, record.ref.name))


def data_path(lease: Lease) -> Path:
    """Return where the source's own folder is: the volume may hold it further down."""
    return Path(lease.point, lease.subpath) if lease.subpath else Path(lease.point)


def release(ctx: Context, lease: Lease) -> None:
    """Undo an attachment, however far it got and whatever boot it is from; the lease goes last. Idempotent.

    Raises InUseError while a process uses the mount.
    """
    # Half of it undone would be left to the next run.
    with signals_held():
        if os.geteuid() == 0 and lease.record.boot_id == boot_id():
            there = _mounted_at(ctx, lease.point)
            if there is not None and _is_ours(lease, there):
                unmount(lease.point)
        ctx.backend(lease.record.ref.backend).detach(lease.record)
        # A folder that somebody named may have been there before.
        if Path(lease.point).parent == ctx.config.scratch_dir.absolute():
            remove_point(lease.point)
        ctx.catalog.drop_lease(lease)


def find_lease(ctx: Context, what: str) -> Lease:
    """Given a mount point (or a path in it), a lease id or a snapshot's id, return its one lease.

    Raises NotFoundError, or ConfigError when a snapshot has several.
    """
    leases = ctx.catalog.leases()[0]
    path = os.path.realpath(what)
    by_point = [lease for lease in leases if path == lease.point or path.startswith(lease.point + "/")]
    if by_point:
        return by_point[-1]
    by_id = [
        lease
        for lease in leases
        if what in (lease.record.id, lease.record.ref.snapshot_id)
        or (what and lease.record.ref.snapshot_id.rsplit(".", 1)[-1].startswith(what))
    ]
    if not by_id:
        raise NotFoundError(f"nothing of ours is mounted at {what}", hint="see: snapmgr list")
    if len(by_id) > 1:
        raise ConfigError(
            f"{what} is mounted {len(by_id)} times: {', '.join(lease.point for lease in by_id)}",
            hint="name the mount point",
        )
    return by_id[0]


@contextmanager
def attached(ctx: Context, entry: Entry) -> Iterator[Lease]:
    """A writable clone of a snapshot for as long as the context lasts."""
    lease = attach(ctx, entry, writable=True, why="verify")
    try:
        yield lease
    finally:
        release(ctx, lease)
