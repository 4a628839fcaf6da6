"""btrfs: only what is ours is deleted, only while nobody uses it, and what is said to be free is free."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter

import pytest
from msgspec import structs

from snapmgr.api import InUseError, StorageError
from snapmgr.system.mount import bind, unmount
from snapmgr_btrfs import kernel, users
from support.btrfs import attached, btrfs_disk, locate, make_backend, make_subvolume, new_record, run, take

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")
BACKEND = make_backend()


@pytest.fixture(name="disk")
def _disk():
    with btrfs_disk() as disk:
        make_subvolume(disk.point / "db", file="data")
        yield disk


@pytest.fixture(name="ref")
def _ref(disk):
    return take(BACKEND, disk.point / "db", "s1")


def _names(disk):
    return {path.name for path in (disk.point / ".snapmgr").iterdir()}


def test_deleting_is_idempotent_and_takes_the_note_along(disk, ref):
    BACKEND.annotate(ref, b"note")
    other = take(BACKEND, disk.point / "db", "s2")
    BACKEND.delete(ref)
    BACKEND.delete(ref)
    BACKEND.delete(ref, wait="space")
    assert _names(disk) == {"s2"}
    BACKEND.delete(other)


def test_a_batch_is_one_mount_one_commit_and_one_look_at_all_processes(disk, monkeypatch):
    refs = [take(BACKEND, disk.point / "db", f"s{number}") for number in range(6)]
    moved, renamed, used, *plain = refs
    BACKEND.annotate(plain[0], b"note")
    (disk.point / ".snapmgr" / renamed.name).rename(disk.point / ".snapmgr" / "renamed")
    run("btrfs", "property", "set", disk.point / ".snapmgr" / moved.name, "ro", "false")
    (disk.point / ".snapmgr" / moved.name).rename(disk.point / "kept")
    BACKEND.attach(new_record(used))
    counts = Counter()

    def counted(where, name):
        call = getattr(where, name)

        def count(*arguments, **options):
            counts[name] += 1
            return call(*arguments, **options)

        monkeypatch.setattr(where, name, count)

    counted(kernel, "commit")
    counted(kernel, "fs_uuid")
    counted(users, "_strangers")
    # However slow this machine is now.
    monkeypatch.setattr(users, "_FRESH_S", 60.0)
    errors = BACKEND.delete_batch(tuple(refs))
    assert "moved to /kept" in errors[0].message
    assert "is attached" in errors[2].message
    assert [error for error in errors if error is not None] == [errors[0], errors[2]]
    assert {name for name in _names(disk) if not name.startswith("attach.")} == {used.name}
    assert (disk.point / "kept" / "file").read_text() == "data"
    assert counts == {"commit": 1, "fs_uuid": 1, "_strangers": 1}


def test_a_mount_that_appears_during_a_batch_is_seen(disk, monkeypatch):
    point = disk.image.parent / "elsewhere"
    point.mkdir()
    refs = [take(BACKEND, disk.point / "db", f"s{number}") for number in range(2)]
    destroy = kernel.destroy

    def destroy_slowly(fd, subvolume_id):
        destroy(fd, subvolume_id)
        run("mount", "-o", "ro,subvol=.snapmgr/s1", disk.device, point)
        time.sleep(0.11)

    monkeypatch.setattr(kernel, "destroy", destroy_slowly)
    first, second = BACKEND.delete_batch(tuple(refs))
    assert first is None
    assert isinstance(second, InUseError)
    run("umount", point)
    assert _names(disk) == {"s1"}


def test_a_note_that_a_killed_deletion_left_goes_with_the_next_one(disk, ref):
    BACKEND.annotate(ref, b"note")
    run("btrfs", "subvolume", "delete", disk.point / ".snapmgr" / "s1")
    assert _names(disk) == {"s1.json"}
    BACKEND.delete(ref)
    assert _names(disk) == set()


def test_something_else_under_the_name_survives(disk, ref):
    place = disk.point / ".snapmgr" / "s1"
    for make in (
        lambda: run("btrfs", "subvolume", "snapshot", "-r", disk.point / "db", place),
        lambda: run("btrfs", "subvolume", "create", place),
        place.mkdir,
        lambda: place.write_text("a file"),
        lambda: place.symlink_to(disk.point / "db"),
    ):
        if place.is_dir() and not place.is_symlink():
            run("btrfs", "subvolume", "delete", place) if place.stat().st_ino == 256 else place.rmdir()
        else:
            place.unlink()
        make()
        before = place.lstat()
        with pytest.raises(StorageError, match="s1"):
            BACKEND.delete(ref)
        assert place.lstat().st_ino == before.st_ino
    assert (disk.point / "db" / "file").read_text() == "data"


def test_another_native_id_deletes_nothing(disk, ref):
    wrong = structs.replace(ref, native_id="01234567-89ab-cdef-0123-456789abcdef")
    with pytest.raises(StorageError, match="is not the snapshot"):
        BACKEND.delete(wrong)
    BACKEND.delete(structs.replace(wrong, name="no-such-name"))
    assert _names(disk) == {"s1"}


def test_a_snapshot_that_was_moved_out_of_the_folder_is_its_movers(disk, ref):
    place = disk.point / ".snapmgr" / "s1"
    run("btrfs", "property", "set", place, "ro", "false")
    place.rename(disk.point / "kept")
    run("btrfs", "property", "set", disk.point / "kept", "ro", "true")
    with pytest.raises(StorageError, match="moved to /kept") as caught:
        BACKEND.delete(ref)
    assert caught.value.hint
    assert (disk.point / "kept" / "file").read_text() == "data"


def test_what_is_mounted_is_not_deleted(disk, ref):
    place, point = disk.point / ".snapmgr" / "s1", disk.image.parent / "elsewhere"
    point.mkdir()
    run("mount", "-o", "ro,subvol=.snapmgr/s1", disk.device, point)
    with pytest.raises(InUseError, match=str(point)):
        BACKEND.delete(ref)
    run("umount", point)
    # A part of it, bound somewhere; the kernel would delete it all the same.
    make_subvolume(disk.point / "db2")
    (disk.point / "db2" / "part").mkdir()
    second = take(BACKEND, disk.point / "db2", "s2")
    bind(str(disk.point / ".snapmgr" / "s2" / "part"), str(point), read_only=True)
    with pytest.raises(InUseError, match=str(point)):
        BACKEND.delete(second)
    unmount(str(point))
    # Something mounted in it.
    run("mount", "-t", "tmpfs", "tmpfs", disk.point / ".snapmgr" / "s2" / "part")
    with pytest.raises(InUseError, match="s2/part"):
        BACKEND.delete(second)
    run("umount", disk.point / ".snapmgr" / "s2" / "part")
    assert (place / "file").exists()
    for one in (ref, second):
        BACKEND.delete(one)
    assert _names(disk) == set()


def test_a_mount_in_another_namespace_counts(disk, ref):
    point = disk.image.parent / "elsewhere"
    point.mkdir()
    script = f"mount -o ro,subvol=.snapmgr/s1 {disk.device} {point} && echo mounted && exec sleep 60"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "mounted\n"
            assert not os.path.ismount(point)
            with pytest.raises(InUseError, match=f"mount namespace of process {other.pid}"):
                BACKEND.delete(ref)
        finally:
            other.kill()
    assert _names(disk) == {"s1"}
    _eventually_deleted(ref)


def _eventually_deleted(ref):
    # The namespace of an ended process is taken down a moment later.
    for _ in range(50):
        try:
            return BACKEND.delete(ref)
        except InUseError:
            time.sleep(0.05)
    return pytest.fail("it is still mounted")


def test_what_is_attached_is_not_deleted_mounted_or_not(disk, ref):
    record = new_record(ref)
    with attached(BACKEND, record), pytest.raises(InUseError, match=record.id):
        BACKEND.delete(ref)
    BACKEND.attach(record)
    with pytest.raises(InUseError, match="is attached"):
        BACKEND.delete(ref)
    other = take(BACKEND, disk.point / "db", "s2")
    BACKEND.delete(other)
    BACKEND.detach(record)
    BACKEND.delete(ref)


def test_a_mounted_clone_is_not_detached(disk, ref):
    record = new_record(ref)
    with attached(BACKEND, record) as clone:
        with pytest.raises(InUseError, match=str(clone)):
            BACKEND.detach(record)
        assert (clone / "file").read_text() == "data"
    assert _names(disk) == {"s1"}


def test_a_snapshot_being_sent_is_in_use(disk, ref):
    # A pipe that nobody reads keeps the send going.
    big = make_subvolume(disk.point / "big")
    (big / "file").write_bytes(os.urandom(8 << 20))
    sent = take(BACKEND, big, "sent")
    out, into = os.pipe()
    command = ["btrfs", "send", "--quiet", str(disk.point / ".snapmgr" / "sent")]
    with subprocess.Popen(command, stdout=into, stderr=subprocess.DEVNULL) as sender:
        os.close(into)
        try:
            assert os.read(out, 1)
            with pytest.raises(InUseError, match="being sent"):
                BACKEND.delete(sent)
        finally:
            sender.kill()
            os.close(out)
    BACKEND.delete(sent)
    BACKEND.delete(ref)


def test_waiting_for_space_returns_when_it_is_free(disk):
    big = make_subvolume(disk.point / "big")
    (big / "file").write_bytes(os.urandom(60 << 20))
    ref = take(BACKEND, big, "big")
    (big / "file").unlink()
    run("sync")
    volume = locate(BACKEND, big)

    def used():
        return next(one.used_bytes for one in BACKEND.headroom(volume) if one.name.startswith("data"))

    before = used()
    assert before >= 60 << 20
    started = time.monotonic()
    BACKEND.delete(ref, wait="space")
    assert before - used() >= 59 << 20
    # btrfs' cleaner is woken; left alone it looks only at the next periodic commit, 30 s later.
    assert time.monotonic() - started < 15


def test_waiting_for_space_has_an_end(disk):
    backend = make_backend(space_wait_s=0.3)
    volume = locate(backend, disk.point / "db")
    ref = take(backend, disk.point / "db", "held")
    # An open file keeps the subvolume from being cleaned.
    with (disk.point / ".snapmgr" / "held" / "file").open() as held:
        with pytest.raises(StorageError, match="not free after 300 ms") as caught:
            backend.delete(ref, wait="space")
        assert held.read() == "data"
        assert caught.value.hint
    assert backend.inventory((volume.pool,)) == ()
    BACKEND.delete(ref, wait="space")


def test_the_cleaner_is_woken_again_while_waiting(disk):
    ref = take(BACKEND, disk.point / "db", "held")
    held = (disk.point / ".snapmgr" / "held" / "file").open()
    release = threading.Timer(0.5, held.close)
    release.start()
    started = time.monotonic()
    BACKEND.delete(ref, wait="space")
    release.join()
    # By itself btrfs would look again at the next periodic commit, up to 30 s later.
    assert 0.4 < time.monotonic() - started < 12


def test_quotas_do_not_get_in_the_way(disk):
    run("btrfs", "quota", "enable", disk.point)
    ref = take(BACKEND, disk.point / "db", "with-quota")
    with attached(BACKEND, new_record(ref)) as clone:
        (clone / "file").write_text("x" * 100_000)
    BACKEND.delete(ref, wait="space")
    assert _names(disk) == set()


@pytest.mark.parametrize("flag", ["i", "a"])
def test_a_clone_of_an_immutable_subvolume_is_removed_and_nothing_else_is_changed(disk, flag):
    origin, snapshot = disk.point / "db", disk.point / ".snapmgr" / "locked"
    run("chattr", f"+{flag}", origin)
    try:
        ref = take(BACKEND, origin, "locked")
        with attached(BACKEND, new_record(ref)):
            pass
        assert _names(disk) == {"locked"}
        with pytest.raises(InUseError, match="immutable"):
            BACKEND.delete(ref)
        # A clone that nobody knows of, of a snapshot that somebody deleted by hand.
        BACKEND.attach(new_record(ref))
        assert all(flag in run("lsattr", "-d", path).split()[0] for path in (origin, snapshot))
        run("btrfs", "property", "set", "-f", snapshot, "ro", "false")
        run("chattr", f"-{flag}", snapshot)
        run("btrfs", "subvolume", "delete", snapshot)
        (debris,) = [one for one in BACKEND.inventory((ref.pool,)) if one.kind != "snapshot"]
        BACKEND.repair(debris)
        assert _names(disk) == set()
    finally:
        run("chattr", f"-{flag}", origin)
