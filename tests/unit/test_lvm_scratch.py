"""What attachments of classic snapshots are decided by, without any device."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from snapmgr.api import AttachRecord, InUseError, MissingRequirementError, Mount, Pool, SnapshotRef, StorageError
from snapmgr.system import loopdevice
from snapmgr.system.command import CommandRunner
from snapmgr.system.mount import KernelMounter
from snapmgr_lvm import dm, luks, scratchfolder
from snapmgr_lvm.config import LvmConfig
from snapmgr_lvm.report import Group, LogicalVolume
from snapmgr_lvm.scratch import Scratch
from support.logicalvolumes import logical_volume

_MIB = 1 << 20
_GROUP = "aaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg"
_SNAPSHOT = "111111-2222-3333-4444-5555-6666-777777"
_ORIGIN = "AAAAAA-2222-3333-4444-5555-6666-777777"
_RECORD = "0123456789abcdef"


def _volume(**changes: object) -> LogicalVolume:
    known: dict[str, object] = {
        "name": "s1",
        "uuid": _SNAPSHOT,
        "size_bytes": 20 * _MIB,
        "roles": frozenset({"public", "snapshot"}),
        "chunk_bytes": 16 << 10,
        "origin_name": "data",
        "origin_uuid": _ORIGIN,
        "device": "254:3",
        "snap_percent": 1.0,
    }
    return logical_volume(**known | changes)


def _group(*volumes: LogicalVolume) -> Group:
    return Group(
        name="vg0",
        uuid=_GROUP,
        size_bytes=1 << 30,
        free_bytes=1 << 29,
        extent_bytes=4 * _MIB,
        metadata_free_bytes=500_000,
        missing_pvs=0,
        exported=False,
        writable=True,
        lock_type="",
        volumes=volumes,
    )


def _record() -> AttachRecord:
    pool = Pool(backend="lvm", id=_GROUP, hint="vg0")
    ref = SnapshotRef(backend="lvm", snapshot_id="job.1", pool=pool, volume_id=_ORIGIN, name="s1", native_id=_SNAPSHOT)
    return AttachRecord(id=_RECORD, ref=ref, writable=True, boot_id="b")


def _scratch(folder: Path, **keys: str) -> Scratch:
    return Scratch(LvmConfig(scratch_dir=str(folder), **keys), CommandRunner(), KernelMounter())


def _note(**changes: object) -> scratchfolder.Note:
    known: dict[str, Any] = {
        "record_id": _RECORD,
        "snapshot_id": "job.1",
        "native_id": _SNAPSHOT,
        "pool_id": _GROUP,
        "boot_id": "b",
    }
    return scratchfolder.Note(**known | changes)


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dm, "_CONTROL", "/nowhere/control")
    monkeypatch.setattr(loopdevice, "SYSFS", Path("/nowhere"))


# ------------------------------------------------------------------------------------------------------- device-mapper


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6184/40960 32", dm.SnapshotStatus(used_bytes=6184 * 512, total_bytes=40960 * 512, failure=None)),
        ("Invalid", dm.SnapshotStatus(used_bytes=0, total_bytes=0, failure="Invalid")),
        ("Merge failed", dm.SnapshotStatus(used_bytes=0, total_bytes=0, failure="Merge failed")),
    ],
)
def test_snapshot_status(text: str, expected: dm.SnapshotStatus) -> None:
    assert dm.parse_snapshot_status("snapshot", text) == expected


@pytest.mark.parametrize(
    ("kind", "text"), [("linear", ""), ("snapshot", ""), ("snapshot", "1/x 3"), ("error", "1/2 3")]
)
def test_status_of_something_else(kind: str, text: str) -> None:
    with pytest.raises(StorageError, match="not the status of a snapshot"):
        dm.parse_snapshot_status(kind, text)


def _device(name: str, uuid: str, *below: str) -> dm.Device:
    return dm.Device(
        kernel_name="dm-9", number="254:9", name=name, uuid=uuid, suspended=False, size_bytes=_MIB, below=below
    )


def test_uuids_of_logical_volumes() -> None:
    uuid = dm.lvm_uuid(_GROUP, _SNAPSHOT)
    assert uuid == "LVM-aaaaaabbbbccccddddeeeeffffgggggg11111122223333444455556666777777"
    assert dm.volume_of(uuid) == (_GROUP, _SNAPSHOT)
    # The layers below it are no volumes.
    assert dm.volume_of(f"{uuid}-cow") is None
    # A group's UUID may have the letters of the prefix in it.
    odd = "LVMLVM-bbbb-cccc-dddd-eeee-ffff-gggggg"
    assert dm.volume_of(dm.lvm_uuid(odd, _SNAPSHOT)) == (odd, _SNAPSHOT)


def _answer(data: bytes, *, flags: int = 0, number: int = 0, name: bytes = b"", uuid: bytes = b"") -> bytes:
    head = struct.pack("=3I3Ii3IQ128s129s7x", 4, 47, 0, 312 + len(data), 312, 0, 0, flags, 0, 0, number, name, uuid)
    return head + data


def test_devices_are_listed_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that does not fit is asked for again with more room; who is gone meanwhile is left out."""
    one, two = b"snapmgr.attachment.1\0".ljust(28, b"\0"), b"other\0"
    entries = struct.pack("=QI", 0xFE04, 40) + one + struct.pack("=QI", 0xFE05, 0) + two
    rooms = []

    def ask(command: int, *, name: str = "", uuid: str = "", room: int = 0, **_: object) -> bytes:
        if command == 2:
            rooms.append(room)
            return _answer(entries if len(rooms) > 1 else bytes(16), flags=0 if len(rooms) > 1 else 1 << 8)
        if name != "snapmgr.attachment.1" or uuid:
            raise OSError(errno.ENXIO, "No such device or address")
        return _answer(b"", flags=1 << 1, number=0xFE04, name=name.encode(), uuid=b"SNAPMGR-1")

    monkeypatch.setattr(dm, "_ask", ask)
    monkeypatch.setattr(dm, "SYSFS", Path("/nowhere"))
    (found,) = dm.devices("snapmgr.")
    assert (found.kernel_name, found.number, found.name, found.uuid) == (
        "dm-4",
        "254:4",
        "snapmgr.attachment.1",
        "SNAPMGR-1",
    )
    assert (found.suspended, found.size_bytes, found.below) == (True, 0, ())
    assert rooms[1] > rooms[0]
    assert dm.find("SNAPMGR-2") is None


@pytest.mark.usefixtures("no_devices")
def test_no_device_mapper_means_no_devices() -> None:
    assert dm.devices("") == ()
    assert dm.find("x") is None


def test_everything_below_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """dm-2 on a loop device and on partition sda1; the loop's file is on a file system that is on dm-0."""
    devices = tmp_path / "dev" / "block"
    devices.mkdir(parents=True)
    monkeypatch.setattr(dm, "SYSFS", tmp_path)
    file = tmp_path / "file"
    file.touch()
    of_file = dm.device_number(file.stat().st_dev)
    for name, number, below in (
        ("dm-2", "254:2", ("loop0", "sda1")),
        ("loop0", "7:0", ()),
        ("sda", "8:0", ()),
        ("dm-0", of_file, ()),
    ):
        (tmp_path / name / "slaves").mkdir(parents=True)
        (tmp_path / name / "dev").write_text(f"{number}\n")
        for one in below:
            (tmp_path / name / "slaves" / one).symlink_to(
                tmp_path / ("sda/sda1" if one == "sda1" else one), target_is_directory=True
            )
        (devices / number).symlink_to(tmp_path / name)
    (tmp_path / "sda" / "sda1").mkdir()
    (tmp_path / "sda" / "sda1" / "dev").write_text("8:1\n")
    (tmp_path / "sda" / "sda1" / "partition").write_text("1\n")
    (devices / "8:1").symlink_to(tmp_path / "sda" / "sda1")
    (tmp_path / "loop0" / "loop").mkdir()
    (tmp_path / "loop0" / "loop" / "backing_file").write_text(f"{file}\n")
    found = [os.path.basename(folder) for folder in dm.everything_below("254:2")]
    assert found[0] == "254:2"
    assert sorted(found) == sorted(["254:2", "7:0", "8:1", "8:0", of_file])


def test_mounted_device_is_named_with_its_place() -> None:
    mount = Mount(id=1, parent_id=0, device="254:9", root="/", point="/mnt", fs_type="ext4", source="/dev/dm-9")
    with pytest.raises(InUseError, match="x is mounted at /mnt"):
        dm.require_unmounted(_device("x", ""), (mount,))
    dm.require_unmounted(_device("x", ""), (replace(mount, device="254:8"),))


# ---------------------------------------------------------------------------------------------------- loop and folder


def test_loop_devices_are_found_by_their_file_also_when_it_is_deleted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number, file in enumerate(("/var/tmp/s/a.cow", "/var/tmp/s/b.cow (deleted)", "/elsewhere/a.cow")):
        (tmp_path / "block" / f"loop{number}" / "loop").mkdir(parents=True)
        (tmp_path / "block" / f"loop{number}" / "loop" / "backing_file").write_text(f"{file}\n")
    monkeypatch.setattr(loopdevice, "SYSFS", tmp_path)
    assert [one.path for one in loopdevice.loops() if one.file == "/var/tmp/s/a.cow"] == ["/dev/loop0"]
    assert [one.path for one in loopdevice.loops() if one.file == "/var/tmp/s/b.cow"] == ["/dev/loop1"]


def test_scratch_folder_is_made_private(tmp_path: Path) -> None:
    with scratchfolder.opened(str(tmp_path / "a" / "b"), make=False) as fd:
        assert fd is None
    with scratchfolder.opened(str(tmp_path / "a" / "b"), make=True) as fd:
        assert fd is not None
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_scratch_folder_that_others_could_use_is_refused(tmp_path: Path) -> None:
    loose, link, file = tmp_path / "loose", tmp_path / "link", tmp_path / "file"
    loose.mkdir()
    loose.chmod(0o750)
    with pytest.raises(StorageError, match="closed to others"), scratchfolder.opened(str(loose), make=True):
        pass
    loose.chmod(0o700)
    link.symlink_to(loose)
    file.touch()
    for path in (link, file):
        for make in (True, False):
            with pytest.raises(StorageError, match="symlink or no folder"), scratchfolder.opened(str(path), make=make):
                pass
    (loose / "inner").mkdir(0o700)
    loose.chmod(0o777)
    with (
        pytest.raises(StorageError, match="others could exchange"),
        scratchfolder.opened(str(loose / "inner"), make=True),
    ):
        pass
    loose.chmod(0o1777)
    with scratchfolder.opened(str(loose / "inner"), make=True) as fd:
        assert fd is not None


def test_files_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note first, then the file; what is promised to it counts as taken; both go, also if only one is there."""
    # Others write to this disk as well.
    room = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "fstatvfs", lambda _fd: room)
    with scratchfolder.opened(str(tmp_path / "s"), make=True) as fd:
        assert fd is not None
        before = scratchfolder.free_bytes(fd)
        scratchfolder.write_note(fd, _note())
        assert scratchfolder.read_note(fd, _RECORD) == _note()
        file = scratchfolder.make_file(fd, _RECORD, 64 * _MIB)
        assert os.fstat(file).st_blocks == 0
        os.close(file)
        assert before - scratchfolder.free_bytes(fd) == 64 * _MIB
        assert scratchfolder.file_size(fd, _RECORD) == 64 * _MIB
        with pytest.raises(StorageError, match="has scratch files already"):
            scratchfolder.write_note(fd, _note())
        (tmp_path / "s" / "README").touch()
        assert scratchfolder.records(fd) == (_RECORD,)
        scratchfolder.remove(fd, _RECORD)
        scratchfolder.remove(fd, _RECORD)
        assert os.listdir(tmp_path / "s") == ["README"]
        assert (scratchfolder.file_size(fd, _RECORD), scratchfolder.read_note(fd, _RECORD)) == (None, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"record_id": "0123456789abcdef"}', "\0" * 9])
def test_note_that_is_none(tmp_path: Path, text: str) -> None:
    with scratchfolder.opened(str(tmp_path / "s"), make=True) as fd:
        assert fd is not None
        (tmp_path / "s" / f"{_RECORD}.json").write_text(text)
        assert scratchfolder.read_note(fd, _RECORD) is None
        assert scratchfolder.records(fd) == (_RECORD,)


def test_note_of_another_record_or_version(tmp_path: Path) -> None:
    with scratchfolder.opened(str(tmp_path / "s"), make=True) as fd:
        assert fd is not None
        scratchfolder.write_note(fd, _note(record_id="f" * 16))
        os.rename(tmp_path / "s" / f"{'f' * 16}.json", tmp_path / "s" / f"{_RECORD}.json")
        assert scratchfolder.read_note(fd, _RECORD) is None
        scratchfolder.remove(fd, _RECORD)
        scratchfolder.write_note(fd, _note(format=2))
        assert scratchfolder.read_note(fd, _RECORD) is None


# --------------------------------------------------------------------------------------------------------- attachments


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"invalid": True}, r"CoW table of 20\.0 MiB ran full \(found 20"),
        ({"merging": True}, "being merged"),
    ],
)
def test_snapshot_that_cannot_be_attached(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    volume = _volume(**changes)
    with pytest.raises(StorageError, match=words):
        _scratch(tmp_path / "s").attach(_record(), volume, _group(volume))
    assert not (tmp_path / "s").exists()


@pytest.mark.usefixtures("no_devices")
def test_files_without_devices_are_found_and_cleared(tmp_path: Path) -> None:
    """As a reboot leaves them: with what they are of, also when the snapshot is gone; without a note as debris."""
    scratch, group = _scratch(tmp_path / "s"), _group(_volume())
    bare, foreign, gone = "b" * 16, "c" * 16, "d" * 16
    with scratchfolder.opened(str(tmp_path / "s"), make=True) as fd:
        assert fd is not None
        scratchfolder.write_note(fd, _note())
        os.close(scratchfolder.make_file(fd, bare, _MIB))
        scratchfolder.write_note(fd, _note(record_id=foreign, pool_id="z" * 38))
        scratchfolder.write_note(fd, _note(record_id=gone, native_id="y" * 38))
    found = {one.record_id: one for one in scratch.found(group)}
    assert set(found) == {_RECORD, bare, gone}
    assert (found[_RECORD].kind, found[_RECORD].ref and found[_RECORD].ref.native_id) == ("attachment", _SNAPSHOT)
    assert (found[gone].kind, found[gone].ref and found[gone].ref.native_id) == ("attachment", "y" * 38)
    assert (found[gone].snapshot_id, found[bare].kind) == ("job.1", "debris")
    scratch.clear_debris(group, _RECORD)
    with pytest.raises(StorageError, match="are of another snapshot"):
        scratch.detach(replace(_record(), id=gone))
    assert len(os.listdir(tmp_path / "s")) == 4
    scratch.clear_debris(group, bare)
    scratch.detach(_record())
    scratch.detach(_record())
    assert sorted(os.listdir(tmp_path / "s")) == [f"{foreign}.json", f"{gone}.json"]


@pytest.mark.usefixtures("no_devices")
def test_attachment_without_a_device_is_not_believed(tmp_path: Path) -> None:
    problem = _scratch(tmp_path / "s").problem(_record())
    assert problem is not None
    assert "has no device any more" in problem.what


@pytest.mark.parametrize("record_id", ["", "..", "0123456789ABCDEF", "0123456789abcdef/x"])
def test_record_ids_are_checked(tmp_path: Path, record_id: str) -> None:
    with pytest.raises(StorageError, match="not the id of an attachment"):
        _scratch(tmp_path / "s").detach(replace(_record(), id=record_id))


# ---------------------------------------------------------------------------------------------------------------- LUKS


class _Library:
    """A libcryptsetup that answers as told."""

    def __init__(self, *, loaded: int = 0, activated: int = 0) -> None:
        self.answers = {"crypt_load": loaded, "crypt_activate_by_keyfile_device_offset": activated}
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls[name] = arguments
            if name == "crypt_load" and self.answers[name] < 0:
                self.calls["crypt_set_log_callback"][1](1, b"Device /dev/x is not a valid LUKS device.\n", None)
            return self.answers.get(name, 0)

        return call


def test_luks_container_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(MissingRequirementError, match="no key for it"):
        luks.open_container("/dev/x", _RECORD, None)
    with pytest.raises(MissingRequirementError, match="is not there"):
        luks.open_container("/dev/x", _RECORD, str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (_Library(activated=-errno.EPERM), "does not open"),
        (_Library(activated=-errno.EBUSY), "Device or resource busy"),
        (_Library(loaded=-errno.EINVAL), "is not a valid LUKS device"),
    ],
)
def test_luks_container_that_does_not_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: _Library, words: str
) -> None:
    (tmp_path / "key").write_bytes(b"key")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    with pytest.raises(StorageError, match=words):
        luks.open_container("/dev/x", _RECORD, str(tmp_path / "key"))
    assert "crypt_free" in library.calls


@pytest.mark.usefixtures("no_devices")
def test_luks_container_is_opened_in_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"key")
    library = _Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    with pytest.raises(StorageError, match="opened and is not there"):
        luks.open_container("/dev/x", _RECORD, str(tmp_path / "key"))
    *_, name, slot, file, size, offset, flags = library.calls["crypt_activate_by_keyfile_device_offset"]
    assert name == f"snapmgr.attachment.{_RECORD}.luks".encode()
    assert (slot.value, file, size.value, offset.value) == (-1, os.fsencode(tmp_path / "key"), 0, 0)
    # CRYPT_ACTIVATE_PRIVATE in libcryptsetup.h.
    assert flags.value == 16
