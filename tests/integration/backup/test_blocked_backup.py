"""The whole command where something holds its lock off: its bounds, its words, and the writers meanwhile."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pymysql
import pytest

from support.kinds import KINDS, SYSTEM
from support.load import write_load
from support.scene import btrfs_scene

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.scene import Scene

pytestmark = [pytest.mark.needs("root", "btrfs"), pytest.mark.timeout(120)]

LOCK_WAIT_S = 1
JOB = f'blocker_wait = "1s"\nmax_stall = "{LOCK_WAIT_S}s"\nlock_attempts = 2\n'
# What starts, checks and flushes on a busy machine is not ours to bound.
AROUND_S = 12.0
# MariaDB's backup lock lets writes to InnoDB pass.
BLOCKER = "UPDATE d.slow SET v = v + 1 WHERE SLEEP(0.1) = 0"


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.needs(name)) for name in (SYSTEM, "mysql-9")]
)
def blocked(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with btrfs_scene(kind=request.param) as scene:
        scene.server.query("CREATE DATABASE d")
        scene.server.query("CREATE TABLE d.slow (id INT AUTO_INCREMENT PRIMARY KEY, v INT) ENGINE=MyISAM")
        scene.server.query("INSERT INTO d.slow (v) VALUES " + ", ".join(["(0)"] * 500))
        scene.server.query("CREATE TABLE d.t (id INT PRIMARY KEY, v INT)")
        scene.server.query("INSERT INTO d.t VALUES (1, 0)")
        scene.configure(JOB)
        yield scene


@contextmanager
def session(scene: Scene, statement: str) -> Iterator[int]:
    """Run a statement in the background; yield its connection's id a moment later; then end it."""
    raw = scene.server.connect()

    def run() -> None:
        with suppress(pymysql.err.Error, OSError), raw.cursor() as cursor:
            cursor.execute(statement)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(1.2)
    try:
        yield raw.thread_id()
    finally:
        with suppress(pymysql.err.OperationalError):
            scene.server.query(f"KILL {raw.thread_id()}")
        thread.join(20)
        raw.close()


def test_a_long_write_ends_it_with_exit_4_within_the_bounds_and_nobody_waits(blocked: Scene) -> None:
    kept = blocked.states()
    engines = KINDS[blocked.server.kind.name].engines
    with session(blocked, BLOCKER) as number, write_load(blocked.server.socket, writers=2, engines=engines) as load:
        load.warm_up()
        began, start_ns = time.monotonic(), time.monotonic_ns()
        done = blocked.run("backup", "demo")
        took_s = time.monotonic() - began
        stall_s = load.statistics(since_ns=start_ns).worst_s
    blocked.server.query("DROP DATABASE load_test")
    assert done.returncode == 4, done.stderr
    said = " ".join(done.stderr.split())
    assert f"connection {number} (root@localhost) has been running for" in said
    assert "UPDATE d.slow SET v" in said
    assert "SLEEP" not in said
    assert f"KILL QUERY {number}" in said
    assert 1.0 <= took_s < 1.0 + 2 * LOCK_WAIT_S + AROUND_S
    # No lock was tried, so nobody waited for one.
    assert stall_s < LOCK_WAIT_S
    assert [state for state in blocked.states() if state == "READY"] == [state for state in kept if state == "READY"]


def test_a_blocker_that_ends_in_time_is_waited_for(blocked: Scene) -> None:
    blocked.configure(JOB.replace('"1s"', '"30s"', 1))
    with session(blocked, BLOCKER) as number:
        threading.Timer(3.0, blocked.server.query, (f"KILL {number}",)).start()
        done = blocked.run("backup", "demo")
    blocked.configure(JOB)
    assert done.returncode == 0, done.stderr
    assert "waiting up to 30.0 s for sessions that would block the lock" in done.stdout + done.stderr


def test_a_forgotten_transaction_is_none(blocked: Scene) -> None:
    with blocked.server.connect() as forgotten, forgotten.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("UPDATE d.t SET v = 1 WHERE id = 1")
        done = blocked.run("backup", "demo")
        assert done.returncode == 0, done.stderr
        cursor.execute("ROLLBACK")
