"""Draws the bars of a figure at several moments (before and after a snapshot), grouped by stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.units import format_quantity
from snapmgr.drawing.svg import WIDE, Scale, box, cut, dots, line, picture, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.drawing.ratios import Kind

_LABELS, _VALUES = 178, 176
_BAR, _STEP, _PAD, _HEAD, _FOOT = 15, 18, 20, 16, 28


class Bar(Struct, frozen=True, kw_only=True):
    """The median of a figure at one moment, and the single samples."""

    value: float
    dots: Sequence[float] = ()
    text: str = ""
    """The ratio to the first moment with its interval: "0.61 (0.55–0.68)"; "" for the first one itself."""
    kind: Kind = "same"


class Bars(Struct, frozen=True, kw_only=True):
    """One stack."""

    label: str
    bars: Sequence[Bar]
    """In chronological order; at least one."""


def bar_chart(stacks: Sequence[Bars], *, unit: str, width: float, title: str, description: str, ident: str) -> str:
    """Return the picture; "" without bars."""
    if not stacks:
        return ""
    wide = width >= WIDE
    # The value is to the right of its bar, and the ratio to the right of the value.
    left, right = (_LABELS, width - _VALUES - 90) if wide else (8, width - 96)
    most = max(max(bar.value, *bar.dots) if bar.dots else bar.value for stack in stacks for bar in stack.bars)
    scale = Scale(low=0, high=most or 1.0, start=left, end=right, binary=unit in {"B", "B/s"})
    head = 0 if wide else _HEAD
    height = sum(head + len(stack.bars) * _STEP + _PAD for stack in stacks) + _FOOT
    parts = []
    for tick in scale.ticks()[:: 1 if wide else 2]:
        parts.append(line(scale(tick), 0, scale(tick), height - _FOOT, kind="grid"))
        words = format_quantity(tick, unit)
        parts.append(text(scale(tick), height - 9, words, kind="axis", anchor="middle" if tick and wide else "start"))
    y = _PAD / 2
    for stack in stacks:
        middle = y + len(stack.bars) * _STEP / 2 + 3 if wide else y + 10
        room = _LABELS - 18 if wide else width * 0.5
        parts.append(text(14 if wide else 8, middle, cut(stack.label, room)))
        for number, bar in enumerate(stack.bars):
            top = y + head + number * _STEP
            parts += _bar(bar, scale, y=top, kind=f"moment{number}", unit=unit)
            # A narrow picture has room only above the first bar, which holds the last ratio.
            if wide or number == len(stack.bars) - 1:
                base = top + 12 if wide else y + 10
                parts.append(text(width - 2, base, bar.text, kind=f"value {bar.kind}", anchor="end"))
        y += head + len(stack.bars) * _STEP + _PAD
    return picture(parts, width=width, height=height, title=title, description=description, ident=ident)


def _bar(bar: Bar, scale: Scale, *, y: float, kind: str, unit: str) -> list[str]:
    middle = y + _BAR / 2
    end = max([bar.value, *bar.dots])
    return [
        box(scale(0), y, max(scale(bar.value) - scale(0), 1.5), _BAR, kind=f"bar {kind}", radius=2),
        dots([(scale(dot), middle) for dot in bar.dots]),
        text(scale(end) + 8, y + 12, format_quantity(bar.value, unit), kind="axis strong"),
    ]
