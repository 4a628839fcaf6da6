"""What fails once the snapshot is taken: it is kept, the other steps go on, and the exit code says what is to do."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.processes import ended, wait_until
from support.scene import Scene

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")


@pytest.fixture
def scene(files: Scene) -> Scene:
    """A directory job "files" with a check command of its own."""
    _configure(files, "true")
    return files


def _configure(scene: Scene, check: str) -> None:
    program = scene.folder / "check"
    program.write_text(f"#!/bin/sh\n{check}\n")
    program.chmod(0o755)
    scene.configure(
        text=f'[job.files]\nsource = "directory"\npath = "{scene.file_system.point}/mysql"\n'
        f'retention.keep-last = 1\nverify.command = ["{program}", "{{}}"]\n'
    )


@pytest.mark.parametrize(("verdict", "code"), [("1", 6), ("0", 5)])
def test_a_clone_that_stays_does_not_hide_what_was_found(scene: Scene, verdict: str, code: int) -> None:
    pid_file = scene.folder / "pid"
    _configure(scene, f'cd "$1" && setsid sleep 60 >/dev/null 2>&1 & echo $! > {pid_file}; sleep 0.2; exit {verdict}')
    done = scene.run("backup", "files", "--verify")
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    wait_until(lambda: ended(int(pid_file.read_text())))
    assert done.returncode == code, done.stderr
    assert "is in use" in done.stderr or "busy" in done.stderr
    (entry,) = scene.entries()
    assert entry.verification is not None
    assert entry.verification.result == ("failed" if code == 6 else "passed")
    # Nobody uses it any more: the next run removes it.
    _configure(scene, "true")
    assert scene.run("backup", "files").returncode == 0
    assert len(scene.stored()) == 2
    assert os.listdir(scene.scratch) == []


def test_what_cannot_be_cleared_up_is_exit_code_5_and_stops_nothing(scene: Scene) -> None:
    for _ in range(3):
        assert scene.run("backup", "files").returncode == 0
    place = Path(scene.file_system.point)
    moved = scene.entries()[0].manifest
    scene.context().catalog.write(moved.with_state("deleting"))
    _move(place / ".snapmgr" / moved.id, place / "elsewhere")
    for options in ((), ("--verify", "--prune")):
        done = scene.run("backup", "files", *options)
        assert done.returncode == 5, done.stderr
        assert "was moved to" in done.stderr
    newest = scene.entries()[-1]
    assert newest.verified
    assert [entry.manifest.id for entry in scene.entries()] == [moved.id, newest.manifest.id]
    _move(place / "elsewhere", place / ".snapmgr" / moved.id)
    assert scene.run("backup", "files").returncode == 0
    assert len(scene.stored()) == 2


def _move(source: Path, target: Path) -> None:
    subprocess.run(["btrfs", "property", "set", "-f", source, "ro", "false"], check=True)
    source.rename(target)
    subprocess.run(["btrfs", "property", "set", "-f", target, "ro", "true"], check=True)


def test_a_run_is_not_over_before_its_verification(scene: Scene) -> None:
    """Another run is refused meanwhile, and what needs only a moment of the job is not."""
    go_on = scene.folder / "go-on"
    started = scene.folder / "started"
    _configure(scene, f"touch {started}; while [ ! -e {go_on} ]; do sleep 0.05; done")
    assert scene.run("backup", "files").returncode == 0
    (first,) = scene.entries()
    running = scene.start("backup", "files", "--verify")
    try:
        wait_until(started.exists)
        refused = scene.run("backup", "files")
        assert refused.returncode == 3, refused.stderr
        assert f"another run of job files is active (pid {running.pid})" in refused.stderr
        assert scene.run("delete", first.manifest.id).returncode == 0
        assert scene.run("doctor", "files").returncode == 0
    finally:
        go_on.touch()
        running.communicate(timeout=60)
    assert running.returncode == 0
    assert len(scene.entries()) == 1
    assert scene.run("backup", "files").returncode == 0
