"""Computes ratios of two storages with honest intervals from few, noisy pairs. Pure.

A pair is the results of two storages in the same block, minutes apart. Influences on the whole machine (a drift, a
neighbour) affect both and cancel out. The computation uses logarithms of the pairs' ratios: there 2 and 1/2 are equally
far from 1.

**The interval** comes from a bootstrap, and is widened to a proven one:

- The figure is the median of the averages of any two pairs, a pair with itself included (Hodges and Lehmann 1963). It
  resists outliers and varies far less than the plain median, which would need half as many pairs again.
- Its interval is a percentile bootstrap over whole pairs, seeded. Alone it is not reliable: an interval from 6 pairs
  never leaves them, so that it misses in 3 % of cases instead of the requested 0.2 %. (A studentised bootstrap of the
  mean covers, but is then 2.4 times as wide as Student's t.)
- So it is never narrower than the interval of signed ranks. Between equal storages both orders of a pair are equally
  likely. Hence the logarithms are symmetric about 0, and their signed ranks have a known distribution (Wilcoxon 1945),
  which decides which of those averages bound the interval.
- n pairs have only 2ⁿ patterns of signs, so such an interval does not exist for an error below 2¹⁻ⁿ: 3 % at n = 6. Then
  Student's t of the logarithms is used. It is conservative, at errors up to 8 % and any n, for normal values of
  *unequal* variance, bursts included: Bakirov and Székely 2005, Ibragimov and Müller 2010. The choice depends on n and
  on the error alone: a choice that depended on the data would add errors of its own.

**The error** (1 − level) is divided by the number of comparisons (Bonferroni: all intervals hold together, whichever of
them is picked), and by `PEEKING`: a run looks at its intervals to decide whether to continue, and intervals that happen
to be narrow end it. Stopping by width, never by the result, multiplies the errors by 1.0 to 2.0 in simulations (6 to 40
pairs, CV of 5–20 %, errors of 5 % down to 0.05 %). The tests repeat them with the real rule.

No interval shows a bias that is the same in each block: the order is balanced (see `snapmgr.bench.run.schedule`), and
A/A pairs show the rest.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LEVEL = 0.95
LEAST_PAIRS = 6
"""With fewer pairs no difference is reported, whatever the interval."""
PEEKING = 2.0
"""Divides the error: see the module's text."""
RESAMPLES = 1000
_EXACT_RANKS = 64
"""Up to this many pairs the distribution of signed ranks is computed exactly; beyond, it is normal to the third digit,
and the bootstrap agrees."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The first figure divided by the second, in the middle of all pairs, with its interval."""

    value: float
    low: float
    """0 if nothing is known."""
    high: float
    """Infinite if nothing is known."""
    n: int
    """Number of pairs."""

    @property
    def shown(self) -> bool:
        """Return whether a difference is shown: enough pairs, and an interval without 1."""
        return self.n >= LEAST_PAIRS and not self.low <= 1 <= self.high

    def narrower_than(self, relative: float) -> bool:
        """Return whether the interval is narrower than ± `relative` (0.1: from 1/1.1 to 1.1 times its middle)."""
        return self.low > 0 and math.log(self.high) - math.log(self.low) <= 2 * math.log1p(relative)

    def inverse(self) -> Ratio:
        """Return the ratio seen from the other side."""
        return Ratio(value=1 / self.value, low=1 / self.high, high=1 / self.low if self.low else math.inf, n=self.n)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The difference between two samples of the same storage in the same block."""

    ratio: Ratio
    """Ratio of the A/A pairs. If it is `shown`, something other than the storage decides, and no result is reliable."""

    @property
    def limit(self) -> float:
        """Return the factor up to which a ratio shows nothing, at least 1; infinite if the A/A pairs differ.

        `verdict.judge` judges by it, and the charts draw it.
        """
        return math.inf if self.ratio.shown else max(self.ratio.value, 1 / self.ratio.value)


def paired_ratio(
    pairs: Sequence[tuple[float, float]], *, seed: int, level: float = LEVEL, comparisons: int = 1
) -> Ratio:
    """Given the figures of two storages in each block, return the ratio of the first to the second.

    Args:
        pairs: figures above 0, one pair for each block; one pair has an infinite interval.
        seed: seed of the bootstrap; equal seeds give equal intervals, and exchanged pairs the inverse.
        level: probability that *all* intervals of one family contain the truth.
        comparisons: number of intervals in the family, whether shown or not.

    Raises ValueError without pairs, and for figures that have no ratio (0, negative, not finite).
    """
    if not pairs:
        raise ValueError("a ratio needs at least one pair")
    if comparisons < 1 or not 0 < level < 1:
        raise ValueError(f"level {level} and {comparisons} comparisons: a share below 1, and at least one")
    for pair in pairs:
        if not have_ratio([pair]):
            raise ValueError(f"{pair[0]} ÷ {pair[1]} has no ratio: both figures must be finite and above 0")
    logs = [math.log(first) - math.log(second) for first, second in pairs]
    error = (1 - level) / comparisons / PEEKING
    exact = _proven(logs, error)
    drawn = _bootstrap(logs, error, seed) if len(logs) <= _EXACT_RANKS else exact
    return Ratio(
        value=_exp(float(np.median(_averages(logs)))),
        low=_exp(min(exact[0], drawn[0])),
        high=_exp(max(exact[1], drawn[1])),
        n=len(logs),
    )


def have_ratio(pairs: Sequence[tuple[float, float]]) -> bool:
    """Return whether there is at least one pair, and all figures are finite and above 0."""
    return bool(pairs) and all(math.isfinite(figure) and figure > 0 for pair in pairs for figure in pair)


def noise_floor(pairs: Sequence[tuple[float, float]], *, seed: int, level: float = LEVEL) -> Noise:
    """Given A/A pairs, return the effect of noise alone on a ratio. Raises ValueError as `paired_ratio`."""
    return Noise(ratio=paired_ratio(pairs, seed=seed, level=level))


def _averages(logs: Sequence[float]) -> NDArray[np.float64]:
    """Return the averages of any two values, and of each with itself (Walsh averages), in the order of `_weights`."""
    values = np.asarray(logs)
    first, second = np.triu_indices(len(values))
    return np.asarray((values[first] + values[second]) / 2)


def _bootstrap(logs: Sequence[float], error: float, seed: int) -> tuple[float, float]:
    """Return the percentile interval of the middle, from resampled pairs.

    `scipy.stats.bootstrap` draws and averages again for each ratio, which takes ten times as long. Here all ratios of
    equally many pairs share their resamples: each resample counts how often it has each average, and these counts are
    summed in the order of the averages until half of them are reached.
    """
    averages = _averages(logs)
    order = np.argsort(averages)
    reached = np.cumsum(_weights(len(logs), seed, RESAMPLES)[order], axis=0, dtype=np.uint16)
    # The median of an even number lies between two of them.
    lower, upper = (
        averages[order[(reached <= below).sum(axis=0)]] for below in ((len(order) - 1) // 2, len(order) // 2)
    )
    middles = np.sort((lower + upper) / 2)
    cut = int(error / 2 * RESAMPLES)
    return float(middles[cut]), float(middles[-1 - cut])


# A report has few numbers of pairs, a run one after the other.
@lru_cache(maxsize=8)
def _weights(n: int, seed: int, resamples: int) -> NDArray[np.uint16]:
    """Return the count of each average of two (row) in each resample (column) of n pairs."""
    random = Random(seed)  # noqa: S311 - repeatable on purpose
    drawn = np.array([random.choices(range(n), k=n) for _ in range(resamples)])
    times = np.array([(drawn == pair).sum(axis=1) for pair in range(n)], dtype=np.uint16)
    first, second = np.triu_indices(n)
    itself = (first == second)[:, np.newaxis]
    return np.where(itself, times[first] * (times[first] + 1) // 2, times[first] * times[second])


def _proven(logs: Sequence[float], error: float) -> tuple[float, float]:
    """Return an interval that misses the middle of a symmetric distribution with probability `error`, for any n."""
    n = len(logs)
    if n == 1:
        return -math.inf, math.inf
    rank = _signed_rank(n, error)
    if rank:
        averages = np.sort(_averages(logs))
        return float(averages[rank - 1]), float(averages[-rank])
    half = _student(error, n - 1) * stdev(logs) / math.sqrt(n)
    return fmean(logs) - half, fmean(logs) + half


@cache
def _signed_rank(n: int, error: float) -> int:
    """Return the rank, from either end, of the Walsh average that bounds the interval; 0 if n values are too few."""
    if n > _EXACT_RANKS:
        spread = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return int(n * (n + 1) / 4 - NormalDist().inv_cdf(1 - error / 2) * spread)
    from scipy.stats import wilcoxon

    def chance(total: int) -> float:
        """Return the probability that the positive ranks have this sum or less."""
        signed = []
        for rank in range(n, 0, -1):
            signed.append(rank if rank <= total else -rank)
            total -= max(signed[-1], 0)
        return float(wilcoxon(signed, alternative="less", method="exact").pvalue)

    return bisect_right(range(n * (n + 1) // 2 + 1), error / 2, key=chance)


@cache
def _student(error: float, degrees: int) -> float:
    """Return the two-sided quantile of Student's t: `error` lies beyond ± it."""
    from scipy.special import stdtrit

    return -float(stdtrit(degrees, error / 2))


def _exp(log: float) -> float:
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf
