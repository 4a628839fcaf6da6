"""The contract suite over the LVM backend: classic snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from snapmgr.testing import BackendContract
from support.lvmlab import LvmLab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.lvm import VolumeGroup


class TestClassic(BackendContract):
    @pytest.fixture
    def lab(self, shared_vg: VolumeGroup, tmp_path: Path) -> Iterator[LvmLab]:
        lab = LvmLab(shared_vg, "classic", tmp_path / "scratch")
        yield lab
        lab.close()
