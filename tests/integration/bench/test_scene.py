"""Whatever ends a run of the benchmark: nothing that it made stays mounted, attached or running."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from snapmgr.bench.measure import memory
from snapmgr.bench.results.samples import Results
from snapmgr.bench.run.plan import Options, RunPlan
from snapmgr.bench.run.session import RunRequest, RunTarget, conductor
from snapmgr.bench.storage import scene
from snapmgr.bench.storage.stacks import STACKS, backend_of, provisioner_of
from snapmgr.contract.errors import ConfigError, MissingRequirementError, StorageError
from snapmgr.system.blockdev import read_mounts
from snapmgr.system.command import CommandRunner
from snapmgr.system.host import start_ticks
from snapmgr.system.mount import KernelMounter
from snapmgr.testing.processes import spawn
from support.bench.device import bench_device
from support.killing import kill_at
from support.processes import children, wait_until
from support.thoroughness import crash_every

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs", "ext4")

_CLEAR_S = 2.0
# A load as bad as it gets: it ignores what ends others, and leaves something in a session of its own.
_LOAD = """
trap '' TERM INT HUP
cd "$1" || exit 1
setsid sh -c 'exec 9>held; echo $$ >"$1"; while :; do sleep 60; done' sh "$2/daemon.tmp" &
while [ ! -s "$2/daemon.tmp" ]; do sleep 0.01; done
mv "$2/daemon.tmp" "$2/daemon"
while :; do dd if=/dev/zero of=load bs=64k count=16 conv=fsync 2>/dev/null; done
"""


@pytest.fixture
def device():
    with bench_device() as made:
        yield made


def _load_forever(device, stack, *, snapshots):
    """Be in the middle of a scenario, for as long as it lasts."""
    with device.bench(stack) as bench:
        (device.folder / "guard").write_text(" ".join(map(str, children())))
        if snapshots:
            snapshot = bench.snapshot()
            with snapshot.opened(), snapshot.opened(writable=True):
                bench.run(["sh", "-c", _LOAD, "sh", str(bench.path), str(device.folder)])
        else:
            bench.run(["sh", "-c", _LOAD, "sh", str(bench.path), str(device.folder)])


def _begin_load(device, stack, *, snapshots=False):
    """Begin one in a child; return its pid and that of the load's daemon once it goes on."""
    pid = spawn(lambda: _load_forever(device, stack, snapshots=snapshots))
    wait_until((device.folder / "daemon").exists)
    return pid, int((device.folder / "daemon").read_text())


def _end(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    "stack", ["btrfs", "xfs-reflink", "ext4", pytest.param("juicefs", marks=pytest.mark.needs("juicefs"))]
)
def test_killed_in_the_middle(device, stack):
    pid, daemon = _begin_load(device, stack, snapshots=stack != "ext4")
    assert start_ticks(daemon) is not None
    # Nobody else sees it.
    assert not any(mount.source == device.device for mount in read_mounts())
    _end(pid)
    device.seconds_until_clear(at_most_s=_CLEAR_S)
    assert start_ticks(daemon) is None
    assert device.tail_is_untouched()
    # And the device can be used at once.
    with device.bench(stack):
        pass


@pytest.mark.parametrize("stack", ["btrfs", "xfs"])
def test_killed_at_each_step(device, stack):
    def whole():
        with device.bench(stack) as bench:
            (bench.path / "file").write_bytes(b"data" * 10000)

    step, every = 0, crash_every(7)
    # From another one each day: all of them are tried in a week.
    step = int(time.time() // 86400) % every
    while kill_at(whole, step, marks=("/run/", str(device.folder))):
        device.seconds_until_clear(at_most_s=_CLEAR_S)
        step += every
    assert step > 10
    assert list(scene.RUN.iterdir()) == []
    assert device.left() == []
    assert device.tail_is_untouched()


def test_next_run_clears_what_a_killed_guard_could_not(device):
    pid, daemon = _begin_load(device, "btrfs")
    guard = int((device.folder / "guard").read_text())
    os.kill(guard, signal.SIGKILL)
    _end(pid)
    time.sleep(0.1)
    assert start_ticks(daemon) is not None
    assert device.left() != []
    with device.bench("ext4"):
        # It would not have been made on a device that is in use.
        assert len(device.records()) == 1
    assert start_ticks(daemon) is None
    assert device.left() == []


def test_a_device_that_a_killed_run_left_in_use_is_taken_again(device, tmp_path):
    pid, daemon = _begin_load(device, "btrfs")
    os.kill(int((device.folder / "guard").read_text()), signal.SIGKILL)
    _end(pid)
    said = []
    try:
        # Cleared before it is looked at: what is left is a file system, which --wipe would overrule, and no use of it.
        with (
            pytest.raises(ConfigError, match="is not blank"),
            conductor(
                RunRequest(options=Options(), on=device.device, wipe=None, line=()),
                RunPlan(options=Options(), experiments=(), absent=(), budget_s=1, least=1, most=1, width=1, steady_s=0),
                RunTarget(text=device.device, size_bytes=device.used_bytes, file_bytes=None),
                Results(tmp_path / "results"),
                runner=CommandRunner(),
                tell=said.append,
                step=said.append,
                advance=lambda _: None,
            ),
        ):
            pytest.fail("a device that is not blank was taken")
        assert start_ticks(daemon) is None
    finally:
        scene.sweep(_restore)
    assert said == [f"cleared what an earlier run had left on {device.device}"]
    assert device.left() == []


def test_sweeping_leaves_others_alone(device):
    pid, daemon = _begin_load(device, "ext4")
    try:
        with bench_device() as other:
            scene.RUN = device.folder / "run"
            with other.bench("btrfs") as bench:
                (bench.path / "file").write_bytes(b"data")
                assert len(device.records()) == 2
            assert start_ticks(daemon) is not None
            assert len(device.records()) == 1
    finally:
        _end(pid)
    device.seconds_until_clear(at_most_s=_CLEAR_S)


def test_sweeping_waits_for_a_guard_at_work(device):
    pid, _ = _begin_load(device, "btrfs")
    guard = int((device.folder / "guard").read_text())
    os.kill(guard, signal.SIGSTOP)
    _end(pid)
    sweeper = spawn(lambda: scene.sweep(_restore))
    time.sleep(0.3)
    assert os.waitpid(sweeper, os.WNOHANG) == (0, 0)
    os.kill(guard, signal.SIGCONT)
    assert os.waitpid(sweeper, 0)[1] == 0
    assert device.left() == []


def _restore(name):
    runner, mounter = CommandRunner(), KernelMounter()
    stack = next(one for one in STACKS.values() if (one.backend or "") == name)
    return provisioner_of(stack, backend_of(stack, {}, runner, mounter), runner, mounter)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupted(device, number):
    pid, daemon = _begin_load(device, "xfs-reflink", snapshots=True)
    os.kill(pid, number)
    status = os.waitpid(pid, 0)[1]
    assert status != 0
    device.seconds_until_clear(at_most_s=_CLEAR_S)
    assert start_ticks(daemon) is None


def test_failure_in_the_middle_is_what_is_told(device):
    def fail():
        with device.bench("btrfs") as bench:
            (bench.path / "file").write_bytes(b"data")
            raise ValueError("of the scenario")

    with pytest.raises(ValueError, match="of the scenario"):
        fail()
    assert device.left() == []


def test_memory_that_cannot_be_bounded_is_told(device, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    with (
        pytest.raises(MissingRequirementError, match="cannot limit memory"),
        device.bench("ext4", memory_bytes=256 << 20),
    ):
        pass
    assert device.left() == []


@pytest.mark.parametrize("content", ["", "[]", '{"conductor": {"pid": 1}}'])
def test_damaged_note_is_told(device, content):
    note = scene.RUN / "0123456789abcdef.json"
    note.write_text(content)
    with pytest.raises(StorageError, match="is damaged") as raised, device.bench("ext4"):
        pass
    assert f"rm {note}" in raised.value.hint
    note.unlink()


@pytest.mark.parametrize("what", ["another folder", "another id", "the root"])
def test_note_of_a_place_that_is_not_ours_is_told(device, what):
    ident = "0123456789abcdef"
    point = {"another folder": device.folder / "data/fs", "another id": scene.RUN / ident / "fs", "the root": "//fs"}
    order = {"id": "" if what == "another id" else ident, "point": str(point[what]), "size_bytes": 1, "options": {}}
    # Of a process that is gone: what it has made would be cleared.
    conductor = {"pid": 1, "start_ticks": -1, "boot_id": ""}
    record = {"conductor": conductor, "backend": "", "device": device.device, "order": order}
    note = scene.RUN / f"{ident}.json"
    note.write_text(json.dumps(record))
    with pytest.raises(StorageError, match="is damaged"):
        scene._read(note)
    if what != "the root":  # whose clearing would be the end of this machine
        with pytest.raises(StorageError, match="is damaged"):
            scene.sweep(_restore)
    assert note.exists()
    note.unlink()


def test_note_that_cannot_be_written_is_told(device):
    scene.RUN.rmdir()
    scene.RUN.write_bytes(b"")
    with pytest.raises(StorageError, match="cannot make"), device.bench("ext4"):
        pass
    assert device.left() == []


def test_only_root_gets_a_scene():
    def without_rights():
        os.setuid(65534)
        with pytest.raises(MissingRequirementError, match="needs root"):
            scene.own_mounts()

    assert os.waitpid(spawn(without_rights), 0)[1] == 0
    assert Path("/proc/self/ns/mnt").exists()
