"""Plans ``restore --in-place``: its consequences and all obstacles. Changes nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.catalog.inplace import inplace_records
from snapmgr.catalog.store import attached_error
from snapmgr.contract.abilities import Revertible
from snapmgr.contract.errors import BusyError, InUseError, MissingRequirementError, SnapmgrError, StorageError
from snapmgr.keep.delete import examine as examine_deletion
from snapmgr.mysql.lock.stopped import server_process
from snapmgr.restore.inplace.remount import lies_on, mounts_of, require_free
from snapmgr.system.boot import machine_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapmgr.catalog.manifest import Manifest, Member
    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context
    from snapmgr.contract.records import Mount, Reason, RevertPlan, SnapshotRef


class OriginPlan(Struct, frozen=True, kw_only=True):
    """The plan for one origin."""

    member: Member
    storage: RevertPlan
    mounts: tuple[Mount, ...]
    beside: tuple[str, ...] | None
    """Paths on the volume outside the source: they go back, too. None: they cannot be listed."""


class InplacePlan(Struct, frozen=True, kw_only=True):
    """The plan of an in-place restore."""

    entry: Entry
    origins: tuple[OriginPlan, ...]
    jobs: tuple[str, ...]
    """The jobs with snapshots of these origins; the snapshot's own first."""
    rules: tuple[str, ...]
    """The rules that protect the snapshot, if it is consumed: "newest READY", "newest VERIFIED", "pinned"."""
    obstacles: tuple[SnapmgrError, ...]
    """The errors that would stop it now."""

    @property
    def consumes(self) -> bool:
        """Whether the restore consumes the snapshot."""
        return any(origin.storage.consumes for origin in self.origins)


def plan_inplace(ctx: Context, entry: Entry, *, force: bool = False) -> InplacePlan:
    """Return the plan of an in-place restore, with all obstacles. Changes nothing.

    With `force`, the possible loss of other snapshots is no obstacle. Raises StorageError for a snapshot that is not
    READY, or whose storage cannot restore in place; NotFoundError if the snapshot or its origin is missing;
    MissingRequirementError without root.
    """
    manifest = entry.manifest
    manifest.require_ready("restored in place")
    if os.geteuid() != 0:
        raise MissingRequirementError("an in-place restore needs root", hint="run it as root")
    origins = tuple(_plan_origin(ctx, manifest, member) for member in manifest.members)
    ids = {member.ref.volume_id for member in manifest.members}
    entries = [one.manifest for one in ctx.catalog.entries()[0]]
    jobs = {one.job for one in entries if any(member.ref.volume_id in ids for member in one.members)} - {manifest.job}
    plan = InplacePlan(
        entry=entry,
        origins=origins,
        jobs=(manifest.job, *sorted(jobs)),
        rules=(),
        obstacles=(),
    )
    rules = examine_deletion(ctx, [manifest.id])[0].rules if plan.consumes else ()
    return replace(plan, rules=rules, obstacles=tuple(_obstacles(ctx, plan, entries, force=force)))


def _plan_origin(ctx: Context, manifest: Manifest, member: Member) -> OriginPlan:
    storage = revertible(ctx, member.ref, manifest.id).revert_plan(member.ref)
    mounts = mounts_of(ctx, storage.number)
    return OriginPlan(member=member, storage=storage, mounts=mounts, beside=_beside(member, mounts))


def revertible(ctx: Context, ref: SnapshotRef, snapshot_id: str) -> Revertible:
    """Return the backend of a member. Raises StorageError if it cannot restore in place."""
    backend = ctx.backend(ref.backend)
    if not isinstance(backend, Revertible):
        raise StorageError(
            f"{ref.backend} cannot restore an origin in place",
            hint=f"stop the server, move the old files away, then: snapmgr restore {snapshot_id} DEST",
        )
    return backend


def _beside(member: Member, mounts: Sequence[Mount]) -> tuple[str, ...] | None:
    whole = next((mount.point for mount in mounts if mount.root == "/"), None)
    if whole is None:
        return None
    try:
        return tuple(_outside(whole, "", {member.subpath, *member.places.values()}))
    except OSError:
        return None


def _outside(root: str, folder: str, places: set[str]) -> Iterator[str]:
    """Yield the topmost entries of `folder` that are outside `places`, all as paths from `root`."""
    if "" in places or folder in places:
        return
    for name in sorted(os.listdir(os.path.join(root, folder))):
        path = os.path.join(folder, name)
        if path == "lost+found" or path in places:
            continue
        if any(place.startswith(path + "/") for place in places):
            yield from _outside(root, path, places)
        else:
            yield path


def _obstacles(ctx: Context, plan: InplacePlan, entries: Sequence[Manifest], *, force: bool) -> Iterator[SnapmgrError]:
    manifest = plan.entry.manifest
    if manifest.machine_id != machine_id():
        yield StorageError(
            f"snapshot {manifest.id} was taken on another machine ({manifest.machine_id})",
            hint="its origin is not on this machine: restore it to a directory",
        )
    for record in inplace_records(ctx.catalog):
        if set(record.jobs) & set(plan.jobs):
            yield BusyError(
                f"another in-place restore, from {record.snapshot_id}, is running or unfinished",
                hint=f"complete it first: snapmgr restore {record.snapshot_id} --in-place",
            )
    yield from _leases(ctx, plan, entries)
    if manifest.source == "mysql" and os.path.isdir(manifest.path):
        pid = server_process(manifest.path)
        if pid is not None:
            yield InUseError(f"a server (pid {pid}) runs on {manifest.path}", hint="stop it first")
    for origin in plan.origins:
        yield from _of_origin(ctx, origin, force=force)


def _of_origin(ctx: Context, origin: OriginPlan, *, force: bool) -> Iterator[SnapmgrError]:
    storage = origin.storage
    yield from (_refusal(reason) for reason in storage.blocked)
    if not force:
        for reason in storage.loses:
            yield StorageError(reason.what, hint=f"{reason.hint}; --force restores anyway")
    if lies_on(str(ctx.config.state_dir), storage.number):
        yield InUseError(
            f"the state directory {ctx.config.state_dir} is on {storage.origin}: it would go back, too",
            hint="move it to another file system (state_dir in the configuration)",
        )
    try:
        require_free(ctx, storage.number)
    except InUseError as error:
        yield error


def _leases(ctx: Context, plan: InplacePlan, entries: Sequence[Manifest]) -> Iterator[SnapmgrError]:
    """Yield the leases of the snapshot, and of others of the same origin if the merge writes to them."""
    origins = {origin.member.ref.volume_id for origin in plan.origins if origin.storage.consumes}
    used = {one.id for one in entries if any(member.ref.volume_id in origins for member in one.members)}
    for lease in ctx.catalog.leases()[0]:
        if lease.snapshot_id in used | {plan.entry.manifest.id}:
            yield attached_error(lease)


def _refusal(reason: Reason) -> StorageError:
    return StorageError(reason.what, hint=reason.hint)
