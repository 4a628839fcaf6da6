"""Charts of a tuning as SVG: bars of rungs, and what a mount did while one ran. Pure: numbers in, text out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from snapmgr.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.physical.tuning.tune import Sample

_WIDTH = 720
_ROW = 44
_LEFT, _RIGHT = 8, 132
_TIMELINE_HEIGHT = 150
_TICKS = 5
# Wider than this and a label would leave the picture.
_LABEL_CHARS = 92

Kind = Literal["best", "step", "tried", "cut", "beside", "published"]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One rung."""

    label: str
    value: float
    """Its length; of several runs the mean."""
    text: str
    """What stands at its end: "29.4 s"."""
    kind: Kind
    dots: tuple[float, ...] = ()
    """Single runs, where there are several."""


def nice_step(most: float) -> float:
    """Return the distance of ticks for an axis from 0 to `most`: 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return 1.0
    rough = most / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def bars(rows: Sequence[Bar], *, title: str, unit: str) -> str:
    """Return horizontal bars, one below the other, each with its label above it."""
    if not rows:
        return ""
    most = max(max((row.value, *row.dots)) for row in rows)
    room = _WIDTH - _LEFT - _RIGHT
    step = nice_step(most)
    scale = room / (most or 1.0)
    height = _ROW * len(rows) + 26
    parts = [_open(_WIDTH, height, title)]
    ticks = int(most / step + 1e-9)
    for tick in range(ticks + 1):
        x = _LEFT + tick * step * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height - 22}"/>')
        anchor = "start" if tick == 0 else "middle"
        parts.append(f'<text class="axis" x="{x:.1f}" y="{height - 6}" text-anchor="{anchor}">{tick * step:g}</text>')
    parts.append(f'<text class="axis" x="{_WIDTH - 4}" y="{height - 6}" text-anchor="end">{escape(unit)}</text>')
    for place, row in enumerate(rows):
        y = place * _ROW
        length = max(row.value * scale, 1.5)
        label = row.label if len(row.label) <= _LABEL_CHARS else row.label[: _LABEL_CHARS - 1] + "…"
        parts.append(f"<g><title>{escape(f'{row.label}: {row.text}')}</title>")
        parts.append(f'<text class="label {row.kind}" x="{_LEFT}" y="{y + 15}">{escape(label)}</text>')
        parts.append(f'<rect class="bar {row.kind}" x="{_LEFT}" y="{y + 21}" width="{length:.1f}" height="15" rx="2"/>')
        parts += [
            f'<circle class="dot" cx="{_LEFT + dot * scale:.1f}" cy="{y + 28.5}" r="3"/>'
            for dot in (row.dots if len(row.dots) > 1 else ())
        ]
        end = max(row.value, *row.dots) if row.dots else row.value
        x = _LEFT + end * scale + 8
        parts.append(f'<text class="value {row.kind}" x="{x:.1f}" y="{y + 33}">{escape(row.text)}</text></g>')
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """A part of a picture with time to the right."""

    left: float
    bottom: float
    height: float
    scale: float
    """Units of the picture for one second."""

    def x(self, at_s: float) -> float:
        return self.left + at_s * self.scale

    def y(self, share: float) -> float:
        return self.bottom - share * self.height


def timeline(samples: Sequence[Sample], *, title: str) -> str:
    """Return what a mount did over time: shares of the time in reads, writes and fsyncs above, its traffic below.

    Given fewer than two samples there is nothing to draw: "".
    """
    if len(samples) < 2:  # noqa: PLR2004 - a span has two ends
        return ""
    last_s = samples[-1].at_s
    right, gap, height = 60, 18, _TIMELINE_HEIGHT
    bottom = 2 * height + gap
    scale = (_WIDTH - _LEFT - right) / (last_s or 1.0)
    upper = _Frame(left=_LEFT, bottom=height, height=height, scale=scale)
    lower = _Frame(left=_LEFT, bottom=bottom, height=height, scale=scale)
    parts = [_open(_WIDTH, bottom + 22, title), *_time_axis(last_s, lower)]
    spans = [_Span(old, new) for old, new in pairwise(samples)]
    totals = [span.rate("read_s") + span.rate("write_s") + span.rate("fsync_s") for span in spans]
    top = max(1.0, *totals)
    below = [0.0] * len(spans)
    for name in ("read", "write", "fsync"):
        above = [low + span.rate(f"{name}_s") / top for low, span in zip(below, spans, strict=True)]
        parts.append(f'<path class="area {name}" d="{_area(spans, below, above, upper)}"><title>{name}</title></path>')
        below = above
    beside = _WIDTH - right + 4
    parts.append(f'<text class="axis" x="{beside}" y="11">{top:.1f}×</text>')
    traffic = {name: [span.rate(f"{name}_bytes") for span in spans] for name in ("get", "put")}
    most = max(1.0, *traffic["get"], *traffic["put"])
    for name, rates in traffic.items():
        ends = [(span.end_s, rate / most) for span, rate in zip(spans, rates, strict=True)]
        parts.append(_line(name, ends, lower))
    parts.append(f'<text class="axis" x="{beside}" y="{height + gap + 11}">{format_size(int(most))}/s</text>')
    if staged := max(one.staged_bytes for one in samples):
        parts.append(_line("staged", [(one.at_s, one.staged_bytes / staged) for one in samples], lower))
        text = f"≤ {format_size(staged)}"
        parts.append(f'<text class="axis staged" x="{beside}" y="{height + gap + 26}">{text}</text>')
    return "".join([*parts, "</svg>"])


class _Span:
    """The time between two samples."""

    def __init__(self, old: Sample, new: Sample) -> None:
        self._old = old
        self._new = new
        self.start_s = old.at_s
        self.end_s = new.at_s

    def rate(self, name: str) -> float:
        """Return how much a counter grew in a second."""
        grown = getattr(self._new, name) - getattr(self._old, name)
        return float(max(grown, 0.0) / max(self.end_s - self.start_s, 1e-9))


def _open(width: int, height: int, title: str) -> str:
    name = escape(title, quote=True)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}" xmlns="http://www.w3.org/2000/svg">'


def _time_axis(last_s: float, frame: _Frame) -> list[str]:
    step, bottom = nice_step(last_s), frame.bottom
    parts = []
    for tick in range(int(last_s / step + 1e-9) + 1):
        at = frame.x(tick * step)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="0" x2="{at:.1f}" y2="{bottom}"/>')
        anchor = "start" if tick == 0 else "middle"
        parts.append(
            f'<text class="axis" x="{at:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{tick * step:g} s</text>'
        )
    return parts


def _area(spans: Sequence[_Span], below: Sequence[float], above: Sequence[float], frame: _Frame) -> str:
    def points(values: Sequence[float]) -> list[tuple[float, float]]:
        pairs = zip(spans, values, strict=True)
        return [(frame.x(at), frame.y(value)) for span, value in pairs for at in (span.start_s, span.end_s)]

    outline = [*points(above), *reversed(points(below))]
    return "M" + "L".join(f"{at:.1f} {y:.1f}" for at, y in outline) + "Z"


def _line(name: str, ends: Sequence[tuple[float, float]], frame: _Frame) -> str:
    points = " ".join(f"{frame.x(at):.1f},{frame.y(share):.1f}" for at, share in ends)
    return f'<polyline class="line {name}" points="{points}"><title>{name}</title></polyline>'
