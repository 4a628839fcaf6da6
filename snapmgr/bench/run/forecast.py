"""Forecasts the steps of a run, with the time and space of each. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.bench.device.precondition import ROUND_S, TIMES, WINDOW
from snapmgr.bench.run.schedule import MeasuredSlot, SampleSchedule, Slot, expected_s, left_out, next_sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.bench.run.plan import RunPlan

_DISK_BYTES_PER_S = 100e6
"""As `Needs.seconds` assumes."""


@dataclass(frozen=True, kw_only=True)
class ForecastStep:
    """A block of one experiment: each stack once, on a fresh file system each time."""

    what: str
    """"random-update database: pilot"."""
    stacks: tuple[str, ...]
    """In their order."""
    seconds: float
    space_bytes: int
    fits: bool
    """Whether the budget has room for it."""


def schedules_of(plan: RunPlan) -> tuple[SampleSchedule, ...]:
    """Return the schedules of a plan, for `snapmgr.bench.run.schedule`."""
    return tuple(
        SampleSchedule(
            name=experiment.name,
            stacks=tuple(stack.name for stack in experiment.stacks),
            seed=plan.options.seed,
            sample_s=experiment.sample_s,
            least=plan.least,
            most=plan.most,
        )
        for experiment in plan.experiments
    )


def preparation_s(file_bytes: int | None, flash_bytes: int | None, *, steady_s: float) -> float:
    """Return how long it takes until the first sample.

    A loop device's file is written once; flash, if its size is given, is brought to a steady state for `steady_s`.
    """
    steadying_s = TIMES * flash_bytes / _DISK_BYTES_PER_S + WINDOW * ROUND_S if flash_bytes else 0.0
    return (file_bytes or 0) / _DISK_BYTES_PER_S + min(steadying_s, steady_s)


def forecast(plan: RunPlan, *, spent_s: float) -> tuple[list[ForecastStep], tuple[str, ...]]:
    """Return the steps of the shortest possible run, and in sentences the parts that do not fit into the budget.

    `spent_s` of the budget go by before the first.
    """
    schedules = schedules_of(plan)
    fitting = {(name, slot) for name, slot in _walked(schedules, budget_s=plan.budget_s, spent_s=spent_s)}
    blocks: dict[tuple[str, int], list[Slot]] = {}
    for name, slot in _walked(schedules, budget_s=math.inf, spent_s=0.0):
        blocks.setdefault((name, slot.block), []).append(slot)
    experiments = {experiment.name: experiment for experiment in plan.experiments}
    more = " or more" if plan.most > plan.least else ""
    steps = [
        ForecastStep(
            what=f"{name}: block {block} of {plan.least}{more}" if block else f"{name}: pilot",
            stacks=tuple(slot.stack for slot in slots),
            seconds=experiments[name].sample_s * len(slots),
            space_bytes=experiments[name].needs.space_bytes,
            fits=all((name, slot) in fitting for slot in slots),
        )
        for (name, block), slots in blocks.items()
    ]
    over = left_out(schedules, {}, narrow=_enough, budget_s=plan.budget_s, spent_s=spent_s)
    return steps, over


def _walked(schedules: Sequence[SampleSchedule], *, budget_s: float, spent_s: float) -> list[tuple[str, Slot]]:
    done: dict[str, list[MeasuredSlot]] = {schedule.name: [] for schedule in schedules}
    walked: list[tuple[str, Slot]] = []
    while found := next_sample(schedules, done, narrow=_enough, budget_s=budget_s, spent_s=spent_s):
        schedule, slot = found
        seconds = expected_s(schedule, slot.stack, schedules, done)
        done[schedule.name].append(MeasuredSlot(slot=slot, seconds=seconds))
        walked.append((schedule.name, slot))
        spent_s += seconds
    return walked


def _enough(_name: str, _blocks: int) -> bool:
    return True
