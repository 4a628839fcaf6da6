"""Provides `CopyStoreBackend`: a backend whose snapshots are copies of folders, complete except for the copying."""

from __future__ import annotations

import math
import os
import re
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.contract.errors import InUseError, MissingRequirementError, NotFoundError, SnapmgrError, StorageError
from snapmgr.contract.records import (
    Attachment,
    AttachRecord,
    Capabilities,
    Found,
    Gauge,
    NotMine,
    Pool,
    Reason,
    SnapshotRef,
    Target,
    Usage,
    Volume,
)
from snapmgr.copystore.alteration import refuse_altered
from snapmgr.copystore.armed import ArmedCopies
from snapmgr.copystore.copyfolder import DATA, DELETING, CopyFolder, Folder, Mark, Store
from snapmgr.copystore.copying import FolderCopy, OpenFolder, explain
from snapmgr.copystore.durability import await_space, flush
from snapmgr.copystore.overlay import overlaid, overlay_point
from snapmgr.copystore.place import gauge, unsuitable, unwritable
from snapmgr.copystore.removal import discard, remove_data
from snapmgr.copystore.store import begin, copy_folder, create, describe, folders, opened, refuse_foreign, snapshot
from snapmgr.system import kernel
from snapmgr.system.filesystem import identify
from snapmgr.system.paths import mounted_inside, shown
from snapmgr.tree.entries import subfolder
from snapmgr.tree.walk import FOLDER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.contract.backend import Mounter, Runner

_SNAPSHOT_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]+")
_RECORD_ID = re.compile(r"[0-9a-f]{16}")
_NOTE_BYTES_AT_MOST = 64 << 10


class Origin(Struct, frozen=True, kw_only=True):
    """The present source and store of a volume's copy."""

    path: str
    store: str
    volatile: bool = True
    """Whether a power cut may destroy parts of its copy before `settle_copy` has returned."""


class CopyStoreBackend(ABC):
    """See `snapmgr.api.Backend`: a backend that keeps copies of folders in a store, as `snapmgr.copystore` does.

    A subclass has `name`, `api_version`, `Config`, `locate` (with `place`) and `new_copy`, and may override the hooks.
    """

    name: ClassVar[str]
    api_version: ClassVar[int]
    Config: ClassVar[type[Any]]
    shared: ClassVar[bool] = False
    """Whether several machines may mount the store: a copy that one has begun is not debris to the others."""

    def __init__(self, config: Any, runner: Runner, mounter: Mounter) -> None:  # noqa: ANN401 - the subclass's Config
        """Store the arguments."""
        self.config = config
        self.runner = runner
        self.mounter = mounter

    # A backend of the kit provides these.

    @abstractmethod
    def locate(self, target: Target) -> Volume | NotMine:
        """Find a place for copies of `target`; see `place`."""

    @abstractmethod
    def new_copy(self, source: Folder, target: Folder) -> FolderCopy:
        """Return a copy of the folder `source`, not begun yet, to be made in the folder `target`."""

    # A backend may override these.

    def volume_id(self, path: str, fd: int) -> str:  # noqa: ARG002 - a client may know more by the path
        """Return the storage's own id of an open directory, constant while the directory exists. Raises OSError."""
        file_system = identify(fd)
        return f"{file_system.id}:{file_system.subvolume}:{os.fstat(fd).st_ino}"

    def find_store(self, pool: Pool) -> str:
        """Return the path of a pool's store. Raises StorageError if it is unavailable."""
        return pool.id

    def find_origin(self, volume: Volume) -> Origin:
        """Return the present places of a volume and its store. Raises StorageError."""
        return Origin(path=volume.path, store=self.find_store(volume.pool))

    def settle_copy(self, folder: CopyFolder, pool: Pool, deadline: float) -> None:  # noqa: ARG002 - for other storage
        """Return when a copy would survive a power cut. Raises StorageError at `deadline` (time.monotonic())."""
        flush(folder.fd, folder.path, deadline)

    def remove_folder(self, folder: Folder, name: str) -> None:
        """Remove the folder `name` in a copy folder, or beside a clone. Raises InUseError, StorageError."""
        remove_data(folder, name)

    def await_space(self, store: Store) -> None:
        """Wait until the storage has reclaimed the space of removed copies."""
        await_space(store.fd, store.path)

    def missing(self) -> tuple[Reason, ...]:
        """Return the kernel's missing abilities."""
        why = kernel.unsupported()
        if why is None:
            return ()
        return (Reason(what=why, hint="use Linux 5.6 or newer; a container's seccomp profile may forbid openat2"),)

    def place(self, target: Target, store: str) -> Volume | NotMine:
        """Return the volume for a target whose copies are to be in the folder `store`, or why that is not possible."""
        hint = f"set store in [backend.{self.name}] to a folder outside of the directory"
        if not os.path.isabs(store):
            return NotMine(reason=f"the store {shown(store)} is not an absolute path", hint=hint)
        real = os.path.realpath(store)
        why_not = unsuitable(real, target.path) or unwritable(real)
        if why_not is not None:
            return NotMine(reason=why_not, hint=hint)
        try:
            fd = os.open(target.path, FOLDER_FLAGS)
            try:
                volume_id = self.volume_id(target.path, fd)
            finally:
                os.close(fd)
        except OSError as error:
            return NotMine(reason=f"{shown(target.path)} cannot be read: {error.strerror}")
        return Volume(
            backend=self.name,
            id=volume_id,
            pool=Pool(backend=self.name, id=real, hint=shown(target.mount.point)),
            path=target.path,
            subpath="",
            excluded=tuple(sorted({mount.point for mount in target.submounts})),
        )

    def capabilities(self, volumes: tuple[Volume, ...]) -> Capabilities:  # noqa: ARG002 - the same for all
        """Each file is copied at its own time; a copy no longer needs its origin."""
        return Capabilities(atomicity="file", clone="native", survives_origin=True)

    def headroom(self, volume: Volume) -> tuple[Gauge, ...]:
        """Return the file system that holds the copies, also before the first one."""
        store = self.find_store(volume.pool)
        path = store if os.path.isdir(store) else os.path.dirname(store)
        return (gauge(volume.pool, path, self.mounter.mounts()),)

    def gauges(self, pools: tuple[Pool, ...]) -> tuple[Gauge, ...]:
        """Return the file system of each store; see `snapmgr.contract.abilities.CapacityReporting`."""
        found = []
        for pool in pools:
            with self._pool(pool) as store:
                found.append(gauge(pool, store.path, self.mounter.mounts()))
        return tuple(found)

    def arm(self, volumes: tuple[Volume, ...], snapshot_id: str) -> ArmedCopies:
        """Begin and prepare a copy for each volume; a failure leaves nothing."""
        if not _SNAPSHOT_ID.fullmatch(snapshot_id):
            raise StorageError(
                f"{snapshot_id!r} is not the id of a snapshot", hint='use letters, digits, ".", "-" and "_"'
            )
        with ExitStack() as undo:
            members = []
            for index, volume in enumerate(volumes):
                name = snapshot_id if index == 0 else f"{snapshot_id}.{index}"
                members.append(self._begin(volume, snapshot_id, name, undo))
            armed = ArmedCopies(members, self.discard)
            undo.pop_all()
            return armed

    def _begin(
        self, volume: Volume, snapshot_id: str, name: str, undo: ExitStack
    ) -> tuple[Volume, CopyFolder, FolderCopy]:
        origin = self.find_origin(volume)
        try:
            origin_fd = os.open(origin.path, FOLDER_FLAGS)
            undo.callback(os.close, origin_fd)
            now = self.volume_id(origin.path, origin_fd)
        except OSError as error:
            raise StorageError(f"cannot open {shown(volume.path)}: {error.strerror}") from error
        if now != volume.id:
            raise StorageError(
                f"{shown(volume.path)} is not the directory it was: another one has been put in its place",
                hint="try again",
            )
        create(origin.store, self.name)
        with self.opened(origin.store) as store:
            own = replace(store, fd=os.dup(store.fd))
        undo.callback(os.close, own.fd)
        mark = Mark(
            kind="snapshot",
            snapshot_id=snapshot_id,
            volume_id=volume.id,
            origin=volume.path,
            volatile=origin.volatile,
        )
        folder = begin(own, name, mark)
        undo.callback(os.close, folder.fd)
        undo.callback(self.discard, folder)
        copy = self.new_copy(OpenFolder(path=origin.path, fd=origin_fd), folder)
        copy.prepare(volume)
        return volume, folder, copy

    @contextmanager
    def opened(self, path: str) -> Iterator[Store]:
        """Open a store until the context ends. Raises StorageError."""
        with opened(path, self.name, shared=self.shared) as store:
            yield store

    @contextmanager
    def _pool(self, pool: Pool) -> Iterator[Store]:
        with self.opened(self.find_store(pool)) as store:
            yield store

    @contextmanager
    def snapshot(self, ref: SnapshotRef) -> Iterator[CopyFolder]:
        """Open the copy folder of a snapshot until the context ends. Raises NotFoundError, StorageError."""
        with self._pool(ref.pool) as store, snapshot(store, ref) as folder:
            yield folder

    def settle(self, refs: tuple[SnapshotRef, ...], timeout_s: float) -> None:
        """Wait until the copies are safe in the storage, then mark them complete, durably."""
        deadline = time.monotonic() + timeout_s
        for ref in refs:
            with self.snapshot(ref) as folder:
                if folder.state == "begun":
                    raise StorageError(
                        f"the copy {shown(folder.path)} was never finished", hint="`snapmgr doctor` removes it"
                    )
                if folder.state == "made":
                    self.settle_copy(folder, ref.pool, deadline)
                    folder.advance("made", "complete", durable=True)

    def inventory(self, pools: tuple[Pool, ...], *, notes: bool = True) -> tuple[Found, ...]:
        """Read the copy folders of each store."""
        listed: list[Found] = []
        for pool in pools:
            with self._pool(pool) as store:
                described = (describe(folder, pool, note=notes) for folder in folders(store))
                listed += [one for one in described if one is not None]
        return tuple(listed)

    def annotate(self, ref: SnapshotRef, note: bytes) -> None:
        """Write the note into the snapshot's copy folder, beside the data."""
        if len(note) > _NOTE_BYTES_AT_MOST:
            raise StorageError(f"a note of {len(note)} bytes is too long", hint="64 KiB is the most")
        with self.snapshot(ref) as folder:
            folder.write_note(note)

    def refuse_altered(self, ref: SnapshotRef) -> None:
        """Walk the copy: `AlterationCheck`."""
        with suppress(NotFoundError), self.snapshot(ref) as folder:
            refuse_altered(folder)

    def attach(self, record: AttachRecord) -> Attachment:
        """Clone the copy once more, or hand out the copy itself for reading."""
        name = _attachment_name(record)
        with ExitStack() as stack:
            parent = stack.enter_context(self.snapshot(record.ref))
            if parent.state == "begun" or parent.mark is None:
                raise NotFoundError(f"the copy {shown(parent.path)} was never finished")
            # Hold the lock until the attachment's folder exists: from then on that folder keeps `delete` away.
            parent.lock(shared=True)
            wanted = record.writable and record.overlay and self.can_overlay(parent)
            overlay = refuse_altered(parent, overlay=wanted)
            mark = Mark(
                kind="attachment",
                snapshot_id=record.ref.snapshot_id,
                volume_id=record.ref.volume_id,
                origin=parent.mark.origin,
                record_id=record.id,
                parent_name=parent.name,
                parent_native_id=record.ref.native_id,
            )
            folder = begin(parent.store, name, mark)
            stack.callback(os.close, folder.fd)
            made = overlaid(parent, folder, self.mounter) if overlay else None
            if record.writable and made is None:
                self._clone(parent, folder)
            folder.advance("begun", "complete", durable=False)
            return made or Attachment(directory=(folder if record.writable else parent).data)

    def can_overlay(self, folder: CopyFolder) -> bool:  # noqa: ARG002 - hooks may need it
        """Return whether a command may get an overlay over the copy in `folder`, with its changes in the store."""
        return False

    def _clone(self, parent: CopyFolder, folder: CopyFolder) -> None:
        try:
            with subfolder(DATA, parent.fd) as fd:
                self.new_copy(OpenFolder(path=parent.data, fd=fd), folder).run(math.inf)
        except (SnapmgrError, OSError) as error:
            self.discard(folder)
            if isinstance(error, MissingRequirementError):
                raise
            why, hint = explain(error)
            raise StorageError(f"cannot clone {shown(parent.path)}: {why}", hint=hint) from error

    def detach(self, record: AttachRecord) -> None:
        """Remove the attachment's copy folder, or the leftovers of a crash."""
        name = _attachment_name(record)
        with self._pool(record.ref.pool) as store:
            for folder in folders(store, snapshots=False):
                mark = folder.mark
                if mark is None or mark.kind != "attachment" or mark.record_id != record.id:
                    continue
                if mark.parent_native_id == record.ref.native_id:
                    folder.lock()
                    self.remove(folder)
            refuse_foreign(store, name)

    def delete(self, ref: SnapshotRef, *, wait: Literal["name", "space"] = "name") -> None:
        """Rename the copy folder away durably, then remove it; "space" waits until the storage has reclaimed it."""
        with self._pool(ref.pool) as store:
            try:
                with snapshot(store, ref) as folder:
                    folder.lock()
                    self._refuse_attached(store, ref)
                    self.remove(folder)
            except NotFoundError:
                refuse_foreign(store, ref.name)
            # An earlier deletion may have been interrupted.
            with copy_folder(store, DELETING + ref.native_id.partition(".")[2]) as half:
                if half and half.mark and half.mark.native_id == ref.native_id:
                    half.lock()
                    self.remove(half)
            if wait == "space":
                self.await_space(store)

    def _refuse_attached(self, store: Store, ref: SnapshotRef) -> None:
        for folder in folders(store, snapshots=False):
            if folder.mark and folder.mark.kind == "attachment" and folder.mark.parent_native_id == ref.native_id:
                where = " by another machine" if folder.is_foreign else ""
                raise InUseError(
                    f"the copy {ref.name} is attached as {shown(folder.path)}{where}", hint="`snapmgr umount` it first"
                )

    def remove(self, folder: CopyFolder) -> None:
        """Remove a locked copy folder. Raises InUseError if something is mounted from it or in it, StorageError."""
        self.refuse_mounted(folder)
        self.discard(folder)

    def refuse_mounted(self, folder: CopyFolder) -> None:
        """Raise InUseError if something is mounted from a copy folder or in it."""
        mounts = self.mounter.mounts()
        point = mounted_inside(folder.path, mounts) or overlay_point(folder, mounts)
        if point is not None:
            raise InUseError(
                f"{shown(folder.path)} is mounted at, or has a mount in it at, {shown(point)}",
                hint=f"umount {shown(point)} and try again",
            )

    def discard(self, folder: CopyFolder) -> None:
        """Remove a locked copy folder. Raises InUseError, StorageError."""
        discard(folder, self.remove_folder)

    def repair(self, found: Found) -> None:
        """Remove a half-made copy, or finish a deletion; leave anything alone that is no longer debris."""
        with self._pool(found.pool) as store, copy_folder(store, found.name) as folder:
            if folder is None:
                return
            folder.lock()
            now = describe(folder, found.pool)
            if now is not None and now.kind == "debris":
                self.remove(folder)

    def usage(self, ref: SnapshotRef, *, exact: bool = False) -> Usage:  # noqa: ARG002 - few file systems can tell
        """Report the cost as unknown."""
        with self.snapshot(ref) as folder:
            return Usage(exclusive_bytes=None, valid=folder.state != "begun")


def _attachment_name(record: AttachRecord) -> str:
    if not _RECORD_ID.fullmatch(record.id):
        raise StorageError(f"{record.id!r} is not the id of an attachment", hint="use 16 hex digits")
    return f"attach@{record.id}"
