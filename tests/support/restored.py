"""What the tests of restores share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.catalog.store import Catalog

if TYPE_CHECKING:
    from support.scene import Scene

LARGE_BYTES = 160 << 20
"""Of a file that takes a while to copy."""


def require_nothing_left(scene: Scene) -> None:
    """Assert that no restore has left a lease, a record or a scratch mount."""
    assert not scene.entries() or Catalog(scene.state).leases() == ([], [])
    for folder in (scene.state / "restores", scene.scratch):
        assert not folder.exists() or os.listdir(folder) == []
