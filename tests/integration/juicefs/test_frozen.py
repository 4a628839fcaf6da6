"""A live server on JuiceFS: its files are cloned one by one, so it stands still, and all it wrote is flushed first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.backup.run import backup
from snapmgr.contract.errors import NotQuiescedError
from support.exactness import take_and_check
from support.juicefs import juicefs_volume
from support.scene import Scene
from support.server import private_server
from support.storage import LoopFileSystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "juicefs", "redis", "mariadbd")


@pytest.fixture
def scene() -> Iterator[Scene]:
    with (
        juicefs_volume("redis", mount_options=("--writeback",), base=Path("/dev/shm")) as volume,
        work_folder() as folder,
        private_server(volume.point / "data") as server,
    ):
        yield Scene(LoopFileSystem(point=volume.point, device="", image=Path(), fs_type="fuse.juicefs"), folder, server)


def test_clones_of_a_frozen_server_restore_exactly(scene: Scene) -> None:
    scene.configure()
    ctx = scene.context()
    with pytest.raises(NotQuiescedError, match="file by file"):
        backup(ctx, ctx.config.job("demo"))
    scene.configure('quiesce = "freeze-process"\nlock_hold = "10s"')
    for manifest in take_and_check(scene.context(), scene.server, 2, writers=2):
        assert manifest.quiesce is not None
        assert manifest.quiesce.level == "freeze-process"
