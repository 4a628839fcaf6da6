"""The room of the machine: system calls, paths and the mount table."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from snapmgr.contract.errors import StorageError
from snapmgr.contract.records import Mount
from snapmgr.system import kernel
from snapmgr.system.filesystem import identify
from snapmgr.system.paths import holder, mounted_inside, shown


def _mount(number: int, point: str, *, device: str = "8:1", root: str = "/") -> Mount:
    return Mount(id=number, parent_id=1, device=device, root=root, point=point, fs_type="xfs", source="/dev/sda1")


def test_holder_is_the_longest_and_latest() -> None:
    mounts = (_mount(1, "/"), _mount(2, "/srv"), _mount(3, "/srv", device="8:2"), _mount(4, "/srv/data2"))
    assert holder("/srv/data", mounts).id == 3
    assert holder("/srv/data2", mounts).id == 4
    assert holder("/srv/data2/x", mounts).id == 4
    assert holder("/etc", mounts).id == 1
    with pytest.raises(StorageError):
        holder("/etc", ())


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


@pytest.mark.parametrize("path", ["plain", "\udcff\udcfe", "new\nline"])
def test_any_name_can_be_shown(path: str) -> None:
    shown(path).encode()


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


def test_a_file_system_that_does_not_tell_extents() -> None:
    fd = os.memfd_create("nothing")
    try:
        with pytest.raises(OSError, match="not supported") as caught:
            list(kernel.extents(fd))
        assert caught.value.errno == errno.EOPNOTSUPP
        assert kernel.count_extents(fd) == 1
    finally:
        os.close(fd)


def test_identity_of_a_file_system_is_the_same_in_all_its_folders(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    found = []
    for folder in (tmp_path, tmp_path / "below"):
        fd = os.open(folder, os.O_RDONLY)
        found.append(identify(fd))
        os.close(fd)
    assert found[0] == found[1]
    assert found[0].id
