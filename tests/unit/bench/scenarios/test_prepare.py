"""The scenario prepare: what is decided without a server or a storage."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from snapmgr.api import MissingRequirementError, NotMine
from snapmgr.bench.prepare import ladder as prepareladder
from snapmgr.bench.prepare.ladder import TITLES, PrepareOutcome, climb_ladder, rungs
from snapmgr.bench.prepare.redobackup import TABLES, KeptFolder, RedoLoad, change_statement, fill_statements
from snapmgr.bench.scenarios import prepare
from snapmgr.bench.storage import stacks
from snapmgr.contract.errors import ConfigError
from snapmgr.physical.tuning.rungs import Run
from snapmgr.physical.tuning.tune import Checked, Measured, ScratchRun
from support.bench.plain import PlainBench, completed

_MIB = 1 << 20
SCENARIO = prepare.scenario
SAME = {f"t{number}": str(number) for number in range(TABLES)}


def test_parameters():
    smoke = completed(SCENARIO)
    assert smoke.extra == {"redo_bytes": 8 * _MIB, "use_memory_bytes": 128 * _MIB}
    assert SCENARIO.parameters(smoke) == smoke
    assert SCENARIO.needs(smoke).seconds < 10
    assert SCENARIO.needs(smoke).space_bytes < 1 << 30
    quick = completed(SCENARIO, profile="quick")
    assert (quick.size_bytes, quick.extra["redo_bytes"]) == (512 * _MIB, 32 * _MIB)
    assert completed(SCENARIO, size_bytes=256 * _MIB).extra["redo_bytes"] == 16 * _MIB
    own = completed(SCENARIO, redo_bytes=64 * _MIB, use_memory_bytes=_MIB)
    assert own.extra == {"redo_bytes": 64 * _MIB, "use_memory_bytes": _MIB}
    with pytest.raises(ConfigError, match=r"4\.0 GiB of data and 256\.0 MiB of redo log .* 1\.0 GiB of memory"):
        completed(SCENARIO, profile="standard")


def test_room_for_the_server_that_makes_the_backup():
    """The load must fit into the server's pool, or its checkpoint moves and the redo log is short."""
    load = RedoLoad(data_bytes=512 * _MIB, redo_bytes=32 * _MIB)
    # 32 MiB change 8,192 pages of 32,768.
    assert load.every == 4
    assert load.pool_bytes > 8192 * (16 << 10)
    assert load.rows == 512 * _MIB // TABLES // 380
    # All pages are changed, again and again.
    assert RedoLoad(data_bytes=_MIB, redo_bytes=64 * _MIB).every == 1
    assert RedoLoad(data_bytes=_MIB, redo_bytes=_MIB).rows == 1000


def test_tables_are_filled_and_changed_in_turns():
    made = list(fill_statements(60_000))
    assert len([one for one in made if one.startswith("CREATE TABLE")]) == TABLES
    inserted = [one for one in made if one.startswith("INSERT INTO lab.t0 ")]
    assert [one.partition(" FROM ")[2] for one in inserted] == ["lab.seq_1_to_50000", "lab.seq_50001_to_60000"]
    first, second, again = (change_statement(1000, 2, turn) for turn in (0, 1, TABLES))
    assert "UPDATE lab.t0 " in first
    assert "UPDATE lab.t1 " in second
    assert "UPDATE lab.t0 " in again
    # 43 rows lie on a page: here another row of the same pages.
    assert "lab.seq_1_to_1000_step_86 " in first
    assert "lab.seq_2_to_1000_step_86 " in again


def test_load_ends_at_its_size_or_when_it_is_told():
    load, ran, stop = RedoLoad(data_bytes=_MIB, redo_bytes=_MIB), [], threading.Event()
    load.change_until(3, ran.append, lambda: len(ran), stop)
    assert len(ran) == len(set(ran)) == 3
    stop.set()
    load.change_until(10, ran.append, lambda: len(ran), stop)
    assert len(ran) == 3


def test_kept_folder_is_put_as_it_was_and_has_no_name(tmp_path):
    source, place = tmp_path / "source", tmp_path / "place"
    (source / "inner").mkdir(parents=True)
    place.mkdir()
    (source / "inner" / "file").write_bytes(os.urandom(100_000))
    (source / "inner" / "file").chmod(0o640)
    os.utime(source / "inner" / "file", ns=(10**18, 10**18))
    kept = KeptFolder(source, str(place))
    try:
        assert list(place.iterdir()) == []
        for name in ("one", "two"):
            kept.put(tmp_path / name)
            copy = tmp_path / name / "inner" / "file"
            assert copy.read_bytes() == (source / "inner" / "file").read_bytes()
            assert copy.stat().st_mode == (source / "inner" / "file").stat().st_mode
            assert copy.stat().st_mtime_ns == 10**18
    finally:
        kept.close()
    with pytest.raises(FileNotFoundError):
        KeptFolder(tmp_path / "absent", str(place))


def test_tables_that_differ_are_named():
    assert prepare.tables_agree({"copy": SAME, "storage": dict(SAME)}).ok
    differs = prepare.tables_agree({"copy": SAME, "storage": SAME | {"t3": "other"}, "scratch": SAME})
    assert not differs.ok
    assert differs.detail == "t3: copy 3, storage other"
    lost = {name: value for name, value in SAME.items() if name != "t7"}
    assert prepare.tables_agree({"copy": SAME, "storage": lost}).detail == "t7: copy 7, storage has none"
    # Equal, but not what was put in.
    assert not prepare.tables_agree({"copy": lost, "storage": lost}).ok
    dead = prepare.tables_agree({way: {"no server starts on it": "it crashed"} for way in ("copy", "scratch")})
    assert not dead.ok
    assert "it crashed" in dead.detail


def test_quickest_way_is_the_best():
    found = prepare.derived({"copy_s": 4.0, "copy_tool_s": 0.5, "storage_s": 1.0, "scratch_s": 3.0})
    assert found == {"best_s": 1.0, "storage_over_copy": 0.25}
    assert prepare.derived({"copy_s": 4.0, "scratch_s": 3.0}) == {"best_s": 3.0}
    assert prepare.derived({"copy_s": 4.0, "storage_s": 8.0, "cache_s": 2.0})["best_s"] == 2.0
    names = [info.name for info in SCENARIO.metrics]
    assert len(names) == len(set(names))
    assert {"best_s", "overlay_space_bytes", "storage_taken_bytes", "writeback_s"} <= set(names)


def test_rungs_follow_one_upon_the_other():
    found = rungs(1000 * _MIB, 300 * _MIB)
    assert list(found) == list(TITLES)
    assert found["default"].use_memory_bytes is None
    assert found["memory"].use_memory_bytes == 300 * _MIB
    assert found["threads"] == replace(found["memory"], io_threads=16)
    assert found["writeback"] == replace(found["threads"], writeback=True)
    assert [one.cache_bytes // _MIB for one in found.values()] == [100, 100, 100, 100, 2000]
    # The client refuses less.
    assert rungs(_MIB, _MIB)["default"].cache_bytes == 32 * _MIB


class FakeStorageBench:
    """Stands for the tuner's, each rung half as long as the one before."""

    failing: str | None = None
    scratch_run: ScratchRun | None = ScratchRun(copy_s=1.0, tool_s=0.5)

    def __init__(self, **given):
        self.given = given
        self.runs = 0

    def measure(self, settings, limit_s, *, warm, check):
        assert check
        assert not warm
        assert limit_s > 0
        self.runs += 1
        failed = "the tool failed" if self.failing and settings.writeback else None
        return Measured(
            run=Run(settings=settings, seconds=64 / 2**self.runs, cut=failed is not None),
            failure=failed,
            verdict="it waits",
            checked=None if failed else Checked(tables=SAME),
        )

    def scratch(self, limit_s):
        assert limit_s > 0
        return self.scratch_run


def climbed(tmp_path, monkeypatch, fake=FakeStorageBench):
    monkeypatch.setattr(prepareladder, "StorageBench", fake)
    monkeypatch.setattr(prepareladder, "tool_for", lambda _staged: None)
    backup = SimpleNamespace(info=None, sizes={"a": 60 * _MIB, "b": 40 * _MIB})
    bench = PlainBench(tmp_path, completed(SCENARIO))
    found = PrepareOutcome()
    climb_ladder(bench, found, base=bench.path / "backup", backup=backup, storage=(None, None), memory_bytes=128 * _MIB)
    return found


def test_ladder_is_climbed(tmp_path, monkeypatch):
    found = climbed(tmp_path, monkeypatch)
    assert found.metrics == {
        "default_s": 32,
        "memory_s": 16,
        "threads_s": 8,
        "writeback_s": 4,
        "cache_s": 2,
        "scratch_s": 1.5,
        "scratch_tool_s": 0.5,
    }
    assert found.tables == dict.fromkeys(TITLES, SAME)
    assert [check.ok for check in found.checks] == [True]
    assert any("writeback" in note and "it waits" in note for note in found.notes)


def test_rung_that_fails_fails_the_sample(tmp_path, monkeypatch):
    class Failing(FakeStorageBench):
        failing = "writeback"
        scratch_run = None

    found = climbed(tmp_path, monkeypatch, Failing)
    assert set(found.metrics) == {"default_s", "memory_s", "threads_s"}
    (check,) = found.checks
    assert not check.ok
    assert check.detail == "writeback: the tool failed; cache: the tool failed"
    assert any("no room" in note for note in found.notes)


class FakeBackend:
    """A backend; `Cloning` is one that clones folders."""

    def __init__(self, name, *, mine=True, lacking=()):
        self.name = name
        self._mine, self._lacking = mine, lacking

    def locate(self, _target):
        if self._mine is None:
            raise MissingRequirementError("its program is missing")
        return SimpleNamespace() if self._mine else NotMine(reason="another file system")

    def missing(self):
        return self._lacking


class Cloning(FakeBackend):
    def clone_folder(self, source, target):
        raise AssertionError((source, target))


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        (Cloning("own"), [Cloning("other")], "own"),
        (FakeBackend("own"), [FakeBackend("plain"), Cloning("other")], "other"),
        (Cloning("own", mine=False), [Cloning("broken", mine=None), Cloning("other")], "other"),
        (FakeBackend("own"), [Cloning("other", lacking=("a program",))], None),
        (FakeBackend("own"), [Cloning("other", mine=False)], None),
    ],
)
def test_backend_that_clones_folders_is_found(monkeypatch, own, others, chosen):
    by_name = {one.name: one for one in (own, *others)}
    plugins = [SimpleNamespace(name=name, backend=object) for name in by_name]
    plugins.append(SimpleNamespace(name="cannot-be-imported", backend=None))
    monkeypatch.setattr(stacks, "find_target", lambda path, *, runner: (path, runner))
    monkeypatch.setattr(stacks, "list_plugins", lambda: plugins)
    monkeypatch.setattr(stacks, "make_backend", lambda name, _table, _runner, _mounter: by_name[name])
    found = stacks.cloning_of(own, "/path", None, None)
    assert (found and found.name) == chosen


def test_missing_programs_are_named(monkeypatch):
    def find(name):
        if name == "mariadb-backup":
            raise MissingRequirementError("there is no mariadb-backup", hint="apt-get install mariadb-backup")
        return f"/bin/{name}"

    monkeypatch.setattr("snapmgr.system.command.find_program", find)
    (reason,) = SCENARIO.missing()
    assert reason.what == "there is no mariadb-backup"
    assert reason.hint == "apt-get install mariadb-backup"
