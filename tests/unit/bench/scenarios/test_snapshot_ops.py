"""The scenario of a snapshot's operations: on a plain folder; its raw calls by what they run; its load."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from snapmgr.api import CommandError, StorageError
from snapmgr.bench.load import background
from snapmgr.bench.model import Stack
from snapmgr.bench.scenarios import snapshot_ops
from snapmgr.bench.storage import rawsnapshot
from snapmgr.contract.errors import ConfigError
from snapmgr.contract.records import Completed
from snapmgr.system.command import CommandRunner
from support.bench.plain import PlainBench, completed
from support.processes import children
from support.storage import work_folder

SCENARIO = snapshot_ops.scenario
_MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.needs("fio")


@pytest.fixture
def folder():
    with work_folder(_MEMORY if os.access(_MEMORY, os.W_OK) else None) as made:
        yield made


def small(**extra):
    return completed(SCENARIO, size_bytes=16 << 20, **{"levels": (1, 3), "repeats": 2, **extra})


def test_scenario(folder):
    others, bench = children(), PlainBench(folder, small())
    outcome = SCENARIO.run(bench)
    assert [check for check in outcome.checks if not check.ok] == []
    assert len(outcome.checks) == 4
    known = {info.name for info in SCENARIO.metrics}
    # A plain folder has no call or program of its own.
    assert known - set(outcome.metrics) == {"create_over_call", "whole_over_program"}
    assert set(outcome.metrics) <= known
    assert outcome.axes["create_p95"]["x"] == [1, 3]
    for operation in ("create", "whole", "list", "attach", "detach", "delete", "loaded"):
        low, middle, high = (outcome.series[f"{operation}_{name}"] for name in ("p50", "p95", "max"))
        assert all(0 <= one <= two <= three for one, two, three in zip(low, middle, high, strict=True))
    assert bench.snapshots == []
    # Three kept, and for each level two idle and two loaded ones.
    assert bench.taken == 3 + 2 * 4
    assert children() <= others
    assert any("the load: fio --name=load" in note for note in outcome.notes)
    json.dumps([outcome.metrics, outcome.series, outcome.axes, outcome.notes])


def test_snapshot_that_is_none_is_found(folder):
    bench = PlainBench(folder, small(levels=(1,), repeats=1))
    bench.shares = True
    (wrong,) = [check for check in SCENARIO.run(bench).checks if not check.ok]
    assert wrong.name == "the first snapshot holds the old data"
    assert wrong.detail == "load"


def test_snapshot_that_was_lost_is_found(tmp_path):
    bench = PlainBench(tmp_path, small())
    (bench.path / "load").write_bytes(b"new" * 10000)
    bench.overflows = True
    changed, lost = snapshot_ops._proof(bench, bench.snapshot(), {"load": ("old",)})
    assert (changed.ok, lost.ok) == (True, False)
    assert "room ran full" in lost.detail


def test_backend_that_loses_one_is_found(folder, monkeypatch):
    bench = PlainBench(folder, small(levels=(2,), repeats=1))
    whole = bench.inventory
    monkeypatch.setattr(bench, "inventory", lambda: whole()[1:])
    (wrong,) = [check for check in SCENARIO.run(bench).checks if not check.ok]
    assert wrong.name == "with 2 snapshots the backend finds so many"
    assert wrong.detail == "it finds 1"


def test_classic_lvm_stays_at_ten():
    parameters = completed(SCENARIO, profile="standard")
    assert parameters.extra["levels"] == (1, 10, 100, 1000)
    classic = Stack(name="lvm+ext4", title="", backend="lvm")
    thin = replace(classic, options={"thin": "yes"})
    assert snapshot_ops._levels(SimpleNamespace(parameters=parameters, stack=classic)) == [1, 10]
    assert snapshot_ops._levels(SimpleNamespace(parameters=parameters, stack=thin)) == [1, 10, 100, 1000]


def test_parameters():
    smoke = completed(SCENARIO)
    assert smoke.extra["levels"] == (1, 10)
    assert SCENARIO.needs(smoke).seconds < 6
    assert SCENARIO.parameters(smoke) == smoke
    assert "no snapshots" in SCENARIO.suits(Stack(name="ext4", title="", backend=None))
    assert SCENARIO.suits(Stack(name="btrfs", title="", backend="btrfs")) is None
    with pytest.raises(ConfigError, match="at least 16.0 MiB of data"):
        completed(SCENARIO, size_bytes=1 << 20)


def test_quantile_is_the_nearest_rank():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert snapshot_ops.quantile(values, 0.5) == 3
    assert snapshot_ops.quantile(values, 0.95) == 5
    assert snapshot_ops.quantile([7.0], 0.5) == 7


class Lvm:
    """Stands for a workbench on LVM: answers lvs, and keeps what is run."""

    def __init__(self, answer, folder):
        self.stack = Stack(name="lvm", title="", backend="lvm")
        self.path = folder
        self.answer = answer
        self.ran = []

    def run(self, argv, *, timeout_s=None):
        assert argv[0] == "lvs" or timeout_s is not None
        self.ran.append(argv)
        return Completed(argv=tuple(argv), returncode=0, stdout=self.answer, stderr="")


@pytest.mark.parametrize(("pool", "room"), [("", ["--extents", "3%ORIGIN"]), ("pool", [])])
def test_lvm_program(tmp_path, monkeypatch, pool, room):
    device = SimpleNamespace(path="/dev/dm-3", dm_name="vg0-data")
    monkeypatch.setattr(rawsnapshot, "find_target", lambda _: SimpleNamespace(devices=(device,)))
    bench = Lvm(f"  vg0|data|{pool}\n", tmp_path)
    (way,) = rawsnapshot.raw_ways(bench)
    assert way.create("raw-1") >= 0
    assert way.delete("raw-1") >= 0
    listed, created, deleted = bench.ran
    assert listed[-1] == "/dev/mapper/vg0-data"
    assert list(created) == ["lvcreate", "--yes", "--snapshot", *room, "--name", "raw-1", "vg0/data"]
    assert deleted == ("lvremove", "--yes", "vg0/raw-1")


@pytest.mark.parametrize("printed", ["", "  vg0|data|\n vg1|data|\n", "  vg0||\n", "vg0 data"])
def test_lvs_that_tells_nothing(printed):
    with pytest.raises(StorageError, match="does not list"):
        rawsnapshot.read_names(printed)


def test_load_writes_is_frozen_and_ends(folder):
    others, file = children(), folder / "odd:name"
    file.write_bytes(bytes(1 << 20))
    argv = background.command(file, block_bytes=16384, writes_per_s=500, seed=1)
    with background.written_to(argv, file, folder / "log") as load:
        load.check()
        assert file.read_bytes().strip(b"\0")
        with load.frozen():
            before = file.stat().st_mtime_ns
            assert _settled(file) == before
        _until(lambda: file.stat().st_mtime_ns != before)
    assert children() <= others
    assert file.stat().st_size == 1 << 20


def _settled(file):
    CommandRunner().run(["sleep", "0.1"])
    return file.stat().st_mtime_ns


def _until(condition):
    for _ in range(500):
        if condition():
            return
        CommandRunner().run(["sleep", "0.01"])
    raise AssertionError("it did not go on")


def test_load_that_fails_says_why(folder):
    file = folder / "file"
    file.write_bytes(b"x")
    with (
        pytest.raises(CommandError, match="the writes in the background ended") as caught,
        background.written_to(["fio", "--name=load", "--no-such-option"], file, folder / "log"),
    ):
        pytest.fail("it began")
    assert "no-such-option" in caught.value.message


def test_figures_that_are_compared_are_of_as_many_snapshots_as_each_storage_can_have():
    times = {name: {1: [1.0], 10: [2.0, 3.0, 4.0]} for name in snapshot_ops._TITLES}
    few = snapshot_ops._figures(times, [1, 10])
    thousand = {name: {**by_level, 1000: [50.0]} for name, by_level in times.items()}
    assert snapshot_ops._figures(thousand, [1, 10, 1000]) == few
    assert (few["create_s"], few["loaded_max_s"], few["create_growth"]) == (3.0, 4.0, 3.0)
