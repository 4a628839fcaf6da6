"""Which sessions block which lock on real servers: exactly those that docs/explanation/locks.md names are found."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING

import pymysql
import pytest

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.abilities import probe_abilities
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.lock.blockers import BlockerWatch, wait_for_blockers
from support.kinds import KINDS, SYSTEM
from support.load import write_load
from support.server import private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.lock.blockers import Blocker
    from snapmgr.mysql.lock.levels import LockLevel
    from support.server import PrivateServer

SHOWS_LOCKS = ("--performance-schema=ON", "--performance-schema-instrument=wait/lock/metadata/sql/mdl=ON")
LEVELS: tuple[LockLevel, ...] = ("backup-lock", "global-read-lock")
OPEN_READ = ["LOCK TABLES d.a READ"]
OPEN_HANDLER = ["USE d", "HANDLER b OPEN"]
OPEN_EXPORT = ["FLUSH TABLES d.c FOR EXPORT"]
ROWS = 200
# Long enough for a test, and over soon if something fails.
SLOWLY = "SLEEP(0.05) = 0"

# name: statements of one session; the last one may run long. Each has tables of its own where it needs them.
BOTH = {
    "select": ["SELECT COUNT(*) FROM d.a WHERE " + SLOWLY],
    "select in a transaction": ["BEGIN", "SELECT COUNT(*) FROM d.a WHERE " + SLOWLY],
    "select of a view": ["SELECT COUNT(*) FROM d.seen WHERE " + SLOWLY],
    "select from MyISAM": ["SELECT COUNT(*) FROM d.read_myisam WHERE " + SLOWLY],
    "select without a table": ["SELECT SLEEP(30)"],
    "update": ["UPDATE d.b SET v = v + 1 WHERE " + SLOWLY],
    "update MyISAM": ["UPDATE d.write_myisam SET v = v + 1 WHERE " + SLOWLY],
    "update a temporary table": [
        "CREATE TEMPORARY TABLE d.mine (v INT)",
        "INSERT INTO d.mine SELECT 1",
        "UPDATE d.mine SET v = SLEEP(30)",
    ],
    "procedure that updates": ["CALL d.updating()"],
    "procedure that sleeps": ["CALL d.sleeping()"],
    "insert select": ["INSERT INTO d.c (v) SELECT v FROM d.c WHERE " + SLOWLY],
    "lock rows": ["SELECT COUNT(*) FROM d.e WHERE " + SLOWLY + " FOR UPDATE"],
    "forgotten transaction": ["BEGIN", "UPDATE d.f SET v = 1 WHERE id = 1"],
    "waits for its row": ["UPDATE d.f SET v = 2 WHERE id = 1"],
    "forgotten reader": ["BEGIN", "SELECT v FROM d.g WHERE id = 1"],
    "alter that waits for it": ["ALTER TABLE d.g ADD COLUMN w INT"],
    "prepared transaction": ["XA START 'x'", "UPDATE d.h SET v = 1 WHERE id = 1", "XA END 'x'", "XA PREPARE 'x'"],
    "user lock": ["SELECT GET_LOCK('x', 1)"],
    "waits for the user lock": ["SELECT GET_LOCK('x', 30)"],
    "idle": ["SELECT 1"],
}
WRITES = {"update", "update MyISAM", "procedure that updates", "insert select", "lock rows", "waits for its row"}
READS = {"select", "select in a transaction", "select of a view", "select from MyISAM"}
EXPECTED = {
    ("mariadb", "backup-lock"): {"update MyISAM"},
    ("mariadb", "global-read-lock"): WRITES | {"alter that waits for it"},
    ("mysql", "backup-lock"): WRITES | READS | {"alter that waits for it"},
    ("mysql", "global-read-lock"): WRITES | READS | {"alter that waits for it"},
}
# The list of processes does not tell a temporary table from another.
GUESSED = {("processes", "global-read-lock"): {"update a temporary table"}}
# A few at a time, for the server does not always tell whose they are; and the levels that they hold off.
ALONE: dict[str, dict[str, tuple[list[list[str]], Sequence[LockLevel]]]] = {
    "create table as select": {
        "mariadb": ([["CREATE TABLE d.made AS SELECT * FROM d.a WHERE " + SLOWLY]], LEVELS),
        "mysql": ([["CREATE TABLE d.made AS SELECT * FROM d.a WHERE " + SLOWLY]], LEVELS),
    },
    "LOCK TABLES WRITE": {
        "mariadb": ([["LOCK TABLES d.a WRITE"]], LEVELS),
        "mysql": ([["LOCK TABLES d.a WRITE"]], LEVELS),
    },
    "idle, with open tables": {
        "mariadb": ([OPEN_READ, OPEN_HANDLER, OPEN_EXPORT], ()),
        "mysql": ([OPEN_READ, OPEN_HANDLER, OPEN_EXPORT], LEVELS),
    },
    "another backup": {
        "mariadb": ([["BACKUP STAGE START"]], ("backup-lock",)),
        "mysql": ([["LOCK INSTANCE FOR BACKUP"]], ()),
    },
    "a global read lock": {
        "mariadb": ([["FLUSH TABLES WITH READ LOCK"]], ()),
        "mysql": ([["FLUSH TABLES WITH READ LOCK"]], ()),
    },
}
SHOWING = f"{SYSTEM} that shows its locks"
# What counts as long, so that tests need not wait for a whole second.
LONG_S = 0.3


class Site:
    """A running server, how it shows its locks, and sessions on it."""

    def __init__(self, server: PrivateServer, source: str) -> None:
        self.server = server
        self.flavor = server.kind.flavor
        self.source = source

    @contextmanager
    def session(self, statements: Sequence[str]) -> Iterator[int]:
        """Run the statements, the last one in the background; yield the connection's id; then end it."""
        raw = self.server.connect()
        thread = threading.Thread(target=_last, args=(raw, statements[-1]))
        try:
            with raw.cursor() as cursor:
                for statement in statements[:-1]:
                    cursor.execute(statement)
            thread.start()
            yield raw.thread_id()
        finally:
            self._end(raw.thread_id())
            if thread.ident is not None:
                thread.join(20)
            raw.close()

    def _end(self, connection_id: int) -> None:
        try:
            self.server.query(f"KILL {connection_id}")
        except pymysql.err.OperationalError as error:
            # It has ended by itself.
            if error.args[0] != 1094:
                raise

    @contextmanager
    def sessions(self, chosen: dict[str, list[str]]) -> Iterator[dict[str, int]]:
        """Run them all, one after another begun; yield their connections' ids when they are old enough to count."""
        with ExitStack() as stack:
            ids = {}
            for name, statements in chosen.items():
                ids[name] = stack.enter_context(self.session(statements))
                time.sleep(0.03)
            # MySQL's clock of idle connections counts whole seconds.
            time.sleep(1.1 if self.flavor == "mysql" else LONG_S + 0.1)
            yield ids

    def runs(self) -> set[int]:
        """Return the connections that run a statement."""
        rows = self.server.query("SELECT ID FROM information_schema.PROCESSLIST WHERE COMMAND = 'Query'")
        return {number for (number,) in rows}

    @contextmanager
    def looking(self) -> Iterator[Connection]:
        with connect(Credentials(socket=self.server.socket, user="root")) as connection:
            yield connection

    def found(self, level: LockLevel) -> tuple[Blocker, ...]:
        with self.looking() as connection:
            return BlockerWatch(connection, probe_abilities(connection, identify(connection)), level, LONG_S).blockers()

    def is_granted(self, level: LockLevel, *, within_s: int = 1) -> bool:
        """Whether the server grants the lock: the truth."""
        locks = {
            ("mariadb", "backup-lock"): [f"BACKUP STAGE {s}" for s in ("START", "FLUSH", "BLOCK_DDL", "BLOCK_COMMIT")],
            ("mysql", "backup-lock"): ["LOCK INSTANCE FOR BACKUP", "FLUSH TABLES WITH READ LOCK"],
        }
        raw = self.server.connect()
        try:
            with raw.cursor() as cursor:
                cursor.execute(f"SET SESSION lock_wait_timeout = {within_s}")
                for statement in locks.get((self.flavor, level), ["FLUSH TABLES WITH READ LOCK"]):
                    cursor.execute(statement)
        except pymysql.err.OperationalError as error:
            if error.args[0] != 1205:
                raise
            return False
        finally:
            raw.close()
        return True


def _last(raw: pymysql.connections.Connection[pymysql.cursors.Cursor], statement: str) -> None:
    try:
        with raw.cursor() as cursor:
            cursor.execute(statement)
    except (pymysql.err.Error, OSError, ValueError, AttributeError):
        # Killed at the end.
        pass


@pytest.fixture(scope="module")
def sites() -> Iterator[Callable[[str], Site]]:
    """Servers by kind, each started when it is first asked for."""
    with ExitStack() as stack:
        yield cache(lambda name: _start(stack, name))


def _start(stack: ExitStack, name: str) -> Site:
    shows = name == SHOWING
    kind = KINDS[SYSTEM if shows else name]
    folder = stack.enter_context(work_folder())
    server = stack.enter_context(private_server(folder / "data", SHOWS_LOCKS if shows else (), kind=kind.name))
    server.query("CREATE DATABASE d")
    for table in ("a", "b", "c", "e", "f", "g", "h", "read_myisam", "write_myisam"):
        engine = "MyISAM" if "myisam" in table else "InnoDB"
        server.query(f"CREATE TABLE d.{table} (id INT AUTO_INCREMENT PRIMARY KEY, v INT) ENGINE={engine}")
        server.query(f"INSERT INTO d.{table} (v) VALUES " + ", ".join(["(0)"] * ROWS))
    server.query("CREATE VIEW d.seen AS SELECT * FROM d.a")
    server.query(f"CREATE PROCEDURE d.updating() UPDATE d.e SET v = 1 WHERE id > 100 AND {SLOWLY}")
    server.query("CREATE PROCEDURE d.sleeping() DO SLEEP(30)")
    server.query(f"CREATE PROCEDURE d.reading() SELECT COUNT(*) FROM d.a WHERE {SLOWLY}")
    server.query(
        "CREATE PROCEDURE d.hot() BEGIN DECLARE i INT DEFAULT 0; "
        "WHILE i < 100000 DO UPDATE d.f SET v = v + 1 WHERE id = 1; SET i = i + 1; END WHILE; END"
    )
    return Site(server, "locks" if kind.flavor == "mysql" else "performance_schema" if shows else "processes")


def on(*names: str) -> pytest.MarkDecorator:
    """Repeat a test for these servers."""
    wanted = [(name, SYSTEM if name == SHOWING else name) for name in names]
    return pytest.mark.parametrize(
        "site", [pytest.param(name, marks=pytest.mark.needs(kind), id=name) for name, kind in wanted], indirect=True
    )


@pytest.fixture
def site(request: pytest.FixtureRequest, sites: Callable[[str], Site]) -> Site:
    return sites(request.param)


@on(*KINDS, SHOWING)
def test_what_holds_a_lock_off_is_found_and_nothing_else(site: Site) -> None:
    with ExitStack() as stack:
        # It outlives its session.
        stack.callback(site.server.query, "XA ROLLBACK 'x'")
        ids = stack.enter_context(site.sessions(BOTH))
        names = {number: name for name, number in ids.items()}
        for level in LEVELS:
            found = site.found(level)
            expected = EXPECTED[site.flavor, level] | GUESSED.get((site.source, level), set())
            assert {names[each.connection_id or 0] for each in found} == expected, (level, found)
            # Of a statement only its first words are ever shown.
            assert not any("SLEEP" in str(each) or "0.05" in str(each) for each in found)


@on(SYSTEM, "mysql-9")
def test_what_is_not_found_holds_nothing_off(site: Site) -> None:
    # MySQL's levels wait for the same here.
    for level in LEVELS if site.flavor == "mariadb" else LEVELS[:1]:
        quiet = {name: BOTH[name] for name in BOTH if name not in EXPECTED[site.flavor, level]}
        assert "forgotten transaction" in quiet
        with ExitStack() as stack:
            stack.callback(site.server.query, "XA ROLLBACK 'x'")
            stack.enter_context(site.sessions(quiet))
            assert site.is_granted(level), level


@on(*KINDS, SHOWING)
@pytest.mark.parametrize("name", ALONE)
def test_few_alone(site: Site, name: str) -> None:
    statements, expected = ALONE[name][site.flavor]
    with site.sessions({str(number): each for number, each in enumerate(statements)}) as ids:
        for level in LEVELS:
            found = site.found(level)
            held_off = level in expected
            assert bool(found) == held_off, (level, found)
            if site.source != "processes":
                assert {each.connection_id for each in found} == (set(ids.values()) if held_off else set())
            patience_s = 0 if held_off and site.flavor == "mariadb" else 1
            assert site.is_granted(level, within_s=patience_s) != held_off, level


def waiting(site: Site, *, at_most_s: float, kill_selects_after_s: float | None = None) -> list[str]:
    """Wait for the level that a SELECT and an UPDATE hold off on MySQL, and an UPDATE on MariaDB."""
    said: list[str] = []
    with site.looking() as connection:
        wait_for_blockers(
            connection,
            probe_abilities(connection, identify(connection)),
            "global-read-lock",
            at_most_s=at_most_s,
            min_age_s=LONG_S,
            kill_selects_after_s=kill_selects_after_s,
            tell=said.append,
        )
    return said


@on(SYSTEM, "mysql-9")
def test_the_wait_ends_with_the_blocker_and_writers_write_on(site: Site) -> None:
    with (
        site.sessions({"update": BOTH["update"]}) as ids,
        write_load(site.server.socket, writers=2, engines=()) as load,
    ):
        load.warm_up()
        threading.Timer(3.0, site._end, (ids["update"],)).start()
        began, start = time.monotonic(), time.monotonic_ns()
        said = waiting(site, at_most_s=30)
        assert 2.9 < time.monotonic() - began < 25
        assert "UPDATE d.b SET" in said[0]
        statistics = load.statistics(since_ns=start)
        # Had the lock been tried meanwhile, they would have waited behind it for so long.
        assert statistics.worst_s < 2.5
        assert statistics.writes > 20
    site.server.query("DROP DATABASE load_test")


@on(SYSTEM, "mysql-9")
def test_the_bound_is_kept_and_the_blocker_named(site: Site) -> None:
    with site.sessions({"update": BOTH["update"]}) as ids:
        began = time.monotonic()
        with pytest.raises(NotQuiescedError) as caught:
            waiting(site, at_most_s=0.6)
        assert 0.6 <= time.monotonic() - began < 20
        assert caught.value.exit_code == 4
        assert f"connection {ids['update']} (root@localhost) has been running for " in caught.value.message
        assert f"KILL QUERY {ids['update']}" in (caught.value.hint or "")


@on(SYSTEM, "mysql-9")
def test_many_short_writes_to_one_row_are_no_reason_to_wait(site: Site) -> None:
    hot = {f"hot {number}": ["CALL d.hot()"] for number in range(6)}
    with site.sessions(hot):
        began = time.monotonic()
        waiting(site, at_most_s=10)
        assert time.monotonic() - began < 8


@on(SYSTEM, "mysql-9")
def test_only_plain_selects_are_ended_and_only_old_ones(site: Site) -> None:
    selects = {
        "old": BOTH["select"],
        "writes a variable": ["SELECT COUNT(*) FROM d.a WHERE " + SLOWLY + " INTO @x"],
        "locks rows": ["SELECT COUNT(*) FROM d.e WHERE " + SLOWLY + " LOCK IN SHARE MODE"],
        "procedure": ["CALL d.reading()"],
    }
    with site.sessions(selects) as ids:
        if site.flavor == "mariadb":
            # Reading holds nothing off there: nobody is waited for, and nobody ended.
            assert waiting(site, at_most_s=5, kill_selects_after_s=LONG_S) == []
            assert site.runs() >= set(ids.values())
            return
        with pytest.raises(NotQuiescedError):
            waiting(site, at_most_s=0, kill_selects_after_s=60)
        assert site.runs() >= set(ids.values())
        with pytest.raises(NotQuiescedError) as caught:
            waiting(site, at_most_s=0.5, kill_selects_after_s=LONG_S)
        assert f"connection {ids['procedure']} " in caught.value.message
        assert set(ids.values()) - site.runs() == {ids["old"]}
        # Its connection lives on.
        assert site.server.query("SELECT 1 FROM performance_schema.threads WHERE PROCESSLIST_ID = %s", ids["old"])


@on(SYSTEM, "mysql-9")
def test_an_account_that_may_not_look_is_told_so_once(site: Site) -> None:
    site.server.query("CREATE USER IF NOT EXISTS few@localhost IDENTIFIED BY ''")
    site.server.query("GRANT RELOAD ON *.* TO few@localhost")
    said: list[str] = []
    with (
        site.sessions({"update": BOTH["update"]}),
        site.looking() as root,
        connect(Credentials(socket=site.server.socket, user="few")) as connection,
    ):
        abilities = probe_abilities(root, identify(root))
        wait_for_blockers(
            connection,
            abilities,
            "global-read-lock",
            at_most_s=5,
            min_age_s=LONG_S,
            kill_selects_after_s=None,
            tell=said.append,
        )
    assert len(said) == len(set(said))
    assert any("PROCESS" in line for line in said)
