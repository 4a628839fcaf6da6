"""What a statement's text tells, whose locks count, and how long is waited: without a server."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError
from snapmgr.mysql.connect.statements import code, is_only_a_select, kind, reads_tables, target
from snapmgr.mysql.lock import blockers
from snapmgr.mysql.lock.blockers import Blocker, BlockerWatch, wait_for_blockers
from snapmgr.mysql.lock.probe import LockProbe, Session
from support.sample import abilities_of

ABILITIES = abilities_of("mysql")


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT 1", "read"),
        ("  (select 1) union (select 2)", "read"),
        ("/* app */ SELECT 'FOR UPDATE' FROM t", "read"),
        ("SELECT * FROM t -- FOR UPDATE\n WHERE a = 1", "read"),
        ("SELECT * FROM t FOR UPDATE", "write"),
        ("WITH x AS (SELECT 1) SELECT * FROM x", "read"),
        ("WITH x AS (SELECT 1) DELETE FROM t USING t JOIN x", "write"),
        ("TABLE t", "read"),
        ("insert into t values (1)", "write"),
        ("LOAD DATA INFILE 'x' INTO TABLE t", "write"),
        ("ALTER TABLE t ADD c INT", "ddl"),
        ("CREATE TABLE t AS SELECT 1", "ddl"),
        ("CREATE TEMPORARY TABLE t AS SELECT 1", "other"),
        ("CREATE OR REPLACE TEMPORARY TABLE t (a INT)", "other"),
        ("DROP TEMPORARY TABLE t", "other"),
        ("CALL p()", "other"),
        ("LOCK TABLES t WRITE", "other"),
        ("", "other"),
        ("'unfinished", "other"),
    ],
)
def test_kind(sql, expected):
    assert kind(sql) == expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("UPDATE d.t SET a = 1", ("d", "t")),
        ("update low_priority ignore `my db`.`t``x` set a = 1", ("my db", "t`x")),
        ("INSERT INTO t (a) SELECT 1", (None, "t")),
        ("REPLACE d . t VALUES (1)", ("d", "t")),
        ("INSERT HIGH_PRIORITY IGNORE INTO d.t VALUES (1)", ("d", "t")),
        ("DELETE FROM t WHERE a IN (SELECT b FROM u)", (None, "t")),
        ("DELETE QUICK FROM d.t", ("d", "t")),
        ("LOAD DATA LOCAL INFILE 'INTO TABLE x' REPLACE INTO TABLE d.t", ("d", "t")),
        ("ALTER ONLINE TABLE IF EXISTS d.t FORCE", ("d", "t")),
        ("CREATE UNIQUE INDEX x ON d.t (a)", ("d", "t")),
        ("OPTIMIZE NO_WRITE_TO_BINLOG TABLE t", (None, "t")),
        ("REPAIR TABLE d.t QUICK", ("d", "t")),
        ("CREATE TABLE t AS SELECT 1", None),
        ("SELECT 1", None),
    ],
)
def test_target(sql, expected):
    assert target(sql) == expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT a FROM t", True),
        ("/* report */ WITH x AS (SELECT 1) SELECT * FROM x, t", True),
        ("SELECT 'INTO' FROM t", True),
        ("SELECT a INTO OUTFILE '/x' FROM t", False),
        ("SELECT a FROM t INTO @x", False),
        ("SELECT a FROM t FOR UPDATE", False),
        ("SELECT a FROM t FOR SHARE", False),
        ("SELECT a FROM t LOCK IN  SHARE MODE", False),
        ("SELECT /*!40001 SQL_NO_CACHE */ * FROM t", False),
        ("SELECT SQL_NO_CACHE * FROM t", False),
        ("SELECT a FROM t /*!50000 FOR UPDATE */", False),
        ("SELECT a FROM t /*M! FOR UPDATE */", False),
        ("UPDATE t SET a = 1", False),
        ("CALL p()", False),
        ("", False),
    ],
)
def test_only_a_plain_select_may_be_ended(sql, expected):
    assert is_only_a_select(sql) is expected


def test_a_select_without_a_table_holds_none():
    assert not reads_tables("SELECT SLEEP(9), 'FROM t'")
    assert reads_tables("SELECT a FROM t")
    assert reads_tables("TABLE t")


@given(st.text(max_size=60), st.text(max_size=60).map(lambda text: text.replace("'", "").replace("\\", "")))
def test_no_literal_survives_and_no_text_breaks_it(anything, literal):
    kind(anything)
    target(anything)
    is_only_a_select(anything)
    assert code(f"SELECT '{literal}' x") == "SELECT '' x"


class Scripted(LockProbe):
    """Returns one list of sessions per call; the last one forever. Raises an exception that is in its place."""

    def __init__(self, *looks):
        self.looks = list(looks)
        self.warnings = []
        self.causes = {}

    def _blocking_sessions(self, min_age_s):  # noqa: ARG002
        shown = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(shown, Exception):
            raise shown
        return shown

    def row_lock_waits(self):
        return self.causes


def session(**fields):
    given = {"key": 1, "connection_id": 7, "account": "app@x", "activity": "has been running", "age_s": 5.0}
    return Session(**{**given, **fields})


@pytest.fixture
def script(monkeypatch):
    def use(*looks):
        probe = Scripted(*looks)
        monkeypatch.setattr(blockers, "MysqlLockProbe", lambda *_: probe)
        return probe

    return use


def wait(at_most_s, tell=lambda _: None, connection=None, kill_selects_after_s=None):
    wait_for_blockers(
        connection, ABILITIES, "backup-lock", at_most_s=at_most_s, kill_selects_after_s=kill_selects_after_s, tell=tell
    )


def test_nothing_in_the_way_is_no_wait_and_says_nothing(script):
    script([])
    start, said = time.monotonic(), []
    wait(60, said.append)
    assert time.monotonic() - start < 10
    assert said == []


def test_what_is_younger_is_let_end_and_what_came_after_it_does_not_count(script):
    script([session(key=1, age_s=0.1)], [session(key=2, age_s=0.1)])
    said = []
    wait(60, said.append)
    assert said == []


def test_it_returns_when_the_last_one_has_ended(script):
    script([session(), session(key=2)], [session(key=2)], [])
    said = []
    wait(60, said.append)
    assert len(said) == 1
    assert "connection 7 (app@x) has been running for 5.0 s" in said[0]


def test_the_bound_is_kept_and_the_error_says_who_and_what_to_do(script):
    looking = script(
        [
            session(statement="UPDATE d.t SET", age_s=70.0),
            session(key=2, connection_id=8, activity="holds LOCK TABLES", idle=True),
            session(key=3, connection_id=9, activity="is the server's own", system=True),
            session(key=4, connection_id=10, only_reads=True),
        ]
    )
    looking.causes = {7: 99}
    start = time.monotonic()
    with pytest.raises(NotQuiescedError) as caught:
        wait(0.5)
    assert 0.5 <= time.monotonic() - start < 10
    assert caught.value.exit_code == 4
    assert "UPDATE d.t SET (waits for a row that connection 99 has locked); connection 8" in caught.value.message
    hint = caught.value.hint or ""
    assert "KILL QUERY 7; KILL 8; KILL QUERY 10)" in hint
    assert "KILL 99" in hint
    assert "kill_selects_after" in hint
    assert "blocker_wait" in hint


def test_no_wait_at_all_fails_at_once(script):
    script([session()])
    start = time.monotonic()
    with pytest.raises(NotQuiescedError, match="not tried"):
        wait(0)
    assert time.monotonic() - start < 5


def test_many_are_counted_not_listed(script):
    script([session(key=number, connection_id=number, age_s=2.0 + number) for number in range(1, 10)])
    with pytest.raises(NotQuiescedError, match="connection 9 .*; and 4 more") as caught:
        wait(0)
    assert "connection 4 " not in caught.value.message


def test_without_a_clock_of_the_servers_ours_counts(script):
    """The same lock for a second is in the way; one that changes hands, or ends, is a busy server."""
    script([session(age_s=None)])
    start = time.monotonic()
    (found,) = BlockerWatch(None, ABILITIES, "backup-lock").blockers()
    assert 1.0 <= time.monotonic() - start < 10
    assert 1.0 <= found.age_s < 10
    script(*([session(age_s=None, key=number)] for number in range(100)))
    assert BlockerWatch(None, ABILITIES, "backup-lock").blockers() == ()


def test_what_cannot_be_seen_is_said_once_and_no_obstacle(script):
    script(MysqlError("no such table", errno=1146))
    said = []
    wait(60, said.append)
    assert said == ["cannot see which sessions would block the lock: no such table"]


def test_a_lost_connection_is_an_error(script):
    script(ConnectionLostError("gone", errno=2006))
    with pytest.raises(ConnectionLostError):
        wait(60)


class Recorder:
    """A connection that shows one statement in its process list and takes KILL."""

    def __init__(self, info, program="app"):
        self.info = info
        self.program = program
        self.killed = []

    def rows(self, _sql, _args=()):
        return [{"Id": 7, "Info": self.info}]

    def value(self, _sql, _args=()):
        return self.program

    def execute(self, sql, _args=()):
        self.killed.append(sql)


SELECTING = {"statement": "SELECT a FROM t", "only_reads": True}


def killed(script, connection, after_s=3.0, **fields):
    script([session(**{**SELECTING, **fields})])
    with pytest.raises(NotQuiescedError):
        wait(0, connection=connection, kill_selects_after_s=after_s)
    return connection.killed


def test_an_old_select_is_ended(script):
    assert killed(script, Recorder("SELECT a FROM t")) == ["KILL QUERY 7"]


@pytest.mark.parametrize(
    ("connection", "fields"),
    [
        (Recorder("SELECT a FROM t"), {"age_s": 2.9}),
        (Recorder("SELECT a FROM t"), {"only_reads": False}),
        (Recorder("SELECT a FROM t INTO OUTFILE '/x'"), {}),
        (Recorder("SELECT b FROM t"), {}),
        (Recorder(None), {}),
        (Recorder("SELECT a FROM t", program="mysqldump"), {}),
    ],
    ids=["too young", "holds more", "writes a file", "another by now", "ended", "a backup"],
)
def test_what_is_not_ended(script, connection, fields):
    assert killed(script, connection, **fields) == []


def test_nothing_is_ended_unless_the_job_says_so(script):
    assert killed(script, Recorder("SELECT a FROM t"), after_s=None) == []


def test_a_line_about_a_blocker():
    blocker = Blocker(key=1, connection_id=None, account="", activity="somebody", age_s=1.0)
    assert str(blocker) == "somebody for 1.0 s"
