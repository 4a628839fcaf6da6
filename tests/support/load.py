"""A write load in processes of its own, with an invariant over up to three storage engines.

Each writer repeats, each step being one acknowledged write:

1. InnoDB, one transaction: move money between two accounts, append (writer, n) to the ledger;
2. Aria: append (writer, n) to its journal and set the writer's counter to n;
3. MyISAM: the same.

So in a consistent copy: the money's sum is unchanged; every ledger is 1…n without a hole; and, for each writer, Aria is
at n or n-1 and MyISAM at Aria's or one less, never ahead. A copy without the right lock breaks one of these. What was
acknowledged, and how long each write took, is kept in files that can be read while the load runs, and after it was
killed. Aria, MyISAM or both can be left out.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymysql

from support.storage import shielded, work_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SCHEMA = "load_test"
ACCOUNTS = 100
_OPENING_BALANCE = 1000
# One writer's line in the shared file: last acknowledged number (InnoDB), the same for Aria and MyISAM, and the start
# of the write in progress (CLOCK_MONOTONIC, ns; 0: none).
_SLOT = struct.Struct("=QQQQ")
_SAMPLE = struct.Struct("=QQ")  # start and duration of one write, ns
_PR_SET_PDEATHSIG = 1

ENGINES = ("aria", "myisam")
"""Engines beside InnoDB, in the order in which a writer comes to them."""
_JOURNAL = "(writer INT, n BIGINT, note VARCHAR(200), PRIMARY KEY (writer, n))"
_TABLES = (
    "CREATE TABLE accounts (id INT PRIMARY KEY, balance BIGINT NOT NULL) ENGINE=InnoDB",
    f"CREATE TABLE ledger {_JOURNAL} ENGINE=InnoDB",
)
_ENGINE_OPTIONS = {"aria": "ENGINE=Aria TRANSACTIONAL=1", "myisam": "ENGINE=MyISAM"}


class InvariantError(AssertionError):
    """A copy of the database is not what any instant of the original was."""


@dataclass(frozen=True, kw_only=True)
class Acknowledged:
    """What one writer had been told is committed, at one moment."""

    innodb: int
    aria: int
    myisam: int


@dataclass(frozen=True, kw_only=True)
class LoadStatistics:
    """How the writes went."""

    writes: int
    elapsed_s: float
    p50_s: float
    p95_s: float
    worst_s: float
    """The longest write, one that is still waiting included: the clients' worst stall."""


# --------------------------------------------------------------------------------------------------------- the writers


class _Slot:
    """A writer's place in the shared file, and its own file of samples."""

    def __init__(self, folder: Path, writer: int) -> None:
        with (folder / "slots").open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._offset = writer * _SLOT.size
        self.acknowledged = list(_SLOT.unpack_from(self._memory, self._offset)[:3])
        self._samples = os.open(folder / f"samples-{writer}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @contextmanager
    def write(self, engine: int, number: int) -> Iterator[None]:
        started = time.monotonic_ns()
        _SLOT.pack_into(self._memory, self._offset, *self.acknowledged, started)
        yield
        os.write(self._samples, _SAMPLE.pack(started, time.monotonic_ns() - started))
        self.acknowledged[engine] = number
        _SLOT.pack_into(self._memory, self._offset, *self.acknowledged, 0)


def _write_forever(socket: str, folder: Path, writer: int, pause_s: float, engines: Sequence[str]) -> None:
    rng = random.Random(writer)
    slot = _Slot(folder, writer)
    connection = pymysql.connect(unix_socket=socket, user="root", database=SCHEMA, autocommit=False, ssl_disabled=True)
    with connection.cursor() as cursor:
        number = slot.acknowledged[0]
        while os.getppid() != 1 and not (folder / "stop").exists():
            number += 1
            note = f"{writer}-{number}-" + "x" * rng.randrange(20, 150)
            # In the order of ids: two transfers must not wait for each other.
            low, high = sorted(rng.sample(range(ACCOUNTS), 2))
            amount = rng.randrange(1, 10)
            with slot.write(0, number):
                cursor.execute("UPDATE accounts SET balance = balance - %s WHERE id = %s", (amount, low))
                cursor.execute("UPDATE accounts SET balance = balance + %s WHERE id = %s", (amount, high))
                cursor.execute("INSERT INTO ledger VALUES (%s, %s, %s)", (writer, number, note))
                connection.commit()
            for name in engines:
                with slot.write(1 + ENGINES.index(name), number):
                    cursor.execute(f"INSERT INTO journal_{name} VALUES (%s, %s, %s)", (writer, number, note))
                    cursor.execute(f"REPLACE INTO counter_{name} VALUES (%s, %s)", (writer, number))
                    # Ends Aria's and MyISAM's statements in the binlog's eyes too.
                    connection.commit()
            if pause_s:
                time.sleep(pause_s)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("folder", type=Path)
    parser.add_argument("writer", type=int)
    parser.add_argument("pause_s", type=float)
    parser.add_argument("engines", nargs="*")
    arguments = parser.parse_args()
    # A killed test must not leave writers behind.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        _write_forever(arguments.socket, arguments.folder, arguments.writer, arguments.pause_s, arguments.engines)
    except pymysql.err.MySQLError as error:
        sys.exit(str(error))


# ------------------------------------------------------------------------------------------------------------- the load


class WriteLoad:
    """Writers that run (or have run) against a server. Made by `write_load`."""

    def __init__(self, socket: str, folder: Path, writers: int, pause_s: float, engines: Sequence[str]) -> None:
        self.writers = writers
        self._engines = engines
        self._socket = socket
        self._folder = folder
        self._pause_s = pause_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._since_ns = time.monotonic_ns()
        (folder / "slots").write_bytes(bytes(_SLOT.size * writers))

    def start(self) -> None:
        """Start the writers; they go on where they stopped."""
        (self._folder / "stop").unlink(missing_ok=True)
        self._since_ns = time.monotonic_ns()
        pause = str(self._pause_s)
        program = [sys.executable, "-m", "support.load"]
        with shielded():
            for writer in range(self.writers):
                with (self._folder / f"errors-{writer}").open("ab") as errors:
                    self._processes.append(
                        subprocess.Popen(
                            [*program, self._socket, self._folder, str(writer), pause, *self._engines],
                            stdin=subprocess.DEVNULL,
                            stdout=errors,
                            stderr=errors,
                            cwd=Path(__file__).parent.parent,
                            env={"PYTHONPATH": ":".join(path for path in sys.path if path), "LC_ALL": "C.UTF-8"},
                            start_new_session=True,
                        )
                    )

    def warm_up(self, writes_each: int = 20, *, timeout_s: float = 120.0) -> None:
        """Return when every writer has made `writes_each` further writes. Raises TimeoutError, or as `check_alive`."""
        goals = [line.innodb + writes_each for line in self.acknowledged()]
        deadline = time.monotonic() + timeout_s
        while any(line.innodb < goal for line, goal in zip(self.acknowledged(), goals, strict=True)):
            self.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"writers did not make {writes_each} writes each in {timeout_s} s")
            time.sleep(0.01)

    def check_alive(self) -> None:
        """Raise RuntimeError with the writers' own words if one has ended."""
        if any(process.poll() is not None for process in self._processes):
            raise RuntimeError(f"a writer has ended: {self.errors()}")

    def errors(self) -> list[str]:
        """Return what writers said when they ended."""
        texts = (path.read_text(errors="replace").strip() for path in sorted(self._folder.glob("errors-*")))
        return [text for text in texts if text]

    def stop(self, *, timeout_s: float = 60.0) -> None:
        """Let every writer finish its round and end; kill those that do not within `timeout_s`."""
        (self._folder / "stop").touch()
        deadline = time.monotonic() + timeout_s
        processes, self._processes = self._processes, []
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """End the writers at once."""
        for process in self._processes:
            process.kill()
        self.stop()

    def acknowledged(self) -> tuple[Acknowledged, ...]:
        """Return what each writer has been told is committed, now."""
        data = (self._folder / "slots").read_bytes()
        return tuple(
            Acknowledged(innodb=innodb, aria=aria, myisam=myisam) for innodb, aria, myisam, _ in _SLOT.iter_unpack(data)
        )

    def statistics(self, *, since_ns: int | None = None, until_ns: int | None = None) -> LoadStatistics:
        """Return how the writes went that were under way between two instants of CLOCK_MONOTONIC.

        By default since the last `start`, until now. A write that waits right now counts with its time so far.
        """
        begin = self._since_ns if since_ns is None else since_ns
        now = time.monotonic_ns()
        end = now if until_ns is None else until_ns
        durations: list[int] = []
        for path in self._folder.glob("samples-*"):
            data = path.read_bytes()
            whole = memoryview(data)[: len(data) - len(data) % _SAMPLE.size]
            samples = _SAMPLE.iter_unpack(whole)
            durations += [took for started, took in samples if started + took >= begin and started <= end]
        if self._processes:
            waiting = [started for *_, started in _SLOT.iter_unpack((self._folder / "slots").read_bytes())]
            durations += [now - started for started in waiting if 0 < started <= end]
        durations.sort()
        elapsed_s = (end - begin) / 1e9
        if not durations:
            return LoadStatistics(writes=0, elapsed_s=elapsed_s, p50_s=0.0, p95_s=0.0, worst_s=0.0)
        return LoadStatistics(
            writes=len(durations),
            elapsed_s=elapsed_s,
            p50_s=durations[len(durations) // 2] / 1e9,
            p95_s=durations[min(len(durations) * 95 // 100, len(durations) - 1)] / 1e9,
            worst_s=durations[-1] / 1e9,
        )


@contextmanager
def write_load(
    socket: str, *, writers: int = 4, pause_s: float = 0.0, engines: Sequence[str] = ENGINES, start: bool = True
) -> Iterator[WriteLoad]:
    """Make the tables on the server at `socket` and write to them while the context lasts.

    Args:
        socket: of a server that lets root in without a password.
        writers: number of connections, each a process.
        pause_s: rest after each round; 0 writes as fast as it goes.
        engines: those beside InnoDB, of `ENGINES`; MySQL has no Aria.
        start: False leaves the first `start` to the caller.
    """
    connection = pymysql.connect(unix_socket=socket, user="root", autocommit=True, ssl_disabled=True)
    with connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {SCHEMA}")
        cursor.execute(f"USE {SCHEMA}")
        for statement in _TABLES:
            cursor.execute(statement)
        for name in engines:
            cursor.execute(f"CREATE TABLE journal_{name} {_JOURNAL} {_ENGINE_OPTIONS[name]}")
            cursor.execute(
                f"CREATE TABLE counter_{name} (writer INT PRIMARY KEY, n BIGINT NOT NULL) {_ENGINE_OPTIONS[name]}"
            )
        rows = ", ".join(f"({number}, {_OPENING_BALANCE})" for number in range(ACCOUNTS))
        cursor.execute(f"INSERT INTO accounts VALUES {rows}")
    with work_folder() as folder:
        load = WriteLoad(socket, folder, writers, pause_s, engines)
        try:
            if start:
                load.start()
            yield load
        finally:
            with shielded():
                load.stop(timeout_s=5.0)


# -------------------------------------------------------------------------------------------------------- the invariant


def check_invariant(
    connection: pymysql.connections.Connection[Any],
    *,
    before: tuple[Acknowledged, ...] | None = None,
    after: tuple[Acknowledged, ...] | None = None,
    engines: Sequence[str] = ENGINES,
) -> tuple[Acknowledged, ...]:
    """Given a connection to a server on a copy, return what each writer had written in it.

    Args:
        connection: to the copy's server.
        before: `WriteLoad.acknowledged` before the copy was made: none of it may be lost.
        after: the same after: nothing beyond it, but for the one write that was under way, may be there.
        engines: as `write_load` had them; what an engine that was left out wrote is 0.

    Raises InvariantError that lists everything that is wrong.
    """
    with connection.cursor() as cursor:

        def rows(sql: str) -> list[tuple[Any, ...]]:
            cursor.execute(sql)
            return list(cursor.fetchall())

        reached, wrong = _inspect(rows, engines)
    count = len(before or after or ()) or max((1 + max(tops) for tops in reached.values() if tops), default=0)
    found = tuple(
        Acknowledged(
            innodb=reached["ledger"].get(writer, 0),
            aria=reached.get("journal_aria", {}).get(writer, 0),
            myisam=reached.get("journal_myisam", {}).get(writer, 0),
        )
        for writer in range(count)
    )
    for writer, line in enumerate(found):
        wrong += _compare(writer, line, engines, before[writer] if before else None, after[writer] if after else None)
    if wrong:
        raise InvariantError("; ".join(wrong))
    return found


def table_names(engines: Sequence[str] = ENGINES) -> tuple[str, ...]:
    """Return the names of the load's tables in `SCHEMA`."""
    return ("accounts", "ledger", *(f"{what}_{name}" for name in engines for what in ("journal", "counter")))


def _inspect(
    rows: Callable[[str], list[tuple[Any, ...]]], engines: Sequence[str]
) -> tuple[dict[str, dict[int, int]], list[str]]:
    """Return how far each writer came in each journal, and what is wrong inside the copy."""
    wrong = [
        f"CHECK TABLE {name}: {kind} {text}"
        for name in table_names(engines)
        for _, _, kind, text in rows(f"CHECK TABLE {SCHEMA}.{name} EXTENDED")
        if kind == "error" or (kind == "status" and text != "OK")
    ]
    ((total,),) = rows(f"SELECT SUM(balance) FROM {SCHEMA}.accounts")
    if total != ACCOUNTS * _OPENING_BALANCE:
        wrong.append(f"the accounts hold {total}, not {ACCOUNTS * _OPENING_BALANCE}")
    reached: dict[str, dict[int, int]] = {}
    for name in ("ledger", *(f"journal_{engine}" for engine in engines)):
        reached[name] = {}
        for writer, count, top in rows(f"SELECT writer, COUNT(*), MAX(n) FROM {SCHEMA}.{name} GROUP BY writer"):
            reached[name][writer] = top
            if count != top:
                wrong.append(f"{name}: writer {writer} is at {top} but has {count} rows")
    for name in engines:
        counter = dict(rows(f"SELECT writer, n FROM {SCHEMA}.counter_{name}"))
        # Row first, counter second: the counter may be one behind.
        wrong += [
            f"{name}: writer {writer}'s counter is {counter.get(writer, 0)}, its journal at {top}"
            for writer, top in reached[f"journal_{name}"].items()
            if not top - 1 <= counter.get(writer, 0) <= top
        ]
    return reached, wrong


def _compare(
    writer: int, line: Acknowledged, engines: Sequence[str], before: Acknowledged | None, after: Acknowledged | None
) -> list[str]:
    """Return what is wrong with one writer's journals, against each other and against what was acknowledged."""
    wrong = []
    steps = ("innodb", *engines)
    if not all(0 <= getattr(line, first) - getattr(line, then) <= 1 for first, then in pairwise(steps)):
        wrong.append(f"writer {writer}'s engines are of different instants: {line}")
    for engine in steps:
        here = getattr(line, engine)
        if before is not None and here < getattr(before, engine):
            wrong.append(f"writer {writer}: {engine} {getattr(before, engine)} was acknowledged, {here} is there")
        if after is not None and here > getattr(after, engine) + 1:
            wrong.append(f"writer {writer}: {engine} has {here}, written after the copy was made")
    return wrong


if __name__ == "__main__":
    _main()
