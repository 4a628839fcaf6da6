"""Draws a run interval by interval, before and after its snapshot, and marks stalls: intervals without any work."""

from __future__ import annotations

import math
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.units import format_quantity
from snapmgr.drawing.svg import WIDE, Scale, box, cut, line, picture, text

if TYPE_CHECKING:
    from collections.abc import Sequence

_LANE, _LANE_GAP, _FOOT, _HEAD = 58, 30, 30, 8
# More intervals are merged into means: single ones would be invisible, and a page may have a hundred lanes.
_COLUMNS = 200


class Lane(Struct, frozen=True, kw_only=True):
    """One figure over the intervals, with one scale for before and after the snapshot."""

    title: str
    unit: str
    before: Sequence[float]
    after: Sequence[float]
    """Empty if no snapshot divides the run; `before` then holds the whole run."""
    colour: int


def stalls(values: Sequence[float]) -> list[tuple[int, int]]:
    """Return the spans of intervals without any work, as [first, end); nothing for a lane that never moved."""
    if not any(values):
        return []
    found: list[tuple[int, int]] = []
    for number, value in enumerate(values):
        if value > 0:
            continue
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def interval_chart(
    lanes: Sequence[Lane], *, interval_s: float, width: float, title: str, description: str, ident: str
) -> str:
    """Return the picture; "" without intervals."""
    most = max((len(lane.before) + len(lane.after) for lane in lanes), default=0)
    if not most:
        return ""
    left, right = 8.0, width - 8.0
    height = _HEAD + len(lanes) * (_LANE + _LANE_GAP) + _FOOT
    parted = max(len(lane.before) for lane in lanes) if any(lane.after for lane in lanes) else None
    scale = Scale(low=0, high=most, start=left, end=right)
    parts: list[str] = []
    for number, lane in enumerate(lanes):
        parts += _lane(lane, scale, top=_HEAD + number * (_LANE + _LANE_GAP) + _LANE_GAP - 8, wide=width >= WIDE)
    bottom = height - _FOOT
    if parted is not None:
        x = scale(parted)
        parts.append(line(x, _HEAD, x, bottom + 4, kind="snapshot"))
        parts.append(text(x, height - 4, "snapshot", kind="axis strong", anchor="middle"))
    for share in (0, most):
        seconds = abs(share - (parted or 0)) * interval_s
        sign = "−" if parted is not None and share == 0 else ""
        anchor = "start" if share == 0 else "end"
        parts.append(text(scale(share), height - 14, f"{sign}{seconds:g} s", kind="axis", anchor=anchor))  # type: ignore[arg-type]
    return picture(parts, width=width, height=height, title=title, description=description, ident=ident)


def _lane(lane: Lane, scale: Scale, *, top: float, wide: bool) -> list[str]:
    values = [*lane.before, *lane.after]
    most = max(values, default=0.0)
    upwards = Scale(low=0, high=most or 1.0, start=top + _LANE, end=top)
    step = scale(1) - scale(0)
    gap = 1.0 if step > 4 else 0.0  # noqa: PLR2004 - thinner bars would be all gap
    peak = f"most {format_quantity(most, lane.unit)}"
    parts = [
        text(scale.start, top - 6, cut(lane.title, 420 if wide else 200), kind="label"),
        text(scale.end, top - 6, peak, kind="axis", anchor="end"),
    ]
    if not any(values):
        return [*parts, text((scale.start + scale.end) / 2, top + 34, "nothing at all", kind="alarm", anchor="middle")]
    for first, end in stalls(values):
        x, broad = scale(first), scale(end) - scale(first)
        count = f"{end - first} interval{'s' if end - first > 1 else ''}"
        parts.append(f"<g><title>{escape(f'nothing in {count}')}</title>")
        parts.append(box(x, top, broad, _LANE, kind="stall"))
        parts.append(f"{line(x, top + _LANE, x + broad, top + _LANE, kind='stalled')}</g>")
    each = max(math.ceil(len(values) / _COLUMNS), 1)
    merged = [(first, values[first : first + each]) for first in range(0, len(values), each)]
    steps = "".join(
        f"M{scale(first + len(some) / 2):.1f} {top + _LANE:.1f}V{min(upwards(fmean(some)), top + _LANE - 1):.1f}"
        for first, some in merged
        if any(some)
    )
    thick = max(step * each - gap, 0.6)
    parts.append(f'<path class="columns c{lane.colour}" stroke-width="{thick:.2f}" d="{steps}"/>')
    parts.append(line(scale.start, top + _LANE, scale.end, top + _LANE, kind="base"))
    return parts
