"""Describes the method of measurement and computation, with the numbers of the given samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.bench.statistics.comparison import failure_of
from snapmgr.bench.statistics.findings import comparisons
from snapmgr.bench.statistics.ratio import LEAST_PAIRS, LEVEL, RESAMPLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.bench.statistics.comparison import Sample


def interval_words(samples: Sequence[Sample]) -> str:
    """Return the meaning of the intervals: "95 % for all 12 comparisons together"."""
    number = comparisons(samples)
    return (
        f"{LEVEL:.0%} for all {number} comparisons together".replace("%", " %") if number > 1 else f"{LEVEL * 100:g} %"
    )


def method(samples: Sequence[Sample], *, seed: int) -> list[str]:
    """Return the sentences."""
    measured = [one for one in samples if one["kind"] == "measured" and not failure_of(one)]
    twins = sum(1 for one in samples if one["kind"] == "a/a" and not failure_of(one))
    pilots = sum(1 for one in samples if one["kind"] == "pilot")
    blocks = len({(one["run"], one["scenario"], one["variant"], one["block"]) for one in measured})
    return [
        "Each sample starts on a fresh file system, made on the blank device by the backend that makes the backups.",
        f"Samples come in blocks that have each stack once, in random order; the next block is its mirror image "
        f"(A B B A). Here: {len(measured)} samples in {blocks} blocks, and {pilots} pilots that count for nothing.",
        f"A/A: one stack of a block runs twice. Here {twins} times; their ratio would be 1 if nothing but the storage "
        "decided.",
        f"A ratio is the middle of the ratios within the blocks (Hodges and Lehmann). Its interval is a bootstrap's "
        f"({RESAMPLES:,} draws of whole pairs, seed {seed}), never narrower than an exact one (Wilcoxon's signed ranks "
        f"or Student's t of the logarithms). The level is {interval_words(samples)} (Bonferroni); the looks at the "
        "intervals by which a run decides to go on are paid for.",
        f"A difference is shown if there are at least {LEAST_PAIRS} pairs, the interval does not hold 1, and the ratio "
        "is farther from 1 than that of the A/A pairs (outside the grey band). If the A/A pairs are shown to differ, "
        "nothing is shown. Where no difference is shown there may be one that is smaller than the interval.",
        "Before and after a snapshot are compared within each sample; these intervals are corrected for their own "
        "number.",
        "Each sample checks its snapshot: after the updates the snapshot still holds the old data, and the origin the "
        "new. A sample that fails this counts for nothing.",
        "Bytes written and read are counted at the physical device, below the file system and below LVM.",
    ]
