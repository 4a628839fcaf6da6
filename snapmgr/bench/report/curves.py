"""Curves of a figure over what was swept (threads, snapshots), one for each stack, with the span of the samples."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from snapmgr.bench.report.svg import COLOURS, WIDE, Scale, cut, line, path, picture, text, text_width, tick_words
from snapmgr.units import format_quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEIGHT, _HEIGHT_NARROW = 320, 250
_FOOT, _TOP = 42, 20
# Over a wider range than this, steps that double look alike only on a logarithmic axis.
_LOG_FROM = 8.0
# A figure that spans more than this hides its small values on a linear axis.
_LOG_VALUES_FROM = 40.0
_LABEL_STEP = 16
# Round, square, up, down, lozenge: drawn from where the pen is, the middle.
_MARKS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "m-4 -4h8v8h-8z",
    "m0 -5l5 9h-10z",
    "m0 5l5 -9h-10z",
    "m0 -5.5l5 5.5l-5 5.5l-5 -5.5z",
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One stack: medians at each x, and the least and most of the samples."""

    label: str
    colour: int
    """Number of the stack in the page: always the same colour and mark."""
    points: Sequence[tuple[float, float]]
    low: Sequence[float]
    high: Sequence[float]


def curve_chart(
    curves: Sequence[Curve], *, x_title: str, unit: str, width: float, title: str, description: str, ident: str
) -> str:
    """Return the picture; of no point, ""."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    wide = width >= WIDE
    height = _HEIGHT if wide else _HEIGHT_NARROW
    names = min(max(text_width(curve.label) for curve in curves) + 22, 190) if wide else 10.0
    left, right, bottom = (82.0 if wide else 64.0), width - names, height - _FOOT
    across, upwards = _scales(curves, left=left, right=right, bottom=bottom, binary=unit in {"B", "B/s"})
    parts = _axes(curves, across, upwards, x_title=x_title, unit=unit, height=height)
    for curve in curves:
        parts.append(_band(curve, across, upwards))
    for curve in curves:
        parts.append(_curve(curve, across, upwards))
    if wide:
        parts += _labels(curves, upwards, x=right + 12, room=names - 16, top=_TOP, bottom=bottom)
    return picture(parts, width=width, height=height, title=title, description=description, ident=ident)


def _scales(curves: Sequence[Curve], *, left: float, right: float, bottom: float, binary: bool) -> tuple[Scale, Scale]:
    xs = [x for curve in curves for x, _ in curve.points]
    least, most = min(xs), max(xs)
    across = Scale(low=least, high=most, start=left, end=right, logarithmic=least > 0 and most / least >= _LOG_FROM)
    lows = [value for curve in curves for value in curve.low]
    highs = [value for curve in curves for value in curve.high]
    medians = [y for curve in curves for _, y in curve.points]
    if min(*lows, *medians) > 0 and max(medians) / min(medians) > _LOG_VALUES_FROM:
        return across, Scale(low=min(lows) / 1.15, high=max(highs) * 1.15, start=bottom, end=_TOP, logarithmic=True)
    return across, Scale(low=0, high=max(*highs, 0) * 1.04 or 1.0, start=bottom, end=_TOP, binary=binary)


def _axes(
    curves: Sequence[Curve], across: Scale, upwards: Scale, *, x_title: str, unit: str, height: float
) -> list[str]:
    parts = []
    for tick in upwards.ticks():
        y = upwards(tick)
        parts.append(line(across.start, y, across.end, y, kind="grid"))
        parts.append(text(across.start - 8, y + 4, format_quantity(tick, unit), kind="axis", anchor="end"))
    # The swept values themselves are the best ticks; where they crowd, those that have room.
    taken = -1e9
    for x in sorted({x for curve in curves for x, _ in curve.points}):
        words = tick_words(x)
        if across(x) - taken >= text_width(words) + 6:
            parts.append(text(across(x), upwards.start + 16, words, kind="axis", anchor="middle"))
            taken = across(x)
        parts.append(line(across(x), upwards.start, across(x), upwards.start + 4, kind="grid"))
    parts.append(text((across.start + across.end) / 2, height - 6, x_title, kind="axis", anchor="middle"))
    return parts


def _band(curve: Curve, across: Scale, upwards: Scale) -> str:
    if list(curve.low) == list(curve.high):
        return ""
    xs = [across(x) for x, _ in curve.points]
    over = [(x, upwards(value)) for x, value in zip(xs, curve.high, strict=True)]
    under = [(x, upwards(value)) for x, value in zip(xs, curve.low, strict=True)]
    return path([*over, *reversed(under)], kind=f"band c{curve.colour % COLOURS}")


def _curve(curve: Curve, across: Scale, upwards: Scale) -> str:
    colour = f"c{curve.colour % COLOURS}"
    points = [(across(x), upwards(y)) for x, y in curve.points]
    marks = "".join(f"M{x:.1f} {y:.1f}{_MARKS[curve.colour % len(_MARKS)]}" for x, y in points)
    return (
        f"<g><title>{escape(curve.label)}</title>{path(points, kind=f'curve {colour}')}"
        f'<path class="mark {colour}" d="{marks}"/></g>'
    )


def _labels(curves: Sequence[Curve], upwards: Scale, *, x: float, room: float, top: float, bottom: float) -> list[str]:
    """Return the curves' names at their ends, pushed apart where they would overlap."""
    ends = sorted(((upwards(curve.points[-1][1]), curve) for curve in curves), key=lambda end: end[0])
    places: list[float] = []
    for y, _ in ends:
        places.append(max(y, places[-1] + _LABEL_STEP if places else top))
    # Back up from below the axis.
    lowest = bottom
    for place in reversed(range(len(places))):
        places[place] = min(places[place], lowest)
        lowest = places[place] - _LABEL_STEP
    return [
        text(x, y + 4, cut(curve.label, room), kind=f"name c{curve.colour % COLOURS}")
        for y, (_, curve) in zip(places, ends, strict=True)
    ]
