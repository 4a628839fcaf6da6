"""What a database administrator does at the wrong moment: nothing inconsistent gets READY, nothing good gets lost."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.backup import run as backup_run
from snapmgr.backup.run import backup
from snapmgr.contract.errors import LaterStepError, NotQuiescedError
from snapmgr.jobrun import run_job
from snapmgr.keep.prune import plan_prune, prune
from support.scene import Scene, btrfs_scene
from support.server import server_user

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Manifest

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")


@pytest.fixture(scope="module")
def shared() -> Iterator[Scene]:
    with btrfs_scene() as scene:
        scene.server.query("CREATE DATABASE d")
        yield scene


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    """The shared scene with a fresh state directory and no snapshots."""
    shared.state = shared.folder / f"state-{time.monotonic_ns()}"
    shared.configure("[job.demo.retention]\nkeep-last = 1")
    shared.lines.clear()
    yield shared
    for name in shared.stored():
        _delete(shared, name)


def _delete(scene: Scene, name: str) -> None:
    subprocess.run(["btrfs", "-q", "subvolume", "delete", f"{scene.file_system.point}/.snapmgr/{name}"], check=True)


def _take(scene: Scene, count: int) -> list[Manifest]:
    ctx = scene.context()
    return [backup(ctx, ctx.config.job("demo")) for _ in range(count)]


@contextmanager
def _elsewhere(scene: Scene) -> Iterator[Path]:
    """A folder on another file system that the server may write to."""
    folder = scene.folder / "elsewhere"
    folder.mkdir()
    scene.folder.chmod(0o711)
    os.chown(folder, server_user().pw_uid, -1)
    yield folder
    folder.rmdir()


def _stopped(scene: Scene) -> None:
    scene.configure(text=f'[job.demo]\nsource = "mysql"\nquiesce = "stopped"\ndatadir = "{scene.server.datadir}"\n')


# ---- files that are not in the snapshot


@pytest.mark.parametrize("engine", ["InnoDB", "MyISAM"])
def test_a_table_made_elsewhere_right_before_the_lock(
    scene: Scene, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(*_: object) -> None:
        if not made:
            made.append("t")
            scene.server.query(f"CREATE TABLE d.t (id INT) ENGINE={engine} DATA DIRECTORY '{folder}'")

    monkeypatch.setattr(backup_run, "flush_until_short", make)
    with _elsewhere(scene) as folder:
        ctx = scene.context()
        try:
            with pytest.raises(NotQuiescedError, match=str(folder)):
                backup(ctx, ctx.config.job("demo"))
        finally:
            scene.server.query("DROP TABLE d.t")
            for path in folder.iterdir():
                path.rmdir()
    # Seen before anything was taken.
    assert scene.states() == []
    assert scene.stored() == []


@pytest.mark.parametrize("engine", ["InnoDB", "MyISAM"])
def test_a_stopped_server_with_a_table_on_other_storage(scene: Scene, engine: str) -> None:
    with _elsewhere(scene) as folder:
        scene.server.query(f"CREATE TABLE d.t (id INT) ENGINE={engine} DATA DIRECTORY '{folder}'")
        scene.server.stop()
        _stopped(scene)
        done = scene.run("backup", "demo")
        scene.server.start()
        scene.server.query("DROP TABLE d.t")
        for path in folder.iterdir():
            path.rmdir()
    assert done.returncode == 1, done.stderr
    assert str(folder) in done.stderr
    assert scene.stored() == []


@pytest.mark.parametrize("name", ["ib_logfile0", "ibdata1"])
def test_a_stopped_server_with_parts_of_innodb_elsewhere(scene: Scene, name: str) -> None:
    scene.server.stop()
    _stopped(scene)
    path = scene.server.datadir / name
    away = scene.server.datadir.parent / name
    path.rename(away)
    done = scene.run("backup", "demo")
    away.rename(path)
    scene.server.start()
    assert done.returncode == 4, done.stderr
    assert "is not in" in done.stderr
    assert scene.stored() == []


# ---- snapshots that must not be lost


def test_what_is_mounted_by_hand_stays_ready_and_stops_no_backup(scene: Scene) -> None:
    first, _ = _take(scene, 2)
    point = scene.folder / "by-hand"
    point.mkdir()
    subvolume = f"subvol=.snapmgr/{first.id}"
    subprocess.run(["mount", "-o", subvolume, scene.file_system.device, point], check=True)
    try:
        assert scene.run("prune", "demo").returncode == 0
        assert scene.states() == ["ready", "ready"]
        assert scene.run("backup", "demo").returncode == 0
    finally:
        subprocess.run(["umount", point], check=True)
        point.rmdir()
    assert scene.run("prune", "demo").returncode == 0
    assert scene.states() == ["ready"]


def test_what_somebody_deleted_by_hand_pushes_nothing_out(scene: Scene) -> None:
    """The newest READY snapshots are gone from the storage: the one that is left is the last."""
    taken = _take(scene, 3)
    for manifest in taken[1:]:
        _delete(scene, manifest.id)
    ctx = scene.context()
    job = ctx.config.job("demo")
    assert [one.id for one in plan_prune(ctx, job, datetime.now(UTC)).delete] == [taken[1].id]
    pruned = prune(ctx, job)
    # The newest lost one keeps its manifest, for somebody may look for it.
    assert (pruned.deleted, pruned.failures) == ((taken[1].id,), ())
    assert [one.reasons[-1] for one in pruned.plan.keep] == ["not found in its storage", "last 1 of 1"]
    assert scene.stored() == [taken[0].id]


# ---- runs that must go on


def test_storage_that_is_gone_stops_no_backup(scene: Scene) -> None:
    """A crash left an unfinished snapshot on a file system that does not exist any more."""
    (old,) = _take(scene, 1)
    ctx = scene.context()
    gone = replace(old.intents[0].pool, id="00000000-0000-4000-8000-000000000000")
    pending = replace(old, state="pending", intents=(replace(old.intents[0], pool=gone),))
    ctx.catalog.write(replace(pending, id=f"{old.id[:-8]}00000001", proved_at=None))
    lost = replace(old.members[0], ref=replace(old.members[0].ref, pool=gone))
    ctx.catalog.write(replace(old, id=f"{old.id[:-8]}00000002", members=(lost,)))
    with pytest.raises(LaterStepError, match="is READY, but leftovers of an earlier run") as told:
        backup(ctx, ctx.config.job("demo"))
    pruned = prune(ctx, ctx.config.job("demo"))
    assert pruned.deleted == (old.id,)
    assert len(pruned.failures) == 2, "the unfinished one, and the lost one that no rule keeps"
    assert scene.stored() == [told.value.snapshot_id]


def test_no_room_to_verify_says_nothing_about_the_snapshot(scene: Scene) -> None:
    (taken,) = _take(scene, 1)
    scene.scratch.mkdir(exist_ok=True)
    # Room for the mount point, and none for the server's files.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=2,mode=755", "tmpfs", scene.scratch], check=True)
    try:
        done = scene.run("verify", taken.id)
    finally:
        subprocess.run(["umount", scene.scratch], check=True)
    assert done.returncode == 7, done.stderr
    assert "no space left" in done.stderr
    assert scene.entries()[0].verification is None


def test_a_full_disk_after_the_snapshot_does_not_hide_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("snapmgr.verify.run.verify", fail)
    ctx = scene.context()
    outcome = run_job(ctx, ctx.config.job("demo"), with_verify=True, with_prune=True)
    assert outcome.error is not None
    assert outcome.error.exit_code == 5
    assert outcome.manifest is not None
    assert outcome.pruned is None
    assert "is kept, but: [Errno 28]" in str(outcome.error)
