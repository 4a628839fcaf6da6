"""A loaded server that is being backed up by the whole command line, and what becomes of the lock.

The command logs in as an account of its own, with the privileges that docs/reference/configuration.md names and no
more: so what is ours on the server can be told from the rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pymysql

from support import faults
from support.faults import Faults
from support.load import SCHEMA, write_load
from support.processes import wait_until
from support.scene import btrfs_scene

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.load import WriteLoad
    from support.scene import Scene

ACCOUNT = "snapmgr"
HOLD_S = 1.0
WAIT_S = 1.0
SLACK_S = 3.0
"""For what comes after a bound: waking up, a signal, a connection, a commit, on a busy machine."""
_GRANTS = {
    "mariadb": ("RELOAD, BINLOG MONITOR, SLAVE MONITOR, PROCESS ON *.*",),
    "mysql": ("BACKUP_ADMIN, RELOAD, REPLICATION CLIENT, PROCESS ON *.*", "SELECT ON performance_schema.*"),
}
_WRITERS = 2
_PAUSE_S = 0.02
# Statements that wait in the server: FLUSH TABLES WITH READ LOCK, or MariaDB's stages.
_LOCKS = ("FLUSH TABLES WITH READ LOCK", "BACKUP STAGE")

UNSEEN = "import snapmgr.mysql.lock.quiesce as q; q.wait_for_blockers = lambda *_, **__: ()"
"""What holds the lock off comes right after it was looked for."""
SLOW_JITTER = "import random; random.uniform = lambda *_: 3.0"
"""More than half a second of rest after the first try; after `UNSEEN`."""
REST_UNTIL_RELEASED = """
import random, time
from pathlib import Path

def _rest(*_):
    folder = Path(__file__).parent
    (folder / "rests").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return 0.0

random.uniform = _rest
"""
"""Rest after each try that failed until `Run.release`; after `UNSEEN`."""
LONG_FIRST_TRY = "q._FIRST_WAIT_S = 1.0"
"""Time enough to see it; after `UNSEEN`."""
DEAF_TO_TIME = "import snapmgr.mysql.connect.client as c; c.Connection.set_read_timeout = lambda *_: None"
"""Wait for what the server answers."""


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A metadata lock of our account, as MySQL's performance_schema shows it."""

    what: str
    status: str
    connection_id: int


class Run:
    """A backup under way. Made by `LockSite.backup`."""

    def __init__(self, site: LockSite, process: subprocess.Popen[str], mark: Path) -> None:
        self.process = process
        self.began_ns = time.monotonic_ns()
        self._site = site
        self._mark = mark

    def wait_for_call(self) -> None:
        """Return when the storage call has begun, which is delayed: the lock is held."""
        wait_until(lambda: self._mark.exists() or self.process.poll() is not None, 60)
        assert self._mark.exists(), self.process.communicate()[1]

    def wait_for_rest(self) -> None:
        """Return when a try has failed, with `REST_UNTIL_RELEASED`."""
        rests = self._mark.parent / "rests"
        wait_until(lambda: rests.exists() or self.process.poll() is not None, 60)
        assert rests.exists(), self.process.communicate()[1]

    def release(self) -> None:
        """Make the file "go" beside the mark, which a prologue may wait for."""
        (self._mark.parent / "go").touch()

    def wait_for_wait(self) -> int:
        """Return the id of our connection once it waits for its lock."""
        seen: list[int] = []

        def twice() -> bool:
            waiting = [number for number, info in self._site.ours().items() if any(lock in info for lock in _LOCKS)]
            seen.extend(waiting)
            return len(seen) > 1 or self.process.poll() is not None

        wait_until(twice, 60)
        assert len(seen) > 1, self.process.communicate()[1]
        return seen[-1]

    def processes(self) -> list[int]:
        """Return the pids of the command and of the helper that makes the storage call."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        thawers = {
            path.read_text().splitlines()[1].split()[0] for path in (self._site.scene.state / "frozen").glob("*")
        }
        return [self.process.pid, *(int(pid) for pid in children if pid not in thawers)]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let both stand still while the context lasts."""
        pids = self.processes()
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def end(self) -> tuple[int, str]:
        """Return the exit code and what was said."""
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


class LockSite:
    """One server on btrfs, with writers. Made by `lock_site`."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.server = scene.server
        self.load: WriteLoad

    def configure(self, more: str = "", *, attempts: int = 1, hold_s: float = HOLD_S, wait_s: float = WAIT_S) -> None:
        """Have a fresh state directory, no snapshot, and the job "demo" with these bounds and `more` lines."""
        self.remove_snapshots()
        self.scene.state = self.scene.folder / f"state-{time.monotonic_ns()}"
        self._write_job(more, attempts, hold_s, wait_s)

    def _write_job(self, more: str, attempts: int, hold_s: float, wait_s: float) -> None:
        bounds = f'lock_hold = "{hold_s * 1000:g}ms"\nmax_stall = "{wait_s * 1000:g}ms"\nlock_attempts = {attempts}'
        job = f'source = "mysql"\nsocket = "{self.server.socket}"\nuser = "{ACCOUNT}"\n{bounds}\n{more}\n'
        self.scene.configure(text=f"[job.demo]\n{job}")

    def require_failure(self, run: Run, codes: tuple[int, ...], *words: str) -> None:
        """The backup failed with one of `codes` and of `words`; and as `require_recovery`."""
        code, said = run.end()
        assert code in codes, said
        assert any(word in said for word in words), said
        self.require_recovery()

    def require_recovery(self) -> None:
        """Nothing is READY, nothing of ours is left in the server, writers write, and the next backup succeeds.

        That one leaves nothing but itself in the storage.
        """
        assert "ready" not in self.scene.states()
        wait_until(lambda: not self.ours(), SLACK_S + WAIT_S)
        assert self.ddl_s() < SLACK_S
        self.load.warm_up(2)
        # The same state directory and storage, with the bounds of real life.
        self._write_job("", attempts=3, hold_s=10, wait_s=3)
        limit = time.monotonic() + 60
        while (done := self.scene.run("backup", "demo")).returncode and time.monotonic() < limit:
            assert "still hangs" in done.stderr
            time.sleep(0.1)
        assert done.returncode == 0, done.stderr
        (ready,) = [entry.manifest.id for entry in self.scene.entries() if entry.manifest.state == "ready"]
        assert [name for name in self.scene.stored() if not name.startswith(ready)] == []

    def remove_snapshots(self) -> None:
        """Remove what is in the storage."""
        for path in self.scene.snapshot_paths():
            subprocess.run(["btrfs", "-q", "subvolume", "delete", path], check=True)

    def prepare(self) -> None:
        """Make the account, and tables for probing."""
        self.server.query(f"CREATE USER {ACCOUNT}@localhost IDENTIFIED BY ''")
        for grant in _GRANTS[self.server.kind.flavor]:
            self.server.query(f"GRANT {grant} TO {ACCOUNT}@localhost")
        self.server.query("CREATE DATABASE probe")
        self.server.query("CREATE TABLE probe.t (v INT) ENGINE=InnoDB")
        self.server.query("CREATE TABLE probe.m (v INT) ENGINE=MyISAM")
        # Of an engine whose writers hold off every lock.
        self.server.query("CREATE TABLE probe.slow (id INT PRIMARY KEY, v INT) ENGINE=MyISAM")
        self.server.query("INSERT INTO probe.slow VALUES (1, 0)")

    @contextmanager
    def loaded(self) -> Iterator[WriteLoad]:
        """Write to the server while the context lasts."""
        self.server.query(f"DROP DATABASE IF EXISTS {SCHEMA}")
        engines = self.server.kind.engines
        with write_load(self.server.socket, writers=_WRITERS, pause_s=_PAUSE_S, engines=engines) as self.load:
            self.load.warm_up(5)
            yield self.load

    @contextmanager
    def backup(self, delay_s: float | None = None, prologue: Sequence[str] = ()) -> Iterator[Run]:
        """Run ``snapmgr backup demo`` while the context lasts, its storage call delayed in C.

        `prologue` is Python that runs in that process before anything else.
        """
        folder = self.scene.folder / f"run-{time.monotonic_ns()}"
        folder.mkdir()
        fault = Faults(delay_s=delay_s, delay_mark=folder / "mark") if delay_s is not None else None
        environment = {}
        if prologue:
            (folder / "sitecustomize.py").write_text("\n".join(prologue))
            environment["PYTHONPATH"] = str(folder)
        with faults.start(self.scene.config_file, "backup", "demo", faults=fault, environment=environment) as process:
            try:
                yield Run(self, process, folder / "mark")
            finally:
                process.kill()

    def ours(self) -> dict[int, str]:
        """Return our connections with what each runs."""
        with self.server.connect() as connection, connection.cursor(pymysql.cursors.DictCursor) as cursor:
            cursor.execute("SHOW FULL PROCESSLIST")
            return {row["Id"]: str(row["Info"] or "") for row in cursor.fetchall() if row["User"] == ACCOUNT}

    def locks(self) -> list[Lock]:
        """Return our locks on the whole server (MySQL)."""
        rows = self.server.query(
            "SELECT OBJECT_TYPE, LOCK_STATUS, PROCESSLIST_ID FROM performance_schema.metadata_locks "
            "JOIN performance_schema.threads ON THREAD_ID = OWNER_THREAD_ID WHERE PROCESSLIST_USER = %s "
            "AND OBJECT_TYPE IN ('GLOBAL', 'COMMIT', 'BACKUP LOCK')",
            ACCOUNT,
        )
        return [Lock(what=what, status=status, connection_id=number) for what, status, number in rows]

    def lock_connection(self) -> int:
        """Return the id of the connection that holds our lock."""
        if self.server.kind.flavor == "mysql":
            (number,) = {lock.connection_id for lock in self.locks() if lock.status == "GRANTED"}
            return number
        (number,) = self.ours()
        return number

    def write_s(self) -> float:
        """Return how long a write takes now, to MyISAM (stopped by all of MariaDB's stages) and to InnoDB."""
        return self._time("INSERT INTO probe.m VALUES (1)", "INSERT INTO probe.t VALUES (1)")

    def ddl_s(self) -> float:
        """Return how long DDL takes now."""
        return self._time("ALTER TABLE probe.t COMMENT = 'probed'")

    def _time(self, *statements: str) -> float:
        with self.server.connect() as connection, connection.cursor() as cursor:
            start = time.monotonic()
            for statement in statements:
                cursor.execute(statement)
            return time.monotonic() - start

    @contextmanager
    def blocker(self, statement: str) -> Iterator[Blocker]:
        """Run a statement that does not end while the context lasts."""
        blocker = Blocker(self, statement)
        try:
            yield blocker
        finally:
            blocker.end()


class Blocker:
    """A statement that somebody else runs."""

    def __init__(self, site: LockSite, statement: str) -> None:
        self._site = site
        self._connection = site.server.connect()
        self._number: int = self._connection.thread_id()  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, args=(statement,))
        self._thread.start()
        wait_until(self._runs)

    def _runs(self) -> bool:
        rows = self._site.server.query("SHOW FULL PROCESSLIST")
        return any(row[0] == self._number and row[4] == "Query" for row in rows)

    def _run(self, statement: str) -> None:
        with suppress(pymysql.err.MySQLError), self._connection, self._connection.cursor() as cursor:
            cursor.execute(statement)

    def end(self) -> None:
        """End the statement."""
        if self._thread.is_alive():
            with suppress(pymysql.err.MySQLError):
                self._site.server.query(f"KILL {self._number}")
        self._thread.join()


UPDATE = "UPDATE probe.slow SET v = v + 1 WHERE id = 1 AND SLEEP(60) = 0"
"""Holds off FLUSH TABLES WITH READ LOCK and BACKUP STAGE FLUSH."""
SELECT = "SELECT SLEEP(60) FROM probe.slow"
"""Holds off MySQL's FLUSH TABLES WITH READ LOCK, once that has the global lock."""


@contextmanager
def lock_site(kind: str, *options: str) -> Iterator[LockSite]:
    """Yield a site with a server of `kind`, without load."""
    with btrfs_scene(*options, kind=kind) as scene:
        site = LockSite(scene)
        site.prepare()
        yield site
        site.remove_snapshots()
