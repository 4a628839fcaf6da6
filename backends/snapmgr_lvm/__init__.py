"""Takes snapshots of logical volumes: classic and thin."""

from __future__ import annotations

from snapmgr_lvm.backend import LvmBackend
from snapmgr_lvm.config import LvmConfig

__all__ = ["LvmBackend", "LvmConfig"]
