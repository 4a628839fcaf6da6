"""The contract suite over the reflink backend: shared blocks on XFS and btrfs, and plain copies anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from snapmgr.testing import BackendContract, FolderLab
from snapmgr_reflink import ReflinkBackend, ReflinkConfig
from support.storage import loop_filesystem
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SIZE_BYTES = 600 << 20


@pytest.fixture(scope="module")
def xfs() -> Iterator[Path]:
    with loop_filesystem("xfs", _SIZE_BYTES) as made:
        yield made.point


@pytest.fixture(scope="module")
def btrfs() -> Iterator[Path]:
    with loop_filesystem("btrfs", _SIZE_BYTES) as made:
        yield made.point


class _Lab(FolderLab):
    kills = 7 if CAMPAIGN else 3
    rounds = 3 if CAMPAIGN else 2


class _WholeFiles(BackendContract):
    # This backend promises whole files and no more.
    test_one_instant_if_promised = None


@pytest.mark.needs("root", "loop", "xfs")
class TestReflinkOnXfs(_WholeFiles):
    @pytest.fixture
    def lab(self, xfs: Path) -> _Lab:
        return _Lab(ReflinkBackend, ReflinkConfig(), xfs)


@pytest.mark.needs("root", "loop", "btrfs")
class TestReflinkOnBtrfs(_WholeFiles):
    @pytest.fixture
    def lab(self, btrfs: Path) -> _Lab:
        return _Lab(ReflinkBackend, ReflinkConfig(store=str(btrfs / "copies")), btrfs)


class TestPlainCopies(_WholeFiles):
    # It takes any directory.
    test_foreign_target_is_refused_with_a_reason = None

    @pytest.fixture
    def lab(self, folder: Path) -> _Lab:
        config = ReflinkConfig(store=str(folder / "copies"), allow_plain_copy=True)
        return _Lab(ReflinkBackend, config, folder)
