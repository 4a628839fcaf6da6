"""Provides the btrfs backend: docs/reference/backends/btrfs.md lists its guarantees."""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec import Struct

from snapmgr.api import (
    API_VERSION,
    AlteredError,
    Attachment,
    Capabilities,
    MissingRequirementError,
    NotFoundError,
    NotMine,
    Reason,
    SnapmgrError,
    StorageError,
    Usage,
)
from snapmgr.api.kernel import may_mount
from snapmgr_btrfs import filesystem, folder, inventory, kernel, library, locating, removal, space, users
from snapmgr_btrfs.armed import ArmedSnapshot, Member, settle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from snapmgr.api import (
        Armed,
        AttachRecord,
        Found,
        Gauge,
        Mounter,
        Pool,
        Provisioned,
        ProvisionOrder,
        Reservoir,
        Runner,
        SnapshotRef,
        StorageMaker,
        Target,
        Volume,
    )
    from snapmgr_btrfs.filesystem import TopLevel
    from snapmgr_btrfs.folder import Entry
    from snapmgr_btrfs.library import Library

# What became dirty since a flush is little; the snapshot call writes it, or the flush before a lock.
_FLUSHED_S = 5.0
_OLDEST_KERNEL = (5, 7)  # deleting a subvolume by its id
# The share of a provisioned file system that the origin may fill: a copy of all of it still fits, and btrfs keeps room
# for its metadata.
_ORIGIN_SHARE = 0.45


class BtrfsConfig(Struct, frozen=True, kw_only=True):
    """``[backend.btrfs]``."""

    folder: str = ".snapmgr"
    """Name of the folder at the top of the file system (subvolid=5) that holds the snapshots."""
    space_wait_s: float = 600.0
    """Seconds after which a deletion that waits for the space gives up, if btrfs' cleaner has freed no snapshot."""

    def __post_init__(self) -> None:
        if self.folder in {"", ".", ".."} or "/" in self.folder or "\0" in self.folder:
            raise ValueError(f"folder: {self.folder!r} is not the name of a folder: one name without a slash")
        if self.space_wait_s <= 0:
            raise ValueError("space_wait_s: must be above 0")


class BtrfsBackend:
    """Snapshots of btrfs subvolumes; see `snapmgr.api.Backend`."""

    name: ClassVar[str] = "btrfs"
    api_version: ClassVar[int] = API_VERSION
    Config: ClassVar[type[BtrfsConfig]] = BtrfsConfig
    shares_space: ClassVar[Literal[True]] = True

    def __init__(self, config: BtrfsConfig, runner: Runner, mounter: Mounter) -> None:
        self._config = config
        self._runner = runner
        self._mounter = mounter
        self._flushed: dict[str, float] = {}

    def missing(self) -> tuple[Reason, ...]:
        """Return the missing requirements: the library, btrfs in the kernel, a recent enough kernel, root."""
        reasons = [library.problem()]
        if not _kernel_knows_btrfs():
            reasons.append(
                Reason(what="the kernel has no btrfs", hint="modprobe btrfs, or install a kernel that has it")
            )
        release = os.uname().release
        if _version(release) < _OLDEST_KERNEL:
            reasons.append(
                Reason(what=f"the kernel {release} is too old for btrfs snapshots", hint="5.7 or newer is needed")
            )
        if not may_mount():
            reasons.append(Reason(what="btrfs snapshots need root (CAP_SYS_ADMIN)", hint="run snapmgr as root"))
        return tuple(reason for reason in reasons if reason is not None)

    def locate(self, target: Target) -> Volume | NotMine:
        """Find the subvolume that holds `target`; see `snapmgr.api.Backend.locate`."""
        if target.mount.fs_type != "btrfs":
            return NotMine(reason=f"{target.path} is on {target.mount.fs_type}, not on btrfs", foreign=True)
        return locating.locate(library.load(), target, self._config.folder)

    def capabilities(self, volumes: tuple[Volume, ...]) -> Capabilities:  # noqa: ARG002 - the same for all
        """One subvolume, one instant; clones by the file system; a snapshot needs its origin no more."""
        return Capabilities(atomicity="volume", clone="native", survives_origin=True)

    def headroom(self, volume: Volume) -> tuple[Reservoir, ...]:
        """Return the data and the metadata space, each with what could still be allocated to it, and the allocation."""
        return self.gauges((volume.pool,))

    def gauges(self, pools: tuple[Pool, ...]) -> tuple[Gauge, ...]:
        """Return the spaces of each pool, as `headroom` does; see `snapmgr.api.CapacityReporting.gauges`."""
        found: list[Gauge] = []
        for pool in pools:
            with self._top(pool, write=False) as top:
                ours = users.mounts_of(top.mounts, top.uuid)
                where = ours[0].point if ours else top.device
                devices = kernel.devices(top.fd)
                found += space.gauges(space.read_spaces(users.SYSFS / top.uuid, devices), devices, where, pool)
        return tuple(found)

    def arm(self, volumes: tuple[Volume, ...], snapshot_id: str) -> Armed:
        """Open all that firing needs, check room and names, and flush the file systems, unless they have just been."""
        lib = library.load()
        folder.check_snapshot_id(snapshot_id)
        if not volumes or len({(volume.pool.id, volume.id) for volume in volumes}) < len(volumes):
            raise StorageError("a snapshot needs one or more volumes, each once")
        with ExitStack() as stack:
            tops: dict[str, tuple[TopLevel, int]] = {}
            for volume in volumes:
                if volume.pool.id not in tops:
                    tops[volume.pool.id] = self._prepare_pool(stack, volume.pool)
            members = []
            for volume, intent in zip(volumes, folder.intents(volumes, snapshot_id), strict=True):
                top, folder_fd = tops[volume.pool.id]
                _require_free(folder_fd, intent.name)
                origin_fd = _open_origin(lib, top, volume)
                stack.callback(os.close, origin_fd)
                members.append(Member(intent=intent, origin_fd=origin_fd, folder_fd=folder_fd))
            armed = ArmedSnapshot(lib, snapshot_id, tuple(members), stack.pop_all())
        if any(time.monotonic() >= self._flushed.get(pool, float("-inf")) + _FLUSHED_S for pool in tops):
            try:
                armed.sync()
            except BaseException:
                armed.__exit__(None, None, None)
                raise
            self._flushed |= dict.fromkeys(tops, time.monotonic())
        return armed

    def _prepare_pool(self, stack: ExitStack, pool: Pool) -> tuple[TopLevel, int]:
        top = stack.enter_context(self._top(pool, write=True))
        space.check_room(space.read_spaces(users.SYSFS / top.uuid, kernel.devices(top.fd)), top.device)
        try:
            folder_fd = top.open_folder(create=True)
        except OSError as error:
            raise StorageError(f"cannot make the folder {top.folder_name} on {top.device}: {error.strerror}") from None
        if folder_fd is None:
            raise StorageError(f"the folder {top.folder_name} on {top.device} vanished")
        stack.callback(os.close, folder_fd)
        return top, folder_fd

    def settle(self, refs: tuple[SnapshotRef, ...], timeout_s: float) -> None:
        """Check that the snapshots are read-only and have the right origins, and wait until they are on disk."""
        deadline = time.monotonic() + timeout_s
        for ref in refs:
            with self._snapshot(ref, write=False) as (top, _, entry):
                settle(top, entry, ref, deadline)

    def inventory(self, pools: tuple[Pool, ...], *, notes: bool = True) -> tuple[Found, ...]:
        """Return all that is ours in `pools`; see `snapmgr_btrfs.folder` for what that means."""
        lib = library.load()
        found: list[Found] = []
        for pool in pools:
            with self._top(pool, write=False) as top, filesystem.opened_folder(top) as folder_fd:
                if folder_fd is not None:
                    found += inventory.read(lib, folder_fd, pool, top, notes=notes)
        return tuple(found)

    def annotate(self, ref: SnapshotRef, note: bytes) -> None:
        """Store `note` in the file ``NAME.json`` beside the snapshot. Raises NotFoundError if the snapshot is gone."""
        if len(note) > folder.NOTE_MAX_BYTES:
            raise StorageError(
                f"the note of {ref.name} has {len(note)} bytes: at most {folder.NOTE_MAX_BYTES} are stored"
            )
        with self._snapshot(ref, write=True) as (_, folder_fd, entry):
            try:
                folder.write_note(folder_fd, entry.name, note)
            except OSError as error:
                raise StorageError(f"cannot write the note of {ref.name}: {error.strerror}") from None

    def attach(self, record: AttachRecord) -> Attachment:
        """Return device and subvolume to mount: a new writable clone ``attach.RECORD``, or the snapshot itself."""
        ref, name = record.ref, folder.clone_name(record.id)
        if folder.record_id_of(name) is None:
            raise StorageError(f"{record.id!r} is not the id of an attachment", hint="use 16 hex digits")
        lib = library.load()
        with self._snapshot(ref, write=record.writable) as (top, folder_fd, entry):
            if not entry.read_only or inventory.is_altered(folder_fd, entry):
                why = inventory.ALTERED if entry.read_only else "it was made writable by hand"
                raise AlteredError(
                    f"the snapshot {ref.name} is not to be trusted: {why}",
                    hint=f"look at it in {top.folder_name} on {top.device}; delete it if it is not needed",
                )
            if not record.writable:
                return _attachment(top, entry, "ro")
            _require_free(folder_fd, name)
            origin_fd = os.open(
                entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd
            )
            try:
                lib.create_snapshot(origin_fd, f"/proc/self/fd/{folder_fd}/{name}")
                clone = folder.look(lib, folder_fd, name)
            except OSError as error:
                raise StorageError(f"cannot make a clone of {ref.name}: {os.strerror(error.errno or 0)}") from None
            finally:
                os.close(origin_fd)
            if clone is None or clone.parent_uuid != ref.native_id:
                raise StorageError(f"the clone {name} of {ref.name} vanished or is of something else")
            return _attachment(top, clone)

    def detach(self, record: AttachRecord) -> None:
        """Delete the clone that `attach` made for `record`, if it is a clone of that very snapshot."""
        if not record.writable:
            return
        with (
            self._top(record.ref.pool, write=self._has_clone(record)) as top,
            filesystem.opened_folder(top) as folder_fd,
        ):
            if folder_fd is not None:
                removal.remove_clone(library.load(), top, folder_fd, record.id, record.ref.native_id)

    def _has_clone(self, record: AttachRecord) -> bool:
        """Whether there is something to remove: on a read-only file system only that is an error."""
        with self._top(record.ref.pool, write=False) as top, filesystem.opened_folder(top) as folder_fd:
            name = folder.clone_name(record.id)
            return folder_fd is not None and folder.look(library.load(), folder_fd, name) is not None

    def delete(self, ref: SnapshotRef, *, wait: Literal["name", "space"] = "name") -> None:
        """Delete the snapshot by its UUID; a renamed one too, but not one that was moved out of the folder."""
        (error,) = self.delete_batch((ref,), wait=wait)
        if error is not None:
            raise error

    def delete_batch(
        self, refs: tuple[SnapshotRef, ...], *, wait: Literal["name", "space"] = "name"
    ) -> tuple[SnapmgrError | None, ...]:
        """Delete the snapshots as `delete` does each, with one private mount and one commit for each file system."""
        lib = library.load()
        errors: dict[SnapshotRef, SnapmgrError] = {}
        for pool in dict.fromkeys(ref.pool for ref in refs):
            mine = [ref for ref in refs if ref.pool == pool]
            try:
                with self._top(pool, write=True) as top, filesystem.opened_folder(top) as folder_fd:
                    batch = removal.Removal(lib, top, folder_fd)
                    deleted: set[int | None] = set()
                    for ref in mine:
                        try:
                            deleted.add(batch.remove(ref))
                        except SnapmgrError as error:
                            errors[ref] = error
                    removal.commit(top)
                    if wait == "space":
                        removal.wait_for_space(lib, top, deleted, self._config.space_wait_s)
            except SnapmgrError as error:
                errors = dict.fromkeys(mine, error) | errors
        return tuple(errors.get(ref) for ref in refs)

    def repair(self, found: Found) -> None:
        """Remove left-over notes and clones; a snapshot that was made writable is refused: somebody may need it."""
        with self._top(found.pool, write=True) as top, filesystem.opened_folder(top) as folder_fd:
            if folder_fd is not None:
                removal.clear(library.load(), top, folder_fd, found)

    def usage(self, ref: SnapshotRef, *, exact: bool = False) -> Usage:
        """Return the exclusive bytes: by quota group where quotas are on, or `exact` by each extent's owners."""
        with self._snapshot(ref, write=False) as (top, _, entry):
            if exact:
                return Usage(exclusive_bytes=space.exact_exclusive(top.fd, entry.info.id))
            return Usage(exclusive_bytes=space.quota_exclusive(users.SYSFS / top.uuid, entry.info.id))

    def _top(self, pool: Pool, *, write: bool) -> AbstractContextManager[TopLevel]:
        if not may_mount():
            raise MissingRequirementError("reaching btrfs snapshots needs root (CAP_SYS_ADMIN)", hint="run it as root")
        return filesystem.open_top(self._mounter, self._runner, pool, self._config.folder, write=write)

    @contextmanager
    def _snapshot(self, ref: SnapshotRef, *, write: bool) -> Iterator[tuple[TopLevel, int, Entry]]:
        with self._top(ref.pool, write=write) as top, filesystem.opened_folder(top) as folder_fd:
            entry = None if folder_fd is None else folder.find(library.load(), folder_fd, ref)
            if folder_fd is None or entry is None:
                raise NotFoundError(
                    f"the btrfs snapshot {ref.name} ({ref.native_id}) is not in {top.folder_name} on {top.device}",
                    hint="snapmgr doctor compares the catalog with the storage",
                )
            yield top, folder_fd, entry

    def provision(self, device: str, order: ProvisionOrder) -> AbstractContextManager[Provisioned]:
        """Make this storage on a blank device; see `snapmgr.api.Provisioner`."""
        from snapmgr.api import StorageMaker, provisioned  # noqa: PLC0415 - for tests and the benchmark alone

        maker = StorageMaker(self._runner, self._mounter, device, order)
        return provisioned(self, device, order, lambda: _make(maker))

    def unprovision(self, device: str, order: ProvisionOrder) -> None:
        """Take it down; see `snapmgr.api.Provisioner`."""
        from snapmgr.api import unmake  # noqa: PLC0415 - the same

        unmake(self._runner, self._mounter, device, order)


def _make(maker: StorageMaker) -> Provisioned:
    """Make it and mount its top; the path is a subvolume, with ``nocow`` one whose files have no copy-on-write."""
    options = maker.options({"nocow": ("no", "yes")})
    maker.discard()
    maker.make_file_system("btrfs", maker.device, maker.order.size_bytes)
    maker.mount(maker.device, "btrfs", "space_cache=v2")
    maker.run("btrfs", "--quiet", "subvolume", "create", maker.path)
    if options.get("nocow") == "yes":
        maker.run("chattr", "+C", maker.path)
    return maker.made(maker.path, capacity_bytes=maker.free_bytes() * _ORIGIN_SHARE)


def _attachment(top: TopLevel, entry: Entry, *options: str) -> Attachment:
    return Attachment(device=top.device, fs_type="btrfs", options=(f"subvolid={entry.info.id}", *options))


def _require_free(folder_fd: int, name: str) -> None:
    try:
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    raise StorageError(f"{name} exists already in snapmgr's folder", hint="`snapmgr doctor` shows it")


def _open_origin(lib: Library, top: TopLevel, volume: Volume) -> int:
    """Return a descriptor of the origin's own folder, inside the private mount: found by its id, wherever it is now."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        if volume.id == f"{top.uuid}:{library.TOP_LEVEL_ID}":
            return os.open(".", flags, dir_fd=top.fd)
        subvolume_id = _subvolume_id(lib, top, volume)
        path = lib.subvolume_path(top.fd, subvolume_id) if subvolume_id != library.TOP_LEVEL_ID else ""
        fd = os.open(path or ".", flags, dir_fd=top.fd)
        # It may have been moved between the two calls.
        if library.volume_id(lib.subvolume_info(fd), top.uuid) == volume.id and not kernel.path_in_subvolume(fd):
            return fd
        os.close(fd)
    except OSError as error:
        raise StorageError(f"cannot open the subvolume of {volume.path}: {os.strerror(error.errno or 0)}") from None
    raise StorageError(f"the subvolume of {volume.path} changed just now", hint="try again")


def _subvolume_id(lib: Library, top: TopLevel, volume: Volume) -> int:
    try:
        info = lib.subvolume_info(volume.path)
    except OSError:
        info = None
    if info is not None and library.volume_id(info, top.uuid) == volume.id:
        return info.id
    info = lib.subvolume_info(top.fd)
    if library.volume_id(info, top.uuid) == volume.id:
        return info.id
    for _, subvolume_id in lib.SubvolumeIterator(top.fd, top=library.TOP_LEVEL_ID):
        if library.uuid_text(lib.subvolume_info(top.fd, subvolume_id).uuid) == volume.id:
            return subvolume_id
    raise StorageError(f"the subvolume {volume.id} of {volume.path} is gone", hint="was it deleted or replaced?")


def _kernel_knows_btrfs() -> bool:
    if any(line.split()[-1] == "btrfs" for line in Path("/proc/filesystems").read_text().splitlines()):
        return True
    # Not loaded yet: mounting loads it.
    modules = Path("/lib/modules") / os.uname().release
    return any(
        "/btrfs.ko" in (modules / name).read_text()
        for name in ("modules.builtin", "modules.dep")
        if (modules / name).exists()
    )


def _version(release: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", release)
    return (0, 0) if match is None else (int(match[1]), int(match[2]))
