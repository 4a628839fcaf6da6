"""Takes snapshots as clones of folders in a JuiceFS volume (Community Edition)."""

from __future__ import annotations

from snapmgr_juicefs.backend import JuicefsBackend
from snapmgr_juicefs.config import JuicefsConfig

__all__ = ["JuicefsBackend", "JuicefsConfig"]
