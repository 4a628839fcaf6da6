"""A folder for backends that take any: on a file system that nobody beside fills and empties."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import requirements
from support.storage import loop_filesystem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def quiet() -> Iterator[Path | None]:
    """A file system of our own; None where none can be made: then the machine must be quiet."""
    if requirements.lacking(["root", "loop", "ext4"]):
        yield None
        return
    with loop_filesystem("ext4", 600 << 20) as made:
        yield made.point


@pytest.fixture
def folder(quiet: Path | None, tmp_path: Path) -> Path:
    """An empty folder."""
    if quiet is None:
        return tmp_path
    made = quiet / tmp_path.name
    made.mkdir()
    return made
