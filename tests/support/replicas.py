"""A source and its replica, each a private server on the loopback, and a load whose lost or repeated writes show.

Every transaction of the load appends rows that nobody else writes, so that executing one twice is an error, and one
left out is a hole.
"""

from __future__ import annotations

import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pymysql.cursors import DictCursor
from pymysql.err import MySQLError

from support.server import PrivateServer, free_port, private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from snapmgr.catalog.manifest import SourcePosition

By = Literal["gtid", "file"]
TABLES = 4
_PASSWORD = "replicate"
# For servers whose durability is not what is tested.
_QUICK = ("--sync-binlog=0", "--innodb-flush-log-at-trx-commit=2")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A source and its replica, which executes what it receives."""

    source: PrivateServer
    source_port: int
    replica: PrivateServer
    replica_port: int
    options: tuple[str, ...]
    """Those of the replica."""

    @property
    def mariadb(self) -> bool:
        """Whether both are MariaDB; else both are MySQL."""
        return self.source.kind.flavor == "mariadb"

    def status(self, server: PrivateServer | None = None) -> list[dict[str, Any]]:
        """Return what the replica (or `server`) says of its sources, a row each."""
        return status(server or self.replica)

    def replicate(
        self, server: PrivateServer, by: By, at: SourcePosition | None = None, *, channel: str = "", port: int = 0
    ) -> None:
        """Make `server` a replica of the source, from the position `at`, or from where its GTIDs are; do not start it.

        `port` is another one than the source's. With `at` all that it knew of replication is forgotten first, its own
        GTIDs as well.
        """
        host = f"='127.0.0.1', {{}}_PORT={port or self.source_port}, {{}}_USER='repl', {{}}_PASSWORD='{_PASSWORD}'"
        word = "MASTER" if self.mariadb else "SOURCE"
        login = f"{word}_HOST" + host.replace("{}", word) + f", {word}_CONNECT_RETRY=1"
        where = f"{word}_LOG_FILE='{at.file}', {word}_LOG_POS={at.offset}" if at and by == "file" else ""
        if self.mariadb:
            if at is not None:
                for row in status(server):
                    server.query(f"RESET SLAVE '{row['Connection_name']}' ALL")
                if by == "gtid":
                    server.query(f"SET GLOBAL gtid_slave_pos = '{at.gtid}'")
            asked = "MASTER_USE_GTID=slave_pos" if by == "gtid" else f"MASTER_USE_GTID=no{', ' if where else ''}{where}"
            server.query(f"CHANGE MASTER '{channel}' TO {login}, {asked}")
            return
        if at is not None:
            server.query("RESET REPLICA ALL")
            if by == "gtid":
                server.query("RESET BINARY LOGS AND GTIDS")
                server.query(f"SET GLOBAL gtid_purged = '{at.gtid}'")
        asked = "SOURCE_AUTO_POSITION=1" if by == "gtid" else f"SOURCE_AUTO_POSITION=0{', ' if where else ''}{where}"
        server.query(f"CHANGE REPLICATION SOURCE TO {login}, GET_SOURCE_PUBLIC_KEY=1, {asked} FOR CHANNEL '{channel}'")

    def start(self, server: PrivateServer | None = None) -> None:
        """Start all threads of all channels of the replica (or of `server`)."""
        (server or self.replica).query("START ALL SLAVES" if self.mariadb else "START REPLICA")

    def stop(self) -> None:
        """Stop all threads of all channels of the replica."""
        self.replica.query("STOP ALL SLAVES" if self.mariadb else "STOP REPLICA")

    def end(self) -> tuple[str, int]:
        """Return file and offset where the source's binary log ends."""
        row = self.source.query("SHOW MASTER STATUS" if self.mariadb else "SHOW BINARY LOG STATUS")[0]
        return str(row[0]), int(row[1])

    def wait_equal(self, server: PrivateServer | None = None, *, limit_s: float = 40.0) -> None:
        """Wait until the replica (or `server`) has executed all, and holds what the source holds. AssertionError."""
        server = server or self.replica
        wanted, deadline = checksums(self.source), time.monotonic() + limit_s
        while (held := _checksums_so_far(server)) != wanted:
            errors = [error for error in map(sql_error, status(server)) if error]
            assert errors == []
            assert time.monotonic() < deadline, f"{held} came to be, {wanted} is in the source"
            time.sleep(0.2)


def _checksums_so_far(server: PrivateServer) -> object:
    """Return `checksums`; None while not even the schema and its tables are there."""
    try:
        return checksums(server)
    except MySQLError as error:
        if error.args[0] not in {1049, 1146}:
            raise
        return None


def status(server: PrivateServer) -> list[dict[str, Any]]:
    """Return what a server says of its sources, a row each."""
    statement = "SHOW ALL SLAVES STATUS" if server.kind.flavor == "mariadb" else "SHOW REPLICA STATUS"
    with server.connect(cursorclass=DictCursor) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return [dict(row) for row in cursor.fetchall()]


def sql_error(row: dict[str, Any]) -> str:
    """Return why a channel does not execute, "" if it does or was stopped."""
    return str(row["Last_SQL_Error"])


def applies(row: dict[str, Any]) -> bool:
    """Whether the SQL thread of a channel runs."""
    return "Yes" in (row.get("Slave_SQL_Running"), row.get("Replica_SQL_Running"))


def receives(row: dict[str, Any]) -> bool:
    """Whether the thread that reads from the source runs."""
    return "Yes" in (row.get("Slave_IO_Running"), row.get("Replica_IO_Running"))


def checksums(server: PrivateServer) -> list[tuple[Any, ...]]:
    """Return number, sum and newest of the rows of each of the load's tables: equal where their contents are."""
    return [
        server.query(
            f"SELECT COUNT(*), SUM(n), MAX(n), SUM(CRC32(CONCAT(w, '-', n, '-', note))) FROM load_test.t{one}"
        )[0]
        for one in range(TABLES)
    ]


def network(port: int, server_id: int) -> tuple[str, ...]:
    """Return the options of a server that others replicate from."""
    return ("--skip-networking=0", "--bind-address=127.0.0.1", f"--port={port}", f"--server-id={server_id}")


@contextmanager
def replica_pair(
    datadir: Path, kind: str, *, by: By = "gtid", options: Sequence[str] = (), replica_options: Sequence[str] = ()
) -> Iterator[Pair]:
    """Run a source and its replica, whose datadir is made at `datadir`; both have the load's tables.

    Args:
        datadir: of the replica. The source's is in a temporary folder.
        kind: of both servers, one of `support.kinds.KINDS`.
        by: how the replica asks its source.
        options: of both servers.
        replica_options: of the replica.
    """
    ports = free_port(), free_port()
    log_updates = ("--log-slave-updates",) if kind.startswith("mariadb") else ()
    mine = (*network(ports[1], 102), "--relay-log=relay", *log_updates, *options, *replica_options)
    with (
        work_folder() as folder,
        private_server(folder / "source", (*network(ports[0], 101), *_QUICK, *options), kind=kind) as source,
        private_server(datadir, mine, kind=kind) as replica,
    ):
        pair = Pair(source=source, source_port=ports[0], replica=replica, replica_port=ports[1], options=mine)
        source.query(f"CREATE USER repl@'127.0.0.1' IDENTIFIED BY '{_PASSWORD}'")
        source.query("GRANT REPLICATION SLAVE ON *.* TO repl@'127.0.0.1'")
        source.query("CREATE DATABASE load_test")
        for one in range(TABLES):
            source.query(
                f"CREATE TABLE load_test.t{one} (w INT, n INT, note VARCHAR(600) NOT NULL, PRIMARY KEY (w, n))"
                " ENGINE=InnoDB"
            )
        pair.replicate(replica, by)
        pair.start()
        pair.wait_equal()
        try:
            yield pair
        finally:
            # A MySQL that is shut down in order waits some ten seconds for its replica's connection.
            source.kill()
            replica.kill()


@contextmanager
def inserting(server: PrivateServer, *, writers: int = 6) -> Iterator[None]:
    """Append rows to the load's tables from `writers` connections while the context lasts."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def write(writer: int) -> None:
        try:
            with server.connect() as connection, connection.cursor() as cursor:
                table = f"load_test.t{writer % TABLES}"
                cursor.execute(f"SELECT COALESCE(MAX(n), 0) FROM {table} WHERE w = %s", (writer,))
                number = int(cursor.fetchone()[0])
                while not stop.is_set():
                    # One row, or three in one transaction.
                    rows = [(writer, number + 1 + more, "x" * (number % 500)) for more in range(1 + number % 2 * 2)]
                    values = ", ".join(["(%s, %s, %s)"] * len(rows))
                    cursor.execute(f"INSERT INTO {table} VALUES {values}", [value for row in rows for value in row])
                    number += len(rows)
                    time.sleep(0.004)
        except BaseException as error:  # noqa: BLE001 - said below
            failures.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


@contextmanager
def server_on(pair: Pair, copy: Path) -> Iterator[PrivateServer]:
    """Run a server on a copy of the replica's datadir; it replicates nothing yet."""
    word = "slave" if pair.mariadb else "replica"
    # Two servers of a source's must not have the same identity. MariaDB's files about replication are rewritten in
    # place and may be cut short in a copy; relay logs are of no use with a position.
    for stale in ("auto.cnf", "*master.info", "relay*"):
        for path in copy.glob(stale):
            path.unlink()
    own = (*pair.options, *_QUICK, f"--skip-{word}-start", "--server-id=103", f"--port={free_port()}")
    with private_server(copy, own, install_options=None, kind=pair.replica.kind.name) as server:
        yield server


def snapshot(subvolume: Path, target: Path) -> None:
    """Make a writable snapshot of a btrfs subvolume."""
    subprocess.run(["btrfs", "-q", "subvolume", "snapshot", subvolume, target], check=True)
