"""A file system with reflinks, and the contract suite's way to use the backend on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from snapmgr.testing import FolderLab
from snapmgr_reflink import ReflinkBackend, ReflinkConfig
from support.reflink import SIZE_BYTES
from support.storage import loop_filesystem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.storage import LoopFileSystem


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def file_system(request: pytest.FixtureRequest) -> Iterator[LoopFileSystem]:
    with loop_filesystem(request.param, SIZE_BYTES) as made:
        yield made


@pytest.fixture
def lab(file_system: LoopFileSystem) -> FolderLab:
    return FolderLab(ReflinkBackend, ReflinkConfig(), file_system.point)
