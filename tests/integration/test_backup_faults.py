"""The lock under fault: killed connections, hung storage calls, stopped and killed processes, on a real server."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from snapmgr.errors import StorageError
from snapmgr.jobs.attach import attached
from snapmgr.jobs.backup import backup, plan_backup
from snapmgr.jobs.sweep import sweep
from support.faults import Faults
from support.scene import Scene

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")


def _mark(scene: Scene) -> Path:
    return scene.folder / f"mark-{time.monotonic_ns()}"


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _lock_connection(scene: Scene) -> int:
    ((number,),) = scene.server.query(
        "SELECT ID FROM information_schema.PROCESSLIST WHERE COMMAND = 'Sleep' AND USER = 'root' AND DB IS NULL"
    )
    return int(number)


def _commit_s(scene: Scene) -> float:
    """Return how long a commit takes now."""
    scene.server.query("CREATE DATABASE IF NOT EXISTS probe")
    scene.server.query("CREATE TABLE IF NOT EXISTS probe.t (v INT) ENGINE=InnoDB")
    start = time.monotonic()
    scene.server.query("INSERT INTO probe.t VALUES (1)")
    return time.monotonic() - start


def test_a_lock_connection_killed_in_the_middle(scene: Scene) -> None:
    mark = _mark(scene)
    with scene.start("backup", "demo", faults_=Faults(delay_s=1.0, delay_mark=mark)) as process:
        _wait_for(mark)
        scene.server.query(f"KILL {_lock_connection(scene)}")
        scene.server.query("CREATE DATABASE IF NOT EXISTS probe")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    assert "lost" in err
    assert scene.states() == ["broken"]
    assert scene.stored() == []


def test_a_storage_call_beyond_the_bound_does_not_keep_the_lock(scene: Scene) -> None:
    """The call is delayed in C, with Python's global lock held; the latecomer is removed."""
    scene.configure('lock_hold = "500ms"')
    _commit_s(scene)
    mark = _mark(scene)
    with scene.start("backup", "demo", faults_=Faults(delay_s=3.0, delay_mark=mark)) as process:
        _wait_for(mark)
        assert _commit_s(scene) < 0.5 + 0.5
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "deadline" in err
    assert "ready" not in scene.states()
    assert scene.stored() == []
    assert scene.run("backup", "demo").returncode == 0
    assert scene.states().count("ready") == 1


def test_the_parent_alone_killed_in_the_middle(scene: Scene) -> None:
    _commit_s(scene)
    mark = _mark(scene)
    with scene.start("backup", "demo", faults_=Faults(delay_s=1.5, delay_mark=mark)) as process:
        _wait_for(mark)
        process.kill()
        assert _commit_s(scene) < 0.5
    # The helper still sits in its storage call: another run must neither join it nor take what it makes for good.
    again = scene.run("backup", "demo")
    assert again.returncode == 1
    assert "still hangs" in again.stderr
    time.sleep(2)
    assert scene.stored() == []
    assert scene.run("backup", "demo").returncode == 0
    assert scene.states() == ["broken", "ready"]
    assert len(scene.stored()) == 1


def test_all_our_processes_stopped_during_the_hold(scene: Scene) -> None:
    """Nothing of ours can act: the server itself ends the lock, a little above the bound."""
    scene.configure('lock_hold = "1s"')
    _commit_s(scene)
    mark = _mark(scene)
    with scene.start("backup", "demo", faults_=Faults(delay_s=0.5, delay_mark=mark)) as process:
        _wait_for(mark)
        pids = [process.pid, *_children(process.pid)]
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        assert _commit_s(scene) < 3.5
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (1, 4), err
    assert "ready" not in scene.states()
    assert scene.stored() == []


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_server_killed_during_the_hold(scene: Scene) -> None:
    mark = _mark(scene)
    with scene.start("backup", "demo", faults_=Faults(delay_s=1.0, delay_mark=mark)) as process:
        _wait_for(mark)
        scene.server.kill()
        _, err = process.communicate(timeout=60)
    scene.server.start()
    assert process.returncode == 4, err
    assert scene.states() == ["broken"]
    assert scene.stored() == []


def test_ctrl_c_during_the_hold(scene: Scene) -> None:
    _commit_s(scene)
    mark = _mark(scene)
    with scene.start("backup", "demo", faults_=Faults(delay_s=1.0, delay_mark=mark)) as process:
        _wait_for(mark)
        process.send_signal(signal.SIGINT)
        assert _commit_s(scene) < 0.5
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert scene.states() == ["broken"]
    assert scene.stored() == []


def test_a_proven_snapshot_is_completed_after_a_crash(scene: Scene) -> None:
    """PENDING with proof resumes; without, it goes."""
    ctx = scene.context()
    manifest = backup(ctx, ctx.config.job("demo"))
    ctx.catalog.write(manifest.with_state("pending"))
    sweep(ctx, "demo")
    assert scene.states() == ["ready"]
    unproven = manifest.with_state("pending")
    object.__setattr__(unproven, "proved_at", None)
    ctx.catalog.write(unproven)
    sweep(ctx, "demo")
    assert scene.states() == ["broken"]
    assert scene.stored() == []


def test_a_broken_snapshot_is_never_attached(scene: Scene) -> None:
    ctx = scene.context()
    manifest = backup(ctx, ctx.config.job("demo"))
    ctx.catalog.write(manifest.with_state("broken", reason="for the test"))
    with pytest.raises(StorageError, match="for the test"), attached(ctx, ctx.catalog.load(manifest.id)):
        pass
    sweep(ctx, "demo")


def test_a_plan_says_what_it_would_do(scene: Scene) -> None:
    ctx = scene.context()
    plan = plan_backup(ctx, ctx.config.job("demo"))
    assert (plan.backend, plan.level) == ("btrfs", "backup-lock")
    assert plan.path == str(scene.server.datadir)
