"""The store of reflink copies: where it may be, whose it is, and what is not taken for a copy."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.api import BusyError, MissingRequirementError, NotFoundError, NotMine, StorageError
from snapmgr.system.command import CommandRunner
from snapmgr.testing import FolderLab, fingerprint, plant, processes
from snapmgr.testing.lab import new_id, new_record
from snapmgr.testing.trees import flush, same
from snapmgr_reflink import ReflinkBackend, ReflinkConfig
from support.reflink import SIZE_BYTES, store_of
from support.storage import fill, loop_filesystem

if TYPE_CHECKING:
    from support.storage import LoopFileSystem


pytestmark = pytest.mark.needs("root", "loop", "xfs", "btrfs")
_RUNNER = CommandRunner()
_ORDINARY_USER = 65534


def test_renamed_box_is_still_the_snapshot(lab: FolderLab) -> None:
    ref = lab.take_one(lab.make_origin())
    (store_of(lab) / ref.name).rename(store_of(lab) / "somewhere-else")
    assert lab.backend().usage(ref).valid
    lab.backend().delete(ref)
    assert not (store_of(lab) / "somewhere-else").exists()


def test_empty_foreign_folder_of_our_name_is_not_replaced(lab: FolderLab) -> None:
    origin, snapshot_id = lab.make_origin(), new_id()
    lab.take_one(origin)
    (store_of(lab) / snapshot_id).mkdir()
    with pytest.raises(StorageError, match="taken"):
        lab.take(origin, snapshot_id=snapshot_id)
    assert (store_of(lab) / snapshot_id).is_dir()
    assert not list(store_of(lab).glob("begun@*"))
    (store_of(lab) / snapshot_id).rmdir()


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
    mark = store_of(lab) / shot.ref.name / "made.json"
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"boot_id": "another"}))
    (found,) = [found for found in lab.found(volume.pool) if found.name == shot.ref.name]
    assert (found.kind, found.why) == ("debris", "the machine stopped before it was safe in the storage")
    lab.backend().repair(found)
    assert not mark.parent.exists()


def test_store_that_others_can_enter_is_refused(lab: FolderLab) -> None:
    origin = lab.make_origin()
    ref = lab.take_one(origin)
    store_of(lab).chmod(0o755)
    try:
        for action in (lambda: lab.take_one(origin), lambda: lab.found(ref.pool), lambda: lab.backend().delete(ref)):
            with pytest.raises(StorageError, match="closed to others"):
                action()
    finally:
        store_of(lab).chmod(0o700)


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
    _RUNNER.run(["cp", "-a", str(store_of(lab)), str(twin)])
    try:
        with pytest.raises(StorageError, match="copy of a store"):
            lab.found(replace(ref.pool, id=str(twin)))
    finally:
        shutil.rmtree(twin)


def test_damaged_mark_makes_a_box_foreign(lab: FolderLab) -> None:
    ref = lab.take_one(lab.make_origin())
    mark = store_of(lab) / ref.name / "complete.json"
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
        flush(ballast.parent)


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
        with pytest.raises(MissingRequirementError, match="run as root|this user cannot copy"):
            lab.take_one(foreign)
        assert lab.found(ref.pool) == ()

    foreign = home / "foreign"
    foreign.mkdir()
    (foreign / "roots").write_bytes(b"x")
    try:
        assert processes.succeeds(processes.spawn(as_user))
    finally:
        shutil.rmtree(home)


def test_identity_survives_a_remount() -> None:
    with loop_filesystem("xfs", SIZE_BYTES) as made, loop_filesystem("xfs", SIZE_BYTES) as other:
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


def test_a_full_file_system_lets_snapshots_go() -> None:
    """Deleting is what makes room, so it must not need any."""
    with loop_filesystem("xfs", 320 << 20) as system:
        lab = FolderLab(ReflinkBackend, ReflinkConfig(), system.point)
        origin = lab.make_origin()
        (origin / "file").write_bytes(os.urandom(1 << 20))
        refs = [lab.take(origin, snapshot_id=f"demo.20260301T02300{number}Z.0000000{number}")[0] for number in range(4)]
        fill(system.point)
        with pytest.raises(StorageError, match="No space left"):
            lab.take(origin)
        for ref in refs:
            lab.backend().delete(ref)
        assert [path.name for path in store_of(lab).iterdir()] == ["snapmgr-reflink-store.json"]
