"""btrfs: from a path to its subvolume, on real mounts of all kinds."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec import structs

from snapmgr.api import MissingRequirementError, NotMine, StorageError
from snapmgr.system.blockdev import find_target
from snapmgr.system.mount import bind, mount_device, unmount
from support.btrfs import attached, btrfs_disk, locate, make_backend, make_subvolume, new_record, run, take
from support.crc32c import crc32c
from support.storage import loop_filesystem, work_folder

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")
BACKEND = make_backend()


@pytest.fixture(name="disk", scope="module")
def _disk():
    with btrfs_disk() as disk:
        yield disk


def _locate(path):
    return BACKEND.locate(find_target(str(path)))


def _show(path, key):
    lines = run("btrfs", "subvolume", "show", path).splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.strip().startswith(f"{key}:"))


def test_a_machine_that_has_all_lacks_nothing():
    assert BACKEND.missing() == ()


def test_a_subvolume_is_found_by_its_uuid(disk):
    path = make_subvolume(disk.point / "plain")
    volume = locate(BACKEND, path)
    assert volume.id == _show(path, "UUID")
    assert (volume.path, volume.subpath, volume.excluded, volume.warnings) == (str(path), "", (), ())
    assert volume.pool.id == run("findmnt", "-no", "UUID", disk.point).strip()
    assert volume.pool.hint == disk.device


def test_a_datadir_that_is_a_folder_has_its_path_inside_recorded(disk):
    origin = make_subvolume(disk.point / "folders")
    (origin / "srv" / "mysql data").mkdir(parents=True)
    volume = locate(BACKEND, origin / "srv" / "mysql data")
    assert volume.id == _show(origin, "UUID")
    assert (volume.path, volume.subpath) == (str(origin), "srv/mysql data")


def test_nested_subvolumes_and_mounts_below_the_target_are_excluded_and_no_others(disk):
    origin = make_subvolume(disk.point / "nesting")
    (origin / "data" / "deep").mkdir(parents=True)
    (origin / "data2").mkdir()
    for name in ("data/one", "data/deep/two", "data2/beside", "data/one/inner"):
        make_subvolume(origin / name)
    (origin / "data" / "mounted").mkdir()
    bind("/usr/share", str(origin / "data" / "mounted"), read_only=True)
    try:
        volume = locate(BACKEND, origin / "data")
    finally:
        unmount(str(origin / "data" / "mounted"))
    expected = ("deep/two", "mounted", "one", "one/inner")
    assert volume.excluded == tuple(str(origin / "data" / name) for name in expected)
    whole = locate(BACKEND, origin)
    assert set(whole.excluded) == {
        str(origin / name) for name in ("data/deep/two", "data/one", "data/one/inner", "data2/beside")
    }


@pytest.mark.needs("ext4")
def test_a_subvolume_mounted_on_an_ext4_parent_is_snapshotted_and_comes_back(disk):
    make_subvolume(disk.point / "@mysql", ibdata="pages")
    with loop_filesystem("ext4", 32 << 20) as parent:
        datadir = parent.point / "var" / "lib" / "mysql"
        mount_device(disk.device, str(datadir), fs_type="btrfs", options=("subvol=@mysql",))
        try:
            volume = locate(BACKEND, datadir)
            assert (volume.path, volume.subpath) == (str(datadir), "")
            assert volume.id == _show(disk.point / "@mysql", "UUID")
            ref = take(BACKEND, datadir, "on-ext4")
            (datadir / "ibdata").write_text("changed")
            assert not (datadir / ".snapmgr").exists()
        finally:
            unmount(str(datadir))
    with attached(BACKEND, new_record(ref)) as clone:
        assert (clone / "ibdata").read_text() == "pages"
    BACKEND.delete(ref)


def test_a_mounted_part_of_a_subvolume_is_located_with_its_whole_path_inside(disk):
    origin = make_subvolume(disk.point / "partly")
    (origin / "a" / "b").mkdir(parents=True)
    make_subvolume(origin / "a" / "b" / "nested")
    with work_folder() as folder:
        bind(str(origin / "a"), str(folder / "seen"), read_only=True)
        try:
            volume = locate(BACKEND, folder / "seen" / "b")
        finally:
            unmount(str(folder / "seen"))
    assert volume.id == _show(origin, "UUID")
    assert volume.subpath == "a/b"
    assert volume.path == str(folder / "seen" / "b")
    assert volume.excluded == (str(folder / "seen" / "b" / "nested"),)


def test_the_top_level_itself_is_refused_but_a_folder_in_it_is_not(disk):
    refused = _locate(disk.point)
    assert isinstance(refused, NotMine)
    assert ".snapmgr" in refused.reason
    assert refused.hint
    (disk.point / "folder").mkdir()
    (disk.point / "folder" / "file").write_text("data")
    ref = take(BACKEND, disk.point / "folder", "of-the-top")
    assert locate(BACKEND, disk.point / "folder").subpath == "folder"
    # The snapshot of the top level shows our folder, but no snapshot in it: subvolumes become empty folders.
    assert (disk.point / ".snapmgr" / "of-the-top" / "folder" / "file").read_text() == "data"
    inner = disk.point / ".snapmgr" / "of-the-top" / ".snapmgr"
    assert [list(entry.iterdir()) for entry in inner.iterdir() if entry.is_dir()] in ([], [[]])
    BACKEND.delete(ref)


def test_nocow_is_recognised_in_folders_in_files_and_in_the_mount(disk):
    folder = make_subvolume(disk.point / "nocow")
    assert locate(BACKEND, folder).warnings == ()
    (folder / "db1").mkdir()
    run("chattr", "+C", folder / "db1")
    (folder / "db1" / "t1.ibd").write_text("x")
    (warning,) = locate(BACKEND, folder).warnings
    assert warning.startswith("2 files or folders")
    assert "checksums" in warning
    with btrfs_disk(mount_options=("nodatacow",)) as other:
        (warning,) = locate(BACKEND, make_subvolume(other.point / "db")).warnings
        assert "nodatacow" in warning


@pytest.mark.needs("ext4")
def test_another_file_system_is_not_mine():
    with loop_filesystem("ext4", 32 << 20) as other:
        found = _locate(other.point)
    assert isinstance(found, NotMine)
    assert "ext4" in found.reason


def test_a_read_only_mount_of_a_writable_file_system_can_be_snapshotted(disk):
    origin = make_subvolume(disk.point / "shown", file="data")
    with work_folder() as folder:
        bind(str(origin), str(folder / "seen"), read_only=True)
        try:
            ref = take(BACKEND, folder / "seen", "of-read-only-mount")
        finally:
            unmount(str(folder / "seen"))
    assert ref.volume_id == _show(origin, "UUID")
    BACKEND.delete(ref)


def test_a_read_only_file_system_is_located_and_left_read_only():
    with btrfs_disk() as disk:
        origin = make_subvolume(disk.point / "db")
        ref = take(BACKEND, origin, "before")
        run("mount", "-o", "remount,ro", disk.point)
        volume = locate(BACKEND, origin)
        assert [found.name for found in BACKEND.inventory((volume.pool,))] == ["before"]
        for act in (lambda: BACKEND.arm((volume,), "s"), lambda: BACKEND.delete(ref)):
            with pytest.raises(StorageError, match="mounted read-only") as caught:
                act()
            assert "remount,rw" in caught.value.hint
        assert (
            " ro,"
            in next(
                line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {disk.point} " in line
            ).partition(" - ")[2]
        )


def test_the_place_of_a_left_out_subvolume_is_refused(disk):
    origin = make_subvolume(disk.point / "outer")
    make_subvolume(origin / "inner")
    run("btrfs", "subvolume", "snapshot", origin, disk.point / "copy")
    found = _locate(disk.point / "copy" / "inner")
    assert isinstance(found, NotMine)
    assert "left out" in found.reason


def test_a_received_subvolume_is_refused_because_its_snapshots_would_look_received(disk):
    make_subvolume(disk.point / "sent", file="data")
    run("btrfs", "property", "set", disk.point / "sent", "ro", "true")
    (disk.point / "got").mkdir()
    stream = disk.image.parent / "stream"
    run("btrfs", "send", "-f", stream, disk.point / "sent")
    run("btrfs", "receive", "-f", stream, disk.point / "got")
    run("btrfs", "subvolume", "snapshot", "-r", disk.point / "got" / "sent", disk.point / "again")
    for received in (disk.point / "got" / "sent", disk.point / "again"):
        assert _show(received, "Received UUID") != "-"
        found = _locate(received)
        assert isinstance(found, NotMine)
        assert "btrfs receive" in found.reason
    # What the hint says helps.
    run("btrfs", "subvolume", "snapshot", disk.point / "got" / "sent", disk.point / "ordinary")
    ref = take(BACKEND, disk.point / "ordinary", "of-ordinary")
    assert [found.ref for found in BACKEND.inventory((ref.pool,))] == [ref]
    BACKEND.delete(ref)


def test_without_root_the_right_is_named(disk):
    origin = make_subvolume(disk.point / "rootless")
    (origin / "folder").mkdir()
    target = find_target(str(origin / "folder"))
    # The child must be able to walk to it.
    assert target.path.startswith("/dev/shm/")
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        code = 1
        try:
            BACKEND.locate(target)
        except MissingRequirementError as error:
            code = 0 if "root" in error.message and error.hint else 2
        if not any("root" in reason.what for reason in BACKEND.missing()):
            code = 3
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_locating_and_looking_change_nothing_on_disk():
    with btrfs_disk() as disk:
        origin = make_subvolume(disk.point / "db", file="data")
        run("sync")
        before = run("btrfs", "inspect-internal", "dump-super", disk.device)
        volume = locate(BACKEND, origin)
        BACKEND.headroom(volume)
        BACKEND.capabilities((volume,))
        assert BACKEND.inventory((volume.pool,)) == ()
        run("sync")
        assert run("btrfs", "inspect-internal", "dump-super", disk.device) == before
        assert not (disk.point / ".snapmgr").exists()


def test_a_top_level_without_uuid_has_an_id_and_its_snapshots_are_found():
    with btrfs_disk() as disk:
        (disk.point / "data").mkdir()
        (disk.point / "data" / "file").write_text("old")
        uuid = _show(disk.point, "UUID")
        unmount(str(disk.point))
        _wipe_top_level_uuid(Path(disk.device), bytes.fromhex(uuid.replace("-", "")))
        run("mount", disk.device, disk.point)
        volume = locate(BACKEND, disk.point / "data")
        assert volume.id == f"{volume.pool.id}:5"
        ref = take(BACKEND, disk.point / "data", "of-old-top")
        assert ref.volume_id == volume.id
        (found,) = BACKEND.inventory((volume.pool,))
        assert (found.kind, found.ref) == ("snapshot", ref)
        with attached(BACKEND, new_record(ref)) as clone:
            assert (clone / "data" / "file").read_text() == "old"
        BACKEND.delete(ref)
        assert BACKEND.inventory((volume.pool,)) == ()


def _wipe_top_level_uuid(device, uuid):
    """Do what mkfs.btrfs did before 2018: leave the top level's UUID out of the root tree's item, in both copies."""
    data, node = bytearray(device.read_bytes()), 16384
    wiped = 0
    for start in range(0, len(data), node):
        block = data[start : start + node]
        # btrfs_header: checksum, fsid, address, flags, chunk tree's UUID, generation, owner (1: the root tree).
        if int.from_bytes(block[88:96], "little") != 1 or uuid not in block:
            continue
        block = bytearray(block.replace(uuid, bytes(16)))
        block[0:4] = crc32c(bytes(block[32:])).to_bytes(4, "little")
        data[start : start + node] = block
        wiped += 1
    assert wiped >= 1
    device.write_bytes(data)


def test_a_datadir_may_have_any_name(disk):
    origin = make_subvolume(disk.point / "with space\n and ünicode")
    (origin / "däta dir").mkdir()
    volume = locate(BACKEND, origin / "däta dir")
    assert volume.subpath == "däta dir"
    ref = take(BACKEND, origin / "däta dir", "odd-names")
    BACKEND.delete(ref)


def test_a_copy_of_the_disk_is_not_taken_for_it():
    with btrfs_disk(128) as disk, work_folder(Path("/dev/shm")) as folder:
        volume = locate(BACKEND, make_subvolume(disk.point / "db"))
        unmount(str(disk.point))
        shutil.copyfile(disk.image, folder / "copy")
        copy = run("losetup", "--find", "--show", folder / "copy").strip()
        try:
            run("mount", disk.device, disk.point)
            # The hint leads to the copy; the mounted file system is the other one.
            ref = take(BACKEND, disk.point / "db", "on-the-mounted-one")
            pool = structs.replace(volume.pool, hint=copy)
            assert [found.ref for found in BACKEND.inventory((pool,))] == [structs.replace(ref, pool=pool)]
            assert (disk.point / ".snapmgr" / "on-the-mounted-one").is_dir()
        finally:
            subprocess.run(["losetup", "--detach", copy], check=True)
