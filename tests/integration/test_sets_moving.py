"""Tables that are made or dropped elsewhere while a set is being taken: never is one missing in what is READY."""

from __future__ import annotations

import os
import shutil
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.backup.run import backup
from snapmgr.contract.errors import NotQuiescedError
from snapmgr.source.server import LiveServer
from snapmgr.verify.run import verify
from support.scene import Scene
from support.server import private_server, server_user
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "xfs", "mariadbd")


@pytest.fixture(scope="module")
def shared() -> Iterator[Scene]:
    """A server whose job freezes it; beside its datadir there are the folders "known" and "new"."""
    with (
        loop_filesystem("xfs", 1 << 30) as xfs,
        work_folder() as folder,
        private_server(Path(xfs.point) / "data") as server,
    ):
        scene = Scene(xfs, folder, server)
        for name in ("known", "new"):
            (xfs.point / name).mkdir()
            os.chown(xfs.point / name, server_user().pw_uid, server_user().pw_gid)
        yield scene


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    """The shared scene with the table d.t in the folder "known", and no snapshots."""
    shared.state = shared.folder / f"state-{time.monotonic_ns()}"
    shared.configure('quiesce = "freeze-process"')
    shared.server.query("CREATE DATABASE d")
    shared.server.query(f"CREATE TABLE d.t (a INT) DATA DIRECTORY='{shared.file_system.point}/known'")
    yield shared
    shared.server.query("DROP DATABASE d")
    shutil.rmtree(shared.file_system.point / ".snapmgr-reflink", ignore_errors=True)


@pytest.mark.parametrize(("before", "looks"), [(True, 1), (False, 1), (False, 2)])
@pytest.mark.parametrize("where", ["known", "new"])
def test_a_table_made_elsewhere_at_the_last_moment(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, where: str, before: bool, looks: int
) -> None:
    """Before or after our first look, or after the second one: then MariaDB's BACKUP STAGE START lets DDL pass."""
    ctx = scene.context()
    check, calls = LiveServer.check, count(1)

    def last_moment(live: LiveServer, connection: object) -> None:
        last = next(calls) == looks
        if not before or not last:
            check(live, connection)  # type: ignore[arg-type]
        if last:
            scene.server.query(f"CREATE TABLE d.late (a INT) DATA DIRECTORY='{scene.file_system.point}/{where}'")
            scene.server.query("INSERT INTO d.late VALUES (1)")
        if before and last:
            check(live, connection)  # type: ignore[arg-type]

    monkeypatch.setattr(LiveServer, "check", last_moment)
    if where == "new":
        with pytest.raises(NotQuiescedError, match=f"began to write elsewhere .*{scene.file_system.point}/new/d"):
            backup(ctx, ctx.config.job("demo"))
        assert "ready" not in scene.states()
        monkeypatch.undo()
    manifest = backup(ctx, ctx.config.job("demo"))
    scene.configure(
        'quiesce = "freeze-process"\nverify.check = "extended"\nverify.assertions = ["SELECT COUNT(*) = 1 FROM d.late"]'
    )
    ctx = scene.context()
    assert verify(ctx, ctx.catalog.load(manifest.id), ctx.config.job("demo").verify).result == "passed"


def test_tables_that_come_and_go_elsewhere_keep_no_backup_from_being_taken(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = scene.context()
    check, calls = LiveServer.check, count(1)

    def rotate(live: LiveServer, connection: object) -> None:
        if next(calls) == 1:
            scene.server.query("DROP TABLE d.t")
            scene.server.query(f"CREATE TABLE d.t2 (a INT) DATA DIRECTORY='{scene.file_system.point}/known'")
        check(live, connection)  # type: ignore[arg-type]

    monkeypatch.setattr(LiveServer, "check", rotate)
    manifest = backup(ctx, ctx.config.job("demo"))
    assert verify(ctx, ctx.catalog.load(manifest.id)).result == "passed"
