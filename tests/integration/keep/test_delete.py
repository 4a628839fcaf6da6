"""Deleting by name: what is protected, what force changes, and what no force deletes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.access.attach import attach, release
from snapmgr.api import BatchDeleting
from snapmgr.backup.run import backup
from snapmgr.backup.sweep import sweep
from snapmgr.catalog.manifest import GONE, Verification
from snapmgr.cli.main import main
from snapmgr.keep.delete import delete_snapshots, examine
from snapmgr.testing import processes
from snapmgr.testing.trees import flush
from snapmgr_btrfs import BtrfsBackend
from support.scene import Scene

if TYPE_CHECKING:
    from snapmgr.api import SnapshotRef
    from snapmgr.catalog.manifest import Manifest

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")


@pytest.fixture
def scene(files: Scene) -> Scene:
    """A directory job "files"."""
    _configure(files, "files")
    return files


def _configure(scene: Scene, job: str) -> None:
    scene.configure(text=f'[job.{job}]\nsource = "directory"\npath = "{scene.file_system.point}/mysql"\n')


def _take(scene: Scene, count: int) -> list[Manifest]:
    ctx = scene.context()
    return [backup(ctx, ctx.config.job("files")) for _ in range(count)]


def _verified(scene: Scene, manifest: Manifest) -> None:
    scene.context().catalog.write_verification(
        manifest.id, Verification(at=datetime.now(UTC), result="passed", duration_s=1.0)
    )


def _left(scene: Scene) -> list[str]:
    """Return the ids that catalog and storage agree on."""
    ids = [entry.manifest.id for entry in scene.entries()]
    assert scene.stored() == sorted(ids)
    return ids


def test_the_newest_ready_and_verified_ones_and_pinned_ones_are_protected(scene: Scene) -> None:
    first, second, third, newest = _take(scene, 4)
    _verified(scene, first)
    _verified(scene, second)
    assert scene.run("pin", third.id, "--reason", "for the audit").returncode == 0
    for one, rule in ((newest, "newest READY"), (second, "newest VERIFIED"), (third, "pinned (for the audit)")):
        done = scene.run("delete", one.short_id, "--yes")
        assert done.returncode == 1
        assert f"{one.id} is protected: {rule}" in done.stderr
        assert "--force" in done.stderr
    assert scene.run("delete", first.id).stdout == f"deleted {first.id}\n"
    assert _left(scene) == [second.id, third.id, newest.id]


def test_one_that_is_refused_keeps_all_that_were_named(scene: Scene) -> None:
    first, second = _take(scene, 2)
    done = scene.run("delete", first.id, second.id, "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert [(one["deleted"], one["exit_code"]) for one in document["snapshots"]] == [(False, 0), (False, 1)]
    assert scene.run("delete", first.id, "nonsense").returncode == 1
    assert _left(scene) == [first.id, second.id]


def test_force_says_what_is_lost_and_needs_a_word(scene: Scene) -> None:
    (only,) = _take(scene, 1)
    assert ", never verified\n" in scene.run("delete", "--force", only.id).stderr
    _verified(scene, only)
    refused = scene.run("delete", "--force", only.id)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert f"{only.id} is protected: newest READY, newest VERIFIED" in refused.stderr
    assert "will have no snapshot left" in refused.stderr
    planned = scene.run("delete", "--force", only.id, "--dry-run")
    assert (planned.returncode, planned.stdout) == (0, f"would delete {only.id} (newest READY, newest VERIFIED)\n")
    assert _left(scene) == [only.id]
    assert scene.run("delete", "--force", "--yes", only.id).returncode == 0
    assert _left(scene) == []


@pytest.mark.parametrize(("answer", "code"), [("{short}", 0), ("yes", 1), ("", 1)])
def test_a_terminal_is_asked(scene: Scene, answer: str, code: int) -> None:
    (only,) = _take(scene, 1)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "snapmgr", "--config", str(scene.config_file), "delete", "--force", "latest"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        os.write(ours, answer.format(short=only.short_id).encode() + b"\n")
        said = b""
        with suppress(OSError):
            while piece := os.read(ours, 4096):
                said += piece
    os.close(ours)
    assert process.returncode == code, said
    assert f"Type {only.short_id}".encode() in said
    assert _left(scene) == ([] if code == 0 else [only.id])


def test_the_storage_is_read_once_and_again_after_a_question(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, second, newest = _take(scene, 3)
    assert scene.run("pin", pinned.id).returncode == 0
    looks = []
    look = BtrfsBackend.inventory
    monkeypatch.setattr(
        BtrfsBackend, "inventory", lambda *args, **options: looks.append(options) or look(*args, **options)
    )
    command = ["--config", str(scene.config_file), "delete"]
    assert main([*command, second.id]) == 0
    assert looks == [{"notes": False}]

    def answer(*_args: object, **_options: object) -> None:
        subprocess.run(["btrfs", "-q", "subvolume", "delete", place / newest.id], check=True)

    place = Path(scene.file_system.point) / ".snapmgr"
    monkeypatch.setattr("snapmgr.cli.delete.ask_for_word", answer)
    # While somebody answers, the newest one goes: now this one is.
    assert main([*command, "--force", pinned.id]) == 1
    assert len(looks) == 3
    assert (place / pinned.id).exists()


def test_what_is_attached_or_read_stays_whatever_is_forced(scene: Scene) -> None:
    first, second, _ = _take(scene, 3)
    ctx = scene.context()
    lease = attach(ctx, ctx.catalog.load(first.id), writable=True, why="mount")
    try:
        done = scene.run("delete", "--force", "--yes", first.id, second.id)
        assert done.returncode == 1
        assert f"snapmgr umount {lease.point}" in done.stderr
    finally:
        release(ctx, lease)
    with ctx.catalog.reading(second.id):
        done = scene.run("delete", "--force", "--yes", first.id, second.id)
        assert done.returncode == 1
        assert "is being read by another process" in done.stderr
    assert len(_left(scene)) == 3


def test_an_active_run_of_the_job_is_exit_code_3(scene: Scene) -> None:
    first, _ = _take(scene, 2)
    with scene.context().catalog.job_lock("files"):
        assert scene.run("delete", first.id).returncode == 3
    assert len(_left(scene)) == 2


def test_a_job_that_is_not_configured_any_more(scene: Scene) -> None:
    first, second = _take(scene, 2)
    _configure(scene, "other")
    assert scene.run("delete", first.id).returncode == 0
    assert scene.run("delete", second.id).returncode == 1
    assert scene.run("delete", second.id, "--force", "--yes").returncode == 0
    assert _left(scene) == []


def test_of_a_broken_one_the_record_goes_with_what_is_left_of_it(scene: Scene) -> None:
    first, second = _take(scene, 2)
    ctx = scene.context()
    ctx.catalog.write(first.with_state("broken", reason="a try"))
    done = scene.run("delete", first.short_id)
    assert (done.returncode, done.stdout) == (0, f"deleted {first.id} (BROKEN)\n")
    assert _left(scene) == [second.id]


def test_one_whose_storage_was_away_and_is_there_again_goes_by_force_only(scene: Scene) -> None:
    first, second = _take(scene, 2)
    ctx = scene.context()
    ctx.catalog.write(first.with_state("broken", reason=GONE))
    done = scene.run("delete", first.short_id)
    assert done.returncode == 1
    assert f"snapshot {first.id} is protected: its remaining data may be the last copy" in done.stderr
    assert scene.run("doctor", "--fix").returncode == 0
    assert ctx.catalog.load(first.id).manifest.state == "ready"
    ctx.catalog.write(first.with_state("broken", reason=GONE))
    assert scene.run("delete", first.short_id, "--force", "--yes").returncode == 0
    assert _left(scene) == [second.id]
    # Of what is not there nothing can be lost.
    path = Path(scene.file_system.point, ".snapmgr", second.id)
    subprocess.run(["btrfs", "-q", "subvolume", "delete", path], check=True)
    ctx.catalog.write(second.with_state("broken", reason=GONE))
    assert scene.run("delete", second.short_id).returncode == 0


def test_what_somebody_else_deleted_is_the_newest_of_nothing(scene: Scene) -> None:
    first, second = _take(scene, 2)
    path = Path(scene.file_system.point, ".snapmgr", second.id)
    subprocess.run(["btrfs", "-q", "subvolume", "delete", path], check=True)
    assert scene.run("delete", first.id).returncode == 1
    done = scene.run("delete", second.id)
    assert (done.returncode, done.stdout) == (0, f"deleted {second.id} (its storage was gone already)\n")
    assert _left(scene) == [first.id]


def test_while_the_storage_does_not_answer_nothing_is_taken_for_gone(scene: Scene) -> None:
    (only,) = _take(scene, 1)
    member = only.members[0]
    pool = replace(member.ref.pool, id="00000000-1111-2222-3333-444444444444")
    ctx = scene.context()
    ctx.catalog.write(replace(only, members=(replace(member, ref=replace(member.ref, pool=pool)),)))
    done = scene.run("delete", only.id)
    assert done.returncode == 1
    assert f"{only.id} is protected: newest READY" in done.stderr
    assert scene.run("delete", only.id, "--force", "--yes").returncode == 1
    # The storage is back.
    ctx.catalog.write(only)
    assert _left(scene) == [only.id]


def test_pending_ones_are_left_to_the_next_run(scene: Scene) -> None:
    first, second = _take(scene, 2)
    scene.context().catalog.write(replace(first, state="pending"))
    done = scene.run("delete", first.id, "--force", "--yes")
    assert done.returncode == 1
    assert "is PENDING" in done.stderr
    assert _left(scene) == [first.id, second.id]


def test_a_deletion_that_fails_is_told_the_others_go_and_the_next_run_goes_on(scene: Scene) -> None:
    moved, other, newest = _take(scene, 3)
    place = Path(scene.file_system.point)
    _move(place / ".snapmgr" / moved.id, place / "kept-by-hand")
    # What was moved is not where it is looked for, and nobody but the user may delete it there.
    done = scene.run("delete", moved.id, other.id)
    assert done.returncode == 1
    assert "was moved to" in done.stderr
    assert f"deleted {other.id}" in done.stdout
    assert scene.states() == ["deleting", "ready"]
    _move(place / "kept-by-hand", place / ".snapmgr" / moved.id)
    ctx = scene.context()
    with ctx.catalog.job_lock("files"):
        assert sweep(ctx, "files") == ()
    assert _left(scene) == [newest.id]


def _move(source: Path, target: Path) -> None:
    subprocess.run(["btrfs", "property", "set", "-f", source, "ro", "false"], check=True)
    source.rename(target)
    subprocess.run(["btrfs", "property", "set", "-f", target, "ro", "true"], check=True)


def test_half_deleted_it_is_named_again(scene: Scene) -> None:
    first, second = _take(scene, 2)
    ctx = scene.context()
    ctx.catalog.write(replace(first, pinned=True).with_state("deleting"))
    assert scene.run("delete", first.id).returncode == 0
    assert _left(scene) == [second.id]


@pytest.mark.parametrize("after", [False, True])
def test_killed_before_or_after_the_storage_call_the_next_run_goes_on(scene: Scene, after: bool) -> None:
    first, newest = _take(scene, 2)

    def killed() -> None:
        ctx = scene.context()
        backend = ctx.backend("btrfs")
        assert isinstance(backend, BatchDeleting)
        delete = backend.delete_batch

        def die(refs: tuple[SnapshotRef, ...], *, wait: str) -> None:
            assert wait == "name"
            if after:
                delete(refs)
            os.kill(os.getpid(), signal.SIGKILL)

        backend.delete_batch = die  # type: ignore[method-assign,assignment]
        delete_snapshots(ctx, examine(ctx, [first.id]), force=False)

    assert not processes.succeeds(processes.spawn(killed))
    assert scene.states() == ["deleting", "ready"]
    ctx = scene.context()
    with ctx.catalog.job_lock("files"):
        assert sweep(ctx, "files") == ()
    assert _left(scene) == [newest.id]


def test_waiting_ends_when_the_space_is_free(scene: Scene) -> None:
    ballast = Path(scene.file_system.point) / "mysql" / "ballast"
    ballast.write_bytes(os.urandom(48 << 20))
    first, *_ = _take(scene, 1)
    ballast.unlink()
    _take(scene, 1)
    flush(ballast.parent)
    used = os.statvfs(scene.file_system.point).f_bfree
    assert scene.run("delete", first.id, "--wait").returncode == 0
    freed = (os.statvfs(scene.file_system.point).f_bfree - used) * os.statvfs(scene.file_system.point).f_frsize
    assert freed > 40 << 20


def test_a_dry_run_locks_nothing(scene: Scene) -> None:
    first, _ = _take(scene, 2)
    before = {path: path.stat().st_mtime_ns for path in scene.state.rglob("*")}
    with scene.context().catalog.job_lock("files"), scene.context().catalog.reading(first.id):
        before |= {path: path.stat().st_mtime_ns for path in (scene.state / "locks").iterdir()}
        assert scene.run("delete", first.id, "-n").stdout == f"would delete {first.id}\n"
    assert {path: path.stat().st_mtime_ns for path in scene.state.rglob("*")} == before


def test_two_at_once_delete_each_once(scene: Scene) -> None:
    ids = [one.id for one in _take(scene, 4)][:3]
    processes = [scene.start("delete", *ids) for _ in range(2)]
    codes = sorted(process.wait(60) for process in processes)
    for process in processes:
        process.communicate()
    assert codes in ([0, 1], [0, 3])
    assert len(_left(scene)) == 1
