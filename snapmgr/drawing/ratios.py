"""Draws ratios with their intervals on a logarithmic scale, with a line at 1 and the noise of the machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from snapmgr.drawing.svg import WIDE, Scale, box, cut, line, picture, text, tick_words, wrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Better = Literal["less", "more", "neither"]
Kind = Literal["better", "worse", "same", "other"]
"""A ratio is shown to be better or worse than 1, not shown to differ, or shown to differ in a neutral metric."""
_LABELS, _VALUES = 178, 176
"""Widths of the columns beside the plot, if they fit."""
_ROW, _ROW_NARROW, _HEAD, _FOOT = 26, 46, 34, 30
_LINE = 17
"""Height of each further line of a title."""
_HINTS: Mapping[Better, str] = {"less": "◂ less is better", "more": "more is better ▸", "neither": ""}
# A ratio beyond this is drawn at the edge with an arrow; otherwise the rest would be squeezed to nothing.
_FARTHEST = 200.0


class RatioRow(Struct, frozen=True, kw_only=True):
    """One ratio and its interval; all above 0, `high` may be infinite."""

    label: str
    value: float
    low: float
    high: float
    text: str
    """The text beside it: "1.42 (1.30–1.57)"."""
    kind: Kind


class RatioGroup(Struct, frozen=True, kw_only=True):
    """The ratios of one metric."""

    title: str
    better: Better
    rows: Sequence[RatioRow]
    noise: float | None = None
    """Factor, at least 1: a ratio whose point lies between it and its inverse shows nothing. Infinite: none does."""


def ratio_chart(groups: Sequence[RatioGroup], *, width: float, title: str, description: str, ident: str) -> str:
    """Return the picture; "" without ratios."""
    rows = [row for group in groups for row in group.rows]
    if not rows:
        return ""
    wide = width >= WIDE
    step = _ROW if wide else _ROW_NARROW
    left, right = (_LABELS, width - _VALUES) if wide else (8, width - 8)
    low, high = _span(rows, groups)
    scale = Scale(low=low, high=high, start=left, end=right, logarithmic=True)
    heads = [_title(group, width) for group in groups]
    height = sum(_head(lines) + step * len(group.rows) for group, lines in zip(groups, heads, strict=True)) + _FOOT
    bottom = height - _FOOT + 6
    parts = [*_axis(scale, bottom, height), line(scale(1), _HEAD - 8, scale(1), bottom, kind="one")]
    y = 0.0
    for group, lines in zip(groups, heads, strict=True):
        parts += _group(group, lines, scale, y=y, step=step, width=width)
        y += _head(lines) + step * len(group.rows)
    return picture(parts, width=width, height=height, title=title, description=description, ident=ident)


def _span(rows: Iterable[RatioRow], groups: Iterable[RatioGroup]) -> tuple[float, float]:
    """Return the ends of the axis: it covers all intervals and at least 0.5 to 2."""
    ends = [end for row in rows for end in (row.low, row.value, row.high)]
    limits = [group.noise for group in groups if group.noise and math.isfinite(group.noise)]
    ends += [*limits, *(1 / limit for limit in limits)]
    seen = [min(max(end, 1 / _FARTHEST), _FARTHEST) for end in ends if not math.isnan(end)]
    low, high = min(0.5, *seen), max(2.0, *seen)
    return low / 1.08, high * 1.08


def _axis(scale: Scale, bottom: float, height: float) -> list[str]:
    parts = []
    for tick in scale.ticks():
        x = scale(tick)
        if abs(tick - 1) > 1e-9:  # noqa: PLR2004 - 1 has its own line
            parts.append(line(x, 22, x, bottom, kind="grid"))
        parts.append(text(x, height - 8, tick_words(tick), kind="axis", anchor="middle"))
    return parts


def _title(group: RatioGroup, width: float) -> list[str]:
    return wrap(group.title, width - (120 if _HINTS[group.better] else 16))


def _head(lines: Sequence[str]) -> float:
    """Return the height of a title."""
    return _HEAD + _LINE * (len(lines) - 1)


def _group(group: RatioGroup, lines: Sequence[str], scale: Scale, *, y: float, step: float, width: float) -> list[str]:
    wide = width >= WIDE
    parts = [text(2, y + 20 + number * _LINE, words, kind="head") for number, words in enumerate(lines)]
    parts.append(text(width - 2, y + 20, _HINTS[group.better], kind="axis", anchor="end"))
    top = y + _head(lines)
    if group.noise is not None:
        low, high = scale(1 / group.noise), scale(group.noise)
        band = box(low, top - 5, max(high - low, 1), step * len(group.rows), kind="noise")
        parts.append(f"<g><title>no more than between A/A pairs: nothing is shown</title>{band}</g>")
    for number, row in enumerate(group.rows):
        parts.append(_row(row, scale, y=top + number * step, wide=wide, width=width))
    return parts


def _row(row: RatioRow, scale: Scale, *, y: float, wide: bool, width: float) -> str:
    middle = y + 8 if wide else y + 23
    baseline = y + 12.5 if wide else y + 10
    low, high = scale(row.low), scale(row.high)
    left, right = _end(row.low, scale, middle, outward=-1), _end(row.high, scale, middle, outward=1)
    parts = [
        text(14 if wide else 8, baseline, cut(row.label, (_LABELS if wide else width * 0.56) - 18)),
        text(width - 2, baseline, row.text, kind=f"value {row.kind}", anchor="end"),
        f'<path class="interval {row.kind}" d="M{low:.1f} {middle:.1f}H{high:.1f}{left}{right}"/>',
        f'<circle class="point {row.kind}" cx="{scale(row.value):.1f}" cy="{middle:.1f}" r="4.6"/>',
    ]
    return "".join(parts)


def _end(value: float, scale: Scale, middle: float, *, outward: int) -> str:
    """Return the end of an interval: a crossbar, or an arrow if the interval continues beyond the edge."""
    x = scale(value)
    if value < scale.low or value > scale.high:
        back = x - outward * 6
        return f"M{back:.1f} {middle - 5:.1f}L{x:.1f} {middle:.1f}L{back:.1f} {middle + 5:.1f}"
    return f"M{x:.1f} {middle - 4:.1f}v8"
