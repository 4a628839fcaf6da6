"""The end of a crashed server's binary logs, compared with its own crash recovery."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

import pymysql
import pytest

from snapmgr.mysql.binlog.events import GtidList, PreviousGtids
from snapmgr.mysql.binlog.gtid import MysqlGtidSet
from snapmgr.mysql.binlog.reader import open_binlog
from snapmgr.mysql.binlog.tail import read_tail, tail
from support import binlogs
from support.copies import frozen
from support.kinds import KINDS, each_kind
from support.processes import wait_until
from support.server import private_server, server_user
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.server import PrivateServer

_KILLS = 2
_DDL_SHARE = 0.1
_INSTANTS = 15
# What is written is the same, and sooner; the page cache outlives a server that is killed.
_QUICK = ("--sync-binlog=0", "--innodb-flush-log-at-trx-commit=2")
_CUTS = 2


@pytest.fixture
def folder() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


def say(server: PrivateServer) -> binlogs.Said:
    with server.connect() as connection, connection.cursor() as cursor:
        return binlogs.say(cursor)


def copy_logs(source: Path, target: Path) -> None:
    user = server_user()
    for path in source.glob("binlog.*"):
        if path.suffix == ".idx":
            continue
        shutil.copy(path, target)
        if os.geteuid() == 0:
            os.chown(target / path.name, user.pw_uid, user.pw_gid)


def write(server: PrivateServer, seed: int, written: list[int], stop: Event) -> None:
    """Write transactions of many sizes, and DDL, until told to stop, or the server is gone."""
    rng = random.Random(seed)
    with suppress(pymysql.err.MySQLError, OSError), server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE w.i{seed} (a INT AUTO_INCREMENT PRIMARY KEY, b LONGTEXT) ENGINE=InnoDB")
        cursor.execute(f"CREATE TABLE w.m{seed} (a INT AUTO_INCREMENT PRIMARY KEY, b LONGTEXT) ENGINE=MyISAM")
        while not stop.is_set():
            cursor.execute("BEGIN")
            for _ in range(rng.randrange(1, 4)):
                cursor.execute(f"INSERT INTO w.i{seed} (b) VALUES (REPEAT('x', {rng.choice([10, 1000, 300_000])}))")
            cursor.execute("COMMIT")
            cursor.execute(f"INSERT INTO w.m{seed} (b) VALUES (REPEAT('y', {rng.choice([10, 20_000])}))")
            if rng.random() < _DDL_SHARE:
                cursor.execute(f"ALTER TABLE w.i{seed} COMMENT '{rng.random()}'")
            written.append(seed)


@contextmanager
def writers(server: PrivateServer, rounds: int) -> Iterator[None]:
    """Enter the context while four connections write and have written `rounds` times together."""
    server.query("DROP DATABASE IF EXISTS w")
    server.query("CREATE DATABASE w")
    written: list[int] = []
    stop = Event()
    threads = [Thread(target=write, args=(server, seed, written, stop)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(written) >= rounds, 60)
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _includes(flavor: str, gtids: str, earlier: str) -> bool:
    """Return whether `gtids` are those of `earlier`, or more."""
    if flavor == "mysql":
        return MysqlGtidSet.parse(gtids) | MysqlGtidSet.parse(earlier) == MysqlGtidSet.parse(gtids)
    now, then = (
        {part.split("-")[0]: int(part.split("-")[2]) for part in text.split(",") if part} for text in (gtids, earlier)
    )
    return all(now.get(domain, 0) >= number for domain, number in then.items())


def _after(gtid: str, transactions: int) -> str:
    """Return the position of MariaDB's only domain after so many more transactions."""
    if transactions == 0:
        return gtid
    origin, _, number = gtid.rpartition("-")
    return f"{origin}-{int(number) + transactions}"


@each_kind
def test_of_a_killed_server_the_tail_is_where_its_recovery_ends(folder, kind):
    with private_server(folder / "data", _QUICK, kind=kind) as server:
        for number in range(_KILLS):
            with writers(server, 20):
                server.kill()
            copy = folder / f"copy-{number}"
            copy.mkdir()
            copy_logs(server.datadir, copy)
            found = read_tail(copy / "binlog")
            assert found.position is not None
            assert found.in_use
            assert found.transactions
            server.start()
            said = say(server)
            # DDL that was under way a MariaDB may complete when it starts: that it writes to the new file.
            later = tail(server.datadir / said.file).transactions
            assert later == 0 or "DDL_LOG: Crash recovery executed" in server.log_text()
            assert said.gtid == _after(found.position.gtid, later)
            left = (server.datadir / found.position.file).stat().st_size
            # MySQL cuts the incomplete transaction off.
            cut_off = found.truncated and KINDS[kind].flavor == "mariadb"
            assert left > found.position.offset if cut_off else left == found.position.offset


@each_kind
def test_while_files_change_all_the_time_every_instant_has_its_position(folder, kind):
    # The smallest files that there are: many copies show a file that the index does not name yet, and of MySQL some
    # have no index at all, because it is just being replaced.
    flavor = KINDS[kind].flavor
    with (
        private_server(folder / "data", [*_QUICK, "--max-binlog-size=4096"], kind=kind) as server,
        writers(server, 4),
    ):
        before, files = "", set()
        for number in range(_INSTANTS):
            copy = folder / f"instant-{number}"
            copy.mkdir()
            with frozen(server):
                copy_logs(server.datadir, copy)
            found = read_tail(copy / "binlog")
            assert found.position is not None
            gtids = found.position.gtid
            # All that was committed before this instant, and then: without an index it is the same.
            assert _includes(flavor, gtids, before)
            for path in copy.glob("binlog.index*"):
                path.unlink()
            by_number = read_tail(copy / "binlog").position
            assert by_number is not None
            assert by_number.gtid == found.position.gtid
            before = gtids
            files.add(found.position.file)
            shutil.rmtree(copy)
        assert len(files) > 2


@each_kind
def test_of_a_log_cut_off_anywhere_the_server_recovers_up_to_the_tail(folder, kind):
    rng = random.Random(f"{kind} cut off")
    mysql = KINDS[kind].flavor == "mysql"
    own = binlogs.MYSQL_TAGS if mysql else binlogs.MARIADB_DOMAINS
    kept = folder / "kept"
    kept.mkdir()
    with private_server(folder / "data", _QUICK, kind=kind) as server:
        with server.connect() as connection, connection.cursor() as cursor:
            for statement in (*binlogs.SETUP, "FLUSH BINARY LOGS", *binlogs.XA, *own, *binlogs.UNFINISHED_XA):
                cursor.execute(statement)
        server.kill()
        copy_logs(server.datadir, kept)
    last = binlogs.logs(kept / "binlog")[-1]
    with open_binlog(last) as reader:
        events = list(reader.events())
    beginning = next(event.next_offset for event in events if isinstance(event.body, PreviousGtids | GtidList))
    # A cut inside an event, and one between two.
    cuts = [rng.randrange(beginning, last.stat().st_size) for _ in range(_CUTS // 2)]
    cuts += [event.offset for event in rng.sample([e for e in events if e.offset > beginning], _CUTS // 2)]
    for number, cut in enumerate(cuts):
        # The data are of no matter: they are a fresh server's.
        data = folder / f"data-{number}"
        with private_server(data, kind=kind, start=False) as server:
            copy_logs(kept, data)
            os.truncate(data / last.name, cut)
            found = read_tail(data / "binlog")
            assert found.position is not None
            assert found.truncated == (found.position.offset < cut)
            server.start()
            assert say(server).gtid == found.position.gtid, cut
            assert (data / last.name).stat().st_size == (found.position.offset if mysql else cut)
        shutil.rmtree(data)
