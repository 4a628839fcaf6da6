"""Draws the map of a file: the offset in the file on the x axis, the place on the device on the y axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.drawing.svg import line, picture

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 190, 8, 6
# The plot's raster: a finer one would be invisible, and two thousand extents take only some kilobytes.
_COLUMNS, _ROWS = 284, 176


def layout_map(
    extents: Iterable[tuple[int, int, int]],
    *,
    window: tuple[int, int],
    size_bytes: int,
    title: str,
    description: str,
    ident: str,
) -> str:
    """Return the picture.

    Args:
        extents: (offset in the file, offset on the device, length), in bytes.
        window: part of the device to draw, so that maps can be compared.
        size_bytes: size of the file.
        title: name of the picture for screen readers.
        description: content of the picture, for screen readers.
        ident: makes the picture's ids unique in the page.
    """
    lowest, highest = window
    cells = _cells(extents, lowest=lowest, span=max(highest - lowest, 1), size_bytes=max(size_bytes, 1))
    # Strokes are the shortest way to write thousands of marks.
    steps = "".join(f"M{_LEFT + column} {_TOP + row}h{length}" for row, column, length in cells)
    bottom = _TOP + _ROWS + 2
    parts = [
        line(_LEFT, bottom, _LEFT + _COLUMNS, bottom, kind="base"),
        line(_LEFT, _TOP, _LEFT, bottom, kind="base"),
        f'<path class="extent" d="{steps}"/>',
    ]
    return picture(parts, width=_WIDTH, height=_HEIGHT, title=title, description=description, ident=ident)


def window_of(maps: Iterable[Sequence[tuple[int, int, int]]]) -> tuple[int, int]:
    """Return the part of the device that holds all extents of all maps; (0, 1) without extents."""
    ends = [(physical, physical + length) for extents in maps for _, physical, length in extents]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (0, 1)


def _cells(
    extents: Iterable[tuple[int, int, int]], *, lowest: int, span: int, size_bytes: int
) -> list[tuple[int, int, int]]:
    """Return the runs of the raster that hold data, each once, as (row from the top, first column, columns)."""
    filled: set[tuple[int, int]] = set()
    for logical, physical, length in extents:
        first = min(int(logical * _COLUMNS / size_bytes), _COLUMNS - 1)
        last = min(int(max(logical + length - 1, logical) * _COLUMNS / size_bytes), _COLUMNS - 1)
        for column in range(first, last + 1):
            # The offset in the extent at which this column begins: a long extent is a slope.
            within = min(max(column * size_bytes / _COLUMNS - logical, 0), length)
            share = (physical + within - lowest) / span
            filled.add((_ROWS - 1 - min(max(int(share * _ROWS), 0), _ROWS - 1), column))
    runs: list[tuple[int, int, int]] = []
    for row, column in sorted(filled):
        if runs and runs[-1][0] == row and runs[-1][1] + runs[-1][2] == column:
            runs[-1] = (row, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((row, column, 1))
    return runs
