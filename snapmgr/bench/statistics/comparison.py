"""Groups samples for a comparison: selects those that count, and pairs those that belong together. Pure.

`findings` computes the ratios for the advice; the report, `published` and `changes` use these functions in addition.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from snapmgr.bench.statistics.findings import experiment_of, usable
from snapmgr.bench.statistics.ratio import LEAST_PAIRS, Ratio

Sample = Mapping[str, Any]
"""A sample's document: see `snapmgr.bench.results.samples`."""
Block = tuple[str, int]
"""Run and block: samples of one block were measured minutes apart."""
# The interval of two pairs may span a hundred powers of ten, whose digits are meaningless.
_FARTHEST = 10_000


@dataclass(frozen=True, kw_only=True)
class Group:
    """All samples of one experiment: a scenario in one of its variants."""

    name: str
    """"random-update database"."""
    samples: tuple[Sample, ...]
    """Includes pilots, A/A twins and failures."""

    @property
    def scenario(self) -> str:
        """Return its scenario's name."""
        return str(self.samples[0]["scenario"])

    @property
    def counted(self) -> list[Sample]:
        """Return the samples that count for figures."""
        return [sample for sample in self.samples if sample["kind"] == "measured" and usable(sample)]

    @property
    def parameters(self) -> list[Mapping[str, Any]]:
        """Return the distinct parameters of its counted samples without seeds; several should not be mixed."""
        found = {json.dumps(_parameters(sample), sort_keys=True): _parameters(sample) for sample in self.counted}
        return list(found.values())


def groups(samples: Iterable[Sample]) -> list[Group]:
    """Return the experiments in the order of their first samples; samples that could not run are left out."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample["kind"] != "absent":
            found.setdefault(experiment_of(sample), []).append(sample)
    return [Group(name=name, samples=tuple(members)) for name, members in found.items()]


def failure_of(sample: Sample) -> str:
    """Return why a sample does not count: its failure, or the failed check; "" if it counts."""
    if sample["failure"]:
        return str(sample["failure"])
    failed = [check for check in sample["checks"] if not check["ok"]]
    return "; ".join(f"{check['name']}: {check['detail'] or 'not so'}" for check in failed)


def _parameters(sample: Sample) -> dict[str, Any]:
    return {name: value for name, value in sample["parameters"].items() if name != "seed"}


def by_block(samples: Iterable[Sample], stack: str, metric: str) -> dict[Block, float]:
    """Return a stack's figure in each block."""
    return {
        (sample["run"], sample["block"]): float(sample["metrics"][metric])
        for sample in samples
        if sample["stack"] == stack and metric in sample["metrics"]
    }


def pairs(first: Mapping[Block, float], second: Mapping[Block, float]) -> list[tuple[float, float]]:
    """Return the pairs of figures from blocks that have both."""
    return [(first[block], second[block]) for block in first if block in second]


def finite(value: float) -> float | None:
    """Return a figure for JSON: None if it is infinite."""
    return value if math.isfinite(value) else None


def ratio_document(ratio: Ratio) -> dict[str, Any]:
    """Return a ratio as JSON, with its words (see `ratio_words`)."""
    return {
        "value": ratio.value,
        "low": ratio.low,
        "high": finite(ratio.high),
        "n": ratio.n,
        "shown": ratio.shown,
        "ratio_text": number_words(ratio.value),
        "interval_text": interval_words(ratio.low, ratio.high),
        "text": ratio_words(ratio),
    }


def ratio_words(ratio: Ratio) -> str:
    """Return "1.42 (1.30–1.57)"."""
    return f"{number_words(ratio.value)} ({interval_words(ratio.low, ratio.high)})"


def interval_words(low: float, high: float) -> str:
    """Return "1.30–1.57"; "any" if nothing is known, and one number if both ends read alike."""
    if low < 1 / _FARTHEST and high > _FARTHEST:
        return "any"
    return "–".join(dict.fromkeys((number_words(low), number_words(high))))


def number_words(value: float) -> str:
    """Return a ratio with about three digits: "0.041", "0.71", "1.42", "12.5", "1,240"; beyond that as a bound."""
    if value > _FARTHEST:
        return f">{_FARTHEST:,}"
    if value < 1 / _FARTHEST:
        return f"<{1 / _FARTHEST:g}"
    if value >= 99.95:  # noqa: PLR2004 - three digits
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.0995 else f"{value:.2g}"  # noqa: PLR2004


def difference_words(ratio: Ratio) -> str:
    """Return a ratio in words, without a judgement: "42 % more", "3.1 times as much", "no difference shown"."""
    if ratio.n < LEAST_PAIRS:
        return f"too few pairs to say: {ratio.n} of {LEAST_PAIRS}"
    if not ratio.shown:
        return "no difference shown"
    if ratio.value >= 2:  # noqa: PLR2004 - "230 % more" is hard to read
        return f"{number_words(ratio.value)} times as much"
    percent = abs(ratio.value - 1) * 100
    digits = 1 if percent < 9.95 else 0  # noqa: PLR2004 - two digits
    # Byte counts may be known to parts of a million.
    words = f"{percent:.{digits}f}" if percent >= 0.05 else "less than 0.1"  # noqa: PLR2004 - "0.0 % more" is none
    return f"{words} % {'more' if ratio.value > 1 else 'less'}"
