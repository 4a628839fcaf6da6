"""Runs rungs on fresh clones with cold caches, one after the other, until none gains more than the noise.

`climb` runs any sequence of rungs: the search of `snapmgr prepare --tune` and the benchmark's published ladder.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from snapmgr.contract.errors import MissingRequirementError, VerificationError
from snapmgr.contract.units import format_duration
from snapmgr.physical.tuning.ladder import Standing, Stop, Try, next_rung, standing
from snapmgr.physical.tuning.rungs import Run, RungSettings, TuningLimits, changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from snapmgr.trace.counters import Counted

DEFAULT_TIME_S = 1800.0
# Share of the time after the first rung to spend on the way over scratch, measured for comparison.
_SCRATCH_SHARE = 0.25
_SCRATCH_LEAST_S = 60.0

Temperature = Literal["cold", "warm"]


class Sample(Struct, frozen=True, kw_only=True):
    """Activity of the mount from the beginning of the rung to one moment."""

    at_s: float
    read_s: float
    """Sum of the seconds of all reads, parallel ones included; likewise for writes and fsyncs."""
    write_s: float
    fsync_s: float
    get_bytes: int
    put_bytes: int
    staged_bytes: int
    """Data that waits for its upload at this moment."""
    cpu_s: float


class Checked(Struct, frozen=True, kw_only=True):
    """The checksums of the prepared data."""

    tables: Mapping[str, str] | None
    """Each table's checksum by a server on the data; None: no server could run."""
    why_not: str = ""
    seconds: float = 0.0


class Measured(Struct, frozen=True, kw_only=True):
    """One prepare of a rung, with all observations."""

    run: Run
    why: str = ""
    """Why this rung was tried."""
    temperature: Temperature = "cold"
    warm_up_s: float = 0.0
    tool_s: float = 0.0
    settle_s: float = 0.0
    """Owners, flush and the remaining uploads."""
    verdict: str = ""
    """The bottleneck in one sentence."""
    advice: str = ""
    counted: Counted | None = None
    samples: tuple[Sample, ...] = ()
    failure: str | None = None
    """Why it failed; None also if its time limit ended it."""
    checked: Checked | None = None


class ScratchRun(Struct, frozen=True, kw_only=True):
    """The alternative to the ladder: many readers copy the backup to a local disk, and the tool prepares it there."""

    copy_s: float
    tool_s: float
    failure: str | None = None

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.copy_s + self.tool_s


class Bench(Protocol):
    """Measures rungs; `snapmgr.physical.tuning.storagebench` has the real one."""

    def measure(self, settings: RungSettings, limit_s: float, *, warm: bool = False, check: bool = False) -> Measured:
        """Prepare a fresh clone with `settings` from a cold cache; with `warm` again, from the cache that this leaves.

        Ends a tool that runs longer than `limit_s`. With `check` takes the tables' checksums. Leaves nothing behind.
        A failure is part of the result; only a failure that every rung would have is raised.
        """

    def scratch(self, limit_s: float) -> ScratchRun | None:
        """Measure the way over scratch, from a cold cache; None without room for it."""


class Tuning(Struct, kw_only=True):
    """Everything measured so far: it grows during the search, and is complete whenever the search ends."""

    name: str
    """Name of the backup, for people."""
    data_bytes: int
    redo_bytes: int
    tool: str
    limits: TuningLimits
    time_s: float
    start: RungSettings = field(default_factory=RungSettings)
    measured: list[Measured] = field(default_factory=list)
    scratch: ScratchRun | None = None
    stop: Stop | None = None
    """None: the search was interrupted, or failed."""
    spent_s: float = 0.0

    @property
    def history(self) -> list[Run]:
        """The cold runs: the search depends on these alone."""
        return [one.run for one in self.measured if one.temperature == "cold"]

    @property
    def standing(self) -> Standing | None:
        """Which rung is the best so far; None before the first."""
        return standing(self.history, self.limits) if self.history else None

    @property
    def first_s(self) -> float | None:
        """Mean time of the first rung; if every run of it was ended, the least time it would have taken."""
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

    def times(self, settings: RungSettings, temperature: Temperature = "cold") -> list[float]:
        """Return the times of the completed runs of a rung."""
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
    """Search for the settings that prepare fastest, and write each measured run into `tuning` immediately.

    Compares the tables of the first and the best rung at the end, if a server program is installed. Raises
    VerificationError if they differ, and the errors of the bench; `tuning` then still holds all measured runs.
    """
    began = clock()
    deadline = began + tuning.time_s
    try:
        _search(bench, tuning, deadline, tell, clock)
        _finish(bench, tuning, deadline, tell, clock)
    finally:
        tuning.spent_s = clock() - began


def climb(
    bench: Bench, tries: Iterable[Try], measured: list[Measured], *, begin: Callable[[Try], None]
) -> Iterator[Measured]:
    """Run one rung after the other; yield each run when it is in `measured`.

    `tries` may depend on `measured`; `begin` is called before each run.
    """
    for step in tries:
        begin(step)
        one = replace(bench.measure(step.settings, step.limit_s, warm=step.warm, check=step.check), why=step.why)
        measured.append(one)
        yield one


def _search(
    bench: Bench, tuning: Tuning, deadline: float, tell: Callable[[str], None], clock: Callable[[], float]
) -> None:
    """Climb until the search is over; measure the way over scratch after the first rung."""

    def left_s() -> float:
        return max(deadline - clock() - _reserve_s(tuning), 0.0)

    def tries() -> Iterator[Try]:
        while isinstance(step := next_rung(tuning.history, tuning.limits, left_s=left_s(), start=tuning.start), Try):
            yield replace(step, check=not tuning.measured)
        tuning.stop = step
        tell(f"the search is over after {len(tuning.history)} runs: {step.why}")

    def begin(step: Try) -> None:
        before = tuning.standing
        what = str(step.settings) if before is None else changes(before.best, step.settings)
        tell(f"rung {len(tuning.history) + 1}: {what} ({step.why}; {format_duration(left_s())} left)")

    for one in climb(bench, tries(), tuning.measured, begin=begin):
        _tell_run(one, tell)
        if len(tuning.measured) > 1:
            continue
        if one.failure is not None:
            raise MissingRequirementError(
                f"the first rung failed: {one.failure}", hint="the search needs its time for comparison"
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

    def run(step: Try, what: str) -> Measured:
        (one,) = climb(bench, (step,), tuning.measured, begin=lambda _step: tell(what))
        _tell_run(one, tell)
        return one

    # One more run may show that another rung is the best.
    while not _is_checked(tuning, now.best) and now.best != tuning.start:
        limit_s = max(deadline - clock(), 2 * now.best_s)
        why = "its tables are compared with the first one's"
        one = run(
            Try(settings=now.best, limit_s=limit_s, why=why, check=True),
            "the best rung once more: are its tables the same as the first one's?",
        )
        _compare(tuning, one)
        now = tuning.standing or now
        if one.checked is None:
            break
    for settings in dict.fromkeys((now.best, tuning.start)):
        # A warm run fills its cache by a cold one first.
        cold, left_s = tuning.times(settings), deadline - clock()
        if tuning.limits.private and cold and left_s > 2 * max(cold):
            run(
                Try(settings=settings, limit_s=left_s, why="from a warm cache", warm=True),
                f"from a warm cache: {settings}",
            )


def _is_checked(tuning: Tuning, settings: RungSettings) -> bool:
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
        hint="do not use these settings, and report this: they must not change the result of a prepare",
    )


def tables_compared(tuning: Tuning) -> str:
    """Say in one sentence whether the tables of the first and the best rung are the same."""
    first = tuning.measured[0].checked if tuning.measured else None
    best = tuning.standing.best if tuning.standing is not None else None
    others = [one.checked for one in tuning.measured[1:] if one.checked is not None and one.run.settings == best]
    if first is None:
        return "tables were not compared: the first rung did not finish"
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


def _tell_run(one: Measured, tell: Callable[[str], None]) -> None:
    took = format_duration(one.run.seconds)
    if one.failure is not None:
        tell(f"  failed: {one.failure}")
    elif one.run.cut:
        tell(f"  slower: ended after {took}")
    else:
        tell(f"  {took}" + (f": {one.verdict}" if one.verdict else ""))
