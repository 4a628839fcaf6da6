"""The lock under fault: killed connections, hung storage calls, stopped and killed processes, on a real server."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from snapmgr.access.attach import attached
from snapmgr.backup.run import backup, plan_backup
from snapmgr.backup.sweep import sweep
from snapmgr.contract.errors import StorageError
from support.faults import Faults
from support.scene import Scene

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")


def _mark(scene: Scene) -> Path:
    return scene.folder / f"mark-{time.monotonic_ns()}"


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _lock_connection(scene: Scene) -> int:
    ((number,),) = scene.server.query(
        "SELECT ID FROM information_schema.PROCESSLIST WHERE COMMAND = 'Sleep' AND USER = 'root' AND DB IS NULL"
    )
    return int(number)


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


def test_a_proven_snapshot_is_completed_after_a_crash(scene: Scene) -> None:
    """PENDING with proof resumes; without, it goes."""
    ctx = scene.context()
    manifest = backup(ctx, ctx.config.job("demo"))
    ctx.catalog.write(manifest.with_state("pending"))
    sweep(ctx, "demo")
    assert scene.states() == ["ready"]
    unproven = replace(manifest.with_state("pending"), proved_at=None)
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
