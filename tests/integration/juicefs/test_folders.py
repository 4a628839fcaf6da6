"""What a clone holds, and what becomes of those that cannot be made."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from snapmgr.api import BusyError, FireError, NotFoundError, StorageError
from snapmgr.testing import fingerprint, plant
from snapmgr.testing.lab import new_id
from snapmgr.testing.trees import same
from snapmgr_juicefs import JuicefsConfig
from support.juicefs import JuicefsVolume, juicefs_volume
from support.juicefslab import JuicefsLab
from support.processes import wait_until

pytestmark = pytest.mark.needs("root", "juicefs")


def test_what_a_program_keeps_open_is_in_it(lab: JuicefsLab) -> None:
    origin = lab.make_origin()
    with (origin / "open").open("wb", buffering=0) as file:
        file.write(b"not closed, not synced")
        ref = lab.take_one(origin)
        with lab.attached(ref, writable=False) as reached:
            assert (reached / "open").read_bytes() == b"not closed, not synced"


def test_nobody_knows_what_it_costs(lab: JuicefsLab) -> None:
    ref = lab.take_one(lab.make_origin())
    for exact in (False, True):
        usage = lab.backend().usage(ref, exact=exact)
        assert (usage.exclusive_bytes, usage.valid) == (None, True)


def test_clone_of_a_folder(lab: JuicefsLab, volume: JuicefsVolume) -> None:
    origin = lab.make_origin()
    plant(origin)
    target = volume.point / "clone"
    lab.backend().clone_folder(str(origin), str(target))
    same(fingerprint(origin), fingerprint(target))
    # With a slash the program would clone *into* it.
    (volume.point / "there").mkdir()
    for taken in (target, volume.point / "there"):
        for shape in ("{}", "{}/"):
            with pytest.raises(StorageError, match="exists already"):
                lab.backend().clone_folder(str(origin), shape.format(taken))
    assert list((volume.point / "there").iterdir()) == []
    with pytest.raises(NotFoundError):
        lab.backend().clone_folder(str(origin / "nothing"), str(volume.point / "other"))
    with pytest.raises(StorageError, match="lies inside"):
        lab.backend().clone_folder(str(origin), str(origin / "inside"))
    with pytest.raises(StorageError, match="not in one mount"):
        lab.backend().clone_folder(str(origin), str(volume.folder / "elsewhere"))


def test_two_clones_at_once(lab: JuicefsLab, volume: JuicefsVolume) -> None:
    origin = lab.make_origin()
    for number in range(200):
        (origin / str(number)).touch()
    target, raised = volume.point / f"wanted-{time.monotonic_ns()}", []

    def clone() -> None:
        try:
            lab.backend().clone_folder(str(origin), str(target))
        except (StorageError, BusyError) as error:
            raised.append(error)

    threads = [threading.Thread(target=clone) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) <= 2
    assert len(list(target.iterdir())) == 200
    assert [path for path in volume.point.iterdir() if path.name.startswith(".snapmgr-clone")] == []


def test_no_room_in_the_volume() -> None:
    with juicefs_volume(format_options=("--trash-days", "0", "--capacity", "1"), base=Path("/dev/shm")) as small:
        lab = JuicefsLab(small, JuicefsConfig())
        origin = lab.make_origin()
        # A clone counts with holes and all: no byte needs to be written for this.
        with (origin / "big").open("wb") as file:
            file.truncate(700 << 20)
        with pytest.raises(StorageError, match=r"the volume .* has room for"):
            lab.take_one(origin)
        store = small.point / ".snapmgr-juicefs"
        assert [path.name for path in store.iterdir()] == ["snapmgr-juicefs-store.json"]
        # What grows after it was looked at is refused by the volume.
        os.truncate(origin / "big", 300 << 20)
        volume, backend = lab.volume(origin), lab.backend()
        with backend.arm((volume,), new_id()) as armed:
            os.truncate(origin / "big", 900 << 20)
            armed.launched = True
            with pytest.raises(FireError, match="no space left"):
                armed.fire(time.monotonic() + 60)
        assert {found.kind for found in lab.found(volume.pool)} == {"debris"}
        lab.repair_all(volume.pool)
        assert lab.found(volume.pool) == ()
        # A quota of the store counts as well.
        os.truncate(origin / "big", 300 << 20)
        small.juicefs("quota", "set", small.meta_url, "--path", "/.snapmgr-juicefs", "--inodes", "3")
        for number in range(9):
            (origin / str(number)).touch()
        with pytest.raises(StorageError, match="the quota of /.snapmgr-juicefs"):
            lab.take_one(origin)
        small.juicefs("quota", "delete", small.meta_url, "--path", "/.snapmgr-juicefs")
        wait_until(lambda: "/.snapmgr" not in small.juicefs("quota", "list", small.meta_url))
        lab.take_one(origin)
