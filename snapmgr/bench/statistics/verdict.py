"""Judges a ratio: the text, the page, its charts, the advice and `bench compare` all use this one rule. Pure.

A difference is shown if

- there are at least `LEAST_PAIRS` pairs;
- the whole interval lies on one side of 1 (or, for `changes`, beyond the tolerance). This alone holds the rate of false
  verdicts at the level of the interval, because random noise is in the interval;
- its middle is farther from 1 than the middle of the A/A pairs, in which the same stack was measured twice, and those
  are not shown to differ. This finds what is no random noise: an order, or a neighbour, that favours one place.

The A/A pairs' *interval* is no bound: it holds the random noise a second time. In 500 simulated runs each, a rule by it
found 1.3 times at a coefficient of variation of 20 % in 37 % of the runs instead of 63 %, and twice at 60 % in 78 %
instead of 93 %. Equal stacks were said to differ in 0.4 % instead of 1 to 3 %; the level allows 5 %.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from snapmgr.bench.statistics.ratio import LEAST_PAIRS

if TYPE_CHECKING:
    from snapmgr.bench.statistics.ratio import Noise, Ratio

Verdict = Literal["better", "worse", "differs", "not shown"]


def judge(ratio: Ratio, better: str, *, noise: Noise | None = None, tolerance: float = 0.0) -> Verdict:
    """Return whether a ratio shows its first figure to be better or worse than the second.

    Args:
        ratio: first ÷ second, with its interval.
        better: "less", "more", or "neither": then the answer is "differs".
        noise: of the same metric; None if it is unknown.
        tolerance: relative difference that does not count (0.1: 10 %).
    """
    most = 1 + tolerance
    if ratio.n < LEAST_PAIRS or (ratio.low <= most and ratio.high >= 1 / most):
        return "not shown"
    if noise is not None and abs(math.log(ratio.value)) <= math.log(noise.limit):
        return "not shown"
    if better == "neither":
        return "differs"
    return "better" if (ratio.value > 1) == (better == "more") else "worse"
