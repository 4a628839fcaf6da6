"""The scenario prepare: a backup with much redo log, prepared in each way that a storage allows."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import asdict

from snapmgr.api import ClientOptions
from snapmgr.bench.model import Parameters
from snapmgr.bench.prepare.ladder import TITLES
from snapmgr.bench.scenarios import prepare
from snapmgr_juicefs import private
from support.bench.device import scenario_bench
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from snapmgr.bench.storage.workbench import StackWorkbench

pytestmark = pytest.mark.needs("root", "mariadbd", "mariadb-backup")
_MIB = 1 << 20
_GIVEN = Parameters(profile="smoke", variant="", size_bytes=8 * _MIB, memory_bytes=1 << 60, seed=1)
_WAYS = ("copy", "scratch", "storage", "overlay")


@pytest.fixture
def scenario() -> Iterator[prepare.Prepare]:
    made = prepare.Prepare()
    yield made
    made.close()


def _bench(stack: str, scenario: prepare.Prepare) -> AbstractContextManager[StackWorkbench]:
    parameters = scenario.parameters(_GIVEN)
    return scenario_bench(stack, parameters, scenario.needs(parameters).space_bytes)


@pytest.mark.needs("loop", "xfs")
def test_each_way_gives_the_same_tables_and_the_clone_shares_the_backup(scenario, monkeypatch):
    with _bench("xfs-reflink", scenario) as bench:
        found = scenario.run(bench)
        assert [check.detail for check in found.checks if not check.ok] == []
        assert len(found.checks) == 3
        metrics = found.metrics
        assert set(metrics) <= {info.name for info in scenario.metrics}
        # No rung of the ladder: that storage has no client.
        assert {name.removesuffix("_s") for name in metrics if name.endswith("_s")} == {
            *_WAYS,
            *(f"{way}_tool" for way in _WAYS),
            "best",
        }
        assert all(0 < metrics[f"{way}_tool_s"] <= metrics[f"{way}_s"] for way in _WAYS)
        assert metrics["best_s"] == min(metrics[f"{way}_s"] for way in _WAYS)
        size_bytes = sum(path.stat().st_size for path in (bench.path / "backup").rglob("*") if path.is_file())
        # What the redo log changes, and not what it does not.
        assert 4 * _MIB < metrics["storage_space_bytes"] < size_bytes / 4
        assert metrics["storage_space_bytes"] <= metrics["storage_taken_bytes"] < size_bytes
        assert size_bytes * 0.9 < metrics["copy_space_bytes"] < metrics["copy_taken_bytes"] * 1.1
        assert 4 * _MIB < metrics["storage_written_bytes"] < metrics["copy_written_bytes"]
        # Nothing but the backup is left.
        assert [path.name for path in bench.path.iterdir()] == ["backup"]

        # A way that writes to the backup, and loses a table, is found. The backup is the one that was kept.
        first = _contents(bench.path / "backup")
        shutil.rmtree(bench.path / "backup")
        monkeypatch.setattr(bench, "cloning", lambda: None)
        monkeypatch.setattr(prepare, "copied", _loses_a_table)
        wrong = scenario.run(bench)
        assert set(_contents(bench.path / "backup")) == set(first)
        bad = {check.name: check.detail for check in wrong.checks if not check.ok}
        assert "backup-my.cnf changed" in bad.pop("the backup is what it was")
        assert "`lab`.`t7`" in bad.pop("a server finds the same tables, whichever way they were prepared")
        assert bad == {}
        assert "storage_s" not in wrong.metrics
        assert any("only copied" in note for note in wrong.notes)
        # The other way came first.
        assert [name for name in wrong.metrics if name in {"copy_s", "scratch_s"}] == ["scratch_s", "copy_s"]


def _loses_a_table(site, work):
    result, tool_s = prepare.prepared(site, "scratch", work)
    for file in (result / "lab").glob("t7.*"):
        file.unlink()
    with (site.base / "backup-my.cnf").open("a") as file:
        file.write("# changed\n")
    return result, tool_s


def _contents(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.needs("loop", "ext4", "juicefs")
def test_volume_of_the_benchmark_is_mounted_privately(scenario):
    """A rung of the ladder needs one, and nobody configures where that volume's metadata are."""
    with _bench("juicefs", scenario) as bench:
        (bench.path / "file").write_text("here")
        with bench.cloning().client_mount(str(bench.path), ClientOptions()) as mount:
            assert Path(mount.path, "file").read_text() == "here"
            assert mount.point != str(bench.path.parent)
            # Not elsewhere: what a killed run leaves there, nobody would remove.
            assert any(path.name.startswith("snapmgr-juicefs-") for path in (bench.path.parents[1] / "cache").iterdir())


@pytest.mark.needs("loop", "ext4", "juicefs")
def test_private_mounts_of_a_killed_run_are_forgotten_with_their_device(scenario, tmp_path):
    with _bench("juicefs", scenario) as bench, bench.cloning().client_mount(str(bench.path), ClientOptions()):
        left = _abandoned(bench.path.parents[1] / "cache" / "gone")
        others = _abandoned(tmp_path / "cache")
    try:
        assert not left.exists()
        assert (others / "record.json").exists()
    finally:
        shutil.rmtree(others)


def _abandoned(cache):
    """Make what is left of a private mount whose process was killed, and its mount with it."""
    identity = secrets.token_hex(8)
    folder = Path(private.root(), identity)
    (folder / "mnt").mkdir(parents=True)
    record = private.Record(id=identity, uuid="none", subdir="", cache_dir=str(cache), own_cache=True)
    (folder / "record.json").write_text(json.dumps(asdict(record)))
    return folder


if CAMPAIGN:  # ten mounts of a client take their time

    @pytest.mark.needs("loop", "ext4", "juicefs")
    def test_ladder_on_a_storage_with_a_client(scenario):
        with _bench("juicefs", scenario) as bench:
            found = scenario.run(bench)
            assert [check.detail for check in found.checks if not check.ok] == []
            assert len(found.checks) == 4
            ways = {name for name in found.metrics if name.endswith("_s") and not name.endswith("_tool_s")}
            assert ways == {f"{way}_s" for way in ("copy", "storage", "scratch", "best", *TITLES)}
            assert found.metrics["copy_written_bytes"] > found.metrics["storage_written_bytes"] > _MIB
            assert any("overlay" in note for note in found.notes)
            assert not any(name.endswith(("_space_bytes", "_taken_bytes")) for name in found.metrics)
            assert [path.name for path in bench.path.iterdir()] == ["backup"]
