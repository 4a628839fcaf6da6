"""A simulated machine that is measured under the benchmark's real rules: which sample comes next, when to stop, what is
then advised. It drifts, and has neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

from snapmgr.bench.run.schedule import MeasuredSlot, SampleSchedule, Slot, complete_blocks, next_sample
from snapmgr.bench.statistics.advice import Advice, Conditions, advise
from snapmgr.bench.statistics.findings import Finding, comparisons, findings, narrow_enough

INFO = {"title": "Random update", "unit": "s", "better": "less", "headline": True}
DISK = Conditions(loop=False, guest=False)


class Machine:
    """What a sample takes: what its stack needs, times noise, times what the machine does at that moment.

    Args:
        medians: seconds of each stack.
        cv: coefficient of variation of a sample, lognormal.
        drift: how much faster or slower, as a logarithm, the machine gets in waves of some hours and at random.
        bursts: share of the time in which a neighbour makes everything slower, mostly by half to three times.
    """

    def __init__(
        self, medians: Mapping[str, float], *, cv: float, seed: int, drift: float = 0, bursts: float = 0
    ) -> None:
        self.medians, self.drift, self.bursts = medians, drift, bursts
        self.sigma = math.sqrt(math.log1p(cv * cv))
        self.random = Random(seed)
        self.phase = self.random.uniform(0, 2 * math.pi)
        self.now_s = self.walk = 0.0
        self.burst_until_s, self.burst = 0.0, 1.0

    def sample(self, stack: str) -> float:
        """Measure once; return the seconds."""
        if self.now_s > self.burst_until_s:
            self.burst = 1.0
            if self.random.random() < self.bursts / 2:
                # About two samples long.
                self.burst = 1.5 + self.random.expovariate(1)
                self.burst_until_s = self.now_s + self.random.expovariate(1 / 20)
        self.walk += self.random.gauss(0, self.drift / 5)
        slow = math.exp(self.drift * math.sin(self.phase + self.now_s / 400) + self.walk) * self.burst
        seconds = self.medians[stack] * self.random.lognormvariate(0, self.sigma) * slow
        self.now_s += seconds
        return seconds


@dataclass
class Ran:
    """What a simulated run did."""

    advice: Advice
    found: tuple[Finding, ...]
    blocks: dict[str, int]
    spent_s: float
    longest_s: float
    samples: list[dict[str, Any]] = field(repr=False)


def document(number: int, schedule: SampleSchedule, slot: Slot, figure: float) -> dict[str, Any]:
    """Return a sample as the benchmark writes it, as far as findings look at it."""
    return {
        "run": "run",
        "id": f"{number:04d}",
        "scenario": schedule.name,
        "variant": "",
        "stack": slot.stack,
        "kind": slot.kind,
        "block": slot.block,
        "metrics": {"update_s": figure},
        "infos": {"update_s": INFO},
        "checks": [],
        "failure": "",
    }


def run(
    machine: Machine,
    schedules: Sequence[SampleSchedule],
    *,
    budget_s: float,
    within: float = 0.1,
    stop: Callable[[list[dict[str, Any]], str, int], bool] | None = None,
    seed: int = 1,
) -> Ran:
    """Measure `schedules` on `machine` until the real rule says enough (or `stop`, asked in its place)."""
    samples: list[dict[str, Any]] = []
    done: dict[str, list[MeasuredSlot]] = {schedule.name: [] for schedule in schedules}
    longest_s = 0.0
    family = sum(len(schedule.stacks) * (len(schedule.stacks) - 1) // 2 for schedule in schedules) or 1

    @cache
    def narrow(name: str, blocks: int) -> bool:
        if stop:
            return stop(samples, name, blocks)
        return narrow_enough(samples, name, blocks, within=within, family=family, seed=seed)

    while step := next_sample(schedules, done, narrow=narrow, budget_s=budget_s, spent_s=machine.now_s):
        schedule, slot = step
        seconds = machine.sample(slot.stack)
        longest_s = max(longest_s, seconds)
        samples.append(document(len(samples), schedule, slot, seconds))
        done[schedule.name].append(MeasuredSlot(slot=slot, seconds=seconds))
    assert comparisons(samples) <= family
    found = findings(samples, seed=seed, family=family).found
    return Ran(
        advice=advise(found, DISK),
        found=found,
        blocks={name: complete_blocks(c, [m.slot for m in done[name]]) for c in schedules for name in [c.name]},
        spent_s=machine.now_s,
        longest_s=longest_s,
        samples=samples,
    )
