"""Finds the sessions that block MariaDB's locks.

Measured on MariaDB 10.11 and 11.8: both levels take one lock, "backup", in several modes, and reading never takes it.
BACKUP STAGE START waits for DDL that does not copy yet, LOCK TABLES … WRITE and other backups. BLOCK_DDL waits for
writes to tables that are not transactional. The other stages wait for nothing long. FLUSH TABLES WITH READ LOCK waits
for every write and DDL. performance_schema (off by default) and the plugin METADATA_LOCK_INFO show the modes. Without
them we use the process list, the engines of the tables that statements name, and a BACKUP STAGE START without waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from snapmgr.mysql.connect.client import MysqlError
from snapmgr.mysql.connect.statements import code, kind, target
from snapmgr.mysql.lock.probe import (
    DENIED,
    NO_SUCH_TABLE,
    TEXT_CHARS,
    LockProbe,
    Session,
    account,
    number,
    running,
    seconds,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.lock.levels import LockLevel

Row = dict[str, object]

_LOCK_WAIT_TIMEOUT = 1205
_TABLES_SHOWN = 3
_APPLIERS = ("Slave_SQL", "Slave_worker")
_SESSION = (
    "SELECT p.ID AS id, p.USER AS user, p.HOST AS host, p.DB AS db, p.COMMAND AS command, p.STATE AS state, "
    "p.TIME_MS / 1000 AS age_s, p.QUERY_ID AS query, LEFT(p.INFO, %s) AS info"
)
_PROCESSES = (
    _SESSION + " FROM information_schema.PROCESSLIST AS p WHERE p.ID <> CONNECTION_ID() AND p.INFO IS NOT NULL "
    "AND p.COMMAND <> 'Daemon' AND p.TIME_MS >= %s"
)
_SESSIONS = _SESSION + " FROM information_schema.PROCESSLIST AS p WHERE p.ID <> CONNECTION_ID() AND p.ID IN %s"
# The mode's name is the plugin's. Not joined with the process list, which has no index: with a thousand connections
# that took 0.1 s, this takes 1 ms.
_MODES = {
    "plugin": "SELECT THREAD_ID AS id, LOCK_MODE AS mode FROM information_schema.METADATA_LOCK_INFO "
    "WHERE LOCK_MODE LIKE 'MDL\\_BACKUP\\_%'",
    "performance_schema": "SELECT OWNER_THREAD_ID AS thread, CONCAT('MDL_', LOCK_TYPE) AS mode "
    "FROM performance_schema.metadata_locks WHERE OBJECT_TYPE = 'BACKUP' AND LOCK_STATUS = 'GRANTED'",
}
_THREADS = "SELECT THREAD_ID AS thread, PROCESSLIST_ID AS id FROM performance_schema.threads WHERE THREAD_ID IN %s"
_WAITED_FOR: dict[LockLevel, frozenset[str]] = {
    "backup-lock": frozenset({"MDL_BACKUP_DML"}),
    "global-read-lock": frozenset(
        {"MDL_BACKUP_DML", "MDL_BACKUP_TRANS_DML", "MDL_BACKUP_DDL", "MDL_BACKUP_ALTER_COPY"}
    ),
}
_STAGES = ("MDL_BACKUP_START", "MDL_BACKUP_FLUSH", "MDL_BACKUP_WAIT", "MDL_BACKUP_BLOCK")
# performance_schema still shows DDL for an ALTER that has stepped down to ALTER_COPY: only START itself shows it.
_BLOCK_START = ("MDL_BACKUP_DDL", *_STAGES)


class MariadbLockProbe(LockProbe):
    """Uses the modes of the backup lock if the server shows them, otherwise the process list."""

    _row_lock_query = (
        "SELECT r.trx_mysql_thread_id AS id, b.trx_mysql_thread_id AS holder "
        "FROM information_schema.INNODB_LOCK_WAITS AS w "
        "JOIN information_schema.INNODB_TRX AS r ON r.trx_id = w.requesting_trx_id "
        "JOIN information_schema.INNODB_TRX AS b ON b.trx_id = w.blocking_trx_id"
    )

    def __init__(self, connection: Connection, level: LockLevel, *, backup_stages: bool) -> None:
        """As in `LockProbe`; `backup_stages`: whether the server knows BACKUP STAGE."""
        super().__init__(connection, level)
        self._backup_stages = backup_stages
        self._source: Literal["plugin", "performance_schema", "processes"] | None = None
        self._engines: dict[tuple[str, str], bool | None] = {}

    def _blocking_sessions(self, min_age_s: float) -> list[Session]:
        self._source = self._source or self._choose_source()
        if self._source == "processes":
            rows = self._connection.rows(_PROCESSES, (TEXT_CHARS, min_age_s * 1000))
            found = [running(row, seconds(row["age_s"])) for row in self._writers(rows)]
            if (self._level == "backup-lock" or not found) and self._start_is_blocked():
                found += self._guess_who_blocks_start(rows)
        else:
            rows = self._held_modes(self._source)
            found = [_session(row) for row in rows if row["mode"] in _WAITED_FOR[self._level]]
            if self._level == "backup-lock" and self._start_is_blocked():
                found += [_session(row) for row in rows if str(row["mode"]).startswith(_BLOCK_START)]
        return list({session.key: session for session in found}.values())

    def _held_modes(self, source: Literal["plugin", "performance_schema"]) -> list[Row]:
        """Return a row for each granted mode of the backup lock: its session, and the mode."""
        modes = self._connection.rows(_MODES[source])
        if modes and source == "performance_schema":
            threads = self._connection.rows(_THREADS, (tuple({row["thread"] for row in modes}),))
            ids = {row["thread"]: row["id"] for row in threads}
            modes = [{"id": ids.get(row["thread"]), "mode": row["mode"]} for row in modes]
        if not modes:
            return []
        sessions = self._connection.rows(_SESSIONS, (TEXT_CHARS, tuple({number(row["id"]) for row in modes})))
        by_id = {number(row["id"]): row for row in sessions}
        return [{**by_id[number(row["id"])], "mode": row["mode"]} for row in modes if number(row["id"]) in by_id]

    def _choose_source(self) -> Literal["plugin", "performance_schema", "processes"]:
        self._check_process_privilege()
        if not self._refused("SELECT 1 FROM information_schema.METADATA_LOCK_INFO LIMIT 1", DENIED | NO_SUCH_TABLE):
            return "plugin"
        if self._performance_schema_shows("wait/lock/metadata/sql/mdl"):
            return "performance_schema"
        return "processes"

    def _writers(self, rows: Iterable[Row]) -> list[Row]:
        """Return the statements that block this level, judged by their text and their tables' engines."""
        writers = [row for row in rows if kind(str(row["info"])) in ("write", "ddl") and not _has_no_lock_yet(row)]
        if self._level == "global-read-lock" or not writers:
            return writers
        in_innodb = self._in_innodb()
        return [row for row in writers if not self._is_transactional(row, in_innodb)]

    def _is_transactional(self, row: Row, in_innodb: set[int]) -> bool:
        text = str(row["info"])
        written = target(text)
        if written is None and kind(text) == "ddl":
            # CREATE TABLE … SELECT and the like block START, which we try as well.
            return True
        schema, table = written or (None, "")
        known = self._engine_is_transactional(schema or str(row["db"] or ""), table) if table else None
        # A view, or a table that we may not see: a session that writes to InnoDB has a transaction there.
        return known if known is not None else number(row["id"]) in in_innodb

    def _in_innodb(self) -> set[int]:
        if self._refused("SELECT trx_id FROM information_schema.INNODB_TRX LIMIT 1"):
            return set()
        rows = self._connection.rows("SELECT trx_mysql_thread_id AS id FROM information_schema.INNODB_TRX")
        return {number(row["id"]) for row in rows}

    def _engine_is_transactional(self, schema: str, table: str) -> bool | None:
        """Return whether a table's engine is transactional; None if the table is not visible."""
        if (schema, table) not in self._engines:
            # Reading about a table waits for a session that has it exclusively.
            rows = self._connection.rows(
                "SET STATEMENT lock_wait_timeout = 1, max_statement_time = 1 FOR "
                "SELECT t.ENGINE AS engine, t.CREATE_OPTIONS AS options, e.TRANSACTIONS AS transactions "
                "FROM information_schema.TABLES AS t LEFT JOIN information_schema.ENGINES AS e ON e.ENGINE = t.ENGINE "
                "WHERE t.TABLE_SCHEMA = %s AND t.TABLE_NAME = %s",
                (schema, table),
            )
            known: bool | None = None
            if rows and rows[0]["engine"]:
                # Aria's tables are crash-safe and do not block, like InnoDB's, unless made with TRANSACTIONAL=0.
                aria = rows[0]["engine"] == "Aria" and "transactional=0" not in str(rows[0]["options"]).lower()
                known = aria or rows[0]["transactions"] == "YES"
            self._engines[schema, table] = known
        return self._engines[schema, table]

    def _start_is_blocked(self) -> bool:
        """Try BACKUP STAGE START without waiting, and end it immediately: only DDL waits for it, for a millisecond."""
        if not self._backup_stages:
            return False
        try:
            self._connection.execute("SET STATEMENT lock_wait_timeout = 0 FOR BACKUP STAGE START")
        except MysqlError as error:
            if error.errno == _LOCK_WAIT_TIMEOUT:
                return True
            if error.errno in DENIED:
                self._warn("cannot check for LOCK TABLES or another backup: the account lacks the privilege RELOAD")
                return False
            raise
        self._connection.execute("BACKUP STAGE END")
        return False

    def _guess_who_blocks_start(self, rows: Iterable[Row]) -> list[Session]:
        """Return the DDL that runs, else one unnamed session: the process list shows no locks."""
        named = [row for row in rows if kind(str(row["info"])) == "ddl" and not _has_no_lock_yet(row)]
        if named:
            return [running(row, seconds(row["age_s"])) for row in named]
        opened = self._connection.rows("SHOW OPEN TABLES")
        used = [f"{row['Database']}.{row['Table']}" for row in opened if number(row["In_use"])]
        if self._level == "global-read-lock" and opened and not used:
            # Another backup's stage does not block this level.
            return []
        shown = ", ".join(used[:_TABLES_SHOWN]) + (", …" if len(used) > _TABLES_SHOWN else "")
        activity = "LOCK TABLES … WRITE, DDL or another backup" + (f" (tables in use: {shown})" if used else "")
        return [Session(key="start", connection_id=None, account="", activity=activity, age_s=None, idle=True)]


def _session(row: Row) -> Session:
    if row["info"] is not None:
        return running(row, seconds(row["age_s"]))
    if row["command"] in _APPLIERS:
        activity, idle = "is the replication applier, at work", False
    elif str(row["mode"]).startswith(_STAGES):
        activity, idle = "is another backup (BACKUP STAGE), idle", True
    else:
        activity, idle = "holds LOCK TABLES … WRITE, idle", True
    return Session(
        key=(row["id"], row["query"]),
        connection_id=number(row["id"]),
        account=account(row),
        activity=activity,
        # An applier's clock does not restart with each transaction.
        age_s=seconds(row["age_s"]) if idle else None,
        # Modes and sessions are two queries: a statement may have ended between them, so several looks must agree.
        own_clock=not idle,
        idle=idle,
        system=row["command"] in _APPLIERS,
    )


def _has_no_lock_yet(row: Row) -> bool:
    """Return whether a statement still waits for its own lock, as DROP and TRUNCATE do before they take ours."""
    waits = str(row["state"] or "").startswith("Waiting for table metadata lock")
    return waits and code(str(row["info"]))[:8].upper().startswith(("DROP", "TRUNCATE"))
