"""Draws curves of a figure over a swept parameter (threads, snapshots), one per stack, with the span of the samples."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.units import format_quantity
from snapmgr.drawing.svg import COLOURS, Scale, line, path, picture, text, text_width, tick_words

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEIGHT, _FOOT, _TOP = 250, 42, 14
# Room for tick labels: those of the values, and half of the last label on the x axis.
_LEFT, _RIGHT = 64, 18
# Over a wider range, steps that double look equal only on a logarithmic axis.
_LOG_FROM = 8.0
# Over a wider range, a linear axis hides small values.
_LOG_VALUES_FROM = 40.0
# Circle, square, triangle up, triangle down, lozenge; each path starts in the middle, where the pen is.
_MARKS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "m-4 -4h8v8h-8z",
    "m0 -5l5 9h-10z",
    "m0 5l5 -9h-10z",
    "m0 -5.5l5 5.5l-5 5.5l-5 -5.5z",
)


class Curve(Struct, frozen=True, kw_only=True):
    """One stack: the median, minimum and maximum of the samples at each x."""

    label: str
    colour: int
    """Number of the stack in the page, so that its colour and mark are always the same."""
    points: Sequence[tuple[float, float]]
    low: Sequence[float]
    high: Sequence[float]


def curve_chart(
    curves: Sequence[Curve], *, x_title: str, unit: str, width: float, title: str, description: str, ident: str
) -> str:
    """Return the picture; "" without points."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    across, upwards = _scales(curves, right=width - _RIGHT, binary=unit in {"B", "B/s"})
    parts = _axes(curves, across, upwards, x_title=x_title, unit=unit)
    parts += [_band(curve, across, upwards) for curve in curves]
    parts += [_curve(curve, across, upwards) for curve in curves]
    return picture(parts, width=width, height=_HEIGHT, title=title, description=description, ident=ident)


def _scales(curves: Sequence[Curve], *, right: float, binary: bool) -> tuple[Scale, Scale]:
    xs = [x for curve in curves for x, _ in curve.points]
    least, most = min(xs), max(xs)
    bottom = _HEIGHT - _FOOT
    across = Scale(low=least, high=most, start=_LEFT, end=right, logarithmic=least > 0 and most / least >= _LOG_FROM)
    lows = [value for curve in curves for value in curve.low]
    highs = [value for curve in curves for value in curve.high]
    medians = [y for curve in curves for _, y in curve.points]
    if min(*lows, *medians) > 0 and max(medians) / min(medians) > _LOG_VALUES_FROM:
        return across, Scale(low=min(lows) / 1.15, high=max(highs) * 1.15, start=bottom, end=_TOP, logarithmic=True)
    return across, Scale(low=0, high=max(*highs, 0) * 1.04 or 1.0, start=bottom, end=_TOP, binary=binary)


def _axes(curves: Sequence[Curve], across: Scale, upwards: Scale, *, x_title: str, unit: str) -> list[str]:
    parts = []
    for tick in upwards.ticks():
        y = upwards(tick)
        parts.append(line(across.start, y, across.end, y, kind="grid"))
        parts.append(text(across.start - 8, y + 4, format_quantity(tick, unit), kind="axis", anchor="end"))
    # The swept values themselves are the best ticks; if they crowd, only those that have room.
    taken = -1e9
    for x in sorted({x for curve in curves for x, _ in curve.points}):
        words = tick_words(x)
        if across(x) - taken >= text_width(words) + 6:
            parts.append(text(across(x), upwards.start + 16, words, kind="axis", anchor="middle"))
            taken = across(x)
        parts.append(line(across(x), upwards.start, across(x), upwards.start + 4, kind="grid"))
    parts.append(text((across.start + across.end) / 2, _HEIGHT - 6, x_title, kind="axis", anchor="middle"))
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
