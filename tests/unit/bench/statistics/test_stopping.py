"""Simulated runs under the real rules, from the first pilot to the advice: how often it is wrong, what it finds.

By default a part of the runs; in a campaign all 500, with several seeds.
"""

from __future__ import annotations

import math

import pytest

from snapmgr.bench.run.schedule import SampleSchedule
from snapmgr.bench.statistics import findings
from snapmgr.bench.statistics import ratio as stats
from support.bench.sim import Machine, run
from support.thoroughness import CAMPAIGN


@pytest.fixture(scope="module", autouse=True)
def _quick_bootstrap():
    """Outside a campaign few resamples do: what is wider than the bootstrap's interval decides at few pairs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "RESAMPLES", stats.RESAMPLES if CAMPAIGN else 80)
        yield


SEEDS = range(1, 4) if CAMPAIGN else range(1, 2)
TWO, THREE = ("a", "b"), ("a", "b", "c")
SAMPLE_S = 10.0
# Machines whose storages are all the same.
EQUAL = {
    "60 % of noise": {"cv": 0.6},
    "60 % of noise on a machine that drifts and has neighbours": {"cv": 0.6, "drift": 0.3, "bursts": 0.2},
    "10 % of noise, where runs end by themselves": {"cv": 0.1},
}


def advised(medians, *, runs: int, budget_blocks: int, seed: int, **machine) -> tuple[int, int, int]:
    """Return in how many runs something was recommended, in how many it was the fastest, and in how many some pair of
    storages was said to differ."""
    stacks = tuple(medians)
    right = said = differ = 0
    for number in range(runs):
        schedule = SampleSchedule(name="random-update", stacks=stacks, seed=number, sample_s=SAMPLE_S)
        budget_s = SAMPLE_S * (len(stacks) + (len(stacks) + 1) * budget_blocks)
        ran = run(
            Machine(medians, seed=1000 * seed + number, **machine),
            [schedule],
            budget_s=budget_s,
            within=0.15,
            seed=number,
        )
        said += ran.advice.recommended is not None
        differ += any(one.verdict != "not shown" for one in ran.found)
        right += ran.advice.recommended == min(medians, key=lambda stack: medians[stack])
        assert ran.spent_s - ran.longest_s < budget_s
    return said, right, differ


@pytest.mark.parametrize("stacks", [TWO, THREE] if CAMPAIGN else [TWO])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.timeout(1800)
def test_equal_storages_are_said_to_differ_in_5_percent_of_runs_at_most(stacks, seed):
    runs = 500 if CAMPAIGN else 60
    medians = dict.fromkeys(stacks, SAMPLE_S)
    said = {
        name: advised(medians, runs=runs, budget_blocks=16, seed=10 * seed + place, **machine)
        for place, (name, machine) in enumerate(EQUAL.items())
    }
    false = [differ for _, _, differ in said.values()]
    assert all(recommended <= differ for recommended, _, differ in said.values()), said
    assert sum(false) <= 0.05 * runs * len(said), said
    if CAMPAIGN:
        assert max(false) <= 0.05 * runs, said


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("factor", "cv", "budget_blocks", "power"),
    [(1.3, 0.1, 12, 0.93), (2.0, 0.6, 30, 0.85)],
    ids=["1.3 times at 10 %", "twice at 60 %"],
)
@pytest.mark.timeout(900)
def test_known_differences_are_found(factor, cv, budget_blocks, power, seed):
    runs = 200 if CAMPAIGN else 30
    medians = {"slow": SAMPLE_S * math.sqrt(factor), "fast": SAMPLE_S / math.sqrt(factor)}
    said, right, _ = advised(medians, runs=runs, budget_blocks=budget_blocks, seed=seed, cv=cv)
    assert right >= power * runs
    assert said == right, "the wrong one was recommended"


def test_the_simulation_can_tell_a_bad_rule(monkeypatch):
    """Stop as soon as a difference shows, by the bootstrap alone: this is what the rule is made against."""
    monkeypatch.setattr(stats, "_proven", lambda logs, error: stats._bootstrap(logs, error, 1))
    monkeypatch.setattr(stats, "PEEKING", 1.0)
    monkeypatch.setattr(stats, "RESAMPLES", 80)
    said = 0
    for number in range(40):
        schedule = SampleSchedule(name="random-update", stacks=TWO, seed=number, sample_s=SAMPLE_S)
        ran = run(
            Machine(dict.fromkeys(TWO, SAMPLE_S), cv=0.6, seed=number),
            [schedule],
            budget_s=600,
            stop=lambda samples, name, blocks: any(  # noqa: ARG005
                one.ratio.shown
                for one in findings.findings([s for s in samples if s["block"] <= blocks], seed=1, family=1).found
            ),
        )
        said += any(one.ratio.shown for one in ran.found)
    assert said > 0.15 * 40
