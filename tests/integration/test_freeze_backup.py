"""Backups of a running server by copies made file by file: consistent because the process stands still meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.backup.run import backup
from snapmgr.contract.errors import NotQuiescedError
from snapmgr.verify.run import verify
from support.exactness import take_and_check
from support.faults import Faults
from support.freezing import traced
from support.scene import Scene
from support.server import private_server
from support.storage import loop_filesystem, work_folder
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "xfs", "mariadbd")
# 20 were shown once; CI repeats a few.
SNAPSHOTS = int(os.environ.get("SNAPMGR_FREEZE_SNAPSHOTS", "20" if CAMPAIGN else "3"))


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with (
        loop_filesystem("xfs", 2 << 30) as xfs,
        work_folder() as folder,
        private_server(Path(xfs.point) / "data") as server,
    ):
        yield Scene(xfs, folder, server)


@pytest.fixture(autouse=True)
def _clean(scene: Scene) -> Iterator[None]:
    scene.state = scene.folder / f"state-{time.monotonic_ns()}"
    scene.configure('quiesce = "freeze-process"')
    yield
    scene.server.query("DROP DATABASE IF EXISTS load_test")


def server_state(scene: Scene) -> str:
    """Return the state letter of the server process."""
    return Path(f"/proc/{scene.server.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_copies_under_load_restore_exactly(scene: Scene) -> None:
    ctx = scene.context()
    taken = take_and_check(ctx, scene.server, SNAPSHOTS)
    for manifest in taken:
        assert manifest.quiesce is not None
        assert manifest.quiesce.level == "freeze-process"
        assert 0 < manifest.quiesce.frozen_s <= manifest.quiesce.held_s
    assert verify(ctx, ctx.catalog.load(taken[-1].id)).result == "passed"
    quiesce = taken[-1].quiesce
    assert quiesce is not None
    assert scene.json("show", "latest")["snapshot"]["frozen_s"] == quiesce.frozen_s
    assert "frozen " in scene.run("show", "latest").stdout


def test_without_freezing_a_file_by_file_copy_is_refused(scene: Scene) -> None:
    scene.configure()
    ctx = scene.context()
    with pytest.raises(NotQuiescedError, match="file by file") as refused:
        backup(ctx, ctx.config.job("demo"))
    assert 'set quiesce = "freeze-process" in the job' in str(refused.value.hint)
    assert server_state(scene) != "T"


def test_doctor_names_the_level(scene: Scene) -> None:
    said = scene.run("doctor", "demo").stdout
    assert "level freeze-process: " in said


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


def test_a_traced_server_is_refused_before_anything_is_begun(scene: Scene) -> None:
    with traced(scene.server.pid) as tracer:
        for command, code in (("backup", 4), ("doctor", 1)):
            done = scene.run(command, "demo")
            assert done.returncode == code, done.stderr
            assert f"debugged by process {tracer}" in done.stdout + done.stderr
    assert scene.states() == []


def test_a_disk_that_fills_up_under_the_copy(scene: Scene) -> None:
    """The server goes on, nothing is kept, the reason has numbers; with room again the next one succeeds."""
    point = Path(scene.file_system.point)
    mark, filling = scene.folder / "mark-full", point / "filling"
    before = sorted(path.name for path in (point / ".snapmgr-reflink").iterdir())
    with scene.start("backup", "demo", faults_=Faults(delay_s=0.3, delay_mark=mark, delay_skip=1)) as process:
        while not mark.exists():
            assert process.poll() is None
            time.sleep(0.002)
        with filling.open("wb") as file:
            step = 64 << 20
            while step >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), step)
                except OSError:
                    step //= 2
        _, err = process.communicate(timeout=60)
    try:
        assert process.returncode == 1, err
        assert "No space left on device: " in err
        assert "inodes are free" in err
        assert scene.states() == ["broken"]
        assert sorted(path.name for path in (point / ".snapmgr-reflink").iterdir()) == before
        assert server_state(scene) != "T"
    finally:
        filling.unlink()
    assert scene.run("backup", "demo").returncode == 0
