"""Which bytes of a device files lie on: what several share is counted once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.bench.measure.layout import read_extents

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def file_extents(path: Path) -> list[tuple[int, int]]:
    """Return where a file's data lie on its device: (first byte, byte behind the last)."""
    with path.open("rb") as file:
        return [(one.physical, one.physical + one.length) for one in read_extents(file.fileno()) if one.placed]


def occupied_bytes(files: Iterable[Path]) -> int:
    """Return how many bytes of their device the data of `files` occupy together."""
    extents = sorted(extent for path in files for extent in file_extents(path))
    total = reached = 0
    for start, end in extents:
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total
