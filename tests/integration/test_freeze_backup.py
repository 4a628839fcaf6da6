"""Backups of a running server by copies made file by file: consistent because the process stands still meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.errors import NotQuiescedError, StorageError
from snapmgr.jobs.backup import backup
from snapmgr.jobs.verify import verify
from support.exactness import take_and_check
from support.faults import Faults
from support.scene import SERVER_OPTIONS, Scene
from support.server import private_server
from support.storage import loop_filesystem, processes_of, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "xfs", "mariadbd")
# 20 were shown once; CI repeats a few.
SNAPSHOTS = int(os.environ.get("SNAPMGR_FREEZE_SNAPSHOTS", "4"))


_earlier: list[str] = []
"""Copies of earlier tests, in the same store."""


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with (
        loop_filesystem("xfs", 2 << 30) as xfs,
        work_folder() as folder,
        private_server(Path(xfs.point) / "data", SERVER_OPTIONS) as server,
    ):
        yield Scene(xfs, folder, server)


@pytest.fixture(autouse=True)
def _clean(scene: Scene) -> Iterator[None]:
    scene.state = scene.folder / f"state-{time.monotonic_ns()}"
    _earlier[:] = stored(scene)
    scene.configure('quiesce = "freeze-process"')
    yield
    scene.server.query("DROP DATABASE IF EXISTS load_test")


def stored(scene: Scene) -> list[str]:
    """Return the names in the store of copies."""
    store = Path(scene.file_system.point) / ".snapmgr-reflink"
    return sorted(path.name for path in store.iterdir()) if store.exists() else []


def server_state(scene: Scene) -> str:
    """Return the state letter of the server process."""
    return Path(f"/proc/{scene.server.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_copies_under_load_restore_exactly(scene: Scene) -> None:
    ctx = scene.context()
    taken = take_and_check(ctx, ctx.config.job("demo"), scene.server, SNAPSHOTS)
    for manifest in taken:
        assert manifest.quiesce is not None
        assert manifest.quiesce.level == "freeze-process"
        assert 0 < manifest.quiesce.frozen_s <= manifest.quiesce.held_s
    assert verify(ctx, ctx.catalog.load(taken[-1].id)).result == "passed"


def test_without_freezing_a_file_by_file_copy_is_refused(scene: Scene) -> None:
    scene.configure()
    ctx = scene.context()
    with pytest.raises(StorageError, match="freeze-process"):
        backup(ctx, ctx.config.job("demo"))
    assert server_state(scene) != "T"


def test_a_forecast_beyond_the_bound_stops_nothing(scene: Scene) -> None:
    scene.configure('quiesce = "freeze-process"\nlock_hold = "100ms"')
    # 20,000 extents: some 14 µs each.
    pieces = scene.server.datadir / "pieces"
    with pieces.open("wb") as file:
        for number in range(20_000):
            file.seek(number << 16)
            file.write(b"x" * 4096)
    try:
        ctx = scene.context()
        with pytest.raises(NotQuiescedError, match="forecast"):
            backup(ctx, ctx.config.job("demo"))
    finally:
        pieces.unlink()
    assert not ctx.catalog.frozen.exists()


def test_at_the_bound_the_server_goes_on_and_nothing_is_ready(scene: Scene) -> None:
    """The copy is delayed in C: each file by a second."""
    scene.configure('quiesce = "freeze-process"\nlock_hold = "1s"')
    mark = scene.folder / "mark-bound"
    with scene.start("backup", "demo", faults_=Faults(delay_s=1.5, delay_mark=mark, delay_skip=1)) as process:
        _wait_for(mark)
        start = time.monotonic()
        scene.server.query("SELECT 1")
        assert time.monotonic() - start < 1.5
        _, err = process.communicate(timeout=60)
    assert process.returncode in (1, 4), err
    assert "ready" not in scene.states()
    assert server_state(scene) != "T"
    _converges(scene)


def test_sigkill_of_all_but_the_thawer(scene: Scene) -> None:
    mark = scene.folder / "mark-kill"
    with scene.start("backup", "demo", faults_=Faults(delay_s=2.0, delay_mark=mark, delay_skip=1)) as process:
        _wait_for(mark)
        assert server_state(scene) == "T"
        process.kill()
        start = time.monotonic()
        scene.server.query("SELECT 1")
        assert time.monotonic() - start < 1
    _end_helpers(scene)
    _converges(scene)


def test_sigkill_of_the_thawer_too(scene: Scene) -> None:
    mark = scene.folder / "mark-thawer"
    with scene.start("backup", "demo", faults_=Faults(delay_s=2.0, delay_mark=mark, delay_skip=1)) as process:
        _wait_for(mark)
        (record,) = (scene.state / "frozen").iterdir()
        os.kill(int(record.read_text().splitlines()[1].split()[0]), signal.SIGKILL)
        process.kill()
    assert server_state(scene) == "T"
    listed = scene.run("doctor")
    assert "frozen" in listed.stderr
    assert server_state(scene) != "T"
    _end_helpers(scene)
    _converges(scene)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _end_helpers(scene: Scene) -> None:
    """End the helper that still copies, slowed down file by file: it would take minutes."""
    for pid in processes_of(scene.config_file):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)


def _converges(scene: Scene) -> None:
    _end_helpers(scene)
    done = scene.run("backup", "demo")
    assert done.returncode == 0, done.stderr
    ready = [entry.manifest.id for entry in scene.entries() if entry.manifest.state == "ready"]
    assert [name for name in stored(scene) if name not in (*ready, *_earlier)] == []
    assert not any((scene.state / "frozen").glob("*"))
