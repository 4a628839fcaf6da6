"""Ratios of two storages with honest intervals from few, noisy pairs. Pure: the standard library alone.

A pair is what two storages gave in the same block, minutes apart, so that what the whole machine does (a drift, a
neighbour) is in both and leaves the ratio. All is done with logarithms of the pairs' ratios: there 2 and 1/2 are
equally far from 1.

**The interval** is that of a bootstrap, widened to one that has a proof:

- The figure is the median of all averages of two pairs (of one with itself, too): Hodges and Lehmann 1963. Outliers
  hardly move it, and it is far less shaky than the plain median, which would take half as many pairs again.
- Its interval is a percentile bootstrap's: the pairs, whole, are drawn again and again with replacement, seeded. Alone
  it is not to be believed here: an interval from 6 pairs never leaves them, so that it misses in 3 % of cases where 0.2
  was asked for. (A studentised bootstrap of the mean covers, but there it is 2.4 times as wide as Student's t.)
- So it never is narrower than the interval of signed ranks. Between equal storages both orders of a pair are equally
  likely, hence the logarithms are symmetric about 0 and their signed ranks have a known distribution (Wilcoxon 1945),
  from which follows which of those averages bound the interval.
- n pairs have 2ⁿ patterns of signs only, so that there is no such interval for an error below 2¹⁻ⁿ: 3 % at n = 6. There
  Student's t of the logarithms stands in. It is conservative, at errors up to 8 % and any n, for normal values of
  *unequal* variance, bursts included: Bakirov and Székely 2005, Ibragimov and Müller 2010. Which of the two is taken
  depends on n and on the error alone, never on the data, or the choice itself would be a way to err.

**The error** (1 − level) is divided by the number of comparisons (Bonferroni: the intervals hold all at once, whichever
of them somebody picks), and by `PEEKING`: a run looks at its intervals to decide whether to go on, and those that
happen to be narrow end it. Stopping by width, never by the result, makes 1.0 to 2.0 times the errors in simulations
(6 to 40 pairs, CV of 5–20 %, errors of 5 % down to 0.05 %). The tests repeat them with the real rule.

What no interval sees is a bias that is the same in each block: the order is balanced (see `order`), and A/A pairs show
what is left.
"""

from __future__ import annotations

import math
import sys
from array import array
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import itemgetter, mul
from random import Random
from statistics import NormalDist, fmean, median, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LEVEL = 0.95
LEAST_PAIRS = 6
"""Below that nothing is said to differ, whatever the interval."""
PEEKING = 2.0
"""Divides the error: see the module's text."""
RESAMPLES = 1000
_EXACT_RANKS = 64
"""Up to so many pairs the distribution of signed ranks is counted out; beyond it is normal to the third digit, and the
bootstrap says the same."""
# Of a field that counts for one resample: its top bit stays free for counts up to that of the averages of 255 pairs.
_TOP = 1 << 15


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times the second figure the first one is, in the middle of all pairs, with its interval."""

    value: float
    low: float
    """0 if nothing can be said."""
    high: float
    """Infinite if nothing can be said."""
    n: int
    """Pairs."""

    @property
    def shown(self) -> bool:
        """Whether a difference is shown: enough pairs, and an interval without 1."""
        return self.n >= LEAST_PAIRS and not self.low <= 1 <= self.high

    def narrower_than(self, relative: float) -> bool:
        """Whether the interval is narrower than ± `relative` (0.1: from 1/1.1 to 1.1 times its middle)."""
        return self.low > 0 and math.log(self.high) - math.log(self.low) <= 2 * math.log1p(relative)

    def inverse(self) -> Ratio:
        """Return the ratio seen from the other side."""
        return Ratio(value=1 / self.value, low=1 / self.high, high=1 / self.low if self.low else math.inf, n=self.n)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What two samples of the same storage in the same block differ by."""

    ratio: Ratio
    """Of the A/A pairs. If it is `shown`, something but the storage decides, and nothing else is to be believed."""
    factor: float
    """The farther end of its interval, as a factor above 1: what the same storage may differ by from itself here."""
    pair: float
    """What the median pair differs by, as a factor above 1: what one pair alone is worth."""


def paired_ratio(
    pairs: Sequence[tuple[float, float]], *, seed: int, level: float = LEVEL, comparisons: int = 1
) -> Ratio:
    """Given what two storages gave in each block, return the ratio of the first to the second.

    Args:
        pairs: figures above 0, one pair for each block; one pair has an infinite interval.
        seed: of the bootstrap; equal seeds give equal intervals, and exchanged pairs the inverse.
        level: that *all* intervals of one family hold the truth.
        comparisons: how many intervals the family has, shown ones and others.

    Raises ValueError for no pairs, and for figures that have no ratio (0, negative, not finite).
    """
    if not pairs:
        raise ValueError("a ratio needs at least one pair")
    if comparisons < 1 or not 0 < level < 1:
        raise ValueError(f"level {level} and {comparisons} comparisons: a share below 1, and at least one")
    for pair in pairs:
        if not have_ratio([pair]):
            raise ValueError(f"{pair[0]} ÷ {pair[1]} is no ratio: both have to be finite and above 0")
    logs = [math.log(first) - math.log(second) for first, second in pairs]
    error = (1 - level) / comparisons / PEEKING
    exact = _proven(logs, error)
    drawn = _bootstrap(logs, error, seed) if len(logs) <= _EXACT_RANKS else exact
    return Ratio(
        value=_exp(_middle(sorted(_averages(logs)))),
        low=_exp(min(exact[0], drawn[0])),
        high=_exp(max(exact[1], drawn[1])),
        n=len(logs),
    )


def have_ratio(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether there is at least one pair, and all figures are finite and above 0."""
    return bool(pairs) and all(math.isfinite(figure) and figure > 0 for pair in pairs for figure in pair)


def noise_floor(pairs: Sequence[tuple[float, float]], *, seed: int, level: float = LEVEL) -> Noise:
    """Given A/A pairs, return what the machine's noise alone does to a ratio. Raises ValueError as `paired_ratio`."""
    ratio = paired_ratio(pairs, seed=seed, level=level)
    return Noise(
        ratio=ratio,
        factor=max(ratio.high, 1 / ratio.low if ratio.low else math.inf),
        pair=_exp(median(abs(math.log(first) - math.log(second)) for first, second in pairs)),
    )


def _averages(logs: Sequence[float]) -> list[float]:
    """Return the averages of each two values, and of each with itself (Walsh averages), in the order of `_weights`."""
    return [(first + second) / 2 for place, first in enumerate(logs) for second in logs[place:]]


def _bootstrap(logs: Sequence[float], error: float, seed: int) -> tuple[float, float]:
    """Return the percentile interval of the middle, from resampled pairs."""
    weights = _weights(len(logs), seed, RESAMPLES)
    averages = sorted(zip(_averages(logs), weights, strict=True), key=itemgetter(0))
    cut = int(error / 2 * RESAMPLES)
    return _lowest(averages, cut), -_lowest([(-average, counts) for average, counts in reversed(averages)], cut)


def _lowest(averages: Sequence[tuple[float, int]], cut: int) -> float:
    """Given the averages in order with their `_weights`, return the middle that `cut` resamples have a lower one than.

    All resamples are reckoned at once, which is tens of times as quick as one by one: `low` and `high` have a field for
    each, which counts how many of its averages have come. Its top bit is set as soon as the lower and the upper one of
    the two in its middle have.
    """
    ones = _packed([1] * RESAMPLES)
    tops, below = ones * _TOP, 0
    low, high = ones * (_TOP - (len(averages) + 1) // 2), ones * (_TOP - len(averages) // 2 - 1)
    middles: list[float] = []
    # Lower ones of a middle in order, each with the resamples whose upper one is still to come.
    waiting: list[tuple[float, int]] = []
    for average, counts in averages:
        low += counts
        high += counts
        reached = low & tops
        if reached != below:
            waiting.append((average, reached ^ below))
            below = reached
        if waiting:
            passed = high & tops
            for lower, resamples in waiting:
                middles += [(lower + average) / 2] * (resamples & passed).bit_count()
            waiting = [(lower, left) for lower, resamples in waiting if (left := resamples & ~passed)]
        if len(middles) > cut:
            middles.sort()
            # What is still to come is not lower than this.
            if middles[cut] <= ((waiting[0][0] if waiting else average) + average) / 2:
                break
    return middles[cut]


# A report has few numbers of pairs, a run one after the other.
@lru_cache(maxsize=8)
def _weights(n: int, seed: int, resamples: int) -> tuple[int, ...]:
    """Return how often each resample of n pairs has each of the averages of two, as fields of one number each."""
    random = Random(seed)  # noqa: S311 - repeatable on purpose
    drawn = [[0] * resamples for _ in range(n)]
    for resample in range(resamples):
        for pair in random.choices(range(n), k=n):
            drawn[pair][resample] += 1
    return tuple(
        _packed(number * (number + 1) // 2 for number in first) if first is second else _packed(map(mul, first, second))
        for place, first in enumerate(drawn)
        for second in drawn[place:]
    )


def _packed(counts: Iterable[int]) -> int:
    return int.from_bytes(array("H", counts).tobytes(), sys.byteorder)


def _middle(ordered: Sequence[float]) -> float:
    """Return the median of ordered values; faster than `statistics.median`, which orders them again."""
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _proven(logs: Sequence[float], error: float) -> tuple[float, float]:
    """Return an interval that holds the middle of a symmetric distribution but for `error`, at any number of values."""
    n = len(logs)
    if n == 1:
        return -math.inf, math.inf
    rank = _signed_rank(n, error)
    if rank:
        averages = sorted(_averages(logs))
        return averages[rank - 1], averages[-rank]
    half = _student(error, n - 1) * stdev(logs) / math.sqrt(n)
    return fmean(logs) - half, fmean(logs) + half


@cache
def _signed_rank(n: int, error: float) -> int:
    """Return which Walsh average, counted from either end, bounds the interval; 0 if n values are too few."""
    if n > _EXACT_RANKS:
        spread = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return int(n * (n + 1) / 4 - NormalDist().inv_cdf(1 - error / 2) * spread)
    # How many of the 2ⁿ patterns of signs have each sum of positive ranks.
    patterns = [1]
    for rank in range(1, n + 1):
        patterns = [
            (patterns[total] if total < len(patterns) else 0) + (patterns[total - rank] if total >= rank else 0)
            for total in range(len(patterns) + rank)
        ]
    tail, rank = 0, 0
    while tail + patterns[rank] <= error / 2 * 2**n:
        tail += patterns[rank]
        rank += 1
    return rank


@cache
def _student(error: float, degrees: int) -> float:
    """Return the two-sided quantile of Student's t: beyond ± it lies `error`."""
    low, high = 0.0, 1.0
    while _within(high, degrees) < 1 - error:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 1 - error else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """Return the probability that Student's t lies within ± `t`: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    if degrees % 2 == 0:
        term = total = 1.0
        for step in range(2, degrees - 1, 2):
            term *= square * (step - 1) / step
            total += term
        return sine * total
    if degrees == 1:
        return 2 * angle / math.pi
    term = total = math.cos(angle)
    for step in range(3, degrees - 1, 2):
        term *= square * (step - 1) / step
        total += term
    return 2 / math.pi * (angle + sine * total)


def _exp(log: float) -> float:
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf
