"""Finds the sessions that block MySQL's locks.

Measured on MySQL 9: FLUSH TABLES WITH READ LOCK waits for every session with the global intention lock (every write,
DDL even while it waits, LOCK TABLES … WRITE), and for every table in use by a running statement, LOCK TABLES or
HANDLER. An open transaction that runs no statement holds neither. LOCK INSTANCE FOR BACKUP waits for the intention
locks on BACKUP LOCK. performance_schema shows all of these, in metadata_locks and table_handles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.mysql.connect.statements import kind, reads_tables
from snapmgr.mysql.lock.probe import TEXT_CHARS, LockProbe, Session, account, number, running, seconds, words

if TYPE_CHECKING:
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.lock.levels import LockLevel

_ORDINARY_THREAD = "thread/sql/one_connection"
_PLAIN_SELECTS = ("statement/sql/select", "statement/com/Execute")
_WAITING_READER = ("Waiting for", "User lock")

# table_handles leaves the system schemas out. The event that took a lock is part of a session's key: an applier keeps
# it as long as it applies one batch of rows.
_HELD = """
SELECT h.held, h.since, t.THREAD_ID AS thread, t.NAME AS name, t.PROCESSLIST_ID AS id, t.PROCESSLIST_USER AS user,
  t.PROCESSLIST_HOST AS host, t.PROCESSLIST_COMMAND AS command, t.PROCESSLIST_TIME AS time_s,
  LEFT(COALESCE(e.SQL_TEXT, t.PROCESSLIST_INFO), %s) AS info,
  e.NESTING_EVENT_LEVEL AS depth, e.EVENT_NAME AS event, e.TIMER_WAIT / 1e12 AS event_s,
  e.EVENT_ID IS NOT NULL AND e.END_EVENT_ID IS NULL AS running
FROM (
  SELECT OWNER_THREAD_ID AS owner, OWNER_EVENT_ID AS since, 'table' AS held
    FROM performance_schema.table_handles WHERE OWNER_THREAD_ID > 0
  UNION ALL SELECT OWNER_THREAD_ID, OWNER_EVENT_ID,
      CASE OBJECT_TYPE WHEN 'GLOBAL' THEN 'global' WHEN 'BACKUP LOCK' THEN 'backup' ELSE 'system' END
    FROM performance_schema.metadata_locks WHERE LOCK_STATUS = 'GRANTED' AND (
      (OBJECT_TYPE IN ('GLOBAL', 'BACKUP LOCK') AND LOCK_TYPE = 'INTENTION_EXCLUSIVE')
      OR (OBJECT_TYPE = 'TABLE' AND OBJECT_SCHEMA IN ('mysql', 'information_schema', 'performance_schema')))
) AS h
JOIN performance_schema.threads AS t ON t.THREAD_ID = h.owner
LEFT JOIN performance_schema.events_statements_current AS e ON e.THREAD_ID = h.owner
WHERE t.PROCESSLIST_ID IS NULL OR t.PROCESSLIST_ID <> CONNECTION_ID()
ORDER BY depth
"""


class MysqlLockProbe(LockProbe):
    """Uses performance_schema; without it the process list, which shows statements but no locks."""

    _row_lock_query = (
        "SELECT r.PROCESSLIST_ID AS id, b.PROCESSLIST_ID AS holder FROM performance_schema.data_lock_waits AS w "
        "JOIN performance_schema.threads AS r ON r.THREAD_ID = w.REQUESTING_THREAD_ID "
        "JOIN performance_schema.threads AS b ON b.THREAD_ID = w.BLOCKING_THREAD_ID"
    )

    def __init__(self, connection: Connection, level: LockLevel) -> None:
        """As in `LockProbe`."""
        super().__init__(connection, level)
        self._shows_locks: bool | None = None

    def _blocking_sessions(self, min_age_s: float) -> list[Session]:  # noqa: ARG002 - the clock of performance_schema decides later
        if self._shows_locks is None:
            self._shows_locks = self._performance_schema_shows(
                "wait/lock/metadata/sql/mdl", "wait/lock/table/sql/handler"
            )
            if not self._shows_locks:
                self._warn(
                    "cannot see which locks other sessions hold, only their running statements: performance_schema or "
                    "its lock instruments are off, or the account lacks SELECT on performance_schema.*"
                )
                self._check_process_privilege()
        return self._by_locks() if self._shows_locks else self._by_processes()

    def _by_locks(self) -> list[Session]:
        threads: dict[object, list[dict[str, object]]] = {}
        for row in self._connection.rows(_HELD, (TEXT_CHARS,)):
            threads.setdefault(row["thread"], []).append(row)
        return [session for rows in threads.values() if (session := self._session(rows)) is not None]

    def _session(self, rows: list[dict[str, object]]) -> Session | None:
        row = rows[0]
        ordinary = row["name"] == _ORDINARY_THREAD
        # A procedure may run for hours, but its locks belong to its current statement.
        under_way = [seconds(each["event_s"]) for each in rows if each["running"]]
        busy = bool(row["running"])
        idle = ordinary and row["command"] == "Sleep"
        held = {str(each["held"]) for each in rows}
        if self._level == "global-read-lock":
            held.discard("backup")
        if not busy:
            # An open transaction has read them; they are no longer in use.
            held.discard("system")
        if not held:
            return None
        if not ordinary:
            # An applier's clock shows the lag behind its source.
            activity, age_s = f"is the server's own thread ({_thread_name(row)}), at work", None
        elif idle:
            # The locks of a write or DDL end with the statement.
            activity = "holds tables by LOCK TABLES, HANDLER or FLUSH TABLES, idle"
            age_s = seconds(row["time_s"])
        else:
            activity, age_s = "has been running", min(under_way, default=seconds(row["time_s"]))
        return Session(
            key=(row["thread"], max(number(each["since"]) for each in rows)),
            connection_id=number(row["id"]) or None,
            account=account(row),
            activity=activity,
            age_s=age_s,
            # That of an idle session has ended, and did not take these locks.
            statement="" if idle else words(str(row["info"] or "")),
            # The tables of performance_schema are read one after another: between two reads an ordinary client ends
            # its statement. Only who holds the same lock at several looks, for long enough, is really idle with it.
            own_clock=not idle,
            idle=idle,
            system=not ordinary,
            only_reads=ordinary and busy and held <= {"table", "system"} and row["event"] in _PLAIN_SELECTS,
        )

    def _by_processes(self) -> list[Session]:
        own = number(self._connection.value("SELECT CONNECTION_ID()"))
        found = []
        for listed in self._connection.rows("SHOW FULL PROCESSLIST"):
            row = {name.lower(): value for name, value in listed.items()}
            text = str(row["info"] or "")[:TEXT_CHARS]
            if row["id"] == own or not text or row["command"] not in ("Query", "Execute"):
                continue
            does = kind(text)
            waits = str(row["state"] or "").startswith(_WAITING_READER)
            if does in ("write", "ddl") or (does == "read" and reads_tables(text) and not waits):
                found.append(running(row, seconds(row["time"])))
        return found


def _thread_name(row: dict[str, object]) -> str:
    return str(row["name"]).rsplit("/", 1)[-1].replace("_", " ")
