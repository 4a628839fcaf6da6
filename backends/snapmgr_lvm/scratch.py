"""Attaches classic snapshots without ever writing to them: our own CoW table in a scratch file takes the writes.

The attachment RECORD consists, in this order, of: the note ``RECORD.json`` and the sparse file ``RECORD.cow`` in the
scratch folder; a loop device on the file, which the kernel removes with its last user; and over snapshot and loop
device the device-mapper device ``snapmgr.attachment.RECORD`` (a non-persistent "snapshot" target: its table of
exceptions is in memory). Only the files survive a reboot. Attachments for reading work in the same way, because
the journal must be replayed somewhere.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from snapmgr.api import CommandError, Found, Reason, SnapmgrError, SnapshotRef, StorageError, attach_loop, format_size
from snapmgr.api.kernel import holder, loops, release_loop
from snapmgr_lvm import dm, marks, scratchfolder
from snapmgr_lvm.config import size_of
from snapmgr_lvm.inventory import pool_of, snapshot_ref

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import AttachRecord, Mount, Mounter, Runner
    from snapmgr_lvm.config import LvmConfig
    from snapmgr_lvm.dm import Device
    from snapmgr_lvm.report import Group, LogicalVolume

# Documentation/admin-guide/device-mapper/snapshot.rst: the smallest chunk copies the least for each small write.
_CHUNK_BYTES = 4096
_LEAST_BYTES = 1 << 20
_ACTIVATE_TIMEOUT_S = 60.0
_DM_UUID = re.compile(r"SNAPMGR-([0-9a-f]{16})")


class Scratch:
    """Makes, finds and removes attachments of classic snapshots."""

    def __init__(self, config: LvmConfig, runner: Runner, mounter: Mounter) -> None:
        """Store the arguments; touch nothing."""
        self._config = config
        self._runner = runner
        self._mounter = mounter

    def attach(self, record: AttachRecord, snapshot: LogicalVolume, group: Group) -> str:
        """Make a writable view of a classic snapshot and return its device. `detach` removes leftovers of a failure.

        Raises StorageError if the snapshot is lost or scratch space is missing.
        """
        name = marks.attachment_name(record.id)
        _require_sound(snapshot, group)
        below = self._active_device(snapshot, group)
        self._require_elsewhere(snapshot, group)
        with ExitStack() as stack:
            folder_fd = stack.enter_context(scratchfolder.opened(self._config.scratch_dir, make=True))
            if folder_fd is None:
                raise StorageError(f"the scratch folder {self._config.scratch_dir} went away just now")
            size_bytes = self._require_room(folder_fd, below)
            scratchfolder.write_note(
                folder_fd,
                scratchfolder.Note(
                    record_id=record.id,
                    snapshot_id=record.ref.snapshot_id,
                    native_id=snapshot.uuid,
                    pool_id=group.uuid,
                    boot_id=record.boot_id,
                ),
            )
            file_fd = scratchfolder.make_file(folder_fd, record.id, size_bytes)
            stack.callback(os.close, file_fd)
            # A crash cannot leave the loop device: it exists only while we or the device-mapper device hold it open.
            loop_fd, loop_path = attach_loop(file_fd, name)
            stack.callback(os.close, loop_fd)
            # N: not persistent. The snapshot is opened for reading only (drivers/md/dm-snap.c, snapshot_ctr).
            target = dm.Target(
                sectors=below.size_bytes // dm.SECTOR_BYTES,
                kind="snapshot",
                parameters=f"{below.number} {loop_path} N {_CHUNK_BYTES // dm.SECTOR_BYTES}",
            )
            device = dm.node(dm.create(name, _dm_uuid(record.id), target))
            _spend_first_chunk(device)
            return device

    def detach(self, record: AttachRecord) -> None:
        """Remove a complete or partial attachment of a record; idempotent, also after a reboot.

        Raises InUseError if it is mounted or open, StorageError if its snapshot is not the one in the record.
        """
        self._clear(record.id, native_id=record.ref.native_id)

    def clear_debris(self, group: Group, record_id: str) -> None:
        """Remove debris that `found` reported, if it still is debris. Errors as `detach`."""
        if any(one.kind == "debris" and one.record_id == record_id for one in self.found(group)):
            self._clear(record_id, native_id=None)

    def found(self, group: Group) -> Iterator[Found]:
        """Yield the attachments, complete or not, of a volume group's snapshots: devices, and files without a device.

        Debris that is too incomplete to name its group counts as this group's.
        """
        devices = {
            record_id: device
            for device in dm.devices(marks.ATTACHMENT)
            if (record_id := _record_of(device)) is not None
        }
        with scratchfolder.opened(self._config.scratch_dir, make=False) as folder_fd:
            in_files = scratchfolder.records(folder_fd) if folder_fd is not None else ()
            for record_id in sorted({*devices, *in_files}):
                note = scratchfolder.read_note(folder_fd, record_id) if folder_fd is not None else None
                pool_id, native_id = (note.pool_id, note.native_id) if note is not None else (None, None)
                if record_id in devices:
                    pool_id, native_id = _stands_on(devices[record_id]) or (pool_id, native_id)
                if pool_id in (None, group.uuid):
                    yield _describe(group, record_id, note, native_id)

    def clear_group(self, group_uuid: str) -> None:
        """Remove all attachments, complete or not, of a volume group that will be removed. Errors as `detach`."""
        devices = dm.devices(marks.ATTACHMENT)
        ids = {_record_of(device) for device in devices if (_stands_on(device) or ("",))[0] == group_uuid}
        with scratchfolder.opened(self._config.scratch_dir, make=False) as folder_fd:
            if folder_fd is not None:
                notes = [
                    scratchfolder.read_note(folder_fd, record_id) for record_id in scratchfolder.records(folder_fd)
                ]
                ids |= {note.record_id for note in notes if note is not None and note.pool_id == group_uuid}
        for record_id in sorted(filter(None, ids)):
            self._clear(record_id, native_id=None)

    def users(self, native_id: str) -> tuple[str, ...]:
        """Return the ids of the attachments that use a snapshot now, and so prevent its removal."""
        found = ((_record_of(device), _stands_on(device)) for device in dm.devices(marks.ATTACHMENT))
        return tuple(record_id for record_id, below in found if record_id and below and below[1] == native_id)

    def problem(self, record: AttachRecord) -> Reason | None:
        """Return why the data of an attachment cannot be trusted; None if they can."""
        device = dm.find(_dm_uuid(record.id))
        if device is None or not device.size_bytes:
            return Reason(what=f"the attachment {record.id} has no device any more", hint="attach the snapshot again")
        failure = dm.snapshot_status(device).failure
        # The snapshot comes first: if it is lost, so is everything on it.
        for one in dm.below(device):
            if dm.volume_of(one.uuid) is not None and (lost := dm.snapshot_status(one).failure) is not None:
                return Reason(
                    what=f"the snapshot {record.ref.name} was lost while it was attached: {_meaning(lost)}",
                    hint="take another one, with a larger cow_size in [backend.lvm]",
                )
        if failure is None:
            return None
        return Reason(
            what=f"the attachment {record.id} of {record.ref.name} took more writes than it has scratch space: "
            f"{self._room_text(record.id)}; the snapshot itself is as it was",
            hint=f"raise scratch_size (now {self._config.scratch_size}) or make room in {self._config.scratch_dir}",
        )

    def _clear(self, record_id: str, *, native_id: str | None) -> None:
        name = marks.attachment_name(record_id)
        device = dm.find(_dm_uuid(record_id))
        folders = {os.path.realpath(self._config.scratch_dir)}
        if device is not None:
            below = _stands_on(device)
            if device.name != name or (native_id and below is not None and below[1] != native_id):
                raise StorageError(
                    f"the device {device.name} was not made by attachment {record_id}",
                    hint=f"look at it: dmsetup table {device.name}; lsblk -s /dev/{device.kernel_name}",
                )
            # scratch_dir may have changed in the configuration since.
            folders |= {os.path.dirname(one.file) for one in loops() if os.path.basename(one.path) in device.below}
            dm.require_unmounted(device, self._mounter.mounts())
            dm.remove(device)
        for folder in sorted(folders):
            self._clear_files(folder, record_id, native_id)

    def _clear_files(self, folder: str, record_id: str, native_id: str | None) -> None:
        with scratchfolder.opened(folder, make=False) as folder_fd:
            if folder_fd is None:
                return
            note = scratchfolder.read_note(folder_fd, record_id)
            if note is not None and native_id and note.native_id != native_id:
                raise StorageError(
                    f"the scratch files {folder}/{record_id}.* are of another snapshot, {note.native_id}"
                )
            for one in loops():
                if one.file == os.path.join(folder, f"{record_id}.cow"):
                    release_loop(one)
            scratchfolder.remove(folder_fd, record_id)

    def _active_device(self, snapshot: LogicalVolume, group: Group) -> Device:
        uuid, name = dm.lvm_uuid(group.uuid, snapshot.uuid), f"{group.name}/{snapshot.name}"
        device = dm.find(uuid)
        if device is None:
            try:
                self._runner.run(["lvchange", "--yes", "--activate", "y", name], timeout_s=_ACTIVATE_TIMEOUT_S)
            except CommandError as error:
                raise StorageError(f"cannot activate the snapshot {name}: {error.message}") from None
            device = dm.find(uuid)
        if device is None or not device.size_bytes:
            raise StorageError(f"the snapshot {name} has no device", hint=f"try: lvchange --activate y {name}")
        if device.suspended:
            raise StorageError(f"the snapshot {name} is suspended: reading it would hang", hint="snapmgr doctor")
        return device

    def _require_elsewhere(self, snapshot: LogicalVolume, group: Group) -> None:
        """Raise StorageError if the scratch folder is on the snapshot's origin: each write would fill the snapshot."""
        folder = self._config.scratch_dir
        origin = dm.lvm_uuid(group.uuid, snapshot.origin_uuid or "")
        there = os.path.realpath(folder)
        while not os.path.isdir(there):
            there = os.path.dirname(there)
        number = dm.device_number(os.stat(there).st_dev)
        if number.startswith("0:"):  # btrfs, overlayfs, tmpfs, …: the mount table may name a device
            number = _source_number(there, self._mounter.mounts()) or number
        for below in dm.everything_below(number):
            with suppress(OSError), open(f"{below}/dm/uuid", encoding="ascii") as file:
                if file.read().strip() == origin:
                    raise StorageError(
                        f"the scratch folder {folder} is on {group.name}/{snapshot.origin_name}, the origin of the "
                        f"snapshot: writes there fill the snapshot",
                        hint="set scratch_dir in [backend.lvm] to a folder on another volume",
                    )

    def _require_room(self, folder_fd: int, below: Device) -> int:
        """Return the maximum size of the scratch file. Raises StorageError without enough room."""
        # Writes can change at most the whole volume.
        wanted = min(max(size_of(self._config.scratch_size, below.size_bytes), _LEAST_BYTES), below.size_bytes)
        wanted -= wanted % _CHUNK_BYTES
        free = scratchfolder.free_bytes(folder_fd)
        if free < wanted:
            raise StorageError(
                f"the attachment may take {format_size(wanted)} of scratch space (scratch_size = "
                f'"{self._config.scratch_size}" of {format_size(below.size_bytes)}), and {self._config.scratch_dir} '
                f"has {format_size(max(free, 0))} that is not promised to others",
                hint="set scratch_size smaller, or scratch_dir to a folder with more room, in [backend.lvm]",
            )
        return wanted

    def _room_text(self, record_id: str) -> str:
        with suppress(SnapmgrError), scratchfolder.opened(self._config.scratch_dir, make=False) as folder_fd:
            if folder_fd is not None:
                size_bytes = scratchfolder.file_size(folder_fd, record_id)
                room = os.fstatvfs(folder_fd)
                free = format_size(room.f_bavail * room.f_frsize)
                file = f"its file may have {format_size(size_bytes)}" if size_bytes is not None else "its file is gone"
                return f"{file}, and {self._config.scratch_dir} has {free} free"
        return f"{self._config.scratch_dir} cannot be looked at"


def _spend_first_chunk(device: str) -> None:
    """Rewrite an attachment's last chunk unchanged, so that the scratch file begins with it.

    The file begins with the first write, which would otherwise be the file system's superblock: a program that probes
    the loop device (``udevadm trigger``) would mistake it for the origin, and point /dev/disk/by-uuid to it.
    """
    try:
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        try:
            start = os.lseek(fd, 0, os.SEEK_END) - _CHUNK_BYTES
            os.pwrite(fd, os.pread(fd, _CHUNK_BYTES, start), start)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(f"cannot write to {device}: {error.strerror}", hint="see: dmesg") from None


def _require_sound(snapshot: LogicalVolume, group: Group) -> None:
    name = f"{group.name}/{snapshot.name}"
    if snapshot.invalid:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        raise StorageError(
            f"the snapshot {name} is lost: its CoW table of {format_size(snapshot.size_bytes)} ran full (found {now})",
            hint="take another one, with a larger cow_size in [backend.lvm]",
        )
    if snapshot.merging:
        raise StorageError(f"the snapshot {name} is being merged into its origin")


def _dm_uuid(record_id: str) -> str:
    return f"SNAPMGR-{record_id}"


def _record_of(device: Device) -> str | None:
    found = _DM_UUID.fullmatch(device.uuid)
    return found[1] if found and device.name == marks.attachment_name(found[1]) else None


def _stands_on(device: Device) -> tuple[str, str] | None:
    """Return the UUIDs of group and snapshot below a device of ours; None until it has a table."""
    return next((found for one in dm.below(device) if (found := dm.volume_of(one.uuid)) is not None), None)


def _describe(group: Group, record_id: str, note: scratchfolder.Note | None, native_id: str | None) -> Found:
    """Describe an attachment by the known facts; as debris if they are not enough to detach it by a record."""
    pool, name = pool_of(group), marks.attachment_name(record_id)
    snapshot = group.by_uuid(native_id)
    if snapshot is not None:
        ref = snapshot_ref(group, snapshot)
    elif note is not None:
        # The snapshot was removed by hand or with its origin; `detach` needs only its id.
        ref = SnapshotRef(
            backend=pool.backend,
            snapshot_id=note.snapshot_id,
            pool=pool,
            volume_id="",
            name=marks.snapshot_name(note.snapshot_id, 0),
            native_id=note.native_id,
        )
    else:
        why = "an attachment was begun and not finished"
        return Found(kind="debris", pool=pool, name=name, record_id=record_id, why=why)
    return Found(
        kind="attachment", pool=pool, name=name, snapshot_id=ref.snapshot_id or None, ref=ref, record_id=record_id
    )


def _meaning(failure: str) -> str:
    return "its CoW table ran full" if failure in ("Invalid", "Overflow") else f'its device says "{failure}"'


def _source_number(path: str, mounts: tuple[Mount, ...]) -> str | None:
    """Return the number of the device that the mount of a real path names."""
    with suppress(OSError, StorageError):
        source = holder(path, mounts).source
        return dm.device_number(os.stat(source).st_rdev) if source.startswith("/") else None
    return None
