"""SIGKILL before and after each call that changes something; the next run must converge and lose nothing.

SNAPMGR_CRASH_EVERY=1 tries all points; by default every third, always with the first and the last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.catalog import Catalog
from support.faults import Faults
from support.scene import Scene, btrfs_scene
from support.storage import processes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd"),
    pytest.mark.timeout(900),
]
EVERY = int(os.environ.get("SNAPMGR_CRASH_EVERY", "3"))


@pytest.fixture(scope="module")
def server_scene() -> Iterator[Scene]:
    with btrfs_scene() as scene:
        scene.server.query("CREATE DATABASE probe")
        scene.server.query("CREATE TABLE probe.t (v INT) ENGINE=InnoDB")
        yield scene


@pytest.fixture(scope="module")
def directory_scene() -> Iterator[Scene]:
    with btrfs_scene(server=False) as scene:
        data = Path(scene.file_system.point) / "mysql"
        (data / "file").write_text("content")
        scene.configure(
            text=f'[job.demo]\nsource = "directory"\npath = "{data}"\n'
            f'[job.demo.retention]\nkeep-last = 1\n[job.demo.verify]\ncommand = ["grep", "-r", "content", "{{}}"]\n'
        )
        yield scene


def _points(scene: Scene, *arguments: str) -> list[tuple[int, bool]]:
    """Run the command whole, counting; return the points to try: (number, after)."""
    log = scene.folder / f"calls-{time.monotonic_ns()}"
    done = scene.run(*arguments, faults_=Faults(log=log))
    assert done.returncode == 0, done.stderr
    total = len(log.read_text().splitlines())
    assert total > 5
    chosen = sorted({*range(1, total + 1, EVERY), total})
    return [(number, after) for number in chosen for after in (False, True)]


def _kill_at(scene: Scene, point: tuple[int, bool], *arguments: str) -> None:
    number, after = point
    done = scene.run(*arguments, faults_=Faults(kill_at=number, kill_after=after))
    # A run may need fewer calls than the counted one: then it simply succeeds.
    assert done.returncode in (-signal.SIGKILL, 0), done.stderr


def _settle_helpers(scene: Scene) -> None:
    """Wait for a helper that the kill left in its storage call."""
    deadline = time.monotonic() + 10
    while processes_of(scene.config_file):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _ready(scene: Scene) -> list[str]:
    return [entry.manifest.id for entry in scene.entries() if entry.manifest.state == "ready"]


def _check_clean(scene: Scene) -> None:
    """After convergence: the storage holds the READY snapshots and nothing else, and nothing is mounted or running."""
    ready = _ready(scene)
    assert scene.stored() == sorted(ready)
    assert all(state in ("ready", "broken") for state in scene.states())
    assert Catalog(scene.state).leases() == ([], [])
    assert str(scene.scratch) not in Path("/proc/self/mountinfo").read_text()
    assert processes_of(scene.scratch) == []
    notes = {path.name.removesuffix(".json") for path in Path(scene.file_system.point, ".snapmgr").glob("*.json")}
    assert notes == set(ready)


def test_backup_of_a_server(server_scene: Scene, record_property: Callable[[str, object], None]) -> None:
    scene = server_scene
    points = _points(scene, "backup", "demo")
    for point in points:
        ready = scene.states().count("ready")
        _kill_at(scene, point, "backup", "demo")
        start = time.monotonic()
        scene.server.query("INSERT INTO probe.t VALUES (1)")
        assert time.monotonic() - start < 2, f"writers stalled after a kill at {point}"
        _settle_helpers(scene)
        again = scene.run("backup", "demo")
        assert again.returncode == 0, f"{point}: {again.stderr}"
        assert scene.states().count("ready") >= ready + 1
        _check_clean(scene)
        subprocess.run(["rm", "-r", scene.state], check=True)
        for name in scene.stored():
            path = Path(scene.file_system.point, ".snapmgr", name)
            subprocess.run(["btrfs", "-q", "subvolume", "delete", path], check=True)
            path.with_name(f"{name}.json").unlink()
    record_property("points", len(points))


@pytest.mark.parametrize("command", ["backup", "verify", "mount", "umount", "prune"])
def test_each_command_on_a_directory(
    directory_scene: Scene, command: str, record_property: Callable[[str, object], None]
) -> None:
    scene = directory_scene
    arguments = {
        "backup": ("backup", "demo"),
        "verify": ("verify", "latest"),
        "mount": ("mount", "latest"),
        "umount": ("umount", "--all"),
        "prune": ("prune", "demo"),
    }[command]

    def prepare() -> None:
        for _ in range(2 if command == "prune" else 1):
            assert scene.run("backup", "demo").returncode == 0
        if command == "umount":
            assert scene.run("mount", "latest").returncode == 0

    prepare()
    points = _points(scene, *arguments)
    for point in points:
        prepare()
        newest = _ready(scene)[-1]
        _kill_at(scene, point, *arguments)
        _settle_helpers(scene)
        assert newest in _ready(scene), f"{point}: the newest READY snapshot was lost"
        assert newest in scene.stored()
        for step in (("umount", "--all"), ("backup", "demo"), ("prune", "demo")):
            done = scene.run(*step)
            assert done.returncode == 0, f"{point} {step}: {done.stderr}"
        _check_clean(scene)
        # The newest, and the newest VERIFIED one.
        assert scene.states().count("ready") <= 2
    record_property("points", len(points))
