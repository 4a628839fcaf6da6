"""A whole tuning, on a bench that only says how long things would take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from msgspec import structs

from snapmgr.contract.errors import MissingRequirementError, VerificationError
from snapmgr.physical.tuning.rungs import Run, RungSettings
from snapmgr.physical.tuning.tune import Checked, Measured, ScratchRun, Tuning, tables_compared, tune
from support.simulated import GIB, LIMITS, SimulatedStorage

TABLES = {"`a`.`t1`": "17", "`a`.`t2`": "4"}


@dataclass(kw_only=True)
class FakeBench:
    """Takes the time that the simulated storage would, on a clock of its own."""

    storage: SimulatedStorage = field(default_factory=SimulatedStorage)
    now_s: float = 1000.0
    asked: list[tuple[RungSettings, float, bool, bool]] = field(default_factory=list)
    tables: dict[str, str] | None = field(default_factory=lambda: dict(TABLES))
    tuned_tables: dict[str, str] | None = field(default_factory=lambda: dict(TABLES))
    fails: tuple[str, ...] = ()
    """Words of settings that no prepare bears."""
    interrupt_at: int = 1000

    def clock(self):
        return self.now_s

    def measure(self, settings, limit_s, *, warm=False, check=False):
        self.asked.append((settings, limit_s, warm, check))
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        broken = next((word for word in self.fails if word in str(settings)), None)
        seconds = self.storage.seconds(settings) * (1.5 if warm else 1)
        cut = seconds > limit_s or broken is not None
        self.now_s += min(seconds, limit_s)
        tables = self.tables if settings == RungSettings() else self.tuned_tables
        return Measured(
            run=Run(settings=settings, seconds=min(seconds, limit_s), cut=cut, bottleneck="upload"),
            temperature="warm" if warm else "cold",
            failure=f"the tool dislikes {broken}" if broken else None,
            checked=Checked(tables=tables, why_not="no server" if tables is None else "") if check else None,
        )

    def scratch(self, limit_s):
        self.now_s += 7
        assert limit_s > 0
        return ScratchRun(copy_s=5, tool_s=2)


def tuning(time_s=1800.0, **changed):
    return Tuning(
        name="backup",
        data_bytes=2 * GIB,
        redo_bytes=1 << 27,
        tool="mariadb-backup",
        limits=LIMITS,
        time_s=time_s,
        **changed,
    )


def test_tuning_finds_compares_and_warms():
    bench, ours, told = FakeBench(), tuning(), []
    tune(bench, ours, tell=told.append, clock=bench.clock)
    best = ours.standing.best
    assert best.writeback
    assert ours.speed_up >= 3
    assert ours.stop is not None
    assert ours.scratch.seconds == 7
    # Within the time that was asked for, what is measured at the end included.
    assert ours.spent_s == bench.now_s - 1000 <= 1800
    assert "the tables (2) are the same" in tables_compared(ours)
    assert ours.times(best, "warm")
    assert [check for *_, check in bench.asked].count(True) == 2
    assert any("over scratch it takes 7.0 s" in line for line in told)
    assert {one.why for one in ours.measured} >= {"what all others are compared with", "from a warm cache"}


def test_data_that_differ_are_an_error_and_all_is_kept():
    bench, ours = FakeBench(tuned_tables=TABLES | {"`a`.`t2`": "5"}), tuning()
    with pytest.raises(VerificationError, match=r"1 of 2 tables: `a`\.`t2`"):
        tune(bench, ours, clock=bench.clock)
    assert ours.measured[-1].checked.tables["`a`.`t2`"] == "5"
    assert "NOT the same" in tables_compared(ours)


def test_missing_server_is_told_and_no_error():
    bench, ours = FakeBench(tables=None, tuned_tables=None), tuning()
    tune(bench, ours, clock=bench.clock)
    assert tables_compared(ours) == "tables were not compared: no server"


def test_interruption_keeps_what_was_measured():
    bench, ours = FakeBench(interrupt_at=5), tuning()
    with pytest.raises(KeyboardInterrupt):
        tune(bench, ours, clock=bench.clock)
    assert len(ours.measured) == 4
    assert ours.stop is None
    assert ours.standing.best == min(ours.history, key=lambda run: run.seconds).settings
    assert ours.spent_s > 0


def test_first_rung_that_takes_too_long_is_a_bound():
    bench, ours = FakeBench(storage=replace(SimulatedStorage(), put_s=1.0)), tuning(600.0)
    measure = bench.measure
    bench.measure = lambda settings, limit_s, **more: drop_check_if_cut(measure(settings, limit_s, **more))
    tune(bench, ours, clock=bench.clock)
    assert ours.measured[0].run.cut
    assert ours.first_s == ours.measured[0].run.seconds
    assert ours.speed_up > 1
    assert tables_compared(ours) == "tables were not compared: the first rung did not finish"


def drop_check_if_cut(one):
    return structs.replace(one, checked=None) if one.run.cut else one


def test_rung_that_fails_is_no_candidate():
    bench, ours = FakeBench(fails=("writeback",)), tuning()
    tune(bench, ours, clock=bench.clock)
    assert "writeback" not in str(ours.standing.best)
    assert any(one.failure == "the tool dislikes writeback" for one in ours.measured)


def test_first_rung_must_not_fail():
    bench, ours = FakeBench(fails=("default",)), tuning()
    with pytest.raises(MissingRequirementError, match="the tool dislikes default"):
        tune(bench, ours, clock=bench.clock)
    assert len(ours.measured) == 1
    assert ours.scratch is None


@pytest.mark.parametrize("time_s", [30.0, 150.0, 400.0, 5000.0])
def test_time_is_kept_with_all_that_belongs_to_it(time_s):
    bench, ours = FakeBench(), tuning(time_s)
    tune(bench, ours, clock=bench.clock)
    longest = max((run.seconds for run in ours.history[1:]), default=0.0)
    # The check at the end is not left out when a rung took longer than foreseen.
    assert ours.spent_s <= time_s + 2 * longest + 7


def test_start_settings_are_the_first_rung():
    start = RungSettings(use_memory_bytes=GIB)
    bench, ours = FakeBench(), tuning(start=start)
    tune(bench, ours, clock=bench.clock)
    assert ours.measured[0].run.settings == start
    assert ours.first_s == SimulatedStorage().seconds(start)


def test_nothing_to_gain_needs_no_comparison():
    bench, ours = FakeBench(storage=replace(SimulatedStorage(), pages=0, get_s=0, fsync_s=0)), tuning()
    tune(bench, ours, clock=bench.clock)
    assert ours.standing.best == RungSettings()
    assert ours.stop.exhausted
    assert tables_compared(ours) == "tables were not compared: the best rung was not checked"
