"""Attachments of classic snapshots: the snapshot never changes, and what was made for one goes, whatever happened."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from msgspec.structs import replace

from snapmgr.api import AlteredError, InUseError, MissingRequirementError, SnapshotRef, StorageError
from snapmgr.system.loopdevice import loops
from snapmgr.testing.lab import new_record
from snapmgr_lvm import LvmBackend, dm, luks, marks
from snapmgr_lvm.report import read_group
from snapmgr_lvm.scratch import Scratch
from support import lvm
from support.killing import kill_at
from support.lvm import run
from support.lvmlab import LvmLab
from support.thoroughness import crash_every

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import AttachRecord
    from snapmgr_lvm.report import LogicalVolume
    from support.lvm import VolumeGroup

_MIB = 1 << 20
_OTHER_BOOT = "00000000-0000-0000-0000-000000000000"
_STEPS_AT_MOST = 60
# One in so many steps is tried.
_STRIDE = crash_every(1)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """An origin with a file of 8 MiB, and a classic snapshot of it."""

    lab: LvmLab
    origin: Path
    ref: SnapshotRef
    scratch: Path

    def configure(self, **keys: str) -> LvmBackend:
        """Return a backend with other settings."""
        return LvmBackend(replace(self.lab.config, **keys), self.lab.runner, self.lab.mounter)

    def snapshot(self) -> LogicalVolume:
        """Return what LVM says of the snapshot."""
        volume = read_group(self.lab.runner, self.ref.pool).by_uuid(self.ref.native_id)
        assert volume is not None
        return volume

    def checksum(self) -> str:
        """Return the sha256 of all that the snapshot holds."""
        with open(f"/dev/{self.ref.pool.hint}/{self.ref.name}", "rb") as device:
            return hashlib.file_digest(device, "sha256").hexdigest()

    def left_over(self, record: AttachRecord) -> list[str]:
        """Return what is there of an attachment, by other eyes than the backend's."""
        if Path("/run/udev/control").exists():
            # Its links go a little later.
            run("udevadm", "settle")
        nodes = [str(node) for node in Path("/dev/mapper").glob(f"*{record.id}*")]
        devices = [str(file) for file in Path("/sys/block").glob("dm-*/dm/name") if record.id in file.read_text()]
        loops = [
            str(file) for file in Path("/sys/block").glob("loop*/loop/backing_file") if record.id in file.read_text()
        ]
        return nodes + devices + loops + [path.name for path in self.scratch.glob(f"*{record.id}*")]


@pytest.fixture(scope="module")
def scene(shared_vg: VolumeGroup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scratch = tmp_path_factory.mktemp("above") / "scratch"
    lab = LvmLab(shared_vg, "classic", scratch)
    origin = lab.make_origin()
    (origin / "file").write_bytes(os.urandom(8 * _MIB))
    ref = lab.take_one(origin)
    scene = Scene(lab=lab, origin=origin, ref=ref, scratch=scratch)
    before = scene.checksum()
    yield scene
    assert scene.checksum() == before, "some test wrote to the snapshot"
    assert not scene.snapshot().writable
    assert os.listdir(scratch) == []


@pytest.fixture
def record(scene: Scene) -> Iterator[AttachRecord]:
    record = new_record(scene.ref, writable=True)
    yield record
    scene.lab.backend().detach(record)
    assert scene.left_over(record) == []


@contextmanager
def _load(origin: Path) -> Iterator[list[int]]:
    """Rewrite a file on the origin over and over, to the disk; yields the number of rounds."""
    rounds, stop = [0], threading.Event()
    (origin / "load").write_bytes(b"")

    def write() -> None:
        with open(origin / "load", "r+b", buffering=0) as file:
            while not stop.is_set():
                file.seek(0)
                file.write(os.urandom(_MIB))
                os.fsync(file.fileno())
                rounds[0] += 1
                # The guest has one processor.
                time.sleep(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield rounds
    finally:
        stop.set()
        writer.join()


def test_attachments_under_load_leave_the_snapshot_as_it_is(scene: Scene) -> None:
    """While the origin is written, two that write, one that stays mounted meanwhile, and a reader change nothing."""
    before = scene.checksum()
    wanted = (scene.origin / "file").read_bytes()
    with _load(scene.origin) as rounds, scene.lab.attached(scene.ref, writable=True) as held:
        for number in range(2):
            with scene.lab.attached(scene.ref, writable=True) as reached:
                inside = scene.lab.inside(reached, scene.origin)
                assert (inside / "file").read_bytes() == wanted
                (inside / "file").write_bytes(bytes([number]) * 8 * _MIB)
                os.sync()
        with scene.lab.attached(scene.ref, writable=False) as reader:
            assert (scene.lab.inside(reader, scene.origin) / "file").read_bytes() == wanted
            with pytest.raises(OSError, match="Read-only"):
                (scene.lab.inside(reader, scene.origin) / "new").touch()
        (scene.lab.inside(held, scene.origin) / "file").unlink()
        os.sync()
    assert rounds[0] > 2
    assert scene.snapshot().snap_percent
    assert scene.checksum() == before


def test_attachment_uses_direct_io_where_it_can(scene: Scene, record: AttachRecord, vg_folder: Path) -> None:
    backend = scene.configure(scratch_dir=str(vg_folder / "scratch"))
    device = backend.attach(record).device
    try:
        assert device == f"/dev/mapper/snapmgr.attachment.{record.id}"
        ((dio, autoclear),) = [
            line.split()[1:]
            for line in run("losetup", "--list", "--noheadings", "--output", "BACK-FILE,DIO,AUTOCLEAR").splitlines()
            if record.id in line
        ]
        assert (dio, autoclear) == ("1", "1")
    finally:
        backend.detach(record)


@pytest.fixture
def udevd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """udevd runs, and knows all devices that there are."""
    monkeypatch.delenv("DM_DISABLE_UDEV", raising=False)
    started = not Path("/run/udev/control").exists()
    if started:
        run("/usr/lib/systemd/systemd-udevd", "--daemon")
    run("udevadm", "trigger", "--settle", "--action=add", "--subsystem-match=block")
    yield
    if started:
        run("udevadm", "control", "--exit")
        shutil.rmtree("/run/udev")


def _by_uuid() -> dict[str, str]:
    """Return where udev's links by UUID lead, when it is done, and has looked at every device once more."""
    run("udevadm", "settle")
    run("udevadm", "trigger", "--settle", "--subsystem-match=block")
    return {link.name: os.path.realpath(link) for link in Path("/dev/disk/by-uuid").glob("*")}


@pytest.mark.usefixtures("udevd")
def test_no_link_by_uuid_leads_to_an_attachment(scene: Scene, record: AttachRecord) -> None:
    """Nor to its scratch file: an fstab would mount that in the origin's place."""
    before = _by_uuid()
    attachment = scene.lab.backend().attach(record)
    with scene.lab.reached(attachment, writable=True) as reached:
        (reached / "new").write_text("new")
        os.sync()
        assert _by_uuid() == before
    # As without udevd, but that it makes the link.
    assert str(attachment.device).endswith(record.id)
    assert Path(str(attachment.device)).is_block_device()


@pytest.fixture
def vg_folder(scene: Scene) -> Iterator[Path]:
    """A folder on another volume of the group."""
    origin = scene.lab.group.classic_origin("beside", size_mib=64)
    yield origin.point
    run("umount", origin.point)
    run("lvremove", "--yes", f"{origin.vg}/{origin.lv}")


def test_full_scratch_file_is_an_error_of_the_attachment_alone(scene: Scene, record: AttachRecord) -> None:
    before = scene.checksum()
    backend = scene.configure(scratch_size="2M")
    attachment = backend.attach(record)
    with scene.lab.reached(attachment, writable=True) as reached:
        assert backend.attachment_problem(record) is None
        with suppress(OSError), open(reached / "big", "wb") as file:
            file.write(os.urandom(4 * _MIB))
            os.fsync(file.fileno())
        problem = backend.attachment_problem(record)
    assert problem is not None
    assert "its file may have 2.0 MiB" in problem.what
    assert "scratch_size (now 2M)" in problem.hint
    assert not scene.snapshot().invalid
    assert scene.checksum() == before
    backend.detach(record)
    assert scene.left_over(record) == []


def test_full_snapshot_is_told_by_its_attachment(scene: Scene) -> None:
    backend = scene.configure(cow_size="4M", chunk_size="4K")
    with backend.arm((scene.lab.volume(scene.origin),), "overflow.1") as armed:
        armed.sync()
        armed.launched = True
        ref = armed.fire(float("inf"))[0].ref
    backend.settle((ref,), 60)
    record = new_record(ref, writable=True)
    try:
        device = backend.attach(record).device
        assert device is not None
        assert backend.attachment_problem(record) is None
        with open(scene.origin / "much", "wb") as file:
            file.write(os.urandom(12 * _MIB))
            os.fsync(file.fileno())
        problem = backend.attachment_problem(record)
        assert problem is not None
        assert "was lost while it was attached: its CoW table ran full" in problem.what
        with pytest.raises(StorageError, match=r"is lost: its CoW table .* ran full \(found 20\d\d-"):
            backend.attach(new_record(ref, writable=True))
        with pytest.raises(InUseError, match="is attached as"):
            backend.delete(ref)
    finally:
        backend.detach(record)
        (scene.origin / "much").unlink()
    assert scene.left_over(record) == []
    backend.delete(ref)


def _kill_everywhere(scene: Scene, action: Literal["attach", "detach"]) -> int:
    """Kill it at its first step and at each `_STRIDE`-th until it has no more; return how many it has, or more."""
    # Not by the backend, which reads the volume group each time.
    scratch = Scratch(scene.lab.config, scene.lab.runner, scene.lab.mounter)
    group, snapshot = read_group(scene.lab.runner, scene.ref.pool), scene.snapshot()
    for step in range(0, _STEPS_AT_MOST, _STRIDE):
        record = new_record(scene.ref, writable=True)
        acts = {"attach": partial(scratch.attach, record, snapshot, group), "detach": partial(scratch.detach, record)}
        if action == "detach":
            acts["attach"]()
        killed = kill_at(acts[action], step, marks=(record.id, str(scene.scratch), "/dev/loop"))
        found = [one for one in scratch.found(group) if one.record_id == record.id]
        # Whatever is left is found, and it is known of what it is, unless that could not be written down yet.
        assert bool(found) == bool(there := scene.left_over(record)), (step, there)
        for one in found:
            assert one.kind == "debris" or (one.kind, one.ref) == ("attachment", scene.ref), step
            if one.kind == "debris":
                assert len(there) == 1, (step, there)
                scratch.clear_debris(group, record.id)
        scratch.detach(record)
        scratch.detach(record)
        assert (list(scratch.found(group)), scene.left_over(record)) == ([], []), step
        if not killed:
            # Also of those without a table, which only device-mapper itself knows.
            assert marks.ATTACHMENT not in run("dmsetup", "ls")
            return step
    raise AssertionError("it does not end")


def test_killed_at_each_step_of_attaching(scene: Scene) -> None:
    """Nothing is left once it is detached."""
    assert _kill_everywhere(scene, "attach") >= 12


def test_killed_at_each_step_of_detaching(scene: Scene) -> None:
    """Nothing is left once it is detached again."""
    assert _kill_everywhere(scene, "detach") >= 5


def test_detach_after_a_reboot_and_by_hand(scene: Scene, record: AttachRecord) -> None:
    """Files without devices, a device without files, and a device that has no table yet, all go."""
    backend, name = scene.lab.backend(), f"snapmgr.attachment.{record.id}"
    # What a reboot leaves: the kernel's things are gone.
    backend.attach(record)
    run("dmsetup", "remove", "--retry", name)
    assert not [one for one in loops() if one.file == f"{scene.scratch}/{record.id}.cow"]
    (found,) = [one for one in scene.lab.found(scene.ref.pool) if one.record_id == record.id]
    assert (found.kind, found.ref) == ("attachment", scene.ref)
    backend.detach(replace(record, boot_id=_OTHER_BOOT))
    assert scene.left_over(record) == []
    # Somebody cleared the folder under it.
    backend.attach(record)
    for path in scene.scratch.glob(f"{record.id}*"):
        path.unlink()
    assert [one.ref for one in scene.lab.found(scene.ref.pool) if one.record_id == record.id] == [scene.ref]
    backend.detach(record)
    assert scene.left_over(record) == []
    # dmsetup was killed half-way.
    run("dmsetup", "create", name, "--uuid", f"SNAPMGR-{record.id}", "--notable")
    (found,) = [one for one in scene.lab.found(scene.ref.pool) if one.record_id == record.id]
    assert found.kind == "debris"
    backend.repair(found)
    assert scene.left_over(record) == []


def test_scratch_folder_may_change_while_it_is_used(scene: Scene, record: AttachRecord, tmp_path: Path) -> None:
    scene.configure(scratch_dir=str(tmp_path / "old")).attach(record)
    scene.lab.backend().detach(record)
    assert list((tmp_path / "old").iterdir()) == []


def test_foreign_things_under_our_names_are_left_alone(scene: Scene) -> None:
    """A device and files of another snapshot are not removed for a record, nor a device without our mark."""
    record = new_record(scene.ref, writable=True)
    scene.lab.backend().attach(record)
    other = replace(record, ref=replace(scene.ref, native_id="x" * 38))
    with pytest.raises(StorageError, match="was not made by attachment"):
        scene.lab.backend().detach(other)
    run("dmsetup", "remove", "--retry", f"snapmgr.attachment.{record.id}")
    with pytest.raises(StorageError, match="are of another snapshot"):
        scene.lab.backend().detach(other)
    scene.lab.backend().detach(record)
    run("dmsetup", "create", f"snapmgr.attachment.{record.id}", "--table", "0 8 zero")
    with pytest.raises(StorageError, match="cannot make the device"):
        scene.lab.backend().attach(record)
    scene.lab.backend().detach(record)
    assert dm.NODES.joinpath("mapper", f"snapmgr.attachment.{record.id}").exists()
    run("dmsetup", "remove", "--retry", f"snapmgr.attachment.{record.id}")
    assert scene.left_over(record) == []


def test_busy_attachment_is_not_detached(scene: Scene, record: AttachRecord, tmp_path: Path) -> None:
    """Who has it is said, at once for a mount; and what is brief is waited for."""
    device = scene.lab.backend().attach(record).device
    assert device is not None
    run("mount", device, tmp_path)
    with pytest.raises(InUseError, match=f"is mounted at {tmp_path}"):
        scene.lab.backend().detach(record)
    run("umount", tmp_path)
    run("dmsetup", "create", "snapmgr-test-above", "--table", f"0 8 linear {device} 0")
    closer = threading.Timer(0.5, run, ("dmsetup", "remove", "snapmgr-test-above"))
    closer.start()
    scene.lab.backend().detach(record)
    closer.join()


def test_scratch_space_that_is_not_to_be_had_is_refused_before_anything_is_made(
    scene: Scene, record: AttachRecord
) -> None:
    on_origin = scene.origin.parent / "scratch"
    with pytest.raises(StorageError, match="is on .* the origin of the snapshot"):
        scene.configure(scratch_dir=str(on_origin)).attach(record)
    assert not on_origin.exists()
    run("mount", "-t", "tmpfs", "-o", "size=3m,mode=0700", "small", "/mnt")
    try:
        with pytest.raises(StorageError, match=r"may take 25\.6 MiB .* has 3\.0 MiB"):
            scene.configure(scratch_dir="/mnt").attach(record)
        small = scene.configure(scratch_dir="/mnt", scratch_size="2M")
        small.attach(record)
        # The second one's room is promised to the first.
        with pytest.raises(StorageError, match=r"may take 2\.0 MiB .* has 1020\.0 KiB"):
            small.attach(new_record(scene.ref, writable=True))
        small.detach(record)
    finally:
        run("umount", "/mnt")


def test_snapshot_that_was_made_writable_is_refused(scene: Scene, record: AttachRecord) -> None:
    name = f"{scene.ref.pool.hint}/{scene.ref.name}"
    run("lvchange", "--yes", "--permission", "rw", name)
    try:
        with pytest.raises(AlteredError, match="writable by hand"):
            scene.lab.backend().attach(record)
    finally:
        run("lvchange", "--yes", "--permission", "r", name)
    assert not scene.snapshot().writable


@pytest.mark.parametrize("kind", ["classic", "thin"])
def test_luks_container_on_the_volume_is_opened(scene: Scene, kind: str, tmp_path: Path) -> None:
    group = scene.lab.group
    size = ["--size", "40m"] if kind == "classic" else ["--virtualsize", "40m", "--thinpool", group.pool(data_mib=64)]
    run("lvcreate", "--yes", *size, "--name", "crypt", group.name)
    try:
        _container_opens(scene, kind, tmp_path)
    finally:
        run("lvremove", "--yes", f"{group.name}/crypt")


def _container_opens(scene: Scene, kind: str, tmp_path: Path) -> None:
    with lvm.luks(scene.lab.group.device("crypt")) as plain:
        run("mkfs.ext4", "-q", plain)
        point, key = tmp_path / "point", tmp_path / "key"
        point.mkdir()
        run("mount", plain, point)
        (point / "file").write_text("secret")
        key.write_bytes(b"a key of tests")
        backend = scene.configure(luks_key_file=str(key))
        with backend.arm((scene.lab.volume(point),), f"crypt.{kind}") as armed:
            armed.sync()
            armed.launched = True
            ref = armed.fire(float("inf"))[0].ref
        backend.settle((ref,), 60)
        record = new_record(ref, writable=True)
        with scene.lab.reached(backend.attach(record), writable=True) as reached:
            assert (reached / "file").read_text() == "secret"
            (reached / "file").write_text("else")
            os.sync()
            if Path("/run/udev/control").exists():
                # The links of a device that had this number before go a little later.
                run("udevadm", "settle")
                opened = os.path.realpath(f"/dev/mapper/{luks.container_name(record.id)}")
                assert opened not in _by_uuid().values()
            with pytest.raises(InUseError, match=r"\.luks is mounted at"):
                backend.detach(record)
        backend.detach(record)
        assert (luks.find_container(record.id), scene.left_over(record)) == (None, [])
        if kind == "classic":
            (tmp_path / "wrong").write_bytes(b"another key")
            for name, error in ((None, "no key for it"), ("none", "is not there"), ("wrong", "does not open")):
                keyed = scene.configure(luks_key_file=str(tmp_path / name) if name else None)
                with pytest.raises((MissingRequirementError, StorageError), match=error):
                    keyed.attach(record)
                backend.detach(record)
            assert scene.left_over(record) == []
        backend.delete(ref)
