"""Computes the ratio of two sets of figures that were not measured in pairs: of two runs, days apart. Pure.

Changes of the machine between the runs are part of this ratio, and no interval shows them: `changes` checks the
controls for that. Apart from this the interval is the wider of two:

- a percentile bootstrap of the ratio of the medians, both sets resampled, seeded;
- the exact one of Mann and Whitney (1947) for a shift of the logarithms, by ordered differences (Hodges and Lehmann
  1963; Hollander and Wolfe, section 4.3), which misses no more often than requested, for any number of figures. Too few
  figures for the level have no such interval, and allow no conclusion.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cache, lru_cache
from random import Random
from statistics import NormalDist, median
from typing import TYPE_CHECKING

import numpy as np

from snapmgr.bench.statistics.ratio import LEVEL, RESAMPLES, Ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# Up to this many figures in both sets the distribution is computed exactly; beyond, it is normal to the third digit.
_EXACT = 60


def unpaired_ratio(
    first: Sequence[float], second: Sequence[float], *, seed: int, level: float = LEVEL, comparisons: int = 1
) -> Ratio:
    """Given two sets of figures above 0, return the ratio of their medians, first ÷ second, with its interval.

    `Ratio.n` is the size of the smaller set. `level` covers all `comparisons` intervals together. Raises ValueError
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
    above, below = _drawn(len(over), len(under), seed, RESAMPLES)
    shifts = np.sort(np.median(np.asarray(over)[above], axis=1) - np.median(np.asarray(under)[below], axis=1))
    cut = int(error / 2 * RESAMPLES)
    return float(shifts[cut]), float(shifts[-1 - cut])


@lru_cache(maxsize=8)
def _drawn(n: int, m: int, seed: int, resamples: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the indexes among n and among m figures that each resample (row) draws."""
    random = Random(seed)  # noqa: S311 - repeatable on purpose
    drawn = [(random.choices(range(n), k=n), random.choices(range(m), k=m)) for _ in range(resamples)]
    return np.array([one for one, _ in drawn]), np.array([other for _, other in drawn])


def _shift(over: Sequence[float], under: Sequence[float], error: float) -> tuple[float, float]:
    rank = rank_sum_rank(len(over), len(under), error)
    if not rank:
        return -math.inf, math.inf
    differences = sorted(above - below for above in over for below in under)
    return differences[rank - 1], differences[-rank]


@cache
def rank_sum_rank(n: int, m: int, error: float) -> int:
    """Return the rank, from either end, of the ordered difference that bounds the interval; 0 for too few figures."""
    if n + m > _EXACT:
        spread = math.sqrt(n * m * (n + m + 1) / 12)
        return max(int(n * m / 2 - NormalDist().inv_cdf(1 - error / 2) * spread), 0)
    from scipy.stats import mannwhitneyu

    def chance(total: int) -> float:
        """Return the probability that this many differences, or fewer, are positive."""
        above_all, above_some = divmod(total, m)
        first = [m + 1.0 + number if number < above_all else -float(number) for number in range(n)]
        if above_all < n:
            first[above_all] = above_some + 0.5
        return float(mannwhitneyu(first, range(1, m + 1), alternative="less", method="exact").pvalue)

    return bisect_right(range(n * m + 1), error / 2, key=chance)
