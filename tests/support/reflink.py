"""What the tests of the reflink backend share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapmgr.testing import FolderLab

SIZE_BYTES = 600 << 20
"""Of their file systems."""


def store_of(lab: FolderLab) -> Path:
    """Return the folder that holds a lab's copies."""
    return Path(lab.folder, ".snapmgr-reflink")
