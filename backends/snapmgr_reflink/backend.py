"""`ReflinkBackend`: snapshots as copies of a directory, file by file, that share their blocks with the origin."""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from snapmgr.api import (
    API_VERSION,
    Attachment,
    AttachRecord,
    Capabilities,
    FireError,
    Found,
    InUseError,
    Mounter,
    NotFoundError,
    NotMine,
    Pool,
    Provisioned,
    ProvisionOrder,
    Reason,
    Reservoir,
    Runner,
    SnapshotRef,
    StorageError,
    StorageMaker,
    Target,
    Usage,
    Volume,
    provisioned,
    unmake,
)
from snapmgr_reflink import kernel, provisioning, store, survey, tree
from snapmgr_reflink.alteration import refuse_altered
from snapmgr_reflink.armed import Member, ReflinkArmed, can_clone, check_rights, check_room, flush, forecast_s
from snapmgr_reflink.cloning import clone_folder
from snapmgr_reflink.contents import boxes, describe, refuse_foreign
from snapmgr_reflink.place import Place, choose_place, mounted_inside

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_SNAPSHOT_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]+")
_RECORD_ID = re.compile(r"[0-9a-f]{16}")
_NOTE_BYTES_AT_MOST = 64 << 10
_SPACE_STEADY_S = 0.05
_SPACE_AT_MOST_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ReflinkConfig:
    """``[backend.reflink]``."""

    store: str | None = None
    """Folder of the copies, on the origin's file system and outside of it. Default: ``.snapmgr-reflink`` at the top of
    the mount that holds the origin."""
    allow_plain_copy: bool = False
    """Copy the data where the file system cannot share blocks: slow, and every copy takes its full size."""


class ReflinkBackend:
    """See `snapmgr.api.Backend` for the contract; docs/reference/backends/reflink.md for what this one does."""

    name: ClassVar[str] = "reflink"
    api_version: ClassVar[int] = API_VERSION
    Config: ClassVar[type[ReflinkConfig]] = ReflinkConfig

    def __init__(self, config: ReflinkConfig, runner: Runner, mounter: Mounter) -> None:
        """Store the arguments; no program is ever run."""
        self._config = config
        self._runner = runner
        self._mounter = mounter

    def missing(self) -> tuple[Reason, ...]:
        """Return what the kernel lacks."""
        lacking = kernel.lacking()
        if lacking is None:
            return ()
        return (Reason(what=lacking, hint="use Linux 5.6 or newer; a container's seccomp profile may forbid openat2"),)

    def locate(self, target: Target) -> Volume | NotMine:
        """Find a place for copies of `target`; on btrfs walk it for nested subvolumes."""
        try:
            fd = os.open(target.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            return NotMine(reason=f"{tree.shown(target.path)} cannot be read: {error.strerror}")
        try:
            known_uuid = target.devices[0].fs_uuid if target.devices else None
            file_system = kernel.identify(fd, target.mount.fs_type, known_uuid)
            place = choose_place(
                target, file_system, self._mounter.mounts(), self._config.store, plain=self._config.allow_plain_copy
            )
            if isinstance(place, NotMine):
                return place
            excluded = {mount.point for mount in target.submounts}
            if target.mount.fs_type == "btrfs":
                excluded.update(os.path.join(target.path, path) for path in survey.survey(fd, extents=False).excluded)
            inode = os.fstat(fd).st_ino
        except OSError as error:
            return NotMine(reason=f"{tree.shown(target.path)} cannot be looked at: {error.strerror}")
        finally:
            os.close(fd)
        return Volume(
            backend=self.name,
            id=_volume_id(file_system, inode),
            pool=Pool(backend=self.name, id=place.store, hint=tree.shown(target.mount.point)),
            path=target.path,
            subpath="",
            excluded=tuple(sorted(excluded)),
            warnings=place.warnings,
        )

    def capabilities(self, volumes: tuple[Volume, ...]) -> Capabilities:  # noqa: ARG002 - the same for all
        """Each file is copied at its own time; a copy needs its origin no more."""
        return Capabilities(atomicity="file", clone="native", survives_origin=True)

    def headroom(self, volume: Volume) -> tuple[Reservoir, ...]:
        """Return the file system that holds the copies."""
        path = volume.pool.id if os.path.isdir(volume.pool.id) else os.path.dirname(volume.pool.id)
        try:
            room = os.statvfs(path)
            shared = os.stat(path).st_dev == os.stat(volume.path).st_dev or self._holder(path) == self._holder(
                volume.path
            )
        except OSError as error:
            raise StorageError(f"cannot look at {tree.shown(path)}: {error.strerror}") from error
        return (
            Reservoir(
                name=f"file system of {tree.shown(path)}",
                size_bytes=room.f_blocks * room.f_frsize,
                used_bytes=(room.f_blocks - room.f_bfree) * room.f_frsize,
                when_full="origin_errors" if shared else "snapshot_lost",
            ),
        )

    def _holder(self, path: str) -> str:
        return Place.holder(path, self._mounter.mounts()).device

    def arm(self, volumes: tuple[Volume, ...], snapshot_id: str) -> ReflinkArmed:
        """Survey the directories and begin a box for each; whatever fails leaves nothing."""
        if not _SNAPSHOT_ID.fullmatch(snapshot_id):
            raise StorageError(f"{snapshot_id!r} is not a snapshot's id", hint='use letters, digits, ".", "-" and "_"')
        with ExitStack() as undo:
            members, stall_s = [], 0.0
            for index, volume in enumerate(volumes):
                name = snapshot_id if index == 0 else f"{snapshot_id}.{index}"
                member, duration_s = self._prepare(volume, snapshot_id, name, undo)
                members.append(member)
                stall_s += duration_s
            armed = ReflinkArmed(self.name, tuple(members), stall_s)
            undo.pop_all()
            return armed

    def _prepare(self, volume: Volume, snapshot_id: str, name: str, undo: ExitStack) -> tuple[Member, float]:
        try:
            origin_fd = os.open(volume.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"cannot open {tree.shown(volume.path)}: {error.strerror}") from error
        undo.callback(os.close, origin_fd)
        mount = Place.holder(volume.path, self._mounter.mounts())
        file_system = kernel.identify(origin_fd, mount.fs_type, volume.id.split(":")[0])
        if _volume_id(file_system, os.fstat(origin_fd).st_ino) != volume.id:
            raise StorageError(
                f"{tree.shown(volume.path)} is not the directory it was: another one has been put in its place",
                hint="try again",
            )
        store.create(volume.pool.id)
        with store.opened(volume.pool.id) as opened:
            store_fd = os.dup(opened)
        undo.callback(os.close, store_fd)
        mark = store.Mark(
            kind="snapshot",
            nonce="",
            inode=0,
            boot_id=store.boot_id(),
            snapshot_id=snapshot_id,
            volume_id=volume.id,
            origin=volume.path,
        )
        box = store.begin(store_fd, volume.pool.id, name, mark)
        undo.callback(os.close, box.fd)
        undo.callback(store.discard, box)
        method = self._method(box)
        # First: what is not on disk yet has no extents to count.
        flush(origin_fd, volume.path)
        seen = self._survey(volume, origin_fd)
        check_rights(volume, seen)
        check_room(store_fd, volume.pool.id, seen, method)
        member = Member(
            volume=volume,
            origin_fd=origin_fd,
            store_fd=store_fd,
            box=box,
            method=method,
            excluded=frozenset(os.path.relpath(path, volume.path) for path in volume.excluded),
            nocow=mount.fs_type == "btrfs",
        )
        return member, forecast_s(seen, method)

    def _method(self, box: store.Box) -> tree.Method:
        if can_clone(box):
            return "reflink"
        if self._config.allow_plain_copy:
            return "copy"
        raise StorageError(
            f"the file system of {tree.shown(os.path.dirname(box.path))} cannot share blocks between files",
            hint="use XFS (made with reflink=1) or btrfs, or set allow_plain_copy in [backend.reflink]",
        )

    def _survey(self, volume: Volume, origin_fd: int) -> survey.Survey:
        try:
            seen = survey.survey(origin_fd, extents=True)
        except OSError as error:
            raise StorageError(
                f"cannot look through {tree.shown(volume.path)}: {error.strerror}", hint="is the device failing?"
            ) from error
        new = {os.path.join(volume.path, path) for path in seen.excluded} - set(volume.excluded)
        if new:
            raise StorageError(
                f"another file system appeared below {tree.shown(volume.path)}: "
                + ", ".join(tree.shown(path) for path in sorted(new)),
                hint="try again, so that it is named as excluded",
            )
        return seen

    def settle(self, refs: tuple[SnapshotRef, ...], timeout_s: float) -> None:
        """Write the copies to disk, then mark them complete, durably."""
        deadline = time.monotonic() + timeout_s
        for ref in refs:
            with store.snapshot(ref) as box:
                if box.state == "begun":
                    raise StorageError(
                        f"the copy {tree.shown(box.path)} was never finished", hint="`snapmgr doctor` removes it"
                    )
                if box.state == "made":
                    flush(box.fd, box.path, deadline)
                    store.advance(box, "made", "complete", durable=True)

    def inventory(self, pools: tuple[Pool, ...]) -> tuple[Found, ...]:
        """Read the boxes of each store."""
        found: list[Found] = []
        for pool in pools:
            with store.opened(pool.id) as store_fd:
                boot_id = store.boot_id()
                for name in sorted(entry.name for entry in tree.entries(store_fd)):
                    with store.box(store_fd, pool.id, name) as box:
                        if box is not None:
                            found.append(describe(box, pool, boot_id, self.name))
        return tuple(found)

    def annotate(self, ref: SnapshotRef, note: bytes) -> None:
        """Write the note into the snapshot's box, beside the data."""
        if len(note) > _NOTE_BYTES_AT_MOST:
            raise StorageError(f"a note of {len(note)} bytes is too long", hint="64 KiB is the most")
        with store.snapshot(ref) as box:
            store.write_note(box, note)

    def attach(self, record: AttachRecord) -> Attachment:
        """Clone the copy once more, or hand out the copy itself for reading."""
        name = _attachment_name(record)
        with ExitStack() as stack:
            snapshot = stack.enter_context(store.snapshot(record.ref))
            if snapshot.state == "begun" or snapshot.mark is None:
                raise NotFoundError(f"the copy {tree.shown(snapshot.path)} was never finished")
            # Until the attachment's box exists: from then on that keeps `delete` away.
            store.lock(snapshot, shared=True)
            refuse_altered(snapshot)
            mark = store.Mark(
                kind="attachment",
                nonce="",
                inode=0,
                boot_id=store.boot_id(),
                snapshot_id=record.ref.snapshot_id,
                volume_id=record.ref.volume_id,
                origin=snapshot.mark.origin,
                record_id=record.id,
                parent_name=snapshot.name,
                parent_native_id=record.ref.native_id,
            )
            box = store.begin(snapshot.store_fd, record.ref.pool.id, name, mark)
            stack.callback(os.close, box.fd)
            if record.writable:
                self._clone(snapshot, box)
            store.advance(box, "begun", "complete", durable=False)
            return Attachment(directory=f"{(box if record.writable else snapshot).path}/{store.DATA}")

    def _clone(self, snapshot: store.Box, box: store.Box) -> None:
        mount = Place.holder(snapshot.path, self._mounter.mounts())
        copy = tree.TreeCopy(
            method="reflink" if can_clone(box) else "copy",
            deadline=float("inf"),
            excluded=frozenset(),
            nocow=mount.fs_type == "btrfs",
        )
        try:
            with tree.folder(store.DATA, snapshot.fd) as source, tree.folder(store.DATA, box.fd) as data:
                copy.run(source, data)
        except (FireError, OSError) as error:
            store.discard(box)
            if isinstance(error, FireError):
                raise StorageError(f"cannot clone {tree.shown(snapshot.path)}: {error}", hint=error.hint) from error
            raise StorageError(f"cannot clone {tree.shown(snapshot.path)}: {error.strerror}") from error

    def detach(self, record: AttachRecord) -> None:
        """Remove the attachment's box, and what a crash left of it."""
        name = _attachment_name(record)
        with store.opened(record.ref.pool.id) as store_fd:
            for box in boxes(store_fd, record.ref.pool.id):
                mark = box.mark
                if mark is None or mark.kind != "attachment" or mark.record_id != record.id:
                    continue
                if mark.parent_native_id == record.ref.native_id:
                    self._remove(box)
            refuse_foreign(store_fd, record.ref.pool.id, name)

    def delete(self, ref: SnapshotRef, *, wait: Literal["name", "space"] = "name") -> None:
        """Rename the box away durably, then remove it; for the space wait until the file system has it back."""
        with store.opened(ref.pool.id) as store_fd:
            try:
                with store.snapshot(ref) as box:
                    store.lock(box)
                    self._refuse_attached(store_fd, ref)
                    self._remove(box, locked=True)
            except NotFoundError:
                refuse_foreign(store_fd, ref.pool.id, ref.name)
            # An earlier deletion may have been interrupted.
            for box in boxes(store_fd, ref.pool.id):
                if box.name.startswith("deleting@") and box.mark and box.mark.native_id == ref.native_id:
                    self._remove(box)
            if wait == "space":
                _await_space(store_fd, ref.pool.id)

    def _refuse_attached(self, store_fd: int, ref: SnapshotRef) -> None:
        for box in boxes(store_fd, ref.pool.id):
            if box.mark and box.mark.kind == "attachment" and box.mark.parent_native_id == ref.native_id:
                raise InUseError(
                    f"the copy {ref.name} is attached as {tree.shown(box.path)}", hint="`snapmgr umount` it first"
                )

    def _remove(self, box: store.Box, *, locked: bool = False) -> None:
        if not locked:
            store.lock(box)
        mounted = mounted_inside(box.path, self._mounter.mounts())
        if mounted is not None:
            raise InUseError(
                f"{tree.shown(box.path)} is mounted at, or has a mount in it at, {tree.shown(mounted)}",
                hint=f"umount {tree.shown(mounted)} and try again",
            )
        store.discard(box)

    def repair(self, found: Found) -> None:
        """Remove a half-made box, or finish a deletion; what is no debris any more is left alone."""
        with store.opened(found.pool.id) as store_fd, store.box(store_fd, found.pool.id, found.name) as box:
            if box is None:
                return
            store.lock(box)
            if describe(box, found.pool, store.boot_id(), self.name).kind == "debris":
                self._remove(box, locked=True)

    def clone_folder(self, source: str, target: str) -> None:
        """Clone a folder, whatever is in it; see `snapmgr.api.FolderCloning`."""
        clone_folder(source, target, self._mounter.mounts())

    def usage(self, ref: SnapshotRef, *, exact: bool = False) -> Usage:
        """Ask FIEMAP about every file if it must be exact: what is shared costs nothing."""
        with store.snapshot(ref) as box:
            if not exact:
                return Usage(exclusive_bytes=None, valid=box.state != "begun")
            try:
                with tree.folder(store.DATA, box.fd) as data:
                    return Usage(exclusive_bytes=survey.exclusive_bytes(data), valid=box.state != "begun")
            except OSError as error:
                raise StorageError(f"cannot look through {tree.shown(box.path)}: {error.strerror}") from error

    def provision(self, device: str, order: ProvisionOrder) -> AbstractContextManager[Provisioned]:
        """Make this storage on a blank device; see `snapmgr.api.Provisioner`."""
        maker = StorageMaker(self._runner, self._mounter, device, order)
        return provisioned(self, device, order, lambda: provisioning.make(maker))

    def unprovision(self, device: str, order: ProvisionOrder) -> None:
        """Take it down; see `snapmgr.api.Provisioner`."""
        unmake(self._runner, self._mounter, device, order)


def _await_space(store_fd: int, path: str) -> None:
    """Return when the file system has the blocks of removed files back."""
    flush(store_fd, path)
    if kernel.free_removed_files(store_fd):
        return
    # Without root, XFS cannot be asked. Each statvfs prods its background work: wait until the figure stands still.
    deadline = time.monotonic() + _SPACE_AT_MOST_S
    free, steady_since = os.fstatvfs(store_fd).f_bfree, time.monotonic()
    while steady_since + _SPACE_STEADY_S > time.monotonic() and time.monotonic() < deadline:
        time.sleep(_SPACE_STEADY_S / 10)
        now = os.fstatvfs(store_fd).f_bfree
        if now != free:
            free, steady_since = now, time.monotonic()


def _volume_id(file_system: kernel.FileSystem, inode: int) -> str:
    return f"{file_system.id}:{file_system.subvolume}:{inode}"


def _attachment_name(record: AttachRecord) -> str:
    if not _RECORD_ID.fullmatch(record.id):
        raise StorageError(f"{record.id!r} is not an attachment's id", hint="16 hex digits are wanted")
    return f"attach@{record.id}"
