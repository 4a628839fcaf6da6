"""The contract suite for storage backends: what `snapmgr.api` promises, as tests for anybody's backend.

Needs pytest beside snapmgr. Write a `Lab` that makes directories on your storage, and a test class::

    from snapmgr.testing import BackendContract, Lab

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def lab(self, tmp_path):
            return MyLab(tmp_path)

``docs/how-to/write-a-backend.md`` explains both, with a complete backend.
"""

from __future__ import annotations

import pytest

# Before they are imported, or their asserts would say nothing but that they failed.
_PARTS = ("attaching", "capacity", "crashing", "locating", "removing", "taking")
pytest.register_assert_rewrite(*(f"snapmgr.testing.{part}" for part in _PARTS))

# ruff: noqa: E402
from snapmgr.testing.attaching import AttachingContract
from snapmgr.testing.capacity import CapacityContract
from snapmgr.testing.crashing import CrashingContract
from snapmgr.testing.lab import FolderLab, Lab
from snapmgr.testing.locating import LocatingContract
from snapmgr.testing.removing import RemovingContract
from snapmgr.testing.taking import TakingContract
from snapmgr.testing.trees import fingerprint, plant

__all__ = ["BackendContract", "FolderLab", "Lab", "fingerprint", "plant"]


class BackendContract(
    LocatingContract, TakingContract, AttachingContract, RemovingContract, CapacityContract, CrashingContract
):
    """Every test of the contract; subclass it as ``TestSomething`` and override the fixture `lab`."""
