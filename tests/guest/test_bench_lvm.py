"""The benchmark's storages on LVM: made on a disk, measured on, and gone whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from snapmgr.bench.results.samples import read
from snapmgr.bench.storage.stacks import STACKS, missing_requirements
from snapmgr.system.host import start_ticks
from snapmgr.testing.processes import spawn
from snapmgr_lvm import dm
from support import lvm
from support.bench.device import bench_disk
from support.killing import kill_at
from support.processes import wait_until
from support.thoroughness import CAMPAIGN, crash_every

_STACKS = ("lvm+ext4", "lvm-thin+xfs")
_MORE = ("lvm+xfs", "lvm-thin+ext4", "lvm-thin-prefilled+ext4", "lvm-thin-prefilled+xfs")
_MIB = 1 << 20
# On one slow processor, where each program of LVM takes a tenth of a second and more.
_CLEAR_S = 20.0
# At how many points, at least, it can be killed.
_STEPS = 50
# The program as it is, but with one sample of each storage, and less to do in it: a guest starts programs slowly.
_PROGRAM = """
import sys
from dataclasses import replace
from snapmgr.bench.run import plan
from snapmgr.bench.scenarios import snapshot_ops
plan.PROFILE["smoke"] = replace(plan.PROFILE["smoke"], least=0, most=0)
snapshot_ops._PROFILES["smoke"] = {"size_bytes": 16 << 20, "levels": (1,), "repeats": 1}
snapshot_ops._LOAD_PER_S = 20
from snapmgr.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def device(disk):
    with bench_disk(disk) as made:
        yield made


def _overwrite(file, data):
    with file.open("r+b") as stream:
        stream.write(data)
        os.fsync(stream.fileno())


def _nothing_is_left(device):
    assert device.left() == []
    assert dm.devices("snapmgr") == ()
    assert list(Path("/dev").glob("snapmgr*")) == []


@pytest.mark.parametrize("stack", [*_STACKS, *(_MORE if CAMPAIGN else ())])
def test_snapshot_is_one_and_all_goes(device, stack):
    assert missing_requirements(STACKS[stack]) == ()
    with device.bench(stack) as bench:
        assert 100 * _MIB < bench.provisioned.capacity_bytes < device.used_bytes // 2
        file = bench.path / "file"
        old, new = os.urandom(4 * _MIB), os.urandom(4 * _MIB)
        file.write_bytes(old)
        snapshot = bench.snapshot()
        assert 0 < snapshot.create_s <= snapshot.whole_s
        assert [found.ref for found in bench.inventory()] == [snapshot.ref]
        with bench.measured() as part:
            _overwrite(file, new)
            bench.run(["sync", "-f", str(bench.path)])
        # What was there is copied first, but for a thin volume, all of whose chunks are overwritten whole.
        assert part.spent.written_bytes >= (4 if "thin" in stack else 8) * _MIB
        with snapshot.opened() as folder:
            assert (folder / "file").read_bytes() == old
        with snapshot.opened(writable=True) as folder:
            _overwrite(folder / "file", b"changed in the clone")
            assert file.read_bytes() == new
        assert (snapshot.usage().exclusive_bytes or 0) >= 3 * _MIB
        assert snapshot.delete() > 0
        assert bench.inventory() == ()
        programs = [argv[0] for argv in bench.record()["commands"]]
        assert programs[:4] == ["blkdiscard", "pvcreate", "vgcreate", "vgs"]
    _nothing_is_left(device)
    assert device.tail_is_untouched()


def _load_forever(device, stack):
    with device.bench(stack) as bench:
        snapshot = bench.snapshot()
        with snapshot.opened(), snapshot.opened(writable=True) as clone:
            (device.folder / "load").unlink(missing_ok=True)
            script = 'echo $$ >"$2.tmp"; mv "$2.tmp" "$2"; cd "$1"; while :; do echo x >>"$3/x"; sync -f .; done'
            bench.run(["sh", "-c", script, "sh", str(clone), str(device.folder / "load"), str(bench.path)])


@pytest.mark.parametrize("stack", _STACKS if CAMPAIGN else _STACKS[:1])
def test_killed_in_the_middle(device, stack):
    (device.folder / "load").unlink(missing_ok=True)
    pid = spawn(lambda: _load_forever(device, stack))
    wait_until((device.folder / "load").exists)
    load = int((device.folder / "load").read_text())
    assert dm.devices("snapmgr") != ()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    device.seconds_until_clear(at_most_s=_CLEAR_S)
    assert start_ticks(load) is None
    _nothing_is_left(device)
    assert device.tail_is_untouched()


@pytest.mark.parametrize("stack", _STACKS if CAMPAIGN else _STACKS[:1])
def test_killed_at_each_step(device, stack):
    def whole():
        with device.bench(stack) as bench:
            (bench.path / "file").write_bytes(b"data" * 10000)
            with bench.snapshot().opened(writable=True):
                pass

    every = crash_every(_STEPS)
    # By default one a day: all of them are tried in some months.
    step = int(time.time() // 86400) % every
    while kill_at(whole, step, marks=("/run/", str(device.folder), "/dev/mapper")):
        device.seconds_until_clear(at_most_s=_CLEAR_S)
        _nothing_is_left(device)
        step += every
        if every == _STEPS:
            break
    assert step >= _STEPS
    _nothing_is_left(device)


def test_group_of_an_earlier_run_is_no_obstacle(device):
    lvm.run("vgcreate", "--yes", "earlier", device.device)
    lvm.run("lvcreate", "--yes", "--size", "8m", "--activate", "n", "--zero", "n", "--name", "x", "earlier")
    with device.bench("lvm+ext4"):
        pass
    _nothing_is_left(device)


@pytest.fixture
def target(disk):
    """A device with a name that stays, as a disk's serial number does, behind what the other tests use."""
    name, first = "benchmark-target", 2 << 30
    lvm.run(
        *("dmsetup", "create", name, "--uuid", f"TEST-{name}"),
        *("--table", f"0 {(1 << 30) // 512} linear {disk} {first // 512}"),
    )
    lvm.run("dmsetup", "mknodes", name)
    try:
        yield f"/dev/mapper/{name}"
    finally:
        lvm.run("dmsetup", "remove", "--retry", name)


def test_the_command_measures_each_storage_and_leaves_nothing(target, tmp_path):
    stacks = (*_STACKS, "ext4")
    before = lvm.run("dmsetup", "ls"), lvm.run("losetup", "--all"), Path("/proc/self/mountinfo").read_text()
    words = ["random-update", "snapshot-ops", "--profile", "smoke", "--budget", "10m", "--size", "16M"]
    words += ["--stacks", ",".join(stacks), "--on", target, "-o", str(tmp_path / "results")]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "bench", "run", *words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    found = read([tmp_path / "results"])
    assert found.problems == []
    samples = [sample for sample in found.samples if sample["kind"] != "absent"]
    assert Counter((sample["scenario"], sample["stack"]) for sample in samples) == {
        **{("random-update", stack): 1 for stack in stacks},
        **{("snapshot-ops", stack): 1 for stack in _STACKS},
    }
    for sample in samples:
        assert sample["failure"] == ""
        assert all(check["ok"] for check in sample["checks"])
        assert sample["checks"] or sample["stack"] == "ext4"
        assert sample["metrics"]
    assert (lvm.run("dmsetup", "ls"), lvm.run("losetup", "--all"), Path("/proc/self/mountinfo").read_text()) == before
    assert list(Path("/dev").glob("snapmgr*")) == []
    assert list(Path("/run/snapmgr/bench").glob("*")) == []


# Enough blocks for advice, on a machine that says it is no guest. A sample is one snapshot, one storage is slowed, so
# that there is a difference.
_ADVISING = _PROGRAM.replace("least=0, most=0", "least=6, most=6").replace(
    "from snapmgr.cli.main import main",
    """
from snapmgr.bench.device import hostfacts
from snapmgr.bench.model import Outcome
hostfacts.virtualisation = lambda runner: {"vm": "none", "container": "none", "dmi": None}
def snap(self, bench):
    create_s = bench.snapshot().create_s + (5 if bench.stack.name == "btrfs-nocow" else 0)
    return Outcome(metrics={"create_s": create_s})
snapshot_ops.SnapshotOps.run = snap
from snapmgr.cli.main import main
""",
)


def _snapmgr(*words):
    return subprocess.run(
        [sys.executable, "-c", _ADVISING, *words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_the_command_advises_on_a_disk(target, tmp_path):
    """From `bench run` to the advice, with a control that the only scenario cannot run on."""
    words = ["snapshot-ops", "--profile", "smoke", "--budget", "10m", "--size", "16M", "--seed", "1"]
    words += ["--stacks", "btrfs,btrfs-nocow,ext4", "--on", target, "-o", str(tmp_path / "results")]
    done = _snapmgr("bench", "run", *words)
    assert done.returncode == 0, done.stderr
    assert "For a database with snapshots: btrfs." in done.stderr.splitlines()
    shown = _snapmgr("bench", "show", str(tmp_path / "results"), "--json")
    found = json.loads(shown.stdout)
    assert not [one for one in found["warnings"] if one["level"] == "alarm"], found["warnings"]
    (use,) = found["recommendation"]["uses"]
    assert (use["use"], use["chosen"], use["sure"]) == ("oltp", "btrfs", "shown")
    assert use["order"] == [["btrfs"], ["btrfs-nocow"]]
    said = {one["kind"]: one["text"] for one in use["sentences"]}
    assert said["guarantee"].startswith("btrfs: a snapshot is atomic for the whole volume; a running server needs a ")
    assert said["avoid"].startswith("btrfs-nocow: Snapshot call")
    assert {(one["scenario"], one["stack"]) for one in found["absent"]} == {("snapshot-ops", "ext4")}
