"""btrfs: arming, firing in a forked helper, settling; what goes wrong between these steps."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec import structs

from snapmgr.api import FireError, MissingRequirementError, NotFoundError, StorageError
from snapmgr.backup.trigger import Trigger
from snapmgr.system.blockdev import read_mounts
from support.btrfs import btrfs_disk, locate, make_backend, make_subvolume, run, take
from support.storage import work_folder

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")
BACKEND = make_backend()


@pytest.fixture(name="disk", scope="module")
def _disk():
    with btrfs_disk() as disk:
        yield disk


def _folder(disk):
    return disk.point / ".snapmgr"


def _in(seconds):
    return time.monotonic() + seconds


def test_a_snapshot_holds_what_was_written_even_if_not_synced_and_never_changes(disk):
    origin = make_subvolume(disk.point / "whole")
    volume = locate(BACKEND, origin)
    with BACKEND.arm((volume,), "whole-1") as armed:
        (origin / "late").write_bytes(b"written after arming, never synced" * 1000)
        before_ns = time.monotonic_ns()
        armed.launched = True
        (shot,) = armed.fire(_in(5))
        after_ns = time.monotonic_ns()
    BACKEND.settle((shot.ref,), 5)
    BACKEND.settle((shot.ref,), 5)
    assert before_ns <= shot.start_ns < shot.finish_ns <= after_ns
    assert (shot.ref.snapshot_id, shot.ref.name, shot.ref.volume_id) == ("whole-1", "whole-1", volume.id)
    assert (shot.ref.pool.id, shot.ref.backend) == (volume.pool.id, "btrfs")
    (origin / "late").unlink()
    copy = _folder(disk) / "whole-1"
    assert (copy / "late").read_bytes() == b"written after arming, never synced" * 1000
    with pytest.raises(OSError, match="Read-only"):
        (copy / "late").write_text("x")
    assert _folder(disk).stat().st_mode & 0o7777 == 0o700


def test_the_forecast_is_not_far_from_the_truth(disk):
    with BACKEND.arm((locate(BACKEND, make_subvolume(disk.point / "timed")),), "timed-1") as armed:
        armed.sync()
        armed.launched = True
        (shot,) = armed.fire(_in(5))
    assert 0 < armed.stall_s < 1
    assert (shot.finish_ns - shot.start_ns) / 1e9 < 20 * armed.stall_s


def test_a_helper_that_keeps_only_the_named_descriptors_fires(disk):
    origin = make_subvolume(disk.point / "helped", file="data")
    with BACKEND.arm((locate(BACKEND, origin),), "helped-1") as armed:
        assert armed.fds
        with Trigger(armed, lambda shot: BACKEND.delete(shot.ref)) as trigger:
            trigger.fire(_in(10))
            (shot,) = trigger.shots()
    BACKEND.settle((shot.ref,), 10)
    assert (_folder(disk) / "helped-1" / "file").read_text() == "data"
    assert [found.ref for found in BACKEND.inventory((shot.ref.pool,)) if found.name == "helped-1"] == [shot.ref]


def test_the_helper_fires_after_the_armed_process_has_gone(disk):
    origin = make_subvolume(disk.point / "orphaned")
    go_out, go_in = os.pipe()
    armed = BACKEND.arm((locate(BACKEND, origin),), "orphaned-1")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd not in {go_out, *armed.fds}:
                    with suppress(OSError):  # the listing's own
                        os.close(fd)
            os.read(go_out, 1)
            armed.fire(_in(5))
            code = 0
        finally:
            os._exit(code)
    armed.launched = True
    armed.__exit__(None, None, None)
    os.write(go_in, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(go_out)
    os.close(go_in)
    assert (_folder(disk) / "orphaned-1").is_dir()


def test_firing_starts_no_program_and_mounts_nothing(disk, monkeypatch):
    with BACKEND.arm((locate(BACKEND, make_subvolume(disk.point / "quick")),), "quick-1") as armed:

        def forbidden(*_args, **_kwargs):
            pytest.fail("something slow was called under the lock")

        monkeypatch.setattr(subprocess.Popen, "__init__", forbidden)
        monkeypatch.setattr(os, "fork", forbidden)
        monkeypatch.setattr("snapmgr.system.mountapi.new_mount", forbidden)
        armed.launched = True
        assert len(armed.fire(_in(5))) == 1


def test_several_volumes_of_one_file_system_and_of_two(disk):
    one, two = (make_subvolume(disk.point / name, file=name) for name in ("data", "redo"))
    with btrfs_disk() as other:
        three = make_subvolume(other.point / "binlog", file="binlog")
        volumes = tuple(locate(BACKEND, path) for path in (one, three, two))
        with BACKEND.arm(volumes, "many") as armed:
            assert [intent.name for intent in armed.intents] == ["many@1", "many", "many@2"]
            armed.launched = True
            shots = armed.fire(_in(5))
        BACKEND.settle(tuple(shot.ref for shot in shots), 5)
        assert [shot.ref.volume_id for shot in shots] == [volume.id for volume in volumes]
        assert {shot.ref.snapshot_id for shot in shots} == {"many"}
        assert (_folder(disk) / "many@2" / "file").read_text() == "redo"
        pools = (volumes[0].pool, volumes[1].pool)
        found = [found for found in BACKEND.inventory(pools) if found.snapshot_id == "many"]
        assert {item.ref for item in found} == {shot.ref for shot in shots}
        for shot in shots:
            BACKEND.annotate(shot.ref, shot.ref.name.encode())
        found = [found for found in BACKEND.inventory(pools) if found.snapshot_id == "many"]
        assert {item.note for item in found} == {b"many", b"many@1", b"many@2"}
        for shot in shots:
            BACKEND.delete(shot.ref)


def test_past_the_deadline_no_further_member_is_begun(disk):
    volumes = tuple(locate(BACKEND, make_subvolume(disk.point / name)) for name in ("late1", "late2"))
    with BACKEND.arm(volumes, "too-late") as armed:
        armed.launched = True
        with pytest.raises(FireError, match="deadline") as caught:
            armed.fire(time.monotonic())
    assert caught.value.shots == ()
    assert not list(_folder(disk).glob("too-late*"))


def test_a_failing_member_hands_over_those_already_made(disk):
    volumes = tuple(locate(BACKEND, make_subvolume(disk.point / name)) for name in ("fail1", "fail2"))
    with BACKEND.arm(volumes, "half") as armed:
        (_folder(disk) / "half@2").mkdir()
        armed.launched = True
        with pytest.raises(FireError, match="half@2") as caught:
            armed.fire(_in(5))
    (shot,) = caught.value.shots
    assert shot.ref.volume_id == volumes[0].id
    BACKEND.delete(shot.ref)
    assert not (_folder(disk) / "half@1").exists()
    (_folder(disk) / "half@2").rmdir()


def test_a_taken_name_a_bad_name_and_a_volume_twice_are_refused_when_arming(disk):
    volume = locate(BACKEND, make_subvolume(disk.point / "named"))
    take(BACKEND, disk.point / "named", "taken")
    with pytest.raises(StorageError, match="exists already"):
        BACKEND.arm((volume,), "taken")
    for name in ("attach.0123456789abcdef", "x.json", ".hidden", "a/b", "", "a@1", ".."):
        with pytest.raises(StorageError, match="cannot name"):
            BACKEND.arm((volume,), name)
    with pytest.raises(StorageError, match="once"):
        BACKEND.arm((volume, volume), "twice")
    with pytest.raises(StorageError, match="once"):
        BACKEND.arm((), "none")


def test_an_armed_snapshot_that_is_not_fired_leaves_nothing(disk):
    volume = locate(BACKEND, make_subvolume(disk.point / "unfired"))
    mounts, before = read_mounts(), sorted(os.listdir(_folder(disk)))
    descriptors = sorted(os.listdir("/proc/self/fd"))
    with BACKEND.arm((volume,), "unfired-1") as armed:
        assert read_mounts() == mounts
        assert armed.intents[0].name == "unfired-1"
    assert sorted(os.listdir(_folder(disk))) == before
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


def test_a_failed_arm_leaks_no_descriptor(disk):
    volume = locate(BACKEND, make_subvolume(disk.point / "leaky"))
    gone = structs.replace(volume, id="00000000-1111-2222-3333-444444444444")
    descriptors = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="is gone"):
        BACKEND.arm((volume, gone), "leaky-1")
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


def test_a_killed_process_that_was_armed_holds_nothing():
    with btrfs_disk() as disk:
        origin = make_subvolume(disk.point / "db")
        script = (
            "import sys, time\nfrom pathlib import Path\nfrom support.btrfs import *\n"
            "armed = make_backend().arm((locate(make_backend(), Path(sys.argv[1])),), 'killed')\n"
            "print('armed', flush=True)\ntime.sleep(60)\n"
        )
        path = os.pathsep.join(str(folder) for folder in (Path.cwd(), Path.cwd() / "backends", Path.cwd() / "tests"))
        command = [sys.executable, "-c", script, str(origin)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "armed\n"
            child.send_signal(signal.SIGKILL)
            child.wait()
        ref = take(BACKEND, origin, "killed")
        BACKEND.delete(ref)
    # Leaving the context unmounted and detached the device: nothing held it.


def test_the_origin_is_found_by_its_id_wherever_it_is_moved_to(disk):
    origin = make_subvolume(disk.point / "here", file="data")
    volume = locate(BACKEND, origin)
    origin.rename(disk.point / "there")
    make_subvolume(disk.point / "here", file="another")
    with BACKEND.arm((volume,), "moved-1") as armed:
        armed.launched = True
        (shot,) = armed.fire(_in(5))
    BACKEND.settle((shot.ref,), 5)
    assert (_folder(disk) / "moved-1" / "file").read_text() == "data"


def test_settling_finds_out_what_was_done_to_the_snapshot(disk):
    origin = make_subvolume(disk.point / "meddled")
    ref = take(BACKEND, origin, "meddled-1")
    BACKEND.settle((ref, ref), 5)
    copy = _folder(disk) / "meddled-1"
    with pytest.raises(StorageError, match="not of"):
        BACKEND.settle((structs.replace(ref, volume_id="00000000-1111-2222-3333-444444444444"),), 5)
    run("btrfs", "property", "set", copy, "ro", "false")
    with pytest.raises(StorageError, match="not read-only"):
        BACKEND.settle((ref,), 5)
    run("btrfs", "subvolume", "delete", copy)
    with pytest.raises(NotFoundError, match="meddled-1"):
        BACKEND.settle((ref,), 5)
    run("btrfs", "subvolume", "snapshot", "-r", origin, copy)
    with pytest.raises(NotFoundError, match="meddled-1"):
        BACKEND.settle((ref,), 5)
    run("btrfs", "subvolume", "delete", copy)


def test_settling_gives_up_when_the_storage_hangs(disk, monkeypatch):
    ref = take(BACKEND, make_subvolume(disk.point / "hung"), "hung-1")
    monkeypatch.setattr("snapmgr_btrfs.kernel.wait_commit", lambda *_: time.sleep(5))
    started = time.monotonic()
    with pytest.raises(StorageError, match="not on disk within the time limit") as caught:
        BACKEND.settle((ref,), 0.2)
    assert time.monotonic() - started < 4.5
    assert caught.value.hint


def test_a_settled_snapshot_and_a_finished_deletion_would_survive_a_power_cut():
    with btrfs_disk(128) as disk:
        origin = make_subvolume(disk.point / "db", file="data")
        ref = take(BACKEND, origin, "durable")
        # The image as it is now is what a power cut would leave.
        assert "durable" in _names_on(disk.image)
        BACKEND.annotate(ref, b"note")
        BACKEND.delete(ref, wait="name")
        assert "durable" not in _names_on(disk.image)


def test_a_note_would_survive_a_power_cut():
    with work_folder(Path("/dev/shm")) as folder:
        with btrfs_disk(128) as disk:
            ref = take(BACKEND, make_subvolume(disk.point / "db"), "noted")
            BACKEND.annotate(ref, b"first")
            run("sync")
            BACKEND.annotate(ref, b"second")
            # What a power cut would leave: nothing was synced since but by annotate itself.
            shutil.copyfile(disk.image, folder / "copy")
        copy = run("losetup", "--find", "--show", folder / "copy").strip()
        try:
            (found,) = BACKEND.inventory((structs.replace(ref.pool, hint=copy),))
        finally:
            run("losetup", "--detach", copy)
    assert (found.kind, found.note) == ("snapshot", b"second")


def _names_on(image):
    """Return the names of subvolumes in the last committed root tree of an image, read without mounting it."""
    dump = run("btrfs", "inspect-internal", "dump-tree", "-t", "root", image)
    return [line.split(" name ", 1)[1].strip() for line in dump.splitlines() if "root ref key dirid" in line]


def _fill(path):
    with path.open("wb") as file:
        while True:
            file.write(os.urandom(1 << 20))


def test_a_full_file_system_refuses_to_arm_but_lets_snapshots_go():
    with btrfs_disk(150) as disk:
        origin = make_subvolume(disk.point / "db", file="data")
        ref = take(BACKEND, origin, "roomy")
        with pytest.raises(OSError, match="No space"):
            _fill(origin / "fill")
        run("sync")
        volume = locate(BACKEND, origin)
        data = next(one for one in BACKEND.headroom(volume) if one.name.startswith(("data", "mixed")))
        assert data.when_full == "origin_errors"
        assert data.size_bytes - data.used_bytes < 16 << 20
        with pytest.raises(StorageError, match="free") as caught:
            BACKEND.arm((volume,), "no-room")
        assert "prune" in caught.value.hint
        BACKEND.delete(ref, wait="space")
        assert BACKEND.inventory((ref.pool,)) == ()


def test_headroom_shrinks_by_what_is_written():
    with btrfs_disk() as disk:
        origin = make_subvolume(disk.point / "db")
        volume = locate(BACKEND, origin)
        before = {one.name.split()[0]: one for one in BACKEND.headroom(volume)}
        (origin / "file").write_bytes(os.urandom(40 << 20))
        after = {one.name.split()[0]: one for one in BACKEND.headroom(volume)}
        run("sync")
        synced = {one.name.split()[0]: one for one in BACKEND.headroom(volume)}
    assert set(before) == {"data", "metadata", "allocation"}
    for later in (after, synced):
        assert 38 << 20 < later["data"].used_bytes - before["data"].used_bytes < 48 << 20
    for one in (*before.values(), *synced.values()):
        assert 0 <= one.used_bytes <= one.size_bytes <= 300 << 20


def test_a_device_set_of_two_is_one_pool():
    with btrfs_disk(200) as disk, btrfs_disk(200) as spare:
        run("umount", spare.point)
        run("btrfs", "device", "add", "-f", spare.device, disk.point)
        origin = make_subvolume(disk.point / "db", file="data")
        before = BACKEND.headroom(locate(BACKEND, origin))
        assert sum(one.size_bytes for one in before if one.name.startswith("data")) > 250 << 20
        ref = take(BACKEND, origin, "on-two")
        assert [found.ref for found in BACKEND.inventory((ref.pool,))] == [ref]
        BACKEND.delete(ref)
        run("btrfs", "device", "remove", spare.device, disk.point)


def test_without_root_everything_says_so(disk):
    ref = take(BACKEND, make_subvolume(disk.point / "rootful"), "rootful-1")
    volume = locate(BACKEND, disk.point / "rootful")
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        code = 0
        acts = (
            lambda: BACKEND.arm((volume,), "s"),
            lambda: BACKEND.inventory((volume.pool,)),
            lambda: BACKEND.delete(ref),
            lambda: BACKEND.usage(ref),
        )
        for number, act in enumerate(acts, 1):
            try:
                act()
                code = number
            except MissingRequirementError as error:
                code = code if "root" in error.message else number + 10
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
