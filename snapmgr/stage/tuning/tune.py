"""Tuning: runs rungs on fresh clones with cold caches, one after the other, until nothing gains more than the noise."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from snapmgr.contract.errors import MissingRequirementError, VerificationError
from snapmgr.contract.units import format_duration
from snapmgr.stage.tuning.ladder import Standing, Stop, next_rung, standing
from snapmgr.stage.tuning.rungs import Limits, Run, Settings, changes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from snapmgr.trace.counters import Counted

DEFAULT_TIME_S = 1800.0
# Of the time that is left after the first rung, for the way over scratch, which is measured beside.
_SCRATCH_SHARE = 0.25
_SCRATCH_LEAST_S = 60.0

Temperature = Literal["cold", "warm"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the mount had done at one moment since the rung began."""

    at_s: float
    read_s: float
    """Seconds that reads took, those side by side added up; the others alike."""
    write_s: float
    fsync_s: float
    get_bytes: int
    put_bytes: int
    staged_bytes: int
    """Waits for its upload at this moment."""
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Whether the prepared data are what they should be."""

    tables: Mapping[str, str] | None
    """Each table's checksum, as a server on the data said; None: it could not be asked."""
    why_not: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One prepare of a rung, with all that was seen of it."""

    run: Run
    why: str = ""
    """Why this rung was tried."""
    temperature: Temperature = "cold"
    warm_up_s: float = 0.0
    tool_s: float = 0.0
    settle_s: float = 0.0
    verdict: str = ""
    """What the time went to, in one sentence."""
    advice: str = ""
    counted: Counted | None = None
    samples: tuple[Sample, ...] = ()
    failure: str | None = None
    """Why it ended without a result, other than by its time limit."""
    checked: Checked | None = None


@dataclass(frozen=True, kw_only=True)
class ScratchRun:
    """The way beside the ladder: copied to a local disk by many readers, prepared there."""

    copy_s: float
    tool_s: float
    failure: str | None = None

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.copy_s + self.tool_s


class Bench(Protocol):
    """What measures; `snapmgr.stage.tuning.bench` has the real one."""

    def measure(self, settings: Settings, limit_s: float, *, warm: bool = False, check: bool = False) -> Measured:
        """Prepare a fresh clone with `settings`, from a cold cache, or once more from the cache that this leaves.

        A tool that runs longer than `limit_s` is ended. With `check` the tables' checksums are taken. Nothing of it
        stays. What fails is in the result; raised is only what no other rung could do better.
        """

    def scratch(self, limit_s: float) -> ScratchRun | None:
        """Measure the way over scratch, from a cold cache; None if there is no room for it."""


@dataclass(kw_only=True)
class Tuning:
    """Everything that was measured so far; it is filled while the search goes on, and whole after any end of it."""

    name: str
    """Of what was prepared, for people."""
    data_bytes: int
    redo_bytes: int
    tool: str
    limits: Limits
    time_s: float
    start: Settings = field(default_factory=Settings)
    measured: list[Measured] = field(default_factory=list)
    scratch: ScratchRun | None = None
    stop: Stop | None = None
    """None: it was interrupted, or failed."""
    spent_s: float = 0.0

    @property
    def history(self) -> list[Run]:
        """What the search goes by: the cold runs."""
        return [one.run for one in self.measured if one.temperature == "cold"]

    @property
    def standing(self) -> Standing | None:
        """Which rung is the best so far; None before the first."""
        return standing(self.history, self.limits) if self.history else None

    @property
    def first_s(self) -> float | None:
        """What the first rung takes, or the least that it would have taken."""
        runs = [run for run in self.history if run.settings == self.start]
        whole = [run.seconds for run in runs if not run.cut]
        if whole:
            return sum(whole) / len(whole)
        return max((run.seconds for run in runs), default=None)

    @property
    def speed_up(self) -> float | None:
        """How many times faster the best rung is than the first."""
        now, first = self.standing, self.first_s
        return first / now.best_s if now is not None and first is not None else None

    def times(self, settings: Settings, temperature: Temperature = "cold") -> list[float]:
        """Return what the runs of a rung took that ended by themselves."""
        return [
            one.run.seconds
            for one in self.measured
            if one.run.settings == settings and one.temperature == temperature and not one.run.cut
        ]


def tune(
    bench: Bench,
    tuning: Tuning,
    *,
    tell: Callable[[str], None] = lambda _line: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Search for the settings that prepare fastest, and write all that is measured into `tuning` at once.

    The first and the best rung's tables are compared at the end, where there is a server program for it. Raises
    VerificationError if they differ; what the bench raises. `tuning` is whole then, too: what is measured is kept.
    """
    began = clock()
    deadline = began + tuning.time_s
    try:
        _climb(bench, tuning, deadline, tell, clock)
        _finish(bench, tuning, deadline, tell, clock)
    finally:
        tuning.spent_s = clock() - began


def _climb(
    bench: Bench, tuning: Tuning, deadline: float, tell: Callable[[str], None], clock: Callable[[], float]
) -> None:
    while True:
        left_s = max(deadline - clock() - _reserve_s(tuning), 0.0)
        step = next_rung(tuning.history, tuning.limits, left_s=left_s, start=tuning.start)
        if isinstance(step, Stop):
            tuning.stop = step
            tell(f"the search is over after {len(tuning.history)} runs: {step.why}")
            return
        first = not tuning.measured
        before = tuning.standing
        what = str(step.settings) if before is None else changes(before.best, step.settings)
        tell(f"rung {len(tuning.history) + 1}: {what} ({step.why}; {format_duration(left_s)} left)")
        one = bench.measure(step.settings, step.limit_s, check=first)
        _add(tuning, one, step.why, tell)
        if first:
            if one.failure is not None:
                raise MissingRequirementError(
                    f"the first rung failed: {one.failure}", hint="without it there is nothing to compare others with"
                )
            limit_s = max(2 * one.run.seconds, _SCRATCH_LEAST_S)
            tuning.scratch = bench.scratch(min(limit_s, (deadline - clock()) * _SCRATCH_SHARE))
            if tuning.scratch is not None and tuning.scratch.failure is None:
                tell(f"beside the ladder: over scratch it takes {format_duration(tuning.scratch.seconds)}")


def _finish(
    bench: Bench, tuning: Tuning, deadline: float, tell: Callable[[str], None], clock: Callable[[], float]
) -> None:
    """Compare the tables of the best rung with the first one's, and measure both from a warm cache."""
    now = tuning.standing
    if now is None:
        return
    # One more run may show that another rung is the best.
    while not _is_checked(tuning, now.best) and now.best != tuning.start:
        tell("the best rung once more: are its tables the same as the first one's?")
        one = bench.measure(now.best, max(deadline - clock(), 2 * now.best_s), check=True)
        _add(tuning, one, "its tables are compared with the first one's", tell)
        _compare(tuning, one)
        now = tuning.standing or now
        if one.checked is None:
            break
    for settings in dict.fromkeys((now.best, tuning.start)):
        # A warm run fills its cache by a cold one first.
        cold = tuning.times(settings)
        if tuning.limits.private and cold and deadline - clock() > 2 * max(cold):
            tell(f"from a warm cache: {settings}")
            _add(tuning, bench.measure(settings, deadline - clock(), warm=True), "from a warm cache", tell)


def _is_checked(tuning: Tuning, settings: Settings) -> bool:
    return any(one.checked is not None and one.run.settings == settings for one in tuning.measured)


def _compare(tuning: Tuning, best: Measured) -> None:
    first = tuning.measured[0].checked
    theirs, ours = first.tables if first else None, best.checked.tables if best.checked else None
    if theirs is None or ours is None or theirs == ours:
        return
    differ = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    raise VerificationError(
        f"prepared with other settings ({best.run.settings}) the data differ, in {len(differ)} of "
        f"{len({*theirs, *ours})} tables: {', '.join(differ[:5])}",
        hint="do not use these settings, and report this: a prepare must not depend on them",
    )


def tables_compared(tuning: Tuning) -> str:
    """Return in one sentence whether the first and the best rung's tables are the same."""
    first = tuning.measured[0].checked if tuning.measured else None
    best = tuning.standing.best if tuning.standing is not None else None
    others = [one.checked for one in tuning.measured[1:] if one.checked is not None and one.run.settings == best]
    if first is None:
        return "tables were not compared: the first rung did not come to its end"
    if not others:
        return "tables were not compared: the best rung was not checked"
    last = others[-1]
    if first.tables is None or last.tables is None:
        return f"tables were not compared: {first.why_not or last.why_not}"
    same = "the same" if first.tables == last.tables else "NOT the same"
    return f"the tables ({len(first.tables)}) are {same} by checksum, prepared by the first and by the best rung"


def _reserve_s(tuning: Tuning) -> float:
    """Return the time to keep for comparing the tables at the end."""
    now = tuning.standing
    if now is None or now.best == tuning.start:
        return 0.0
    checked = tuning.measured[0].checked
    return now.best_s + (checked.seconds if checked is not None else 0.0)


def _add(tuning: Tuning, one: Measured, why: str, tell: Callable[[str], None]) -> None:
    tuning.measured.append(replace(one, why=why))
    took = format_duration(one.run.seconds)
    if one.failure is not None:
        tell(f"  failed: {one.failure}")
    elif one.run.cut:
        tell(f"  slower: ended after {took}")
    else:
        tell(f"  {took}" + (f": {one.verdict}" if one.verdict else ""))
