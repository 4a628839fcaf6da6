"""Snapshots without a lock: refused while the structure of the database may change, exact otherwise."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import TYPE_CHECKING

import pymysql
import pytest

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.abilities import probe_abilities
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.lock.levels import LockNeeds, choose
from snapmgr.mysql.lock.lockless import lockless
from snapmgr.mysql.lock.quiesce import LockBounds
from support.kinds import KINDS, kinds
from support.scene import btrfs_scene
from support.server import private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.mysql.lock.lockless import NoLock
    from support.server import PrivateServer

pytestmark = pytest.mark.needs("mariadbd")
BOUNDS = LockBounds(max_stall_s=1, lock_attempts=1, lock_hold_s=3)
DURABLE = {"sync_binlog": "1", "innodb_flush_log_at_trx_commit": "1"}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.needs(name)) for name in KINDS])
def server(request: pytest.FixtureRequest) -> Iterator[PrivateServer]:
    with work_folder() as folder, private_server(folder / "data", kind=request.param) as server:
        server.query("CREATE DATABASE d")
        server.query("CREATE TABLE d.t (id INT PRIMARY KEY, v INT) ENGINE=InnoDB")
        server.query("INSERT INTO d.t VALUES (1, 0)")
        server.query("CREATE PROCEDURE d.ddl() ALTER TABLE d.t ADD COLUMN p INT")
        yield server


@contextmanager
def watched(server: PrivateServer, user: str = "root", password: str = "") -> Iterator[NoLock]:
    with ExitStack() as stack:
        credentials = Credentials(socket=str(server.socket), user=user)
        if password:
            folder = stack.enter_context(work_folder())
            file = folder / "client.cnf"
            file.write_text(f"[client]\nuser={user}\npassword={password}\nsocket={server.socket}\n")
            file.chmod(0o600)
            credentials = Credentials(defaults_file=str(file))
        connection = stack.enter_context(connect(credentials))
        abilities = probe_abilities(connection, identify(connection))
        choice = choose("crash-consistent", abilities, LockNeeds(engines={"InnoDB": 1}, settings=DURABLE))
        yield stack.enter_context(
            lockless(credentials, abilities, choice, BOUNDS, check=lambda _: None, sync=lambda: None)
        )


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 1",
        "INSERT INTO d.t (id) VALUES (9)",
        "DELETE FROM d.t WHERE id = 9",
        "FLUSH BINARY LOGS",
        "ANALYZE TABLE d.t",
    ],
)
def test_what_a_crash_leaves_whole_does_not_matter(server: PrivateServer, statement: str) -> None:
    with watched(server) as free:
        server.query(statement)
        free.prove()
    assert free.record().level == "crash-consistent"


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE d.t ADD COLUMN a INT",
        "CREATE TABLE d.other (a INT)",
        "TRUNCATE d.other",
        "RENAME TABLE d.other TO d.another",
        "DROP TABLE d.another",
        "CALL d.ddl()",
        "CREATE USER u@localhost",
        "GRANT SELECT ON d.* TO u@localhost",
        "DROP USER u@localhost",
        "OPTIMIZE TABLE d.t",
    ],
)
def test_ddl_and_account_changes_meanwhile_are_seen(server: PrivateServer, statement: str) -> None:
    with watched(server) as free:
        server.query(statement)
        with pytest.raises(NotQuiescedError, match="DDL or an account change"):
            free.prove()


def test_a_prepared_statement_counts_when_it_is_executed(server: PrivateServer) -> None:
    with server.connect() as connection, connection.cursor() as cursor, watched(server) as free:
        cursor.execute("PREPARE s FROM 'ALTER TABLE d.t ADD COLUMN b INT'")
        free.prove()
        cursor.execute("EXECUTE s")
        with pytest.raises(NotQuiescedError):
            free.prove()


def test_ddl_that_waits_since_before_is_seen(server: PrivateServer) -> None:
    def alter() -> None:
        with waiting, waiting.cursor() as cursor:
            cursor.execute("/* by a tool */ ALTER TABLE d.t ADD COLUMN c INT")

    waiting = server.connect()
    with server.connect(autocommit=False) as holder, holder.cursor() as cursor:
        cursor.execute("UPDATE d.t SET v = v + 1")
        thread = Thread(target=alter)
        thread.start()
        try:
            while not server.query(
                "SELECT 1 FROM information_schema.PROCESSLIST WHERE STATE = 'Waiting for table metadata lock'"
            ):
                time.sleep(0.01)
            with pytest.raises(NotQuiescedError, match="DDL"), watched(server):
                pytest.fail("it went on")
        finally:
            holder.rollback()
            thread.join()


def test_an_account_that_cannot_see_it_is_refused(server: PrivateServer) -> None:
    server.query("CREATE USER blind@localhost IDENTIFIED BY 'secret'")
    try:
        with pytest.raises(NotQuiescedError, match="cannot make sure"), watched(server, "blind", "secret"):
            pytest.fail("it went on")
    finally:
        server.query("DROP USER blind@localhost")


def test_a_server_that_went_away_proves_nothing(server: PrivateServer) -> None:
    with watched(server) as free:
        number = free._connection.connection_id
        try:
            server.query(f"KILL {number}")
        except pymysql.err.OperationalError:
            pytest.fail("there was no such connection")
        with pytest.raises(NotQuiescedError, match="did not answer"):
            free.prove()


@pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")
@kinds("mysql-9")
def test_what_mysql_executed_elsewhere_belongs_to_the_position(kind: str) -> None:
    """After a restore, a server's GTIDs begin with some that none of its binary logs names."""
    elsewhere = "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-23"
    with btrfs_scene(kind=kind) as scene:
        scene.server.query(f"SET GLOBAL gtid_purged = '{elsewhere}'")
        scene.server.query("CREATE DATABASE d")
        scene.server.query("CREATE TABLE d.t (id INT PRIMARY KEY) ENGINE=InnoDB")
        scene.configure('quiesce = "crash-consistent"')
        done = scene.run("backup", "demo", "--verify")
        assert done.returncode == 0, done.stderr
        position = scene.entries()[0].manifest.position
        assert position is not None
        ((executed,),) = scene.server.query("SELECT @@GLOBAL.gtid_executed")
        assert position.gtid == "".join(executed.split())
        assert elsewhere in position.gtid
