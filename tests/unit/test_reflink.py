"""What the reflink backend decides, without any storage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.api import MissingRequirementError, Mount, Pool, StorageError, Volume
from snapmgr_reflink import kernel, tree
from snapmgr_reflink.armed import check_rights, check_room, forecast_s
from snapmgr_reflink.place import Place, mounted_inside
from snapmgr_reflink.survey import Survey, survey


def _mount(number: int, point: str, *, device: str = "8:1", root: str = "/") -> Mount:
    return Mount(id=number, parent_id=1, device=device, root=root, point=point, fs_type="xfs", source="/dev/sda1")


def test_holder_is_the_longest_and_latest() -> None:
    mounts = (_mount(1, "/"), _mount(2, "/srv"), _mount(3, "/srv", device="8:2"), _mount(4, "/srv/data2"))
    assert Place.holder("/srv/data", mounts).id == 3
    assert Place.holder("/srv/data2", mounts).id == 4
    assert Place.holder("/srv/data2/x", mounts).id == 4
    assert Place.holder("/etc", mounts).id == 1
    with pytest.raises(StorageError):
        Place.holder("/etc", ())


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (_mount(9, "/srv/store/box/data/x", device="0:9"), "/srv/store/box/data/x"),
        (_mount(9, "/srv/store/box", device="0:9"), "/srv/store/box"),
        (_mount(9, "/srv/store/box2", device="0:9"), None),
        (_mount(9, "/mnt", root="/store/box/data"), "/mnt"),
        (_mount(9, "/mnt", root="/store/box"), "/mnt"),
        (_mount(9, "/mnt", root="/store/box2"), None),
        (_mount(9, "/mnt", root="/store/box/data", device="8:2"), None),
        # The whole file system is mounted once more: nobody uses this box by that.
        (_mount(9, "/mnt", root="/"), None),
    ],
)
def test_mounted_inside(other: Mount, found: str | None) -> None:
    mounts = (_mount(1, "/", device="8:9"), _mount(2, "/srv"), other)
    assert mounted_inside("/srv/store/box", mounts) == found


def test_mounted_inside_a_mounted_subfolder() -> None:
    # /srv shows the folder @srv of its file system: paths in the table are those of the file system.
    mounts = (_mount(1, "/", device="8:9"), _mount(2, "/srv", root="/@srv"), _mount(3, "/mnt", root="/@srv/store/box"))
    assert mounted_inside("/srv/store/box", mounts) == "/mnt"


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(0, 10**6), st.integers(0, 2**40))
def test_forecast_grows_with_everything(files: int, folders: int, extents: int, allocated: int) -> None:
    less = Survey(files=files, folders=folders, extents=extents, allocated_bytes=allocated)
    more = Survey(files=files + 1, folders=folders, extents=extents + 10, allocated_bytes=allocated + 4096)
    for method in ("reflink", "copy"):
        assert 0 < forecast_s(less, method) < forecast_s(more, method)
    assert forecast_s(less, "reflink") <= forecast_s(less, "copy")


def test_forecast_meets_the_measurement() -> None:
    # 300 files: 11 ms in one extent each, 950 ms in 223 extents each (XFS).
    assert 0.011 <= forecast_s(Survey(files=300, folders=1, extents=300), "reflink") <= 0.04
    assert 0.9 <= forecast_s(Survey(files=300, folders=1, extents=300 * 223), "reflink") <= 1.3


def test_obstacles_are_named() -> None:
    volume = Volume(backend="reflink", id="x", pool=Pool(backend="reflink", id="/s", hint=""), path="/d", subpath="")
    seen = Survey()
    check_rights(volume, seen)
    for number in range(100):
        seen.hinder(f"file-{number}", "cannot be read by this user")
    with pytest.raises(MissingRequirementError, match="file-0 cannot be read") as caught:
        check_rights(volume, seen)
    assert len(str(caught.value)) < 1000


def test_room_is_checked_by_method(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        huge = Survey(files=1, folders=1, extents=1, allocated_bytes=1 << 60)
        check_room(fd, str(tmp_path), huge, "reflink")
        with pytest.raises(StorageError, match="free"):
            check_room(fd, str(tmp_path), huge, "copy")
    finally:
        os.close(fd)


def test_survey_counts(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a", "folder/b", "folder/empty"):
        (tmp_path / name).write_bytes(b"" if name.endswith("empty") else b"x" * 10_000)
    (tmp_path / "link").symlink_to("a")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        seen = survey(fd, extents=True)
    finally:
        os.close(fd)
    assert (seen.files, seen.folders, seen.excluded, seen.obstacles) == (4, 2, [], [])
    assert seen.allocated_bytes == sum((tmp_path / name).stat().st_blocks * 512 for name in ("a", "folder/b"))


@pytest.mark.parametrize("path", ["plain", "\udcff\udcfe", "new\nline"])
def test_any_name_can_be_shown(path: str) -> None:
    tree.shown(path).encode()


def test_open_beneath_follows_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        os.close(kernel.open_beneath("file", fd, os.O_RDONLY))
        with pytest.raises(OSError, match="symbolic links"):
            kernel.open_beneath("link", fd, os.O_RDONLY)
        with pytest.raises(FileNotFoundError):
            kernel.open_beneath("none", fd, os.O_RDONLY)
    finally:
        os.close(fd)


def test_rename_new_replaces_nothing(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(FileExistsError):
            kernel.rename_new("one", "two", fd)
        kernel.rename_new("one", "three", fd)
    finally:
        os.close(fd)
    assert sorted(os.listdir(tmp_path)) == ["three", "two"]
