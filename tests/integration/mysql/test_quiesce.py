"""Locks on a real server: bounded, proven, and released in every case."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

import pymysql
import pytest

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.abilities import probe_abilities
from snapmgr.mysql.connect.client import Connection, Credentials, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.lock import quiesce
from snapmgr.mysql.lock.heldlock import LockLostError
from snapmgr.mysql.lock.levels import LockNeeds, choose
from snapmgr.mysql.lock.quiesce import LockBounds, locked
from snapmgr.mysql.lock.stopped import server_process, stopped
from support.load import write_load
from support.server import private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.lock.heldlock import HeldLock
    from support.server import PrivateServer

pytestmark = pytest.mark.needs("mariadbd")
BOUNDS = LockBounds(max_stall_s=1, lock_attempts=2, lock_hold_s=3)
LEVELS = pytest.mark.parametrize("level", ["backup-lock", "global-read-lock"])


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateServer]:
    with work_folder() as folder, private_server(folder / "data", ("--log-bin=binlog", "--general-log")) as server:
        server.query("CREATE DATABASE d")
        server.query("CREATE TABLE d.t (id INT PRIMARY KEY, v INT) ENGINE=InnoDB")
        server.query("INSERT INTO d.t VALUES (1, 0), (2, 0)")
        yield server


@contextmanager
def take(server: PrivateServer, level: str, bounds: LockBounds = BOUNDS) -> Iterator[HeldLock]:
    credentials = Credentials(socket=str(server.socket), user="root")
    abilities = abilities_of(server)
    choice = choose(level, abilities, LockNeeds())
    with locked(credentials, abilities, choice, bounds, check=lambda _: None, sync=lambda: None) as lock:
        yield lock


def abilities_of(server: PrivateServer) -> Abilities:
    with connect(Credentials(socket=str(server.socket), user="root")) as connection:
        return probe_abilities(connection, identify(connection))


def commit_waits(server: PrivateServer) -> bool:
    """Whether a commit does not get through: tried with a short bound of its own."""
    with server.connect(autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION lock_wait_timeout = 1, SESSION max_statement_time = 1")
        try:
            cursor.execute("UPDATE d.t SET v = v + 1 WHERE id = 1")
        except pymysql.err.MySQLError:
            return True
    return False


@LEVELS
def test_commits_wait_while_it_is_held_and_go_on_afterwards(server: PrivateServer, level: str) -> None:
    with take(server, level) as lock:
        assert lock.position is not None
        assert commit_waits(server)
        lock.prove()
        lock.release()
        assert not commit_waits(server)
    record = lock.record()
    assert record.level == level
    assert record.attempts == 1
    assert 0 < record.held_s < BOUNDS.lock_hold_s


@LEVELS
def test_the_position_is_the_servers_own(server: PrivateServer, level: str) -> None:
    with take(server, level) as lock:
        file, offset = server.query("SHOW MASTER STATUS")[0][:2]
        ((gtid,),) = server.query("SELECT @@gtid_binlog_pos")
        assert lock.position is not None
        assert (lock.position.file, lock.position.offset, lock.position.gtid) == (file, offset, gtid)


@LEVELS
def test_leaving_by_an_error_frees_it_at_once(server: PrivateServer, level: str) -> None:
    with pytest.raises(ZeroDivisionError), take(server, level):
        raise ZeroDivisionError
    assert not commit_waits(server)


@LEVELS
def test_a_killed_connection_is_noticed(server: PrivateServer, level: str) -> None:
    with take(server, level) as lock:
        server.query(f"KILL CONNECTION {lock._connection.connection_id}")
        server.query("UPDATE d.t SET v = v + 1 WHERE id = 1")
        with pytest.raises(LockLostError, match="lost"):
            lock.prove()


@LEVELS
def test_an_idle_lock_ends_by_itself_a_little_after_its_bound(server: PrivateServer, level: str) -> None:
    """As when all our processes are stopped: nothing of ours acts any more, the server does."""
    start = time.monotonic()
    with take(server, level, LockBounds(max_stall_s=1, lock_attempts=1, lock_hold_s=1)) as lock:
        while commit_waits(server):
            assert time.monotonic() - start < 10
        with pytest.raises(LockLostError):
            lock.prove()


@LEVELS
def test_a_lock_whose_time_is_over_proves_nothing(server: PrivateServer, level: str) -> None:
    with take(server, level, LockBounds(max_stall_s=1, lock_attempts=1, lock_hold_s=0.2)) as lock:
        time.sleep(0.3)
        with pytest.raises(LockLostError, match="time was over"):
            lock.prove()


@contextmanager
def long_update(server: PrivateServer) -> Iterator[None]:
    """A statement that holds both locks off: an update that does not end."""
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("LOCK TABLES d.t WRITE")
        cursor.execute("UPDATE d.t SET v = v + 1 WHERE id = 2")
        yield
        cursor.execute("UNLOCK TABLES")


@contextmanager
def other_backup(server: PrivateServer) -> Iterator[None]:
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("BACKUP STAGE START")
        yield
        cursor.execute("BACKUP STAGE END")


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds the lock off comes right after it was looked for."""
    monkeypatch.setattr(quiesce, "wait_for_blockers", lambda *_, **__: ())


@pytest.mark.usefixtures("unseen")
def test_a_lock_that_cannot_be_had_is_given_up_within_its_bound(server: PrivateServer) -> None:
    for level, blocker in (("backup-lock", other_backup), ("global-read-lock", long_update)):
        with blocker(server):
            start = time.monotonic()
            with pytest.raises(NotQuiescedError, match="not granted in 2 tries") as failure, take(server, level):
                pass
            assert failure.value.exit_code == 4
            assert time.monotonic() - start < 2 * (BOUNDS.max_stall_s + 1) + 10
        assert not commit_waits(server)


@pytest.mark.usefixtures("unseen")
def test_writers_never_wait_longer_than_one_try(server: PrivateServer) -> None:
    with write_load(str(server.socket), writers=2) as load, other_backup(server):
        load.warm_up()
        since = time.monotonic_ns()
        with suppress(NotQuiescedError), take(server, "backup-lock"):
            pytest.fail("the lock was granted")
        assert load.statistics(since_ns=since).worst_s < 2 * BOUNDS.max_stall_s


@contextmanager
def in_background(server: PrivateServer, *statements: str) -> Iterator[None]:
    """Run statements on a connection of its own while the context lasts, and wait for their end."""

    def run() -> None:
        with server.connect() as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    thread = Thread(target=run)
    thread.start()
    try:
        time.sleep(0.2)
        yield
    finally:
        thread.join()


def test_the_stages_share_one_bound(server: PrivateServer) -> None:
    """A writer that the first stage stopped waits for all of them: here for a MyISAM writer, then for a commit."""
    for name in ("slow", "stopped"):
        server.query(f"CREATE OR REPLACE TABLE d.{name} (id INT) ENGINE=MyISAM SELECT seq AS id FROM d.seq_1_to_100")
    server.query("SET GLOBAL binlog_commit_wait_count = 100, GLOBAL binlog_commit_wait_usec = 5000000")
    worst = 0.0
    ended = Event()

    def write() -> None:
        nonlocal worst
        with server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SET SESSION sql_log_bin = 0")
            while not ended.is_set():
                start = time.monotonic()
                cursor.execute("UPDATE d.stopped SET id = id + 1 LIMIT 1")
                worst = max(worst, time.monotonic() - start)

    writer = Thread(target=write)
    bounds = LockBounds(max_stall_s=2, lock_attempts=1, lock_hold_s=3)
    slow = "UPDATE d.slow SET id = id + SLEEP(0.017)"
    try:
        with (
            in_background(server, "INSERT INTO d.t VALUES (3, 0)", "DELETE FROM d.t WHERE id = 3"),
            in_background(server, "SET SESSION sql_log_bin = 0", slow),
        ):
            writer.start()
            with (
                pytest.raises(NotQuiescedError, match="not granted.*BLOCK_COMMIT"),
                take(server, "backup-lock", bounds),
            ):
                pass
            ended.set()
            writer.join()
    finally:
        ended.set()
        server.query("SET GLOBAL binlog_commit_wait_count = 0, GLOBAL binlog_commit_wait_usec = 100000")
    assert 1 < worst < bounds.max_stall_s + 0.5


@LEVELS
def test_short_timeouts_of_the_server_do_not_end_a_long_flush(server: PrivateServer, level: str) -> None:
    server.query("SET GLOBAL wait_timeout = 1")
    credentials = Credentials(socket=str(server.socket), user="root")
    abilities = abilities_of(server)
    choice = choose(level, abilities, LockNeeds())
    try:
        with locked(credentials, abilities, choice, BOUNDS, check=lambda _: None, sync=lambda: time.sleep(1.5)) as lock:
            lock.prove()
            lock.release()
    finally:
        server.query("SET GLOBAL wait_timeout = 28800")


def test_a_refused_server_never_sees_a_lock(server: PrivateServer) -> None:
    def refuse(_: Connection) -> None:
        raise NotQuiescedError("wrong server")

    log = server.datadir / f"{server.query('SELECT @@general_log_file')[0][0]}"
    before = len(log.read_text(errors="replace"))
    credentials = Credentials(socket=str(server.socket), user="root")
    abilities = abilities_of(server)
    with (
        pytest.raises(NotQuiescedError, match="wrong server"),
        locked(credentials, abilities, choose("auto", abilities, LockNeeds()), BOUNDS, check=refuse, sync=lambda: None),
    ):
        pass
    said = log.read_text(errors="replace")[before:]
    assert "BACKUP STAGE" not in said
    assert "READ LOCK" not in said


def test_stopped_means_stopped_and_stays_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    with work_folder() as folder, private_server(folder / "data") as server:
        datadir = str(server.datadir)
        assert server_process(datadir) == server.pid
        with pytest.raises(NotQuiescedError, match="runs on"), stopped(datadir):
            pass
        server.stop()
        with stopped(datadir) as still:
            # MariaDB tries to get the file lock for many seconds before it gives up.
            with pytest.raises(RuntimeError, match="did not answer|ended with"):
                server.start(timeout_s=3)
            server.kill()
            record = still.record()
        assert "ibdata1" in record.proof
        server.start()
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(NotQuiescedError, match="does not look like a datadir"), stopped(str(empty)):
        pass


def test_being_stopped_while_it_is_granted_gives_no_fresh_bound(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server frees it soon after its bound: a lock whose beginning we slept through is not to be used."""
    execute = Connection.execute

    def stopped_at_the_end(self: Connection, sql: str, args: tuple[object, ...] = ()) -> None:
        execute(self, sql, args)
        if sql.endswith("BLOCK_COMMIT"):
            time.sleep(2.2)

    monkeypatch.setattr(Connection, "execute", stopped_at_the_end)
    with pytest.raises(LockLostError, match="itself was stopped"), take(server, "backup-lock"):
        pytest.fail("the lock was used")
    monkeypatch.undo()
    assert not commit_waits(server)
