"""Draws the parts of a chart: frame, texts, lines, and scales with their ticks."""

from __future__ import annotations

import math
import re
import textwrap
from html import escape
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDE, NARROW = 920, 350
"""Widths in pixels; every chart is drawn for each. The page shows the one that fits, so that texts stay readable."""
COLOURS = 10
"""Number of colours for stacks in the style sheet: classes "c0" to "c9"."""
# Approximate width of a system font's character at 13 pixels; texts are cut before they leave the picture.
_CHARACTER = 7.2

Anchor = Literal["start", "middle", "end"]


def picture(parts: Iterable[str], *, width: float, height: float, title: str, description: str, ident: str) -> str:
    """Return an SVG with its title and description; `ident` makes their ids unique in the page."""
    name = f"{re.sub('[^a-z0-9]+', '-', ident.lower())}-{width:g}"
    return (
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" style="max-width:{width:g}px" role="img" '
        f'aria-labelledby="{name}-t" aria-describedby="{name}-d" xmlns="http://www.w3.org/2000/svg">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def text(x: float, y: float, words: str, *, kind: str = "label", anchor: Anchor = "start") -> str:
    """Return a text in the style class `kind`, placed on its base line; "" without words."""
    if not words:
        return ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, *, kind: str) -> str:
    """Return a straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def box(x: float, y: float, width: float, height: float, *, kind: str, radius: float = 0) -> str:
    """Return a rectangle; a negative width or height counts as 0."""
    rounded = f' rx="{radius:g}"' if radius else ""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" '
        f'height="{max(height, 0):.1f}"{rounded}/>'
    )


def cut(words: str, room: float) -> str:
    """Return a text that fits into `room` pixels; an ellipsis replaces its end if necessary."""
    most = max(int(room / _CHARACTER), 2)
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"


def wrap(words: str, room: float) -> list[str]:
    """Return the lines of a text that is `room` pixels wide at most, broken between words; a longer word is cut."""
    return [cut(line, room) for line in textwrap.wrap(words, max(int(room / _CHARACTER), 2), break_long_words=False)]


def text_width(words: str) -> float:
    """Return the approximate width of a label in pixels."""
    return len(words) * _CHARACTER


class Scale(Struct, frozen=True, kw_only=True):
    """Maps figures to pixels, linearly or logarithmically; values outside the range are drawn at the edge."""

    low: float
    high: float
    start: float
    """Pixel of `low`; `end` may be smaller, as on an axis that points up."""
    end: float
    logarithmic: bool = False
    binary: bool = False
    """Whether ticks are round in units of 1024, for bytes."""

    def __call__(self, value: float) -> float:
        """Return the pixel of a figure."""
        share = self._share(min(max(value, self.low), self.high))
        return self.start + share * (self.end - self.start)

    def _share(self, value: float) -> float:
        if self.high <= self.low:
            return 0.5
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return the positions of the axis's lines: few and round."""
        if self.logarithmic:
            return log_ticks(self.low, self.high)
        unit = 1024.0 ** max(int(math.log(self.high, 1024)), 0) if self.binary and self.high > 0 else 1.0
        return [tick * unit for tick in linear_ticks(self.low / unit, self.high / unit)]


def linear_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`, about five: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    step = nice_step(high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def nice_step(span: float) -> float:
    """Return the distance between about five ticks over a span above 0: 1, 2 or 5 times a power of ten."""
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`, both above 0: powers of two if close, else 1-2-5 or powers of ten."""
    span = high / low
    if span <= 40:  # noqa: PLR2004 - a dozen halvings would crowd
        return [2.0**power for power in range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)]
    factors = (1, 2, 5) if span <= 400 else (1,)  # noqa: PLR2004 - the same
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in found if low * 0.999 <= tick <= high * 1.001]


def tick_words(value: float) -> str:
    """Return the shortest form of a plain number: "0.25", "2", "10k", "5M"."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            divisor = 1e3 if sign == "k" else size
            return f"{value / divisor:.4g}{sign}"
    return f"{value:.4g}"


def path(points: Sequence[tuple[float, float]], *, kind: str) -> str:
    """Return a line through points, in pixels."""
    steps = " ".join(f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(points))
    return f'<path class="{kind}" d="{steps}"/>'


def dots(points: Sequence[tuple[float, float]]) -> str:
    """Return small dots as strokes without length, all in one path, because a page may have thousands of them."""
    return f'<path class="dot" d="{"".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)}"/>' if points else ""
