"""How a cost grows with its work: the slope of a straight line through both logarithms, with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

Verdict = Literal["held", "missed", "not shown"]


@dataclass(frozen=True, kw_only=True)
class Slope:
    """0: the cost does not grow; 1: it grows as the work does. The interval holds 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = f" ({self.low:.2f} to {self.high:.2f})" if self.low < self.high else ""
        return f"{self.value:.2f}{interval}"

    def verdict(self, goal: float) -> Verdict:
        """Return whether it is at most `goal`, as far as the interval tells."""
        if self.high <= goal:
            return "held"
        return "missed" if self.low > goal else "not shown"


Costs = Mapping[int, Sequence[float]]
"""Samples, by the amount of work."""


def slope(costs: Costs, *, exact: bool = False) -> Slope | None:
    """Return the slope of costs and amounts above 0; None from too few: three costs and two amounts are needed.

    `exact`: the costs do not scatter, so that two are enough, and the interval is the slope.
    """
    points = [(math.log(work), math.log(cost)) for work, samples in costs.items() for cost in samples]
    if len(costs) < 2 or (len(points) < 3 and not exact):
        return None
    fit = stats.linregress(*zip(*points, strict=True))
    value = float(fit.slope)
    margin = 0.0 if exact else float(stats.t.ppf(0.975, len(points) - 2) * fit.stderr)
    return Slope(value=value, low=value - margin, high=value + margin)


def last_step(costs: Costs, *, above_smallest: bool = False, exact: bool = False) -> Slope | None:
    """Return the slope between the two largest amounts alone, where what is constant hides least.

    `above_smallest`: of what costs and amounts have above the smallest amount's, so that nothing constant is left. None
    if that is less than a tenth: nothing grows.
    """
    if above_smallest:
        smallest = min(costs)
        base = statistics.fmean(costs[smallest])
        if statistics.fmean(costs[max(costs)]) < 1.1 * base:
            return None
        costs = {
            work - smallest: above
            for work, samples in costs.items()
            if work > smallest and (above := [cost - base for cost in samples if cost > base])
        }
    return slope({work: costs[work] for work in sorted(costs)[-2:]}, exact=exact)
