"""btrfs: what needs no file system: names, classification, space, the library's absence."""

from __future__ import annotations

import builtins
import importlib
import sys
import uuid
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import snapmgr_btrfs
from snapmgr.api import MissingRequirementError, Mount, NotMine, Pool, StorageError, Target, Volume
from snapmgr_btrfs import backend, folder, inventory, kernel, library, locating, space, users

POOL = Pool(backend="btrfs", id=str(uuid.UUID(int=99)), hint="/dev/x")
ORIGIN = uuid.UUID(int=1).bytes
NONE = bytes(16)


@dataclass
class _Info:
    id: int = 300
    parent_id: int = 5
    flags: int = 1
    uuid: bytes = uuid.UUID(int=2).bytes
    parent_uuid: bytes = ORIGIN
    received_uuid: bytes = NONE
    otransid: int = 7
    ctransid: int = 6


def _classify(*entries, names=(), notes=None, top_has_uuid=True):
    all_names = [entry.name for entry in entries] + list(names)
    return list(inventory.classify(POOL, all_names, entries, notes or {}, top_has_uuid=top_has_uuid))


def _entry(name, **facts):
    return folder.Entry(name=name, info=_Info(**facts))


def test_a_read_only_snapshot_of_something_is_ours():
    (found,) = _classify(_entry("s1"), notes={"s1": b"note"})
    assert (found.kind, found.name, found.snapshot_id, found.note) == ("snapshot", "s1", "s1", b"note")
    assert found.ref.native_id == str(uuid.UUID(int=2))
    assert found.ref.volume_id == str(uuid.UUID(int=1))
    assert found.ref.pool == POOL


@pytest.mark.parametrize(
    "facts",
    [{"parent_uuid": NONE}, {"received_uuid": ORIGIN}, {"received_uuid": ORIGIN, "flags": 0}, {"uuid": NONE}],
)
def test_what_is_not_provably_ours_is_not_returned(facts):
    assert _classify(_entry("s1", **facts)) == []


def test_without_a_uuid_on_the_top_level_a_snapshot_without_parent_is_one_of_it():
    (found,) = _classify(_entry("s1", parent_uuid=NONE), top_has_uuid=False)
    assert found.ref.volume_id == f"{POOL.id}:5"


def test_a_writable_one_is_debris_with_its_reference():
    (found,) = _classify(_entry("s1", flags=0))
    assert found.kind == "debris"
    assert found.ref is not None
    assert found.why


def test_a_clone_belongs_to_its_snapshot_or_is_debris():
    snapshot = _entry("s1")
    clone = {"flags": 0, "uuid": uuid.UUID(int=3).bytes}
    mine = _entry("attach.0123456789abcdef", parent_uuid=uuid.UUID(int=2).bytes, **clone)
    lost = _entry("attach.00000000000000ff", parent_uuid=uuid.UUID(int=4).bytes, **clone)
    found = {one.name: one for one in _classify(snapshot, mine, lost)}
    assert found[mine.name].kind == "attachment"
    assert found[mine.name].record_id == "0123456789abcdef"
    assert found[mine.name].ref == found["s1"].ref
    assert found[lost.name].kind == "debris"
    assert found[lost.name].ref is None


def test_only_notes_without_a_snapshot_are_debris():
    names = ["s1.json", "gone.json", ".s1.12.tmp", "readme.txt", "attach.0123456789abcdef.json", "bad name.json"]
    found = _classify(_entry("s1"), names=names, notes={"gone": b"old"})
    debris = {one.name: one for one in found if one.kind == "debris"}
    assert set(debris) == {"gone.json", ".s1.12.tmp"}
    assert debris["gone.json"].note == b"old"


ID = st.from_regex(r"[A-Za-z0-9._-]{1,60}", fullmatch=True)


@given(ID)
def test_an_accepted_id_is_read_back_from_its_names_and_never_taken_for_something_else(snapshot_id):
    try:
        folder.check_snapshot_id(snapshot_id)
    except StorageError:
        return
    for name in (snapshot_id, f"{snapshot_id}@1", f"{snapshot_id}@12"):
        assert folder.snapshot_id_of(name) == snapshot_id
        assert folder.record_id_of(name) is None
        assert not folder.is_temporary(name)
        assert folder.noted_name(name) is None
        assert folder.noted_name(folder.note_name(name)) == name
        assert folder.snapshot_id_of(folder.note_name(name)) is None


@given(st.binary(min_size=8, max_size=8))
def test_a_clones_name_is_never_a_snapshots(raw):
    name = folder.clone_name(raw.hex())
    assert folder.record_id_of(name) == raw.hex()
    assert folder.snapshot_id_of(name) is None


def _volume(number, pool=POOL):
    return Volume(backend="btrfs", id=f"v{number}", pool=pool, path="/x", subpath="")


def test_names_are_numbered_only_where_a_pool_has_several_volumes():
    other = Pool(backend="btrfs", id="other", hint="")
    names = [one.name for one in folder.intents((_volume(1), _volume(2, other), _volume(3)), "s")]
    assert names == ["s@1", "s", "s@2"]
    assert [one.name for one in folder.intents((_volume(1),), "s")] == ["s"]


def _allocation(tmp_path, **spaces):
    base = tmp_path / "allocation"
    for name, numbers in spaces.items():
        (base / name).mkdir(parents=True)
        defaults = dict.fromkeys(("bytes_pinned", "bytes_reserved", "bytes_readonly", "bytes_may_use", "bytes_used"), 0)
        for key, value in (defaults | numbers).items():
            (base / name / key).write_text(f"{value}\n")
    (base / "global_rsv_size").write_text("1000\n")
    return tmp_path


def _devices(*unallocated):
    """Devices with so many bytes left to allocate, beside the reserved beginning."""
    return [kernel.Device("/dev/x", 1 << 30, (1 << 30) - (1 << 20) - left) for left in unallocated]


def test_mirrored_space_can_only_grow_where_enough_devices_have_room(tmp_path):
    pair = {"total_bytes": 1000, "disk_total": 2000, "bytes_used": 900}
    sysfs = _allocation(tmp_path, data={"total_bytes": 1000, "disk_total": 1000, "bytes_used": 500}, metadata=pair)
    (sysfs / "allocation/metadata/raid1").mkdir()
    data, metadata = space.read_spaces(sysfs, _devices(10_000, 0))
    assert (data.free_bytes, metadata.size_bytes) == (10_500, 1000)
    data, metadata = space.read_spaces(sysfs, _devices(10_000, 300))
    assert (data.size_bytes, metadata.size_bytes) == (11_300, 1300)
    assert space.mirrored_bytes([4, 4, 4], 2) == 6
    assert space.mirrored_bytes([10, 2, 1], 3) == 1
    assert space.mirrored_bytes([10, 5], 3) == 0
    assert space.mirrored_bytes([9, 8, 7, 1], 3) == 8


def test_unallocated_space_counts_for_each_kind_by_its_copies(tmp_path):
    sysfs = _allocation(
        tmp_path,
        data={"total_bytes": 10_000, "disk_total": 10_000, "bytes_used": 4000, "bytes_may_use": 500},
        metadata={"total_bytes": 2000, "disk_total": 4000, "bytes_used": 300, "bytes_may_use": 9999},
        system={"total_bytes": 100, "disk_total": 200},
    )
    data, metadata = space.read_spaces(sysfs, _devices(6000))
    assert (data.size_bytes, data.used_bytes, data.free_bytes) == (16_000, 4500, 11_500)
    assert (metadata.size_bytes, metadata.used_bytes) == (5000, 1300)


def test_mixed_block_groups_and_more_allocated_than_there_is(tmp_path):
    sysfs = _allocation(tmp_path, mixed={"total_bytes": 1000, "disk_total": 1000, "bytes_used": 5000})
    (mixed,) = space.read_spaces(sysfs, _devices(-9000))
    assert (mixed.name, mixed.size_bytes, mixed.free_bytes) == ("mixed", 1000, 0)
    with pytest.raises(StorageError, match="mixed space"):
        space.check_room((mixed,), "/dev/x")


def test_an_unmounted_file_system_has_no_space_to_read(tmp_path):
    with pytest.raises(StorageError, match="how full"):
        space.read_spaces(tmp_path / "absent", ())


def test_room_is_checked_for_data_and_metadata_apart():
    roomy = space.Space(name="data", size_bytes=1 << 30, used_bytes=0)
    tight = space.Space(name="metadata", size_bytes=10 << 20, used_bytes=8 << 20)
    space.check_room((roomy,), "/dev/x")
    with pytest.raises(StorageError, match=r"2.0 MiB of metadata") as caught:
        space.check_room((roomy, tight), "/dev/x")
    assert caught.value.hint


def test_a_quota_group_is_believed_only_while_it_is_consistent(tmp_path):
    group = tmp_path / "qgroups" / "0_257"
    group.mkdir(parents=True)
    (group / "exclusive").write_text("12345\n")
    assert space.quota_exclusive(tmp_path, 257) is None
    (tmp_path / "qgroups" / "inconsistent").write_text("0\n")
    assert space.quota_exclusive(tmp_path, 257) == 12345
    assert space.quota_exclusive(tmp_path, 258) is None
    (tmp_path / "qgroups" / "mode").write_text("squota\n")
    assert space.quota_exclusive(tmp_path, 257) is None
    (tmp_path / "qgroups" / "mode").write_text("qgroup\n")
    assert space.quota_exclusive(tmp_path, 257) == 12345
    (tmp_path / "qgroups" / "inconsistent").write_text("1\n")
    assert space.quota_exclusive(tmp_path, 257) is None


def test_a_missing_library_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "btrfsutil", None)
    reason = library.problem()
    assert "not installed" in reason.what
    assert "libbtrfsutil-dev" in reason.hint
    assert "snapmgr[btrfs]" in reason.hint
    with pytest.raises(MissingRequirementError, match="not installed"):
        library.load()


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("/x/btrfsutil.so: undefined symbol: btrfs_util_subvolume_is_valid", "btrfsutil==6.13"),
        ("libbtrfsutil.so.1: cannot open shared object file", "libbtrfsutil-dev"),
    ],
)
def test_a_library_that_does_not_load_is_told_from_a_missing_one(monkeypatch, said, hint):
    def fail(name):
        raise ImportError(said, name=name)

    monkeypatch.setattr(importlib, "import_module", fail)
    reason = library.problem()
    assert said in reason.what
    assert hint in reason.hint


def test_the_library_is_not_imported_with_the_package():
    # In this process other tests have imported it: look at a fresh import of all our modules without it.
    names = [name for name in sys.modules if name == "btrfsutil" or name.startswith("snapmgr_btrfs")]
    saved = {name: sys.modules.pop(name) for name in names}
    original = builtins.__import__

    def guard(name, *args, **kwargs):
        assert name != "btrfsutil"
        return original(name, *args, **kwargs)

    builtins.__import__ = guard
    try:
        importlib.import_module("snapmgr_btrfs")
        assert "btrfsutil" not in sys.modules
    finally:
        builtins.__import__ = original
        for name in [name for name in sys.modules if name.startswith("snapmgr_btrfs")]:
            del sys.modules[name]
        sys.modules.update(saved)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs", "x\0y"])
def test_the_folders_name_is_one_name(name):
    with pytest.raises(ValueError, match="folder"):
        snapmgr_btrfs.BtrfsConfig(folder=name)


def test_the_wait_for_space_is_positive():
    with pytest.raises(ValueError, match="space_wait_s"):
        snapmgr_btrfs.BtrfsConfig(space_wait_s=0)


@pytest.mark.parametrize(
    ("release", "version"), [("6.1.0-28-amd64", (6, 1)), ("5.10-rc1", (5, 10)), ("odd", (0, 0)), ("4.19.0", (4, 19))]
)
def test_kernel_versions(release, version):
    assert backend._version(release) == version


def _mount(number, parent, root, point, source="/dev/x", options=()):
    return Mount(
        id=number, parent_id=parent, device="0:9", root=root, point=point, fs_type="btrfs", source=source,
        super_options=options,
    )  # fmt: skip


def test_users_are_mounts_of_the_subvolume_of_a_part_of_it_and_mounts_in_it(monkeypatch):
    monkeypatch.setattr(users, "device_numbers", lambda _uuid: frozenset({1}))
    monkeypatch.setattr(users, "_is_on", lambda source, _numbers: source == "/dev/x")
    mounts = (
        _mount(1, 0, "/", "/top"),
        _mount(2, 0, "/.snapmgr/s1", "/as-root"),
        _mount(3, 0, "/.snapmgr/s1/part", "/a-part"),
        _mount(4, 0, "/renamed", "/by-id", options=("rw", "subvolid=300")),
        Mount(id=5, parent_id=1, device="0:1", root="/", point="/top/.snapmgr/s1/in", fs_type="tmpfs", source="t"),
        Mount(id=6, parent_id=1, device="0:1", root="/", point="/top/.snapmgr/s10/in", fs_type="tmpfs", source="t"),
        _mount(7, 0, "/.snapmgr/s10", "/another"),
        _mount(8, 0, "/.snapmgr/s1", "/other-disk", source="/dev/y"),
    )
    found = users.Users(POOL.id, lambda: mounts).of("/.snapmgr/s1", 300, idle=True)
    assert set(found) == {"/as-root", "/a-part", "/by-id", "/top/.snapmgr/s1/in"}


@pytest.mark.parametrize(
    ("path", "point", "subpath", "root"),
    [
        ("/srv/db/data", "/srv", "data", "/srv/db"),
        ("/srv/db", "/srv/db", "", "/srv/db"),
        ("/seen/b", "/seen", "a/b", "/seen/b"),
        ("/data", "/", "data", "/"),
        ("/a/data", "/", "data", "/a"),
        ("/m/data", "/m/data", "data", "/m/data"),
    ],
)
def test_where_the_subvolumes_own_folder_is_seen(path, point, subpath, root):
    mount = Mount(id=1, parent_id=0, device="0:9", root="/", point=point, fs_type="btrfs", source="/dev/x")
    assert locating._visible_root(Target(path=path, mount=mount), subpath) == root


def test_another_file_system_is_not_mine_and_the_library_is_not_needed_to_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "btrfsutil", None)
    mount = Mount(id=1, parent_id=0, device="8:1", root="/", point="/", fs_type="ext4", source="/dev/x")
    found = snapmgr_btrfs.BtrfsBackend(snapmgr_btrfs.BtrfsConfig(), None, None).locate(Target(path="/x", mount=mount))
    assert isinstance(found, NotMine)
    assert "ext4" in found.reason
