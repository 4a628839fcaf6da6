"""Which sessions count as blockers, and how long we wait for them: without a server."""

from __future__ import annotations

import time

import pytest

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError
from snapmgr.mysql.lock import probe_mysql
from snapmgr.mysql.lock.blockers import Blocker, BlockerWatch, wait_for_blockers
from snapmgr.mysql.lock.probe import LockProbe, Session
from support.sample import abilities_of

ABILITIES = abilities_of("mysql")


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
        monkeypatch.setattr(probe_mysql, "MysqlLockProbe", lambda *_: probe)
        return probe

    return use


def wait(at_most_s, tell=lambda _: None, connection=None, kill_selects_after_s=None):
    return wait_for_blockers(
        connection,
        ABILITIES,
        "backup-lock",
        at_most_s=at_most_s,
        min_age_s=1.0,
        kill_selects_after_s=kill_selects_after_s,
        ways=("convert the tables",),
        tell=tell,
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
    assert hint.startswith("convert the tables, or end it manually")


def test_a_crowd_that_waits_for_rows_gets_no_more_than_five_statements_to_kill(script):
    crowd = script([session(key=number, connection_id=number, age_s=20.0) for number in range(1, 700)])
    crowd.causes = {number: number + 1000 for number in range(1, 700)}
    with pytest.raises(NotQuiescedError) as caught:
        wait(0)
    assert (caught.value.hint or "").count("KILL") == 5
    assert len(caught.value.message) < 1000


def test_how_old_a_blocker_is_can_be_set(script):
    script([session(age_s=5.0)])
    assert BlockerWatch(None, ABILITIES, "backup-lock", 0.5).blockers() != ()
    script([session(age_s=5.0)], [])
    assert BlockerWatch(None, ABILITIES, "backup-lock", 10.0).blockers() == ()


def test_who_is_idle_with_a_lock_at_one_look_only_is_not_named(script):
    """Two tables were read one after another: the lock is of a statement that ended in between."""
    found = [session(key=(7, number), age_s=12.0, idle=True, own_clock=False) for number in range(100)]
    script(*([one] for one in found))
    assert BlockerWatch(None, ABILITIES, "backup-lock", 0.3).blockers() == ()
    script([found[0]])
    assert BlockerWatch(None, ABILITIES, "backup-lock", 0.3).blockers() != ()


def test_no_wait_at_all_fails_at_once(script):
    script([session()])
    start = time.monotonic()
    with pytest.raises(NotQuiescedError, match="not attempted"):
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
    (found,) = BlockerWatch(None, ABILITIES, "backup-lock", 1.0).blockers()
    assert 1.0 <= time.monotonic() - start < 10
    assert 1.0 <= found.age_s < 10
    script(*([session(age_s=None, key=number)] for number in range(100)))
    assert BlockerWatch(None, ABILITIES, "backup-lock", 1.0).blockers() == ()


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


def test_what_was_ended_is_returned_for_the_record(script):
    script([session(**SELECTING)], [])
    (said,) = wait(60, connection=Recorder("SELECT a FROM t"), kill_selects_after_s=3.0)
    assert said == "connection 7 (app@x), which had run for 5.0 s: SELECT a FROM t"


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
