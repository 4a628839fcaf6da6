"""Tables that are made or dropped elsewhere while a set is being taken: never is one missing in what is READY."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.errors import NotQuiescedError
from snapmgr.jobs.backup import backup
from snapmgr.jobs.source import LiveServer
from snapmgr.jobs.verify import verify
from support.scene import SERVER_OPTIONS, Scene
from support.server import private_server, server_user
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "xfs", "mariadbd")


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A server with the table d.t in the folder "known", beside the datadir; there is "new", too."""
    with (
        loop_filesystem("xfs", 1 << 30) as xfs,
        work_folder() as folder,
        private_server(Path(xfs.point) / "data", SERVER_OPTIONS) as server,
    ):
        scene = Scene(xfs, folder, server)
        scene.configure('quiesce = "freeze-process"')
        for name in ("known", "new"):
            (xfs.point / name).mkdir()
            os.chown(xfs.point / name, server_user().pw_uid, server_user().pw_gid)
        server.query("CREATE DATABASE d")
        server.query(f"CREATE TABLE d.t (a INT) DATA DIRECTORY='{xfs.point}/known'")
        yield scene


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("where", ["known", "new"])
def test_a_table_made_elsewhere_at_the_last_moment(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, where: str, before: bool
) -> None:
    ctx = scene.context()
    check = LiveServer.check

    def last_moment(live: LiveServer, connection: object) -> None:
        if not before:
            check(live, connection)  # type: ignore[arg-type]
        scene.server.query(f"CREATE TABLE d.late (a INT) DATA DIRECTORY='{scene.file_system.point}/{where}'")
        scene.server.query("INSERT INTO d.late VALUES (1)")
        if before:
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
    check = LiveServer.check

    def rotate(live: LiveServer, connection: object) -> None:
        scene.server.query("DROP TABLE d.t")
        scene.server.query(f"CREATE TABLE d.t2 (a INT) DATA DIRECTORY='{scene.file_system.point}/known'")
        check(live, connection)  # type: ignore[arg-type]

    monkeypatch.setattr(LiveServer, "check", rotate)
    manifest = backup(ctx, ctx.config.job("demo"))
    assert verify(ctx, ctx.catalog.load(manifest.id)).result == "passed"
