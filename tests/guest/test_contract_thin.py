"""The contract suite over the LVM backend: thin snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from snapmgr.testing import BackendContract
from support.lvmlab import LvmLab

if TYPE_CHECKING:
    from pathlib import Path

    from support.lvm import VolumeGroup


class TestThin(BackendContract):
    @pytest.fixture
    def lab(self, vg: VolumeGroup, tmp_path: Path) -> LvmLab:
        return LvmLab(vg, "thin", tmp_path / "scratch")
