"""Reflink copies on btrfs: subvolumes and NOCOW."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.api import StorageError
from snapmgr.system.command import CommandRunner
from snapmgr.system.kernel import is_nocow
from snapmgr.testing import FolderLab, fingerprint
from snapmgr.testing.lab import new_record
from snapmgr.testing.trees import same
from snapmgr_reflink import ReflinkBackend, ReflinkConfig
from support.reflink import SIZE_BYTES
from support.storage import loop_filesystem

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.needs("root", "loop", "xfs", "btrfs")
_RUNNER = CommandRunner()


@pytest.fixture(scope="module")
def btrfs() -> Iterator[Path]:
    with loop_filesystem("btrfs", SIZE_BYTES) as made:
        yield made.point


def test_nocow_files_are_cloned_as_such(btrfs: Path) -> None:
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
            assert [_nocow(root / name) for name in ("cow", "nocow", "nocow/file", "nocow/cow-in-nocow-folder")] == [
                False,
                True,
                True,
                False,
            ]


def _nocow(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return is_nocow(fd)
    finally:
        os.close(fd)


def test_nested_subvolume_is_left_out(btrfs: Path) -> None:
    lab = FolderLab(ReflinkBackend, ReflinkConfig(), btrfs)
    origin = lab.make_origin()
    _RUNNER.run(["btrfs", "subvolume", "create", str(origin / "nested")])
    (origin / "nested" / "file").write_bytes(b"not ours")
    assert lab.volume(origin).excluded == (str(origin / "nested"),)
    with lab.attached(lab.take_one(origin), writable=False) as reached:
        assert os.listdir(reached / "nested") == []


def test_same_inode_in_two_subvolumes_are_two_volumes(btrfs: Path) -> None:
    lab = FolderLab(ReflinkBackend, ReflinkConfig(), btrfs)
    for name in ("one", "two"):
        _RUNNER.run(["btrfs", "subvolume", "create", str(btrfs / name)])
    assert (btrfs / "one").stat().st_ino == (btrfs / "two").stat().st_ino
    assert lab.volume(btrfs / "one").id != lab.volume(btrfs / "two").id


def test_subvolume_made_in_a_clone_is_not_destroyed(btrfs: Path) -> None:
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
