"""Draws the charts of a tuning: bars of its rungs, and the activity of a mount during one rung."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

from snapmgr.contract.units import format_size
from snapmgr.drawing.svg import Scale, box, line, text

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH = 720
_ROW = 44
_LEFT, _RIGHT = 8, 132
_TIMELINE_HEIGHT = 150
# A wider label would leave the picture.
_LABEL_CHARS = 92

Kind = Literal["best", "step", "tried", "cut", "beside", "published"]


class MountSample(Protocol):
    """The counters of a mount at one moment; see `snapmgr.physical.tuning.tune.Sample`."""

    @property
    def at_s(self) -> float:
        """Seconds since the rung began."""

    @property
    def staged_bytes(self) -> int:
        """Bytes that wait for their upload."""


class Bar(Struct, frozen=True, kw_only=True):
    """One rung."""

    label: str
    value: float
    """Its length: the mean of several runs."""
    text: str
    """The text at its end: "29.4 s"."""
    kind: Kind
    dots: tuple[float, ...] = ()
    """The single runs, if there are several."""


def bars(rows: Sequence[Bar], *, title: str, unit: str) -> str:
    """Return horizontal bars, one below the other, each below its label."""
    if not rows:
        return ""
    most = max(max((row.value, *row.dots)) for row in rows)
    scale = Scale(low=0, high=most or 1.0, start=_LEFT, end=_WIDTH - _RIGHT)
    height = _ROW * len(rows) + 26
    parts = [_open(_WIDTH, height, title)]
    for tick in scale.ticks():
        x = scale(tick)
        parts.append(line(x, 0, x, height - 22, kind="grid"))
        parts.append(text(x, height - 6, f"{tick:g}", kind="axis", anchor="middle" if tick else "start"))
    parts.append(text(_WIDTH - 4, height - 6, unit, kind="axis", anchor="end"))
    for number, row in enumerate(rows):
        y = number * _ROW
        label = row.label if len(row.label) <= _LABEL_CHARS else row.label[: _LABEL_CHARS - 1] + "…"
        parts.append(f"<g><title>{escape(f'{row.label}: {row.text}')}</title>")
        parts.append(text(_LEFT, y + 15, label, kind=f"label {row.kind}"))
        parts.append(box(_LEFT, y + 21, max(scale(row.value) - _LEFT, 1.5), 15, kind=f"bar {row.kind}", radius=2))
        parts += [
            f'<circle class="dot" cx="{scale(dot):.1f}" cy="{y + 28.5}" r="3"/>'
            for dot in (row.dots if len(row.dots) > 1 else ())
        ]
        end = scale(max((row.value, *row.dots)))
        parts.append(f"{text(end + 8, y + 33, row.text, kind=f'value {row.kind}')}</g>")
    return "".join([*parts, "</svg>"])


def timeline(samples: Sequence[MountSample], *, title: str) -> str:
    """Return the activity of a mount over time: shares of the time in reads, writes and fsyncs above, traffic below.

    Fewer than two samples give "".
    """
    if len(samples) < 2:  # noqa: PLR2004 - a span has two ends
        return ""
    right, gap, height = 60, 18, _TIMELINE_HEIGHT
    bottom = 2 * height + gap
    across = Scale(low=0, high=samples[-1].at_s or 1.0, start=_LEFT, end=_WIDTH - right)
    parts = [_open(_WIDTH, bottom + 22, title)]
    for tick in across.ticks():
        x = across(tick)
        parts.append(line(x, 0, x, bottom, kind="grid"))
        parts.append(text(x, bottom + 16, f"{tick:g} s", kind="axis", anchor="middle" if tick else "start"))
    spans = [_Span(old, new) for old, new in pairwise(samples)]
    totals = [span.rate("read_s") + span.rate("write_s") + span.rate("fsync_s") for span in spans]
    upper = Scale(low=0, high=max(1.0, *totals), start=height, end=0)
    below = [0.0] * len(spans)
    for name in ("read", "write", "fsync"):
        above = [low + span.rate(f"{name}_s") for low, span in zip(below, spans, strict=True)]
        outline = [*_points(spans, above, across, upper), *reversed(_points(spans, below, across, upper))]
        parts.append(f'<path class="area {name}" d="{_outline(outline)}"><title>{name}</title></path>')
        below = above
    beside = _WIDTH - right + 4
    parts.append(text(beside, 11, f"{upper.high:.1f}×", kind="axis"))
    traffic = {name: [span.rate(f"{name}_bytes") for span in spans] for name in ("get", "put")}
    lower = Scale(low=0, high=max(1.0, *traffic["get"], *traffic["put"]), start=bottom, end=height + gap)
    for name, rates in traffic.items():
        ends = [(across(span.end_s), lower(rate)) for span, rate in zip(spans, rates, strict=True)]
        parts.append(_line(name, ends))
    parts.append(text(beside, height + gap + 11, f"{format_size(int(lower.high))}/s", kind="axis"))
    if staged := max(one.staged_bytes for one in samples):
        waiting = Scale(low=0, high=staged, start=bottom, end=height + gap)
        parts.append(_line("staged", [(across(one.at_s), waiting(one.staged_bytes)) for one in samples]))
        parts.append(text(beside, height + gap + 26, f"≤ {format_size(staged)}", kind="axis staged"))
    return "".join([*parts, "</svg>"])


class _Span:
    """The time between two samples."""

    def __init__(self, old: MountSample, new: MountSample) -> None:
        self._old = old
        self._new = new
        self.start_s = old.at_s
        self.end_s = new.at_s

    def rate(self, name: str) -> float:
        """Return the growth of a counter per second."""
        grown = getattr(self._new, name) - getattr(self._old, name)
        return float(max(grown, 0.0) / max(self.end_s - self.start_s, 1e-9))


def _open(width: int, height: int, title: str) -> str:
    name = escape(title, quote=True)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}" xmlns="http://www.w3.org/2000/svg">'


def _points(
    spans: Sequence[_Span], values: Sequence[float], across: Scale, upwards: Scale
) -> list[tuple[float, float]]:
    """Return the corners of a step curve."""
    pairs = zip(spans, values, strict=True)
    return [(across(at), upwards(value)) for span, value in pairs for at in (span.start_s, span.end_s)]


def _outline(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "Z"


def _line(name: str, points: Sequence[tuple[float, float]]) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="line {name}" points="{places}"><title>{name}</title></polyline>'
