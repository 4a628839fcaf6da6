"""The ratio of two sets of figures that were not measured in pairs: of two runs, days or versions apart. Pure.

What changed on the machine between the two runs is in this ratio, and no interval knows of it: see `compare`, which
looks at the controls. Within that limit the interval is the wider of two:

- a percentile bootstrap of the ratio of the medians, both sets drawn anew, seeded;
- the exact one of Mann and Whitney (1947) for a shift of the logarithms, by ordered differences (Hodges and Lehmann
  1963; Hollander and Wolfe, section 4.3), which misses no more often than asked at any number of figures. With too few
  figures for the level asked for there is no such interval: then nothing can be said.
"""

from __future__ import annotations

import math
from functools import cache
from random import Random
from statistics import NormalDist, median
from typing import TYPE_CHECKING

from snapmgr.bench.statistics.ratio import LEVEL, RESAMPLES, Ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

# Up to so many figures in both sets the distribution is counted out; beyond it is normal to the third digit.
_EXACT = 60


def unpaired_ratio(
    first: Sequence[float], second: Sequence[float], *, seed: int, level: float = LEVEL, comparisons: int = 1
) -> Ratio:
    """Given two sets of figures above 0, return the ratio of their medians, first ÷ second, with its interval.

    `Ratio.n` is the size of the smaller set. `level` is for all of `comparisons` intervals together. Raises ValueError
    for an empty set, and for figures that have no ratio.
    """
    if not first or not second:
        raise ValueError("a ratio needs at least one figure on either side")
    if not all(math.isfinite(figure) and figure > 0 for figure in (*first, *second)):
        raise ValueError("a ratio needs figures that are finite and above 0")
    error = (1 - level) / comparisons
    over, under = [math.log(figure) for figure in first], [math.log(figure) for figure in second]
    exact, drawn = _shift(over, under, error), _bootstrap(over, under, error, seed)
    return Ratio(
        value=math.exp(median(over) - median(under)),
        low=math.exp(min(exact[0], drawn[0])),
        high=math.exp(max(exact[1], drawn[1])),
        n=min(len(over), len(under)),
    )


def _bootstrap(over: Sequence[float], under: Sequence[float], error: float, seed: int) -> tuple[float, float]:
    random = Random(seed)  # noqa: S311 - repeatable on purpose
    shifts = sorted(
        median(random.choices(over, k=len(over))) - median(random.choices(under, k=len(under)))
        for _ in range(RESAMPLES)
    )
    cut = int(error / 2 * RESAMPLES)
    return shifts[cut], shifts[-1 - cut]


def _shift(over: Sequence[float], under: Sequence[float], error: float) -> tuple[float, float]:
    rank = rank_sum_rank(len(over), len(under), error)
    if not rank:
        return -math.inf, math.inf
    differences = sorted(above - below for above in over for below in under)
    return differences[rank - 1], differences[-rank]


@cache
def rank_sum_rank(n: int, m: int, error: float) -> int:
    """Return which ordered difference, counted from either end, bounds the interval; 0 if there are too few figures."""
    if n + m > _EXACT:
        spread = math.sqrt(n * m * (n + m + 1) / 12)
        return max(int(n * m / 2 - NormalDist().inv_cdf(1 - error / 2) * spread), 0)
    counts = _arrangements(n, m)
    allowed, tail, rank = error / 2 * math.comb(n + m, n), 0, 0
    while tail + counts[rank] <= allowed:
        tail += counts[rank]
        rank += 1
    return rank


def _arrangements(n: int, m: int) -> list[int]:
    """Return for each value of Mann and Whitney's U how many of the arrangements of n and m figures have it.

    They are the coefficients of the Gaussian binomial: the product of (1 − q^(m+i)) ÷ (1 − q^i) over i from 1 to n.
    """
    size = n * m + 1
    counts = [1] + [0] * (size - 1)
    for i in range(1, n + 1):
        for place in range(size - 1, m + i - 1, -1):
            counts[place] -= counts[place - m - i]
        for place in range(i, size):
            counts[place] += counts[place - i]
    return counts
