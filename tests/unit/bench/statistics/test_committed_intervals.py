"""All ratios that the committed samples give are those that were published, interval by interval."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench.published import unpacked
from snapmgr.bench.report import document
from snapmgr.bench.statistics.changes import compare

GOLDEN = Path(__file__).parents[3] / "golden" / "bench"
# [value, low, high] in the order of the documents; they were computed without scipy and numpy.
EXPECTED = json.loads((GOLDEN / "intervals.json").read_text())


def intervals(part):
    """Return [value, low, high] of all ratios within a document, without those of the A/A pairs."""
    if isinstance(part, dict):
        own = [[part[name] for name in ("value", "low", "high")]] if {"value", "low", "high"} <= part.keys() else []
        return own + [one for name, inner in part.items() if name != "noise" for one in intervals(inner)]
    return [one for inner in part for one in intervals(inner)] if isinstance(part, list) else []


@pytest.mark.parametrize("archive", ["published", "published-plain"])
def test_the_committed_samples_give_the_same_intervals_to_three_digits(archive):
    samples = unpacked(GOLDEN / f"{archive}.tar.xz")
    half = [[one for one in samples if one["block"] % 2 == odd] for odd in (0, 1)]
    paired = intervals(document(samples, made_at=datetime(2026, 1, 1, tzinfo=UTC)))
    unpaired = intervals(compare(half[0], half[1]))
    expected = EXPECTED[archive]
    assert len(paired) == len(expected["paired"])
    assert len(unpaired) == len(expected["unpaired"])
    for found, known in zip(paired + unpaired, expected["paired"] + expected["unpaired"], strict=True):
        assert found == [None if figure is None else pytest.approx(figure, rel=5e-4) for figure in known]
