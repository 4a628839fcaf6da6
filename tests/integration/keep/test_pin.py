"""Pinned is pinned: beside the snapshot too, against a prune that runs at the same time, and after SIGKILL."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.access.deletion import delete
from snapmgr.access.note import decode_note
from snapmgr.backup.run import backup
from snapmgr.contract.errors import SnapmgrError
from snapmgr.keep.pin import pin
from snapmgr.keep.prune import prune
from snapmgr.testing import processes
from support.scene import Scene
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Manifest

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")


@pytest.fixture
def scene(files: Scene) -> Scene:
    """A directory job "files" that keeps but one."""
    path = f"{files.file_system.point}/mysql"
    files.configure(text=f'[job.files]\nsource = "directory"\npath = "{path}"\nretention.keep-last = 1\n')
    return files


def _take(scene: Scene, count: int) -> list[Manifest]:
    ctx = scene.context()
    return [backup(ctx, ctx.config.job("files")) for _ in range(count)]


def _noted(scene: Scene, snapshot_id: str) -> Manifest:
    """Return what is noted beside a snapshot."""
    path = Path(scene.file_system.point, ".snapmgr", f"{snapshot_id}.json")
    return decode_note(path.read_bytes(), str(path))[0]


def test_a_pin_and_its_reason_are_seen_everywhere_and_kept_by_prune(scene: Scene) -> None:
    first, second, _ = _take(scene, 3)
    done = scene.run("pin", first.short_id, "--reason", "ask\x1b[2J Ines")
    assert (done.returncode, done.stdout) == (0, f"pinned: {first.id} (ask\\x1b[2J Ines)\n")
    for manifest in (scene.context().catalog.load(first.id).manifest, _noted(scene, first.id)):
        assert (manifest.pinned, manifest.pin_reason) == (True, "ask\x1b[2J Ines")
    assert "pinned (ask\\x1b[2J Ines)" in scene.run("list").stdout
    assert "pinned      ask\\x1b[2J Ines" in scene.run("show", first.id).stdout
    assert scene.json("list")["snapshots"][0]["pin_reason"] == "ask\x1b[2J Ines"
    pruned = scene.run("prune")
    assert "pinned (ask\\x1b[2J Ines)" in pruned.stdout
    assert f"deleted  {second.id}" in pruned.stdout
    assert scene.run("unpin", first.short_id).stdout == f"unpinned: {first.id}\n"
    assert _noted(scene, first.id).pin_reason is None
    assert f"deleted  {first.id}" in scene.run("prune").stdout


def test_both_may_be_repeated(scene: Scene) -> None:
    (only,) = _take(scene, 1)
    ctx = scene.context()
    assert pin(ctx, only.id, "why").pin_reason == "why"
    assert pin(ctx, only.id).pin_reason == "why"
    assert pin(ctx, only.id, "better").pin_reason == "better"
    for _ in range(2):
        assert scene.run("unpin", only.id).returncode == 0
    assert scene.context().catalog.load(only.id).manifest == _noted(scene, only.id) == only


def test_several_are_pinned_each_for_itself(scene: Scene) -> None:
    broken, ready = _take(scene, 2)
    ctx = scene.context()
    ctx.catalog.write(broken.with_state("broken", reason="a try"))
    done = scene.run("pin", broken.id, ready.id, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)["snapshots"]
    assert [(one["exit_code"], one["pinned"]) for one in told] == [(1, False), (0, True)]
    assert "is BROKEN: a try" in done.stderr
    ctx.catalog.write(broken)
    assert scene.run("pin", "nonsense", broken.id).returncode == 1
    assert not ctx.catalog.load(broken.id).manifest.pinned


@pytest.mark.parametrize("reason", ["x" * 501, "\udcff" * 200])
def test_a_reason_has_an_end(scene: Scene, reason: str) -> None:
    (only,) = _take(scene, 1)
    assert scene.run("pin", only.id, "--reason", reason).returncode == 2
    assert scene.run("pin", only.id, "--reason", "\udcff").stdout == f"pinned: {only.id} (\\xff)\n"


def test_a_note_that_cannot_be_stored_pins_nothing(scene: Scene) -> None:
    (only,) = _take(scene, 1)
    point = scene.file_system.point
    subprocess.run(["mount", "-o", "remount,ro", point], check=True)
    try:
        done = scene.run("pin", only.id)
        assert done.returncode == 1
        assert "read-only" in done.stderr
    finally:
        subprocess.run(["mount", "-o", "remount,rw", point], check=True)
    assert not scene.context().catalog.load(only.id).manifest.pinned


def test_an_active_run_of_the_job_keeps_nobody_from_pinning(scene: Scene) -> None:
    (only,) = _take(scene, 1)
    with scene.context().catalog.job_lock("files"):
        assert scene.run("pin", only.id).returncode == 0


def test_what_is_being_deleted_cannot_be_pinned(scene: Scene) -> None:
    (only,) = _take(scene, 1)
    with scene.context().catalog.deleting(only.id):
        done = scene.run("pin", only.id)
    assert done.returncode == 1
    assert "is being deleted by another process" in done.stderr


def test_a_pin_that_succeeded_holds_against_a_prune_at_the_same_time(scene: Scene) -> None:
    """One process prunes while another pins from the other end: they meet in the middle, each time elsewhere."""
    held = refused = 0
    rounds = 6 if CAMPAIGN else 3
    for _ in range(rounds):
        ids = [manifest.id for manifest in _take(scene, 8)]
        pruner = processes.spawn(lambda: prune(scene.context(), scene.context().config.job("files")))
        pinned = []
        ctx = scene.context()
        # prune begins with the newest.
        for snapshot_id in ids[:-1]:
            try:
                pinned.append(pin(ctx, snapshot_id).id)
            except SnapmgrError:
                refused += 1
        assert processes.succeeds(pruner)
        held += len(pinned)
        assert set(pinned) <= set(scene.stored())
        for snapshot_id in pinned:
            manifest = ctx.catalog.load(snapshot_id).manifest
            assert (manifest.state, manifest.pinned) == ("ready", True)
            delete(ctx, manifest, pinned=True)
    # Both came first at times: else nothing was tried.
    assert held > rounds
    assert refused > rounds


def test_killed_in_the_middle_it_is_pinned_or_not_and_can_be_done_again(scene: Scene) -> None:
    (only,) = _take(scene, 1)
    ctx = scene.context()
    duration_s = processes.duration_s(lambda: pin(ctx, only.id, "a"))
    moments = 20 if CAMPAIGN else 7
    for number in range(moments):

        def repin(reason: str = f"r{number}") -> None:
            pin(scene.context(), only.id, reason)

        processes.kill_after(repin, duration_s * number / moments)
        assert ctx.catalog.load(only.id).manifest.pinned
        assert pin(ctx, only.id, f"s{number}") == _noted(scene, only.id) == ctx.catalog.load(only.id).manifest
