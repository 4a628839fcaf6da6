"""Global settings that administrators make, and that must change neither what snapmgr sees nor what it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.abilities import probe_abilities
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.lock.levels import LockNeeds, choose
from snapmgr.mysql.lock.lockless import lockless
from snapmgr.mysql.lock.quiesce import LockBounds
from support.exactness import take_and_check
from support.kinds import KINDS, each_kind
from support.scene import btrfs_scene
from support.server import private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.server import PrivateServer

pytestmark = pytest.mark.needs("mariadbd")
_DURABLE = {"sync_binlog": "1", "innodb_flush_log_at_trx_commit": "1"}
# Each would cut an answer to one row, refuse or end a query, end a session, or read a backslash in another way.
_DEFAULTS = {
    "sql_select_limit": "1",
    "max_join_size": "1",
    "completion_type": "2",
    "autocommit": "0",
    "sql_mode": "'NO_BACKSLASH_ESCAPES,ANSI'",
}
_TIME_LIMIT = {"mariadb": ("max_statement_time", "0.0001"), "mysql": ("max_execution_time", "1")}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.needs(name)) for name in KINDS])
def server(request: pytest.FixtureRequest) -> Iterator[PrivateServer]:
    with work_folder() as folder, private_server(folder / "data", kind=request.param) as server:
        server.query("CREATE DATABASE d")
        settings = {**_DEFAULTS, **dict([_TIME_LIMIT[server.kind.flavor]])}
        # On one connection: a later one would be bound by the first of them.
        with server.connect() as connection, connection.cursor() as cursor:
            for name, value in settings.items():
                cursor.execute(f"SET GLOBAL {name} = {value}")
        yield server


def test_answers_are_whole(server: PrivateServer) -> None:
    with connect(Credentials(socket=server.socket, user="root")) as connection:
        assert len(connection.rows("SELECT 1 AS n UNION SELECT 2 UNION SELECT 3")) == 3
        assert connection.value("SELECT COUNT(*) FROM information_schema.COLUMNS AS a, information_schema.ENGINES") != 0
        assert connection.rows("SELECT SLEEP(0.05) AS a")[0]["a"] == 0
        assert connection.value("SELECT @@SESSION.sql_mode") == ""
        assert set(connection.variables("datadir", "socket", "version")) == {"datadir", "socket", "version"}


def test_ddl_without_a_lock_is_seen(server: PrivateServer) -> None:
    credentials = Credentials(socket=server.socket, user="root")
    with connect(credentials) as connection:
        abilities = probe_abilities(connection, identify(connection))
    choice = choose("crash-consistent", abilities, LockNeeds(engines={"InnoDB": 1}, settings=_DURABLE))
    bounds = LockBounds(max_stall_s=1, lock_attempts=1, lock_hold_s=3)
    with lockless(credentials, abilities, choice, bounds, check=lambda _: None, sync=lambda: None) as free:
        name, _ = _TIME_LIMIT[server.kind.flavor]
        with server.connect(init_command=f"SET SESSION {name} = 0") as other, other.cursor() as cursor:
            cursor.execute("CREATE TABLE d.made (a INT)")
        with pytest.raises(NotQuiescedError, match="create_table"):
            free.prove()


@each_kind
def test_what_is_committed_in_memory_only_is_in_the_snapshot(kind: str) -> None:
    with btrfs_scene("--innodb-flush-log-at-trx-commit=0", kind=kind) as scene:
        ctx = scene.context()
        (manifest,) = take_and_check(ctx, scene.server, 1, writers=2)
        assert manifest.quiesce is not None
        assert "innodb_flush_log_at_trx_commit is 0" in manifest.quiesce.why
