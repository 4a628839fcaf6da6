"""The scenario of retained snapshots, on a plain folder."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from snapmgr.api import Usage
from snapmgr.bench.model import Stack
from snapmgr.bench.scenarios import aging
from snapmgr.contract.errors import ConfigError
from support.bench.plain import PlainBench, completed
from support.storage import work_folder

SCENARIO = aging.scenario
PAGE = 16 << 10
_MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.needs("fio")


@pytest.fixture
def folder():
    with work_folder(_MEMORY if os.access(_MEMORY, os.W_OK) else None) as made:
        yield made


def bench_in(folder, *, backend="plain", **extra):
    return PlainBench(
        folder, completed(SCENARIO, size_bytes=16 << 20, **{"levels": (0, 1, 2), **extra}), backend=backend
    )


def pages(path):
    data = path.read_bytes()
    return [data[start : start + PAGE] for start in range(0, len(data), PAGE)]


def noted(calls, name, call):
    """Return a function that writes down its name, or what fio is asked for, and calls another."""

    def noting(*given, **named):
        calls.append(given[0] if name == "fio" else name)
        return call(*given, **named)

    return noting


def changed(before, after):
    return {number for number, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}


def test_days(folder):
    bench = bench_in(folder)
    states = []
    taken = bench.snapshot

    def snapshot():
        states.append(pages(bench.path / "data"))
        return taken()

    bench.snapshot = snapshot
    outcome = SCENARIO.run(bench)
    assert [check for check in outcome.checks if not check.ok] == []
    assert len(outcome.checks) == 1 + 2
    assert bench.snapshots == []
    # A day changes its share of the pages, each once, and another day others.
    states.append(pages(bench.path / "data"))
    first, second = (changed(states[number], states[number + 1]) for number in (0, 1))
    assert len(first) == len(second) == int((16 << 20) * bench.parameters.extra["churn"]) // PAGE
    assert first != second
    assert len(first & second) < len(first) / 2
    known = {info.name for info in SCENARIO.metrics}
    assert set(outcome.metrics) <= known
    # A folder has no device of its own, and PlainBench's layout has no blocks.
    absent = {name for name in known - set(outcome.metrics) if "per_byte" not in name}
    assert absent == set()
    assert outcome.axes["write_s"]["x"] == outcome.axes["free_bytes"]["x"] == [0, 1, 2]
    assert outcome.axes["oldest_bytes"]["x"] == [1, 2]
    assert outcome.metrics["snapshots_bytes"] == 2 * (16 << 20)
    assert set(outcome.layouts) == {"day 0", "day 1", "day 2"}
    json.dumps([outcome.metrics, outcome.series, outcome.axes, outcome.layouts, outcome.notes])


def test_every_point_of_a_series_begins_alike(folder, monkeypatch):
    bench = bench_in(folder, levels=(0, 2))
    calls = []
    for name in ("quiet", "cold", "fio", "snapshot"):
        monkeypatch.setattr(bench, name, noted(calls, name, getattr(bench, name)))
    monkeypatch.setattr(aging, "_digests", noted(calls, "digests", aging._digests))
    SCENARIO.run(bench)
    before = {name: calls[max(0, number - 2) : number] for number, name in enumerate(calls)}
    # Also on days on which nothing is read, and on the first.
    assert [before[f"day-{day}"] for day in (0, 1, 2)] == [["quiet", "cold"]] * 3
    assert [before[f"read-{day}"] for day in (0, 2)] == [["quiet", "cold"]] * 2


def test_each_snapshot_is_looked_at(folder):
    bench = bench_in(folder, levels=(0, 1))
    taken = bench.snapshot

    def altering():
        made = taken()
        data = bench.copies / made.name / "data"
        data.write_bytes(os.urandom(data.stat().st_size))
        return made

    bench.snapshot = altering
    (wrong,) = [check for check in SCENARIO.run(bench).checks if not check.ok]
    assert wrong.name == "snapshot 1 holds its day's data"
    assert wrong.detail == "1024 of 1024 pages looked at differ"


def test_snapshots_that_are_none_and_lost_ones_are_found(folder):
    bench = bench_in(folder, levels=(0, 1))
    bench.shares = True
    (wrong,) = [check for check in SCENARIO.run(bench).checks if not check.ok]
    assert wrong.name == "snapshot 1 holds its day's data"
    lost = SimpleNamespace(usage=lambda: Usage(exclusive_bytes=1, valid=False))
    check = aging._check(bench, 3, aging._Kept(snapshot=lost, digests=()))
    assert (check.ok, check.name) == (False, "snapshot 3 holds its day's data")
    assert "room ran full" in check.detail


def test_control(folder):
    outcome = SCENARIO.run(bench_in(folder, backend=None, levels=(0, 1)))
    assert [check for check in outcome.checks if not check.ok] == []
    assert outcome.metrics["write_s_many"] > 0
    assert "delete_s" not in outcome.metrics
    assert any(note.startswith("a control") for note in outcome.notes)


def test_classic_lvm_stays_at_eight():
    parameters = completed(SCENARIO, profile="standard")
    assert max(parameters.extra["levels"]) == 16
    classic = Stack(name="lvm+ext4", title="", backend="lvm")
    thin = replace(classic, options={"thin": "yes"})
    for stack, most in ((classic, 8), (thin, 16)):
        levels = aging._levels(SimpleNamespace(parameters=parameters, stack=stack))
        assert levels[-1] == most
        assert aging._common(levels) == 8


def test_parameters():
    for profile in ("smoke", "quick", "standard", "paper"):
        parameters = completed(SCENARIO, profile=profile)
        extra, size = parameters.extra, parameters.size_bytes
        # A quarter is for classic snapshots, shared out evenly; each has to hold what changes while it is there.
        room = SCENARIO.needs(parameters).space_bytes / 4 / extra["snapshots"]
        assert room > extra["snapshots"] * extra["churn"] * size
        assert SCENARIO.parameters(parameters) == parameters
    assert SCENARIO.needs(completed(SCENARIO)).seconds < 6
    with pytest.raises(ConfigError, match="too few to be measured"):
        completed(SCENARIO, size_bytes=1 << 20)
