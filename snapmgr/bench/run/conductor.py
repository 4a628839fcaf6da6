"""Measures the samples of a plan until there are enough or the budget ends; each is saved when it ends.

The samples are the only state: a second start reads them and continues.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from snapmgr.bench.measure.counters import Counters
from snapmgr.bench.model import Outcome
from snapmgr.bench.run.forecast import schedules_of
from snapmgr.bench.run.schedule import (
    MeasuredSlot,
    SampleSchedule,
    Slot,
    expected_s,
    goal,
    left_out,
    next_sample,
    rest_s,
    strangers,
    taken,
)
from snapmgr.bench.statistics.findings import comparisons, experiment_of, narrow_enough
from snapmgr.bench.storage.scene import neighbours
from snapmgr.bench.storage.workbench import workbench
from snapmgr.contract.backend import Runner
from snapmgr.contract.errors import ConfigError, SnapmgrError
from snapmgr.system.command import CommandRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from snapmgr.bench.device.target import OpenTarget
    from snapmgr.bench.model import Measuring, Scenario, Stack
    from snapmgr.bench.results.samples import Results
    from snapmgr.bench.run.plan import Experiment, RunPlan

FAILURES = 3
"""In a row: so many end a stack in an experiment."""
_NEAR = "another benchmark ran on this machine at the same time: each disturbed the other"
# At most this many times the needed space is formatted: a file system of terabytes takes minutes.
_ROOM_FACTOR = 4
_ROOM_LEAST_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    what: str
    """"random-update on btrfs"."""
    done: int
    """Samples."""
    total: int
    """As many as are expected now."""
    left_s: float
    """About how long these take."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How a run ended."""

    measured: int
    """Samples made now."""
    failed: int
    """Of them."""
    left_out: tuple[str, ...]
    """The parts that did not fit into the budget, in sentences."""
    given_up: tuple[str, ...]
    """The stacks that failed too often, in sentences."""


class Conductor:
    """Conducts one run.

    Args:
        plan: what to measure.
        results: where samples go; locked by the caller, and begun.
        run_id: of the run, as in ``run.json``.
        target: what file systems are made on.
        host: facts for each sample.
        bench: makes workbenches; a test has its own.
        counted: measures what a whole sample took, its file system included.
        runner: runs programs.
        tell: says a line for people.
        step: shows the current step of a sample.
        advance: shows before each sample how far the run is.
        ready: is called before the first sample that is made now, and returns further facts for `host`.
        neighbours: returns the devices on which other runs measure now.
        clock: seconds.
    """

    def __init__(
        self,
        plan: RunPlan,
        results: Results,
        run_id: str,
        *,
        target: OpenTarget,
        host: Mapping[str, Any],
        bench: Callable[..., AbstractContextManager[Any]] = workbench,
        counted: Callable[[], AbstractContextManager[Measuring]] | None = None,
        runner: Runner | None = None,
        tell: Callable[[str], None] = lambda _: None,
        step: Callable[[str], None] = lambda _: None,
        advance: Callable[[Progress], None] = lambda _: None,
        ready: Callable[[], Mapping[str, Any]] = dict,
        neighbours: Callable[[], Sequence[str]] = neighbours,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._results = results
        self._run_id = run_id
        self._target = target
        self._host = dict(host)
        self._bench = bench
        self._counted = counted or Counters([target.device]).measured
        self._runner = runner or CommandRunner()
        self._tell = tell
        self._step = step
        self._advance = advance
        self._ready: Callable[[], Mapping[str, Any]] | None = ready
        self._neighbours = neighbours
        self._warned = False
        self._clock = clock
        self._experiments = {experiment.name: experiment for experiment in plan.experiments}
        self._schedules = schedules_of(plan)
        self._samples = results.samples()
        self._narrow: dict[tuple[str, int, int], bool] = {}
        self._given_up: dict[tuple[str, str], str] = {}
        self._skipped: dict[str, list[Slot]] = {schedule.name: [] for schedule in self._schedules}

    def run(self, *, spent_s: float = 0.0) -> RunSummary:
        """Measure until there is enough of all, or the budget ends.

        `spent_s` of the budget went by before this. An interruption, or an error that is not a sample's own (the device
        is gone, the results' disk is full), leaves all samples made so far. Raises what `OpenTarget.check` raises,
        CatalogError and NoRoomError if nothing more can be written, and ConfigError.
        """
        begun = self._clock()
        for schedule in self._schedules:
            if odd := strangers(schedule, [one.slot for one in self._done()[schedule.name]]):
                what = f"a sample of {schedule.name} on {odd[0].stack} that is none of this run's"
                raise ConfigError(f"{self._results.folder} holds {what}", hint="name a new folder with -o")
        earlier_s = sum(one.seconds for made in self._done().values() for one in made)
        for name, stack in [(schedule.name, stack) for schedule in self._schedules for stack in schedule.stacks]:
            self._judge(name, stack)
        number = failed = 0
        while True:
            done, spent = self._done(), earlier_s + spent_s + self._clock() - begun
            found = next_sample(
                self._schedules, done, narrow=self._is_narrow, budget_s=self._plan.budget_s, spent_s=spent
            )
            if found is None:
                break
            schedule, slot = found
            if (schedule.name, slot.stack) in self._given_up:
                self._skipped[schedule.name].append(slot)
                continue
            if self._ready is not None:
                self._host |= self._ready()
                self._ready = None
                # No document of a sample is written before all facts about the host are known.
                self._note_absent()
                # All this takes from the budget.
                continue
            self._advance(self._how_far(schedule, slot, done, spent))
            sample = self._measure(self._experiments[schedule.name], slot)
            self._samples.append(sample)
            number += 1
            failed += bool(sample["failure"])
            self._judge(schedule.name, slot.stack)
        if self._ready is not None:
            self._note_absent()
        over = left_out(
            self._schedules, self._done(), narrow=self._is_narrow, budget_s=self._plan.budget_s, spent_s=spent
        )
        return RunSummary(measured=number, failed=failed, left_out=over, given_up=tuple(self._given_up.values()))

    # ------------------------------------------------------------------------------------------------ what is known

    def _own(self, name: str) -> list[dict[str, Any]]:
        return [sample for sample in self._samples if sample["kind"] != "absent" and experiment_of(sample) == name]

    def _done(self) -> dict[str, list[MeasuredSlot]]:
        """Return the finished slots: measured, failed, or skipped because their stack failed too often."""
        done: dict[str, list[MeasuredSlot]] = {}
        for name in self._experiments:
            measured = [
                MeasuredSlot(
                    slot=Slot(
                        block=sample["block"], position=sample["position"], stack=sample["stack"], kind=sample["kind"]
                    ),
                    seconds=sample["seconds"],
                )
                for sample in self._own(name)
            ]
            done[name] = measured + [MeasuredSlot(slot=slot, seconds=0.0) for slot in self._skipped[name]]
        return done

    def _is_narrow(self, name: str, blocks: int) -> bool:
        family = comparisons(self._samples)
        # Samples are only added, and to complete blocks none is.
        if (name, blocks, family) not in self._narrow:
            self._narrow[name, blocks, family] = narrow_enough(
                self._samples, name, blocks, within=self._plan.width, family=family, seed=self._plan.options.seed
            )
        return self._narrow[name, blocks, family]

    def _judge(self, name: str, stack: str) -> None:
        """Give a stack up in an experiment if its last samples all failed, and say so."""
        last = [sample["failure"] for sample in self._own(name) if sample["stack"] == stack][-FAILURES:]
        if len(last) == FAILURES and all(last) and (name, stack) not in self._given_up:
            why = f"{name} on {stack} is given up: it failed {FAILURES} times in a row, at last with: {last[-1]}"
            self._given_up[name, stack] = why
            self._tell(f"warning: {why}")

    def _how_far(
        self, schedule: SampleSchedule, slot: Slot, done: Mapping[str, Sequence[MeasuredSlot]], spent_s: float
    ) -> Progress:
        made = sum(len(one) for one in done.values())
        room_s = self._plan.budget_s - spent_s
        left_s, samples = 0.0, 0
        for one in taken(self._schedules, done, room_s=room_s) or (schedule,):
            blocks = goal(one, [measured.slot for measured in done[one.name]], self._is_narrow)
            seconds = rest_s(one, blocks, self._schedules, done)
            left_s += seconds
            samples += round(seconds / max(expected_s(one, one.stacks[0], self._schedules, done), 1e-3))
        if left_s > room_s:
            samples = round(samples * room_s / left_s)
        return Progress(
            what=f"{schedule.name} on {slot.stack}",
            done=made,
            total=made + max(samples, 1),
            left_s=min(left_s, room_s),
        )

    # -------------------------------------------------------------------------------------------------- one sample

    def _note_absent(self) -> None:
        """Record the missing requirements of this machine, once, as absent samples with their reasons."""
        known = {
            (sample["scenario"], sample["stack"], sample["failure"])
            for sample in self._samples
            if sample["kind"] == "absent"
        }
        for absent in self._plan.absent:
            if (absent.scenario.name, absent.stack.name, absent.why) not in known:
                slot = Slot(block=0, position=0, stack=absent.stack.name, kind="pilot")
                sample = self._document(absent.scenario, absent.parameters, slot, failure=absent.why)
                self._samples.append(self._keep(sample | {"kind": "absent"}))

    def _measure(self, experiment: Experiment, slot: Slot) -> dict[str, Any]:
        """Measure once, on a fresh file system, write the sample down and return it."""
        stack = next(stack for stack in experiment.stacks if stack.name == slot.stack)
        at, begun, near = datetime.now(UTC), self._clock(), self._other_runs()
        outcome: Outcome | None = None
        record: dict[str, Any] = {}
        failure = ""
        with self._results.work_folder() as folder:
            # What these two say is about the device, not about the sample: it ends the run.
            self._target.check()
            self._target.blank()
            try:
                with self._counted() as part, self._opened(stack, experiment, folder) as bench:
                    self._target.made()
                    try:
                        outcome = experiment.scenario.run(bench)
                    finally:
                        record = _anywhere(bench.record(), folder)
                record["spent"] = asdict(part.spent)
            except (SnapmgrError, OSError) as error:
                failure = _failure_text(error)
            sample = self._document(
                experiment.scenario,
                asdict(experiment.parameters),
                slot,
                outcome=outcome,
                record=record,
                failure=failure,
                at=at.isoformat(timespec="milliseconds"),
                seconds=self._clock() - begun,
            )
            if sample["failure"]:
                # While the work folder still exists: it may have filled the disk, which is not the storage's fault.
                self._results.require_writable()
        if near or self._other_runs():
            sample["notes"].append(_NEAR)
        return self._keep(sample)

    def _other_runs(self) -> bool:
        """Return whether another benchmark measures on this machine, and say so once."""
        devices = self._neighbours()
        if devices and not self._warned:
            self._warned = True
            self._tell(
                f"warning: another benchmark runs on this machine, on {', '.join(devices)}: both measure each other"
            )
        return bool(devices)

    def _opened(self, stack: Stack, experiment: Experiment, folder: Path) -> AbstractContextManager[Any]:
        room = max(_ROOM_FACTOR * experiment.needs.space_bytes, _ROOM_LEAST_BYTES)
        return self._bench(
            stack,
            experiment.parameters,
            device=self._target.device,
            size_bytes=min(self._target.size_bytes, room),
            folder=folder,
            runner=self._runner,
            tell=self._step,
            discard=self._target.discard,
        )

    def _document(
        self,
        scenario: Scenario,
        parameters: Mapping[str, Any],
        slot: Slot,
        *,
        outcome: Outcome | None = None,
        record: Mapping[str, Any] | None = None,
        failure: str = "",
        at: str = "",
        seconds: float = 0.0,
    ) -> dict[str, Any]:
        outcome = outcome or Outcome()
        checks = [asdict(check) for check in outcome.checks]
        metrics = {name: float(value) for name, value in outcome.metrics.items()}
        odd = [name for name, value in metrics.items() if not math.isfinite(value)]
        wrong = [f"{check['name']}: {check['detail'] or 'not so'}" for check in checks if not check["ok"]]
        wrong += [f"{name} is no number" for name in odd]
        record = record or {}
        return {
            "run": self._run_id,
            "scenario": scenario.name,
            "variant": parameters.get("variant", ""),
            "stack": slot.stack,
            "kind": slot.kind,
            "block": slot.block,
            "position": slot.position,
            "at": at or datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": seconds,
            "parameters": dict(parameters),
            "metrics": {name: value for name, value in metrics.items() if name not in odd},
            "infos": {info.name: _without_name(asdict(info)) for info in scenario.metrics},
            "series": {name: [float(one) for one in values] for name, values in outcome.series.items()},
            "axes": {name: dict(axis) for name, axis in outcome.axes.items()},
            "layouts": {name: dict(layout) for name, layout in outcome.layouts.items()},
            "checks": checks,
            "notes": list(outcome.notes),
            "spent": record.get("spent", {}),
            "commands": list(record.get("commands", [])),
            "jobs": dict(record.get("jobs", {})),
            "provisioned": dict(record.get("provisioned", {})),
            "guarantee": record.get("guarantee"),
            "host": self._host | {"target": self._target.facts()},
            "failure": failure or "; ".join(wrong),
        }

    def _keep(self, sample: dict[str, Any]) -> dict[str, Any]:
        path = self._results.write(sample)
        if sample["failure"] and sample["kind"] != "absent":
            self._tell(f"warning: {sample['scenario']} on {sample['stack']} failed: {sample['failure']} ({path.name})")
        return sample | {"id": path.stem}


def _without_name(info: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name != "name"}


def _failure_text(error: SnapmgrError | OSError) -> str:
    if isinstance(error, SnapmgrError):
        return error.message + (f" ({error.hint})" if error.hint else "")
    return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")


def _anywhere(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a record whose commands do not tell where on this machine the results lie."""
    commands = [[str(word).replace(str(folder), "FOLDER") for word in argv] for argv in record.get("commands", [])]
    return record | {"commands": commands}
