"""The contract suite over btrfs subvolume snapshots."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.system.command import CommandRunner
from snapmgr.testing import BackendContract, Lab
from snapmgr_btrfs import BtrfsBackend
from support.storage import LoopFileSystem, loop_filesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.api import Pool, SnapshotRef

_RUNNER = CommandRunner()


class BtrfsLab(Lab):
    """Origins are subvolumes at the top of a file system."""

    def __init__(self, file_system: LoopFileSystem) -> None:
        super().__init__(BtrfsBackend, BtrfsBackend.Config())
        self.file_system = file_system

    def make_origin(self) -> Path:
        origin = self.file_system.point / f"origin-{secrets.token_hex(4)}"
        _RUNNER.run(["btrfs", "subvolume", "create", str(origin)])
        return origin

    def remove_origin(self, origin: Path) -> None:
        _RUNNER.run(["btrfs", "subvolume", "delete", "--commit-after", str(origin)])

    def impostor(self, ref: SnapshotRef) -> Callable[[], bool]:
        place = self.file_system.point / ".snapmgr" / ref.name
        _RUNNER.run(["btrfs", "subvolume", "delete", "--commit-after", str(place)])
        _RUNNER.run(["btrfs", "subvolume", "create", str(place)])
        (place / "somebody's").write_bytes(b"precious")
        _RUNNER.run(["btrfs", "property", "set", "-ts", str(place), "ro", "true"])
        return lambda: (place / "somebody's").read_bytes() == b"precious" and len(list(place.iterdir())) == 1

    @contextmanager
    def unreachable(self, pool: Pool) -> Iterator[None]:  # noqa: ARG002 - there is one
        with self.file_system.unplugged():
            yield


class SubvolumeInTheWayLab(BtrfsLab):
    """What is nested is a subvolume, not a mount."""

    @contextmanager
    def nest(self, folder: Path) -> Iterator[None]:
        folder.rmdir()
        _RUNNER.run(["btrfs", "subvolume", "create", str(folder)])
        yield


@pytest.fixture(scope="module")
def file_system() -> Iterator[LoopFileSystem]:
    with loop_filesystem("btrfs", 1 << 30) as made:
        yield made


@pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")
class TestBtrfs(BackendContract):
    @pytest.fixture
    def lab(self, file_system: LoopFileSystem) -> BtrfsLab:
        return BtrfsLab(file_system)

    def test_nested_subvolume_is_named_and_left_out(self, file_system: LoopFileSystem) -> None:
        self.test_nested_mount_is_named_and_left_out(SubvolumeInTheWayLab(file_system))
