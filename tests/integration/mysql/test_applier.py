"""Stopping a replica's appliers: they stop, and they run again whatever happens to us."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.abilities import probe_abilities
from snapmgr.mysql.connect.client import Credentials, MysqlError, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.lock import applier
from snapmgr.mysql.lock.applier import applier_stopped, restart_leftovers
from snapmgr.mysql.lock.replication import read_channels, read_sources
from support.processes import ended, wait_until
from support.replicas import Pair, applies, inserting, receives, replica_pair
from support.server import free_port
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection

pytestmark = [pytest.mark.needs("mariadbd"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module", params=["mariadb-10.11", pytest.param("mysql-9", marks=pytest.mark.needs("mysql-9"))])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair whose replica has two connections to the source, of which only the default one executes."""
    with work_folder() as folder, replica_pair(folder / "replica", request.param) as pair:
        pair.replicate(pair.replica, "gtid", channel="idle", port=free_port())
        yield pair


@pytest.fixture(autouse=True)
def _running(pair: Pair) -> Iterator[None]:
    """Each test begins and ends with a default channel that executes, and another one that does not."""
    assert states(pair) == {"": True, "idle": False}
    yield
    wait_until(lambda: states(pair) == {"": True, "idle": False})


def states(pair: Pair) -> dict[str, bool]:
    """Return, by channel, whether it executes."""
    return {str(row.get("Connection_name", row.get("Channel_Name"))): applies(row) for row in pair.status()}


def credentials(pair: Pair) -> Credentials:
    return Credentials(socket=pair.replica.socket, user="root")


def abilities(pair: Pair) -> Abilities:
    with connect(credentials(pair)) as connection:
        return probe_abilities(connection, identify(connection))


@contextmanager
def stopped(
    pair: Pair, folder: Path, *, time_limit_s: float = 30.0, check: Callable[[Connection], None] = lambda _: None
) -> Iterator[None]:
    record = folder / "appliers" / "1"
    with applier_stopped(credentials(pair), abilities(pair), time_limit_s=time_limit_s, record=record, check=check):
        yield
    assert not record.exists()


def rows(pair: Pair) -> object:
    return pair.replica.query("SELECT COUNT(*) FROM load_test.t0")


def guard_of(folder: Path) -> int:
    return int(msgspec.json.decode((folder / "appliers" / "1").read_bytes())["guard"]["pid"])


def test_it_stands_still_and_only_what_ran_goes_on(pair: Pair, tmp_path: Path) -> None:
    with inserting(pair.source, writers=2):
        with stopped(pair, tmp_path):
            assert states(pair) == {"": False, "idle": False}
            assert receives(pair.status()[0])
            before = rows(pair)
            with connect(credentials(pair)) as connection:
                at = read_sources(connection, abilities(pair))
            time.sleep(0.3)
            assert rows(pair) == before
            assert {one.channel: bool(one.gtid) for one in at} == {"": True, "idle": True}
            assert b"replicate" not in (tmp_path / "appliers" / "1").read_bytes()
        assert states(pair)[""]
    pair.wait_equal()
    # A second time nothing runs that could be stopped.
    pair.stop()
    try:
        with stopped(pair, tmp_path):
            assert not (tmp_path / "appliers" / "1").exists()
        assert states(pair) == {"": False, "idle": False}
    finally:
        start_default(pair)


def start_default(pair: Pair) -> None:
    pair.replica.query("START SLAVE ''" if pair.mariadb else "START REPLICA FOR CHANNEL ''")


def test_after_an_exception_and_with_the_wrong_server(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ours"), stopped(pair, tmp_path):
        raise RuntimeError("ours")
    assert states(pair)[""]

    def refuse(_: Connection) -> None:
        raise NotQuiescedError("another one")

    with pytest.raises(NotQuiescedError, match="another one"), stopped(pair, tmp_path, check=refuse):
        pass
    assert list(tmp_path.rglob("1")) == []


def stop_elsewhere(pair: Pair, folder: Path, *, time_limit_s: float) -> int:
    """Stop the applier in another process that never ends by itself; return its pid."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException), stopped(pair, folder, time_limit_s=time_limit_s):
            (folder / "ready").touch()
            time.sleep(300)
        os._exit(0)
    wait_until(lambda: (folder / "ready").exists())
    assert not states(pair)[""]
    return child


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_killed(pair: Pair, tmp_path: Path) -> None:
    child = stop_elsewhere(pair, tmp_path, time_limit_s=60)
    kill(child)
    wait_until(lambda: states(pair)[""], 40)
    wait_until(lambda: not (tmp_path / "appliers" / "1").exists())
    assert not states(pair)["idle"]


def test_stopped_ourselves_it_goes_on_at_the_bound(pair: Pair, tmp_path: Path) -> None:
    child = stop_elsewhere(pair, tmp_path, time_limit_s=5)
    try:
        os.kill(child, signal.SIGSTOP)
        wait_until(lambda: states(pair)[""])
    finally:
        kill(child)


def test_killed_with_the_guard(pair: Pair, tmp_path: Path) -> None:
    child, folder = stop_elsewhere(pair, tmp_path, time_limit_s=60), tmp_path / "appliers"
    try:
        assert restart_leftovers(folder) == []
        assert not states(pair)[""]
        guard = guard_of(tmp_path)
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: ended(guard))
    finally:
        kill(child)
    time.sleep(0.3)
    assert not states(pair)[""]
    (line,) = restart_leftovers(folder)
    assert pair.replica.socket in line
    assert states(pair)[""]
    assert restart_leftovers(folder) == []
    # What is no record, and what is of a server that was restarted since.
    (folder / "1").write_bytes(b'{"server":')
    assert restart_leftovers(folder) == []
    assert list(folder.iterdir()) == []


def test_a_long_transaction_holds_the_stop_off(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 4 at the bound; the STOP goes on in the server, and so does the applier after it, by the guard."""
    monkeypatch.setattr(applier, "_START_S", 1.0)
    with pair.replica.connect() as connection, connection.cursor() as cursor:
        cursor.execute("LOCK TABLES load_test.t3 WRITE")
        pair.source.query("INSERT INTO load_test.t3 VALUES (99, 1, '')")
        time.sleep(0.5)
        began = time.monotonic()
        with pytest.raises(NotQuiescedError, match="did not stop in time") as caught:
            with_applier_stopped(pair, tmp_path, time_limit_s=1)
        assert time.monotonic() - began < 30
        assert "keeps trying" in str(caught.value.hint)
        assert (tmp_path / "appliers" / "1").exists()
        cursor.execute("UNLOCK TABLES")
    wait_until(lambda: states(pair)[""])
    wait_until(lambda: not (tmp_path / "appliers" / "1").exists())
    pair.wait_equal()
    pair.source.query("DELETE FROM load_test.t3 WHERE w = 99")


def with_applier_stopped(pair: Pair, folder: Path, *, time_limit_s: float) -> None:
    with stopped(pair, folder, time_limit_s=time_limit_s):
        raise AssertionError("it stopped")


def test_a_server_that_is_restarted_meanwhile_decides_itself(pair: Pair, tmp_path: Path) -> None:
    word = "slave" if pair.mariadb else "replica"
    with stopped(pair, tmp_path):
        pair.replica.kill()
        pair.replica.start([f"--skip-{word}-start"])
    assert states(pair) == {"": False, "idle": False}
    start_default(pair)


def test_an_applier_that_would_not_go_on_as_it_was_is_refused(pair: Pair, tmp_path: Path) -> None:
    file, offset = pair.end()
    if pair.mariadb:
        pair.replica.query("STOP SLAVE '' SQL_THREAD")
        pair.replica.query(f"START SLAVE '' SQL_THREAD UNTIL MASTER_LOG_FILE='{file}', MASTER_LOG_POS={offset + 10**6}")
    else:
        pair.replica.query("STOP REPLICA SQL_THREAD FOR CHANNEL ''")
        until = f"UNTIL SOURCE_LOG_FILE='{file}', SOURCE_LOG_POS={offset + 10**6}"
        pair.replica.query(f"START REPLICA SQL_THREAD {until} FOR CHANNEL ''")
    try:
        with pytest.raises(NotQuiescedError, match="UNTIL"), stopped(pair, tmp_path):
            pass
        assert states(pair)[""]
    finally:
        pair.replica.query("STOP SLAVE ''" if pair.mariadb else "STOP REPLICA FOR CHANNEL ''")
        start_default(pair)


def test_an_account_without_the_privileges_is_told_which(pair: Pair, tmp_path: Path) -> None:
    pair.replica.query("CREATE USER poor@localhost IDENTIFIED BY 'pw'")
    (tmp_path / "my.cnf").write_text(f"[client]\nsocket={pair.replica.socket}\nuser=poor\npassword=pw\n")
    (tmp_path / "my.cnf").chmod(0o600)
    poor = Credentials(defaults_file=str(tmp_path / "my.cnf"))
    able = abilities(pair)
    with connect(poor) as connection, pytest.raises(MysqlError) as caught:
        read_channels(connection, able)
    assert ("SLAVE MONITOR" if pair.mariadb else "REPLICATION CLIENT") in str(caught.value.hint)
    pair.replica.query(f"GRANT {'SLAVE MONITOR' if pair.mariadb else 'REPLICATION CLIENT'} ON *.* TO poor@localhost")
    record = tmp_path / "r"
    with (
        pytest.raises(MysqlError) as caught,
        applier_stopped(poor, able, time_limit_s=5, record=record, check=lambda _: None),
    ):
        pass
    assert "ADMIN" in str(caught.value.hint)
    assert states(pair)[""]
    pair.replica.query("DROP USER poor@localhost")
    assert not record.exists()
