"""btrfs: what is ours in the folder and what is not; pools that are unmounted, moved or gone; notes and attachments."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from msgspec import structs

from snapmgr.api import InUseError, NotFoundError, Pool, StorageError
from snapmgr.system.mount import mount_device, unmount
from snapmgr_btrfs import kernel, library
from snapmgr_btrfs.folder import look, subvolumes
from support.btrfs import attached, btrfs_disk, locate, make_backend, make_subvolume, new_record, run, take

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")
BACKEND = make_backend()


@pytest.fixture(name="disk")
def _disk():
    with btrfs_disk() as disk:
        yield disk


@pytest.fixture(name="origin")
def _origin(disk):
    return make_subvolume(disk.point / "db", file="data")


@pytest.fixture(name="folder")
def _folder(disk, origin):
    take(BACKEND, origin, "first")
    return disk.point / ".snapmgr"


def _found(disk):
    pool = locate(BACKEND, disk.point / "db").pool
    return {found.name: found for found in BACKEND.inventory((pool,))}


def test_an_unused_pool_is_empty_and_an_absent_one_is_an_error(disk, origin):
    assert _found(disk) == {}
    del origin
    absent = Pool(backend="btrfs", id="11111111-2222-3333-4444-555555555555", hint=disk.device)
    with pytest.raises(StorageError, match="is not there") as caught:
        BACKEND.inventory((absent,))
    assert "holds another file system" in caught.value.message


def test_foreign_and_received_subvolumes_and_plain_things_are_not_returned(disk, origin, folder):
    run("btrfs", "subvolume", "create", folder / "foreign")
    run("btrfs", "property", "set", folder / "foreign", "ro", "true")
    run("btrfs", "subvolume", "snapshot", "-r", origin, disk.point / "sent")
    run("btrfs", "send", "-f", disk.image.parent / "stream", disk.point / "sent")
    run("btrfs", "receive", "-f", disk.image.parent / "stream", folder)
    (folder / "plain-folder").mkdir()
    (folder / "plain-file").write_text("x")
    (folder / "link").symlink_to(origin)
    (folder / "attach.0123456789abcdef").mkdir()
    run("btrfs", "subvolume", "create", folder / "attach.fedcba9876543210")
    run("btrfs", "subvolume", "snapshot", "-r", origin, folder / "bad name")
    assert set(_found(disk)) == {"first"}
    assert _found(disk)["first"].kind == "snapshot"
    assert (folder / "sent" / "file").exists()


def test_one_search_finds_what_opening_each_finds_and_only_in_the_folder_itself(disk, origin, folder, monkeypatch):
    refs = {take(BACKEND, origin, f"number-{number}") for number in range(4)}
    take(BACKEND, origin, "gone")
    (folder / "inner").mkdir()
    for place in (folder / "inner", disk.point):
        run("btrfs", "subvolume", "snapshot", "-r", origin, place / "elsewhere")
    run("btrfs", "subvolume", "snapshot", origin, folder / "odd")
    (folder / "odd").rename(os.fsdecode(os.fsencode(folder) + b"/odd-\xff"))
    # Its space is not free yet.
    run("btrfs", "subvolume", "delete", folder / "gone")
    lib = library.load()
    fd = os.open(folder, os.O_RDONLY)
    try:
        for most_bytes in (1 << 10, kernel._SEARCH_BUFFER):  # two of them in a call; all
            monkeypatch.setattr(kernel, "_SEARCH_BUFFER", most_bytes)
            entries = subvolumes(lib, fd)
            assert [entry.name for entry in entries] == ["first", *(f"number-{n}" for n in range(4)), "odd-\udcff"]
            for entry in entries:
                opened = look(lib, fd, entry.name)
                for name in kernel.Subvolume.__struct_fields__:
                    assert getattr(entry.info, name) == getattr(opened.info, name), name
    finally:
        os.close(fd)
    assert {found.ref for found in _found(disk).values()} == refs | {_found(disk)["first"].ref}


def test_a_snapshot_made_writable_is_debris_and_is_neither_attached_nor_repaired_away(disk, folder):
    ref = _found(disk)["first"].ref
    run("btrfs", "property", "set", folder / "first", "ro", "false")
    (folder / "first" / "file").write_text("somebody's work")
    found = _found(disk)["first"]
    assert (found.kind, found.ref) == ("debris", ref)
    assert "writable" in found.why
    for writable in (True, False):
        with pytest.raises(StorageError, match="made writable"):
            BACKEND.attach(new_record(ref, writable=writable))
    with pytest.raises(StorageError, match="not deleted") as caught:
        BACKEND.repair(found)
    assert "btrfs subvolume delete" in caught.value.hint
    assert (folder / "first" / "file").read_text() == "somebody's work"
    # Asked for by its UUID, it goes: it is what we made.
    BACKEND.delete(ref)
    assert not (folder / "first").exists()


def test_a_renamed_snapshot_is_found_and_deleted_by_its_uuid(disk, folder):
    ref = _found(disk)["first"].ref
    (folder / "first").rename(folder / "renamed")
    found = _found(disk)["renamed"]
    assert (found.kind, found.ref.native_id) == ("snapshot", ref.native_id)
    with attached(BACKEND, new_record(ref)) as clone:
        assert (clone / "file").read_text() == "data"
    BACKEND.delete(ref)
    assert _found(disk) == {}


def test_snapshots_stay_when_their_origin_is_deleted(disk, folder, origin):
    found = _found(disk)["first"]
    run("btrfs", "subvolume", "delete", origin)
    (again,) = BACKEND.inventory((found.pool,))
    assert again == found
    with attached(BACKEND, new_record(found.ref)) as clone:
        assert (clone / "file").read_text() == "data"
    BACKEND.delete(found.ref)
    assert list(folder.iterdir()) == []


def test_notes_are_stored_replaced_and_left_over_ones_cleared(disk, folder):
    ref = _found(disk)["first"].ref
    BACKEND.annotate(ref, b"one")
    BACKEND.annotate(ref, b"\x00two" * 1000)
    assert _found(disk)["first"].note == b"\x00two" * 1000
    with pytest.raises(StorageError, match="at most"):
        BACKEND.annotate(ref, b"x" * (64 * 1024 + 1))
    BACKEND.annotate(ref, b"x" * 64 * 1024)
    assert len(_found(disk)["first"].note) == 64 * 1024
    (folder / "gone.json").write_bytes(b"an orphan")  # perhaps of a snapshot that was moved
    (folder / ".other.99999999.tmp").write_bytes(b"half")
    (folder / "unrelated.txt").write_bytes(b"not ours")
    debris = [found for found in _found(disk).values() if found.kind == "debris"]
    assert {found.name: found.note for found in debris} == {"gone.json": b"an orphan", ".other.99999999.tmp": None}
    assert all(found.why for found in debris)
    for found in (*debris, *debris):
        BACKEND.repair(found)
    assert set(_found(disk)) == {"first"}
    assert (folder / "unrelated.txt").exists()
    assert (folder / "first.json").exists()
    BACKEND.delete(ref)
    assert {path.name for path in folder.iterdir()} == {"unrelated.txt"}


def test_a_note_is_not_orphaned_while_its_snapshot_is_there_under_a_name_that_ends_alike(disk, folder, origin):
    take(BACKEND, origin, "first.json2")
    BACKEND.annotate(_found(disk)["first.json2"].ref, b"n")
    assert {found.kind for found in _found(disk).values()} == {"snapshot"}
    assert (folder / "first.json2.json").read_bytes() == b"n"


def test_what_is_gone_cannot_be_annotated_attached_or_measured(disk, folder):
    ref = _found(disk)["first"].ref
    run("btrfs", "subvolume", "delete", folder / "first")
    for act in (
        lambda: BACKEND.annotate(ref, b"x"),
        lambda: BACKEND.attach(new_record(ref)),
        lambda: BACKEND.attach(new_record(ref, writable=False)),
        lambda: BACKEND.usage(ref),
        lambda: BACKEND.usage(ref, exact=True),
    ):
        with pytest.raises(NotFoundError, match="first"):
            act()
    # Another snapshot under the name is not it, either.
    run("btrfs", "subvolume", "snapshot", "-r", disk.point / "db", folder / "first")
    with pytest.raises(NotFoundError):
        BACKEND.attach(new_record(ref))


def test_a_clone_is_written_and_the_original_never_changes(disk, folder):
    ref = _found(disk)["first"].ref
    record = new_record(ref)
    with attached(BACKEND, record) as clone:
        (clone / "file").write_text("changed in the clone")
        found = _found(disk)[f"attach.{record.id}"]
        assert (found.kind, found.record_id, found.ref, found.snapshot_id) == ("attachment", record.id, ref, "first")
    assert (folder / "first" / "file").read_text() == "data"
    assert set(_found(disk)) == {"first"}


def test_a_read_only_attachment_is_the_snapshot_itself(disk, folder):
    ref = _found(disk)["first"].ref
    record = new_record(ref, writable=False)
    with attached(BACKEND, record) as view:
        assert (view / "file").read_text() == "data"
        with pytest.raises(OSError, match="Read-only"):
            (view / "file").write_text("x")
        with pytest.raises(InUseError, match="is mounted"):
            BACKEND.delete(ref)
    assert {path.name for path in folder.iterdir()} == {"first"}


def test_the_same_record_is_not_attached_twice(disk, folder):
    record = new_record(_found(disk)["first"].ref)
    BACKEND.attach(record)
    with pytest.raises(StorageError, match="exists already"):
        BACKEND.attach(record)
    BACKEND.detach(record)
    BACKEND.detach(record)
    assert {path.name for path in folder.iterdir()} == {"first"}


def test_a_clone_without_its_snapshot_is_debris_and_repaired_once_nobody_uses_it(disk, folder):
    ref = _found(disk)["first"].ref
    record = new_record(ref)
    attachment = BACKEND.attach(record)
    run("btrfs", "subvolume", "delete", folder / "first")
    (found,) = _found(disk).values()
    assert (found.kind, found.record_id) == ("debris", record.id)
    point = str(disk.image.parent / "clone")
    mount_device(attachment.device, point, fs_type="btrfs", options=attachment.options)
    with pytest.raises(InUseError, match=point):
        BACKEND.repair(found)
    unmount(point)
    BACKEND.repair(found)
    BACKEND.repair(found)
    assert _found(disk) == {}


def test_a_detach_after_a_crash_right_after_attach(disk, folder):
    record = new_record(_found(disk)["first"].ref)
    child = os.fork()
    if child == 0:
        BACKEND.attach(record)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert (folder / f"attach.{record.id}").is_dir()
    BACKEND.detach(record)
    assert {path.name for path in folder.iterdir()} == {"first"}


def test_a_foreign_clone_under_our_name_is_not_detached(disk, folder, origin):
    ref = _found(disk)["first"].ref
    record = new_record(ref)
    run("btrfs", "subvolume", "snapshot", origin, folder / f"attach.{record.id}")
    with pytest.raises(StorageError, match="not a clone of"):
        BACKEND.detach(record)
    assert (folder / f"attach.{record.id}" / "file").exists()


def test_subvolumes_that_somebody_made_in_a_clone_survive_the_detach(disk, folder):
    record = new_record(_found(disk)["first"].ref)
    BACKEND.attach(record)
    make_subvolume(folder / f"attach.{record.id}" / "inner", file="work")
    with pytest.raises(StorageError, match="did not make") as caught:
        BACKEND.detach(record)
    assert "btrfs subvolume list" in caught.value.hint
    assert (folder / f"attach.{record.id}" / "inner" / "file").read_text() == "work"
    run("btrfs", "subvolume", "delete", folder / f"attach.{record.id}" / "inner")
    BACKEND.detach(record)
    assert set(_found(disk)) == {"first"}


@contextmanager
def _unmounted(disk):
    run("umount", disk.point)
    try:
        yield
    finally:
        run("mount", disk.device, disk.point)


def test_an_unmounted_file_system_is_found_by_its_hint_or_by_a_search(disk, folder):
    found = _found(disk)["first"]
    assert folder.exists()
    record = new_record(found.ref)
    with _unmounted(disk):
        assert BACKEND.inventory((found.pool,)) == (found,)
        for hint in ("/dev/loop-that-was", "/no/such/thing", "", "/etc/passwd"):
            pool = structs.replace(found.pool, hint=hint)
            assert [item.name for item in BACKEND.inventory((pool,))] == ["first"]
        assert BACKEND.attach(record).device == disk.device
        BACKEND.annotate(found.ref, b"while unmounted")
        BACKEND.detach(record)
        BACKEND.delete(found.ref, wait="space")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o1777])
def test_a_folder_that_others_may_enter_is_refused(disk, folder, mode):
    folder.chmod(mode)
    volume = locate(BACKEND, disk.point / "db")
    for act in (lambda: BACKEND.inventory((volume.pool,)), lambda: BACKEND.arm((volume,), "second")):
        with pytest.raises(StorageError, match="open to others") as caught:
            act()
        assert "chmod 0700" in caught.value.hint


def test_a_folder_of_another_user_a_symlink_and_a_file_are_refused(disk, origin):
    volume = locate(BACKEND, origin)
    place = disk.point / ".snapmgr"
    place.mkdir(0o700)
    os.chown(place, 65534, 65534)
    with pytest.raises(StorageError, match="open to others"):
        BACKEND.arm((volume,), "s")
    place.rmdir()
    (disk.point / "elsewhere").mkdir(0o700)
    place.symlink_to("elsewhere")
    with pytest.raises(StorageError, match="not a folder that snapmgr can use"):
        BACKEND.arm((volume,), "s")
    place.unlink()
    place.write_text("a file")
    with pytest.raises(StorageError, match="not a folder that snapmgr can use"):
        BACKEND.inventory((volume.pool,))
    assert list((disk.point / "elsewhere").iterdir()) == []


def test_the_folder_may_be_a_subvolume_and_have_another_name(disk, origin):
    backend = make_backend(folder="@snapshots")
    make_subvolume(disk.point / "@snapshots").chmod(0o700)
    ref = take(backend, origin, "in-a-subvolume")
    assert [found.ref for found in backend.inventory((ref.pool,))] == [ref]
    backend.delete(ref)
    assert not (disk.point / ".snapmgr").exists()


def test_many_at_once_do_not_disturb_each_other(origin, folder):
    errors = []

    def work(number):
        try:
            ref = take(BACKEND, origin, f"parallel-{number}")
            BACKEND.annotate(ref, b"note")
            assert ref in {found.ref for found in BACKEND.inventory((ref.pool,))}
            record = new_record(ref)
            BACKEND.attach(record)
            BACKEND.detach(record)
            BACKEND.delete(ref)
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {path.name for path in folder.iterdir()} == {"first"}


def test_many_at_once_on_an_unmounted_file_system(disk, folder):
    # Private mounts come and go, read-only and read-write, and each may be the first or the last one.
    ref = _found(disk)["first"].ref
    script = (
        "import sys, pickle\nfrom support.btrfs import *\nref = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "backend = make_backend()\n"
        "for turn in range(6):\n"
        "    backend.inventory((ref.pool,))\n    record = new_record(ref)\n"
        "    backend.attach(record)\n    backend.detach(record)\n    backend.usage(ref, exact=True)\n"
    )
    root = os.getcwd()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((root, f"{root}/backends", f"{root}/tests"))}
    command = [sys.executable, "-c", script, pickle.dumps(ref).hex()]
    with _unmounted(disk):
        workers = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(4)]
        said = [worker.communicate()[1] for worker in workers]
    assert said == [""] * 4
    assert {path.name for path in folder.iterdir()} == {"first"}
