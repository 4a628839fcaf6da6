"""Tuning a prepare on real storage: rungs on clones and private mounts, and nothing of them stays."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from snapmgr.physical.prepare.backupfolder import inspect
from snapmgr.physical.tools.choose import tool_for
from snapmgr.physical.tuning.rungs import RungSettings
from snapmgr.physical.tuning.storagebench import StorageBench
from snapmgr.system.blockdev import read_mounts
from snapmgr.system.command import CommandRunner
from snapmgr.system.mount import KernelMounter
from snapmgr_juicefs import JuicefsBackend
from snapmgr_juicefs.config import JuicefsConfig
from support.backupfolder import loaded_backup
from support.juicefs import juicefs_volume
from support.storage import loop_filesystem, work_folder

pytestmark = pytest.mark.needs("root", "loop", "xfs", "mariadbd", "mariadb-backup", "juicefs")

# The command line with a search that ends after so many runs, or that is interrupted while the tool of a run works.
PATCHED = """
import os, signal, sys
import snapmgr.physical.tuning.storagebench as bench
import snapmgr.physical.tuning.tune as tune
from snapmgr.physical.tuning.ladder import Stop
most, interrupted = int(sys.argv.pop(1)), int(sys.argv.pop(1))
real, applied, count = tune.next_rung, bench.apply_in_place, []
def next_rung(history, limits, **more):
    step = real(history, limits, **more)
    if len(history) < most:
        return step
    return Stop(settings=tune.standing(history, limits).best, why="enough", exhausted=False)
def apply_in_place(*arguments, progress=lambda _: None, **more):
    count.append(1)
    def interrupt(_):
        if len(count) == interrupted:
            os.kill(os.getpid(), signal.SIGINT)
    return applied(*arguments, progress=interrupt, **more)
tune.next_rung, bench.apply_in_place = next_rung, apply_in_place
from snapmgr.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def site():
    with (
        work_folder() as work,
        loop_filesystem("xfs", 500 << 20) as system,
        juicefs_volume("sqlite") as volume,
        loaded_backup(system.point, work) as made,
    ):
        jfs = volume.point / "full"
        shutil.copytree(made.full, jfs)
        config = work / "snapmgr.toml"
        (work / "caches").mkdir()
        (work / "scratch").mkdir()
        config.write_text(
            f'state_dir = "{work}/state"\nscratch_dir = "{work}/scratch"\n'
            f'[backend.juicefs]\nmeta_url = "{volume.meta_url}"\ncache_root = "{work}/caches"\n'
        )
        yield SimpleNamespace(work=work, xfs=made.full, jfs=jfs, volume=volume, config=config, tables=made.tables)


@pytest.fixture(autouse=True)
def nothing_stays(site):
    before = {folder: fingerprint(folder) for folder in (site.xfs, site.jfs)}
    mounts = {mount.point for mount in read_mounts()}
    yield
    assert {folder: fingerprint(folder) for folder in before} == before
    assert {mount.point for mount in read_mounts()} == mounts
    assert [path.name for path in (site.work / "caches").iterdir()] == []
    assert [path.name for path in (site.work / "scratch").iterdir()] == []
    for folder in before:
        assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".snapmgr-prepare")] == []


def fingerprint(folder):
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def tuned(site, source, *, runs, interrupted=0, code=0):
    """Run the command with a search that ends after some runs; return its document and its report."""
    report = site.work / f"report-{secrets.token_hex(4)}.html"
    command = [
        *(sys.executable, "-c", PATCHED, str(runs), str(interrupted)),
        *("--config", str(site.config), "prepare", str(source), "--tune=30m", "--report", str(report), "--json"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=110)
        except BaseException:
            # Killed, it would leave a mount.
            process.terminate()
            process.communicate(timeout=100)
            raise
    assert process.returncode == code, err
    document = json.loads(out)
    assert document["report"] == str(report)
    return document, report.read_text()


def test_rungs_on_juicefs_have_private_mounts_and_give_the_same_tables(site):
    document, page = tuned(site, site.jfs, runs=2)
    found = document["tuning"]
    assert document["exit_code"] == 0
    if found["best"] != found["runs"][0]["settings"]:
        assert found["tables"].startswith(f"the tables ({len(site.tables)}) are the same by checksum")
    cold = [one for one in found["runs"] if one["temperature"] == "cold"]
    first, second = cold[:2]
    # The first rung has the memory that `prepare` would give the tool by itself.
    assert first["words"] == "use-memory 128.0 MiB"
    assert second["words"] != first["words"]
    # Each began with a client of its own, and an empty cache: the backup was downloaded for it.
    assert all(one["counters"]["gets"] > 0 for one in cold if not one["cut"])
    assert found["scratch"]["failure"] is None
    assert "Tuning the prepare of full" in page


def test_interrupted_tuning_keeps_what_was_measured_and_leaves_nothing(site):
    document, page = tuned(site, site.jfs, runs=9, interrupted=2, code=130)
    found = document["tuning"]
    assert document["exit_code"] == 130
    assert not found["finished"]
    assert [one["words"] for one in found["runs"]] == ["use-memory 128.0 MiB"]
    assert found["best_s"] == pytest.approx(found["runs"][0]["seconds"])
    assert "It was ended before it was done" in page


def test_reflinks_have_no_private_mount_and_are_tuned_by_the_tools_settings(site):
    document, _ = tuned(site, site.xfs, runs=2)
    first, second = document["tuning"]["runs"][:2]
    changed = {name for name, value in second["settings"].items() if value != first["settings"][name]}
    assert changed <= {"use_memory_bytes", "flush_method"}
    assert changed
    assert first["counters"] is None
    assert document["tuning"]["first_s"] > 0


def test_rung_that_loses_is_ended_and_its_writes_are_not_waited_for(site):
    backup = inspect(str(site.jfs))
    config = JuicefsConfig(meta_url=site.volume.meta_url, cache_root=str(site.work / "caches"))
    backend = JuicefsBackend(config, CommandRunner(), KernelMounter())
    bench = StorageBench(
        source=str(site.jfs),
        beside=str(site.jfs.parent),
        info=backup.info,
        tool=tool_for(backup.info),
        cloning=backend,
        remounting=backend,
        data_bytes=sum(backup.sizes.values()),
        scratch_dir=str(site.work / "scratch"),
        cache_root=str(site.work / "caches"),
        log=str(site.work / "tool.log"),
    )
    slow = RungSettings(writeback=True, upload_delay_s=3600, cache_dir=str(site.work / "caches"))
    lost = bench.measure(slow, 0.01)
    assert (lost.run.cut, lost.run.seconds, lost.failure) == (True, 0.01, None)
    wrong = bench.measure(RungSettings(extra_tool=("--no-such-option",)), 60)
    assert wrong.run.cut
    assert "no-such-option" in wrong.failure
