"""Backups of a running server by copies made file by file: consistent because the process stands still meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.errors import NotQuiescedError, StorageError
from snapmgr.jobs.backup import backup
from snapmgr.jobs.verify import verify
from support.exactness import take_and_check
from support.scene import SERVER_OPTIONS, Scene
from support.server import private_server
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "xfs", "mariadbd")
# 20 were shown once; CI repeats a few.
SNAPSHOTS = int(os.environ.get("SNAPMGR_FREEZE_SNAPSHOTS", "4"))


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
    scene.configure('quiesce = "freeze-process"')
    yield
    scene.server.query("DROP DATABASE IF EXISTS load_test")


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
