"""Reads the positions that a replica has executed: another replica made from its snapshot must begin there.

Sources: the manuals of SHOW REPLICA STATUS and SHOW ALL SLAVES STATUS. Which position is exact when was measured under
load (docs/how-to/back-up-a-replica.md): we compared positions with the rows in the tables while commits were blocked.

- MySQL: the GTID set is exact under FLUSH TABLES WITH READ LOCK. File and offset lag until the applier's next
  checkpoint; only mysql.slave_worker_info is exact.
- MariaDB: both are exact under FLUSH TABLES WITH READ LOCK, for which parallel appliers pause. Under BACKUP STAGE
  BLOCK_COMMIT a parallel applier leaves both behind the data, also @@gtid_slave_pos; the table mysql.gtid_slave_pos is
  written with the data.
- MariaDB's single applier may write rows of a table that is not InnoDB before either lock, and their position and end
  of transaction after it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.catalog.manifest import SourcePosition
from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.abilities import is_on
from snapmgr.mysql.connect.client import MysqlError, quote
from snapmgr.mysql.lock.position import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection

_DENIED = frozenset({1044, 1142, 1227})
# A position may move after its commit: under the lock it was seen to move, but never after 2 ms.
_SETTLE_S = 0.005
_ERROR_SHOWN = 300
_WORKERS = "SELECT Channel_name, Master_log_name, Master_log_pos FROM mysql.slave_worker_info"
# One for each engine, if gtid_pos_auto_engines is set.
_GTID_TABLES = "SHOW TABLES FROM mysql LIKE 'gtid\\_slave\\_pos%'"
_VARIABLES = (
    *("replica_parallel_workers", "replica_preserve_commit_order"),
    # MySQL until 8.0.25, and MariaDB.
    *("slave_parallel_workers", "slave_preserve_commit_order", "slave_parallel_threads"),
)


class Channel(Struct, frozen=True, kw_only=True):
    """One source of a replica, as the server reports it."""

    name: str
    """MySQL's channel or MariaDB's connection name; "" is the default one."""
    host: str
    port: int
    applies: bool
    """Whether the SQL thread runs, even if it waits or is delayed."""
    file: str
    """The source's binary log up to which it has executed; may lag."""
    offset: int
    by_gtid: bool
    """Whether it asks its source by GTID."""
    gtid: str
    """MySQL: the server's gtid_executed."""
    error: str
    """Why the SQL thread stopped; "" without an error."""
    until: bool
    """Whether it will stop by itself at a position (START … UNTIL)."""

    @property
    def title(self) -> str:
        """Its name in messages."""
        channel = f' (channel "{self.name}")' if self.name else ""
        return f"{self.host}:{self.port}{channel}"


class Applier(Struct, frozen=True, kw_only=True):
    """How a replica applies transactions."""

    workers: int
    """Parallel threads; 0: only the SQL thread itself."""
    in_order: bool
    """Whether it commits transactions in the source's order."""


def parse_channels(rows: Iterable[Mapping[str, object]]) -> tuple[Channel, ...]:
    """Given the rows of the server's SHOW … STATUS, return its sources; accepts the column names of all versions."""
    return tuple(_parse_channel(row) for row in rows)


def _parse_channel(row: Mapping[str, object]) -> Channel:
    def text(*names: str) -> str:
        found = next((row[name] for name in names if name in row), None)
        return "" if found is None else str(found)

    return Channel(
        name=text("Channel_Name", "Connection_name"),
        host=text("Source_Host", "Master_Host"),
        port=int(text("Source_Port", "Master_Port") or 0),
        applies=text("Replica_SQL_Running", "Slave_SQL_Running") != "No",
        file=text("Relay_Source_Log_File", "Relay_Master_Log_File"),
        offset=int(text("Exec_Source_Log_Pos", "Exec_Master_Log_Pos") or 0),
        by_gtid=text("Auto_Position") == "1" or text("Using_Gtid") not in ("", "No"),
        gtid=one_line(text("Executed_Gtid_Set")),
        error=text("Last_SQL_Error") or ("unknown" if text("Last_SQL_Errno") not in ("", "0") else ""),
        until=text("Until_Condition") not in ("", "None"),
    )


def read_channels(connection: Connection, abilities: Abilities) -> tuple[Channel, ...]:
    """Return a server's sources; none if it is not a replica.

    Without the privilege to see them: none for a MariaDB whose applier does not run; else raises MysqlError that names
    the missing privilege.
    """
    try:
        return parse_channels(connection.rows(abilities.replica_status))
    except MysqlError as error:
        if error.errno not in _DENIED:
            raise
        denied = error
    if abilities.flavor == "mariadb" and connection.status("Slaves_running").get("slaves_running") == "0":
        return ()
    privilege = "SLAVE MONITOR" if abilities.flavor == "mariadb" else "REPLICATION CLIENT"
    raise MysqlError(
        f"{abilities.replica_status} is not allowed: cannot tell whether it is a replica, and how far it executed",
        errno=denied.errno,
        hint=f"grant the account {privilege} ON *.* (`snapmgr doctor` prints the statement)",
    )


def read_sources(
    connection: Connection, abilities: Abilities, *, global_read_lock: bool = False, only_innodb: bool = False
) -> tuple[SourcePosition, ...]:
    """Return how far a replica has executed each of its sources, exact or absent; () if it is not a replica.

    Exact only while commits are blocked. Raises MysqlError.

    Args:
        connection: holds the lock.
        abilities: of the server.
        global_read_lock: whether the lock is FLUSH TABLES WITH READ LOCK.
        only_innodb: whether all tables but the system's own are InnoDB. In others a running applier may have written
            rows before their position; only parallel threads of MariaDB end their transactions before the lock.
    """
    channels = read_channels(connection, abilities)
    if not channels:
        return ()
    applier = _read_applier(connection)
    if abilities.flavor == "mysql":
        workers = _read_workers(connection)
        return tuple(
            mysql_position(
                channel, applier, None if workers is None else workers.get(channel.name, ()), only_innodb=only_innodb
            )
            for channel in channels
        )
    if _rows_are_ahead(channels, applier, global_read_lock=global_read_lock, only_innodb=only_innodb):
        return tuple(_position(channel, gtid="") for channel in channels)
    applying = any(channel.applies for channel in channels)
    gtid = ""
    if any(channel.by_gtid for channel in channels):
        gtid = _read_slave_pos(connection, still=global_read_lock or not applying or applier.workers == 0)
    return tuple(mariadb_position(channel, applier, gtid, global_read_lock=global_read_lock) for channel in channels)


def rows_are_ahead(
    connection: Connection,
    abilities: Abilities,
    channels: Iterable[Channel],
    *,
    global_read_lock: bool,
    only_innodb: bool,
) -> bool:
    """Return whether, under the lock, an applier may have written rows that no position covers yet.

    The replica's own position does not cover them either: its binary logs get them later. The arguments are those of
    `read_sources`. Raises MysqlError.
    """
    channels = tuple(channels)
    if abilities.flavor == "mysql" or not channels:
        return False
    applier = _read_applier(connection)
    return _rows_are_ahead(channels, applier, global_read_lock=global_read_lock, only_innodb=only_innodb)


def _rows_are_ahead(
    channels: Iterable[Channel], applier: Applier, *, global_read_lock: bool, only_innodb: bool
) -> bool:
    paused = global_read_lock and applier.workers > 0
    return any(channel.applies for channel in channels) and not (paused or only_innodb)


def applies_in_parallel(connection: Connection, channels: Iterable[Channel]) -> bool:
    """Return whether several threads now apply transactions of one of `channels`. Raises MysqlError."""
    return any(channel.applies for channel in channels) and _read_applier(connection).workers > 0


def settle_sources(
    connection: Connection,
    abilities: Abilities,
    *,
    deadline: float,
    global_read_lock: bool = False,
    only_innodb: bool = False,
) -> tuple[SourcePosition, ...]:
    """Read under the lock until two consecutive readings are equal; the arguments are those of `read_sources`.

    Raises NotQuiescedError if there are none by `deadline` (time.monotonic()), MysqlError.
    """
    last = read_sources(connection, abilities, global_read_lock=global_read_lock, only_innodb=only_innodb)
    while last:
        time.sleep(_SETTLE_S)
        now = read_sources(connection, abilities, global_read_lock=global_read_lock, only_innodb=only_innodb)
        if now == last:
            break
        if time.monotonic() >= deadline:
            raise NotQuiescedError(
                "the replica kept executing under the lock until the lock's time was over",
                hint="use stop_replica = true in the job",
            )
        last = now
    return last


def mysql_position(
    channel: Channel, applier: Applier, workers: tuple[tuple[str, int], ...] | None, *, only_innodb: bool
) -> SourcePosition:
    """Return the exact part of a MySQL channel's position.

    `workers`: file and offset of each worker; None if we may not read them.
    """
    stated = (channel.file, channel.offset)
    gtid = channel.gtid if channel.by_gtid else ""
    if workers is None or (channel.applies and channel.by_gtid):
        return _position(channel, gtid=gtid)
    furthest = max((stated, *workers), key=_order)
    if not channel.applies and not channel.error and furthest == stated:
        return _position(channel, stated, gtid=gtid)
    if only_innodb and (applier.in_order or applier.workers <= 1):
        return _position(channel, furthest, gtid=gtid)
    return _position(channel, gtid=gtid)


def mariadb_position(channel: Channel, applier: Applier, gtid: str, *, global_read_lock: bool) -> SourcePosition:
    """Return the exact part of a MariaDB connection's position; `gtid`: the server's, "" if it is not exact."""
    # By GTID, parallel threads may execute one domain ahead of another: then no single offset is right.
    exact = applier.workers == 0 or (not channel.by_gtid and (global_read_lock or not channel.applies))
    return _position(
        channel, (channel.file, channel.offset) if exact else ("", 0), gtid=gtid if channel.by_gtid else ""
    )


def _position(channel: Channel, at: tuple[str, int] = ("", 0), *, gtid: str) -> SourcePosition:
    file, offset = at if at[0] else ("", 0)
    return SourcePosition(
        channel=channel.name, host=channel.host, port=channel.port, file=file, offset=offset, gtid=gtid
    )


def _order(at: tuple[str, int]) -> tuple[int, int]:
    """Return the sort key of a binlog position: the number in the file's name, the offset."""
    number = at[0].rpartition(".")[2]
    return (int(number) if number.isdigit() else -1, at[1])


def _read_applier(connection: Connection) -> Applier:
    values = connection.variables(*_VARIABLES)
    workers = (values.get(name, "0") for name in ("replica_parallel_workers", "slave_parallel_workers"))
    threads = max((int(value) for value in (*workers, values.get("slave_parallel_threads", "0"))), default=0)
    order = values.get("replica_preserve_commit_order", values.get("slave_preserve_commit_order", "ON"))
    return Applier(workers=threads, in_order=is_on(order))


def _read_workers(connection: Connection) -> dict[str, tuple[tuple[str, int], ...]] | None:
    """Return file and offset up to which each of MySQL's workers has executed, by channel; None without the right.

    The table is InnoDB, and each transaction writes its own position there.
    """
    try:
        rows = connection.rows(_WORKERS)
    except MysqlError as error:
        if error.errno not in _DENIED:
            raise
        return None
    found: dict[str, tuple[tuple[str, int], ...]] = {}
    for row in rows:
        name = str(row["Channel_name"])
        found[name] = (*found.get(name, ()), (str(row["Master_log_name"]), int(str(row["Master_log_pos"]))))
    return found


def _read_slave_pos(connection: Connection, *, still: bool) -> str:
    """Return MariaDB's gtid_slave_pos from its tables, which the transactions themselves write.

    Without the right to read them: the variable if no applier runs (`still`), else "".
    """
    last: dict[int, tuple[int, str]] = {}
    try:
        for row in connection.rows(_GTID_TABLES):
            table = quote(str(next(iter(row.values()))))
            query = f"SELECT domain_id, sub_id, server_id, seq_no FROM mysql.{table}"  # noqa: S608 - quoted
            for one in connection.rows(query):
                domain, sub_id = int(str(one["domain_id"])), int(str(one["sub_id"]))
                gtid = f"{domain}-{one['server_id']}-{one['seq_no']}"
                last[domain] = max(last.get(domain, (-1, "")), (sub_id, gtid))
    except MysqlError as error:
        if error.errno not in _DENIED:
            raise
        last = {}
    if last:
        return ",".join(gtid for _, (_, gtid) in sorted(last.items()))
    return str(connection.value("SELECT @@GLOBAL.gtid_slave_pos") or "") if still else ""


def name_problems(channels: Iterable[Channel]) -> tuple[str, ...]:
    """Return a message for the user for each source whose replication stopped with an error."""
    return tuple(
        f"replication from {channel.title} stopped with an error: {channel.error[:_ERROR_SHOWN]}"
        for channel in channels
        if channel.error and not channel.applies
    )


def name_inexact(sources: Iterable[SourcePosition]) -> tuple[str, ...]:
    """Return a message for the user, with the remedy, for each source without an exact position."""
    return tuple(
        f"no exact position of {one.host}:{one.port}"
        + (f' (channel "{one.channel}")' if one.channel else "")
        + ": appliers were at work; stop_replica = true makes it exact"
        for one in sources
        if not one.file and not one.gtid
    )
