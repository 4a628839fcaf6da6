"""The reflink backend on real file systems: what is its own beyond the contract."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.api import BusyError, FireError, InUseError, LackingError, NotFoundError, NotMine, StorageError
from snapmgr.command import CommandRunner
from snapmgr.mount import bind, unmount
from snapmgr.testing import FolderLab, fingerprint, plant, processes
from snapmgr.testing.lab import new_id, new_record
from snapmgr.testing.trees import same
from snapmgr_reflink import ReflinkBackend, ReflinkConfig, kernel
from support.storage import loop_filesystem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.storage import LoopFileSystem

_SIZE_BYTES = 600 << 20
_RUNNER = CommandRunner()
_ORDINARY_USER = 65534

pytestmark = pytest.mark.needs("root", "loop", "xfs", "btrfs")


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def file_system(request: pytest.FixtureRequest) -> Iterator[LoopFileSystem]:
    with loop_filesystem(request.param, _SIZE_BYTES) as made:
        yield made


@pytest.fixture
def lab(file_system: LoopFileSystem) -> FolderLab:
    return FolderLab(ReflinkBackend, ReflinkConfig(), file_system.point)


def _store(lab: FolderLab) -> Path:
    return lab.folder / ".snapmgr-reflink"


def test_blocks_are_shared(lab: FolderLab) -> None:
    origin = lab.make_origin()
    (origin / "big").write_bytes(os.urandom(32 << 20))
    os.sync()
    before = os.statvfs(origin)
    ref = lab.take_one(origin)
    after = os.statvfs(origin)
    assert (before.f_bfree - after.f_bfree) * before.f_frsize < 8 << 20
    assert lab.backend().usage(ref, exact=True).exclusive_bytes == 0
    with lab.attached(ref, writable=True) as clone:
        assert (clone / "big").read_bytes() == (origin / "big").read_bytes()
        assert (before.f_bfree - os.statvfs(origin).f_bfree) * before.f_frsize < 8 << 20


def test_forecast_holds(lab: FolderLab) -> None:
    origin = lab.make_origin()
    for number in range(600):
        (origin / str(number)).write_bytes(b"x" * 9000)
    with (origin / "fragmented").open("wb") as file:
        for number in range(1500):
            file.seek(number * 8192)
            file.write(b"x" * 4096)
    with lab.backend().arm((lab.volume(origin),), new_id()) as armed:
        armed.sync()
        start = time.monotonic()
        armed.fire(start + 60)
        took_s = time.monotonic() - start
    # Other work on the machine may double either; a wrong count of files or extents shows as much more.
    assert took_s / 4 < armed.stall_s < took_s * 10


def test_deadline_ends_it_between_two_files(lab: FolderLab) -> None:
    origin, small = lab.make_origin(), lab.make_origin()
    for number in range(2000):
        (origin / str(number)).write_bytes(b"x")
    snapshot_id = new_id()
    volumes = (lab.volume(small), lab.volume(origin))
    with lab.backend().arm(volumes, snapshot_id) as armed:
        armed.launched = True
        start = time.monotonic()
        with pytest.raises(FireError, match="not finished in time") as caught:
            armed.fire(start + 0.02)
        assert time.monotonic() - start < 0.2
    assert [shot.ref.volume_id for shot in caught.value.shots] == [volumes[0].id]
    kinds = [found.kind for found in lab.found(volumes[0].pool) if found.snapshot_id == snapshot_id]
    assert sorted(kinds) == ["debris", "snapshot"]
    lab.repair_all(volumes[0].pool)
    lab.backend().delete(caught.value.shots[0].ref)


def test_a_writer_is_noticed(lab: FolderLab) -> None:
    origin = lab.make_origin()
    for number in range(3000):
        (origin / f"{number}").write_bytes(b"x")
    with lab.backend().arm((lab.volume(origin),), new_id()) as armed:
        pid = processes.spawn(lambda: [os.unlink(origin / f"{number}") for number in range(2999, 0, -1)])
        with pytest.raises(FireError, match="changed or vanished"):
            armed.fire(time.monotonic() + 60)
        assert processes.succeeds(pid)


def test_bind_mount_of_the_same_file_system_is_left_out(lab: FolderLab) -> None:
    # st_dev does not tell it.
    origin, elsewhere = lab.make_origin(), lab.make_origin()
    (elsewhere / "not-ours").write_bytes(b"x")
    (elsewhere / "file").write_bytes(b"not ours")
    (origin / "nested").mkdir()
    (origin / "file").write_bytes(b"ours")
    bind(str(elsewhere), str(origin / "nested"), read_only=False)
    _RUNNER.run(["mount", "--bind", str(elsewhere / "file"), str(origin / "file")])
    try:
        assert set(lab.volume(origin).excluded) == {str(origin / "nested"), str(origin / "file")}
        ref = lab.take_one(origin)
        with lab.attached(ref, writable=False) as reached:
            assert os.listdir(reached / "nested") == []
            assert (reached / "file").read_bytes() == b""
    finally:
        unmount(str(origin / "file"))
        unmount(str(origin / "nested"))


def test_mount_that_appears_after_locate_is_refused(lab: FolderLab) -> None:
    origin, elsewhere = lab.make_origin(), lab.make_origin()
    (origin / "nested").mkdir()
    volume = lab.volume(origin)
    bind(str(elsewhere), str(origin / "nested"), read_only=False)
    try:
        with pytest.raises(StorageError, match="appeared"), lab.backend().arm((volume,), new_id()):
            pass
    finally:
        unmount(str(origin / "nested"))
    with lab.backend().arm((volume,), new_id()) as armed:
        bind(str(elsewhere), str(origin / "nested"), read_only=False)
        try:
            with pytest.raises(FireError, match="another mount"):
                armed.fire(time.monotonic() + 60)
        finally:
            unmount(str(origin / "nested"))


def test_symlinks_are_never_followed(lab: FolderLab) -> None:
    origin, secret = lab.make_origin(), lab.make_origin()
    (secret / "secret").write_bytes(b"not for copies")
    (origin / "folder").mkdir()
    with lab.backend().arm((lab.volume(origin),), new_id()) as armed:
        (origin / "folder").rmdir()
        (origin / "folder").symlink_to(secret)
        armed.launched = True
        (shot,) = armed.fire(time.monotonic() + 60)
    data = _store(lab) / shot.ref.name / "data"
    assert os.readlink(data / "folder") == str(secret)


def test_read_only_attachment_in_use_elsewhere_is_not_deleted(lab: FolderLab, tmp_path: Path) -> None:
    origin = lab.make_origin()
    (origin / "file").write_bytes(b"x")
    ref = lab.take_one(origin)
    point = tmp_path / "point"
    bind(str(_store(lab) / ref.name / "data"), str(point), read_only=True)
    try:
        with pytest.raises(InUseError, match=str(point)):
            lab.backend().delete(ref)
        assert (point / "file").read_bytes() == b"x"
    finally:
        unmount(str(point))
    _RUNNER.run(["mount", "-t", "tmpfs", "x", str(_store(lab) / ref.name / "data")])
    try:
        with pytest.raises(InUseError):
            lab.backend().delete(ref)
    finally:
        _RUNNER.run(["umount", str(_store(lab) / ref.name / "data")])
    lab.backend().delete(ref)


def test_clone_with_a_mount_in_it_is_not_detached(lab: FolderLab) -> None:
    origin = lab.make_origin()
    (origin / "folder").mkdir()
    ref = lab.take_one(origin)
    record = new_record(ref, writable=True)
    folder = Path(str(lab.backend().attach(record).directory), "folder")
    with lab._tmpfs(folder):
        (folder / "precious").write_bytes(b"x")
        with pytest.raises(InUseError):
            lab.backend().detach(record)
        assert (folder / "precious").read_bytes() == b"x"
    lab.backend().detach(record)
    assert not folder.exists()


def test_renamed_box_is_still_the_snapshot(lab: FolderLab) -> None:
    ref = lab.take_one(lab.make_origin())
    (_store(lab) / ref.name).rename(_store(lab) / "somewhere-else")
    assert lab.backend().usage(ref).valid
    lab.backend().delete(ref)
    assert not (_store(lab) / "somewhere-else").exists()


def test_empty_foreign_folder_of_our_name_is_not_replaced(lab: FolderLab) -> None:
    origin, snapshot_id = lab.make_origin(), new_id()
    lab.take_one(origin)
    (_store(lab) / snapshot_id).mkdir()
    with pytest.raises(StorageError, match="taken"):
        lab.take(origin, snapshot_id=snapshot_id)
    assert (_store(lab) / snapshot_id).is_dir()
    assert not list(_store(lab).glob("begun@*"))
    (_store(lab) / snapshot_id).rmdir()


def test_what_another_process_is_making_is_not_repaired(lab: FolderLab) -> None:
    origin = lab.make_origin()
    plant(origin)
    volume = lab.volume(origin)
    with lab.backend().arm((volume,), new_id()) as armed:
        (found,) = [found for found in lab.found(volume.pool) if found.name == armed.intents[0].name]
        assert found.kind == "debris"
        with pytest.raises(BusyError):
            lab.backend().repair(found)
        armed.launched = True
        (shot,) = armed.fire(time.monotonic() + 60)
        # Made, but not settled: no longer debris, whatever the caller remembers.
        lab.backend().repair(found)
    lab.backend().settle((shot.ref,), 60)
    with lab.attached(shot.ref, writable=False) as reached:
        same(fingerprint(origin), fingerprint(reached))


def test_unsettled_copy_of_an_earlier_boot_is_debris(lab: FolderLab) -> None:
    origin = lab.make_origin()
    (origin / "file").write_bytes(b"x")
    volume = lab.volume(origin)
    with lab.backend().arm((volume,), new_id()) as armed:
        armed.launched = True
        (shot,) = armed.fire(time.monotonic() + 60)
    mark = _store(lab) / shot.ref.name / "made.json"
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"boot_id": "another"}))
    (found,) = [found for found in lab.found(volume.pool) if found.name == shot.ref.name]
    assert (found.kind, found.why) == ("debris", "the machine stopped before it was safe on disk")
    lab.backend().repair(found)
    assert not mark.parent.exists()


def test_store_that_others_can_enter_is_refused(lab: FolderLab) -> None:
    origin = lab.make_origin()
    ref = lab.take_one(origin)
    _store(lab).chmod(0o755)
    try:
        for action in (lambda: lab.take_one(origin), lambda: lab.found(ref.pool), lambda: lab.backend().delete(ref)):
            with pytest.raises(StorageError, match="closed to others"):
                action()
    finally:
        _store(lab).chmod(0o700)


def test_store_whose_mark_was_not_finished_is_none_yet(file_system: LoopFileSystem, tmp_path: Path) -> None:
    # Killed in the first backup, between making the folder and naming its mark.
    place = file_system.point / tmp_path.name
    place.mkdir(0o700)
    (place / "snapmgr-reflink-store.json.0123abcd~").write_text("{")
    lab = FolderLab(ReflinkBackend, ReflinkConfig(store=str(place)), file_system.point)
    lab.take_one(lab.make_origin())
    assert not list(place.glob("*~"))
    (place / "snapmgr-reflink-store.json").rename(place / "something else")
    with pytest.raises(StorageError, match="holds other things"):
        lab.take_one(lab.make_origin())


def test_places_that_do_not_suit(lab: FolderLab, tmp_path: Path) -> None:
    origin = lab.make_origin()

    def refused(config: ReflinkConfig, path: Path) -> str:
        located = ReflinkBackend(config, lab.runner, lab.mounter).locate(lab.target(path))
        assert isinstance(located, NotMine)
        assert "[backend.reflink]" in (located.hint or "")
        return located.reason

    assert "inside" in refused(ReflinkConfig(store=str(origin / "copies")), origin)
    assert "whole file system" in refused(ReflinkConfig(), lab.folder)
    assert "not on the file system" in refused(ReflinkConfig(store=str(tmp_path / "copies")), origin)
    assert "absolute" in refused(ReflinkConfig(store="copies"), origin)
    assert "cannot be created" in refused(ReflinkConfig(store=str(lab.folder / "no" / "such")), origin)
    assert "not UTF-8" in refused(ReflinkConfig(store=str(lab.folder / os.fsdecode(b"\xff"))), origin)
    assert "cannot share blocks" in refused(ReflinkConfig(), tmp_path)


def test_copied_store_is_not_taken_for_the_store(lab: FolderLab) -> None:
    ref = lab.take_one(lab.make_origin())
    twin = lab.folder / "twin"
    _RUNNER.run(["cp", "-a", str(_store(lab)), str(twin)])
    try:
        with pytest.raises(StorageError, match="copy of a store"):
            lab.found(replace(ref.pool, id=str(twin)))
    finally:
        shutil.rmtree(twin)


def test_damaged_mark_makes_a_box_foreign(lab: FolderLab) -> None:
    ref = lab.take_one(lab.make_origin())
    mark = _store(lab) / ref.name / "complete.json"
    for damage in (b"", b"{}", b"\xff\xfe", b'{"kind": "snapshot"}', b"[1, 2]"):
        mark.write_bytes(damage)
        assert ref.name not in {found.name for found in lab.found(ref.pool)}
        with pytest.raises(StorageError):
            lab.backend().delete(ref)
        with pytest.raises(NotFoundError):
            lab.backend().attach(new_record(ref, writable=True))
    shutil.rmtree(mark.parent)


def test_full_file_system_is_refused_before_anything(file_system: LoopFileSystem, lab: FolderLab) -> None:
    origin = lab.make_origin()
    (origin / "file").write_bytes(b"x" * 100_000)
    ref = lab.take_one(origin)
    ballast = file_system.point / "ballast"
    room = os.statvfs(file_system.point)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize * 95 // 100)
        with suppress(OSError):
            while True:
                os.write(file.fileno(), bytes(4 << 20))
    try:
        before = lab.found(ref.pool)
        with pytest.raises(StorageError, match="free|No space"), lab.backend().arm((lab.volume(origin),), new_id()):
            pass
        assert lab.found(ref.pool) == before
        lab.backend().delete(ref, wait="space")
    finally:
        ballast.unlink()
        os.sync()


def test_ordinary_user_can_do_it_all(file_system: LoopFileSystem) -> None:
    home = file_system.point / "home"
    home.mkdir()
    os.chown(home, _ORDINARY_USER, _ORDINARY_USER)
    home.chmod(0o700)

    def as_user() -> None:
        os.setgroups([])
        os.setresgid(_ORDINARY_USER, _ORDINARY_USER, _ORDINARY_USER)
        os.setresuid(_ORDINARY_USER, _ORDINARY_USER, _ORDINARY_USER)
        lab = FolderLab(ReflinkBackend, ReflinkConfig(store=str(home / "copies")), home)
        origin = lab.make_origin()
        plant(origin)
        before = fingerprint(origin)
        ref = lab.take_one(origin)
        with lab.attached(ref, writable=False) as reached, lab.attached(ref, writable=True) as clone:
            same(before, fingerprint(reached))
            same(before, fingerprint(clone))
        lab.backend().delete(ref, wait="space")
        assert lab.found(ref.pool) == ()
        # The default place belongs to root.
        refused = ReflinkBackend(ReflinkConfig(), lab.runner, lab.mounter).locate(lab.target(origin))
        assert isinstance(refused, NotMine)
        # What belongs to somebody else could not keep its owner.
        with pytest.raises(LackingError, match="run as root|this user cannot copy"):
            lab.take_one(foreign)
        assert lab.found(ref.pool) == ()

    foreign = home / "foreign"
    foreign.mkdir()
    (foreign / "roots").write_bytes(b"x")
    try:
        assert processes.succeeds(processes.spawn(as_user))
    finally:
        shutil.rmtree(home)


@pytest.fixture(scope="module")
def btrfs() -> Iterator[Path]:
    with loop_filesystem("btrfs", _SIZE_BYTES) as made:
        yield made.point


class TestBtrfsOnly:
    def test_nocow_files_are_cloned_as_such(self, btrfs: Path) -> None:
        lab = FolderLab(ReflinkBackend, ReflinkConfig(), btrfs)
        origin = lab.make_origin()
        (origin / "cow").write_bytes(os.urandom(1 << 20))
        nocow = origin / "nocow"
        nocow.mkdir()
        _RUNNER.run(["chattr", "+C", str(nocow)])
        (nocow / "file").write_bytes(os.urandom(1 << 20))
        shutil.copy(origin / "cow", origin / "moved")
        (origin / "moved").rename(nocow / "cow-in-nocow-folder")
        ref = lab.take_one(origin)
        with lab.attached(ref, writable=False) as reached, lab.attached(ref, writable=True) as clone:
            for root in (reached, clone):
                same(fingerprint(origin), fingerprint(root))
                assert [
                    _nocow(root / name) for name in ("cow", "nocow", "nocow/file", "nocow/cow-in-nocow-folder")
                ] == [
                    False,
                    True,
                    True,
                    False,
                ]

    def test_nested_subvolume_is_left_out(self, btrfs: Path) -> None:
        lab = FolderLab(ReflinkBackend, ReflinkConfig(), btrfs)
        origin = lab.make_origin()
        _RUNNER.run(["btrfs", "subvolume", "create", str(origin / "nested")])
        (origin / "nested" / "file").write_bytes(b"not ours")
        assert lab.volume(origin).excluded == (str(origin / "nested"),)
        with lab.attached(lab.take_one(origin), writable=False) as reached:
            assert os.listdir(reached / "nested") == []

    def test_same_inode_in_two_subvolumes_are_two_volumes(self, btrfs: Path) -> None:
        lab = FolderLab(ReflinkBackend, ReflinkConfig(), btrfs)
        for name in ("one", "two"):
            _RUNNER.run(["btrfs", "subvolume", "create", str(btrfs / name)])
        assert (btrfs / "one").stat().st_ino == (btrfs / "two").stat().st_ino
        assert lab.volume(btrfs / "one").id != lab.volume(btrfs / "two").id

    def test_subvolume_made_in_a_clone_is_not_destroyed(self, btrfs: Path) -> None:
        lab = FolderLab(ReflinkBackend, ReflinkConfig(), btrfs)
        ref = lab.take_one(lab.make_origin())
        record = new_record(ref, writable=True)
        made = Path(str(lab.backend().attach(record).directory), "made-here")
        _RUNNER.run(["btrfs", "subvolume", "create", str(made)])
        (made / "precious").write_bytes(b"x")
        with pytest.raises(StorageError, match="subvolume"):
            lab.backend().detach(record)
        (made,) = btrfs.glob(".snapmgr-reflink/*/data/made-here")
        assert (made / "precious").read_bytes() == b"x"
        _RUNNER.run(["btrfs", "subvolume", "delete", str(made)])
        lab.backend().detach(record)
        assert not list(btrfs.glob(".snapmgr-reflink/*/data/made-here"))


def _nocow(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return kernel.is_nocow(fd)
    finally:
        os.close(fd)


def test_identity_survives_a_remount() -> None:
    with loop_filesystem("xfs", _SIZE_BYTES) as made, loop_filesystem("xfs", _SIZE_BYTES) as other:
        lab = FolderLab(ReflinkBackend, ReflinkConfig(), made.point)
        origin = lab.make_origin()
        volume, ref = lab.volume(origin), lab.take_one(origin)
        # Another device takes the number that the first one had.
        _RUNNER.run(["umount", str(made.point)])
        _RUNNER.run(["umount", str(other.point)])
        with pytest.raises(StorageError):
            lab.found(ref.pool)
        _RUNNER.run(["mount", made.device, str(made.point)])
        _RUNNER.run(["mount", other.device, str(other.point)])
        assert lab.volume(origin) == volume
        assert [found.ref for found in lab.found(ref.pool)] == [ref]


def test_nothing_but_system_calls_under_the_lock(lab: FolderLab) -> None:
    origin = lab.make_origin()
    plant(origin)
    with lab.backend().arm((lab.volume(origin),), new_id()) as armed:

        def forbidden(event: str, _args: object) -> None:
            if watching and event in {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "import"}:
                raise AssertionError(event)

        watching = True
        sys.addaudithook(forbidden)
        try:
            armed.fire(time.monotonic() + 60)
        finally:
            watching = False
