"""Finds the sessions that a backup's lock would wait for.

Blockers of a lock, and the tables that show them, differ between servers: see `snapmgr.mysql.lock.probe_mysql` and
`snapmgr.mysql.lock.probe_mariadb`. Their rules were measured: docs/explanation/locks.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.mysql.connect.abilities import is_on
from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError
from snapmgr.mysql.connect.statements import code, first_words

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.lock.levels import LockLevel

# Enough to classify a statement; a whole one may have megabytes.
TEXT_CHARS = 1024
DENIED = frozenset({1044, 1142, 1143, 1227})
NO_SUCH_TABLE = frozenset({1109, 1146})


class Session(Struct, frozen=True, kw_only=True):
    """A session that our lock would wait for."""

    key: Hashable
    """The same as long as the session holds the same locks for the same statement."""
    connection_id: int | None
    """None if the server does not name the session."""
    account: str
    """user@host."""
    activity: str
    """Its activity, as text; " for 5 s" may follow."""
    age_s: float | None
    """Age of the activity; None if the server does not report it."""
    statement: str = ""
    """The first words of its statement, without literals."""
    own_clock: bool = True
    """Whether `age_s` is the age of the lock; False: it may be a procedure's, whose current statement is younger."""
    idle: bool = False
    """Whether it is idle, without a statement."""
    only_reads: bool = False
    """Whether it is an ordinary client that runs a SELECT and only has tables open for reading."""
    system: bool = False
    """Whether it is one of the server's own threads, such as a replica's applier."""


class LockProbe(ABC):
    """Finds the sessions that would block one level of lock. Its own connection never counts."""

    def __init__(self, connection: Connection, level: LockLevel) -> None:
        """Use `connection`; query nothing before the first `blocking_sessions`."""
        self._connection = connection
        self._level = level
        self.warnings: list[str] = []
        """Warnings about sessions that the probe cannot see, with reasons: each sentence once."""

    def blocking_sessions(self, min_age_s: float) -> list[Session]:
        """Return the sessions that block the lock now; where the age is known, only those of at least `min_age_s`.

        Raises ConnectionLostError. Any other failure adds a warning and returns no session.
        """
        try:
            found = self._blocking_sessions(min_age_s)
        except ConnectionLostError:
            raise
        except MysqlError as error:
            self._warn(f"cannot see which sessions would block the lock: {error.message}")
            return []
        return [session for session in found if session.age_s is None or session.age_s >= min_age_s]

    def row_lock_waits(self) -> dict[int, int]:
        """Return, for each connection that waits for a row lock, one that holds it; empty if we cannot see them."""
        try:
            rows = self._connection.rows(self._row_lock_query)
        except ConnectionLostError:
            raise
        except MysqlError:
            return {}
        return {number(row["id"]): number(row["holder"]) for row in rows}

    _row_lock_query: str

    @abstractmethod
    def _blocking_sessions(self, min_age_s: float) -> list[Session]:
        """Return the sessions that block the lock now. Raises MysqlError."""

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _refused(self, sql: str, errors: frozenset[int] = DENIED) -> bool:
        """Return whether a query fails with one of these errors."""
        try:
            self._connection.execute(sql)
        except MysqlError as error:
            if error.errno in errors:
                return True
            raise
        return False

    def _check_process_privilege(self) -> None:
        # Without the privilege the process list is only shorter; this table needs it too, and fails.
        if self._refused("SELECT trx_id FROM information_schema.INNODB_TRX LIMIT 1"):
            self._warn("cannot see what other sessions run: the account lacks the privilege PROCESS")

    def _performance_schema_shows(self, *instruments: str) -> bool:
        """Return whether performance_schema is on, readable, and has these instruments enabled."""
        if not is_on(self._connection.variables("performance_schema").get("performance_schema")):
            return False
        try:
            return all(
                self._connection.value(
                    "SELECT 1 FROM performance_schema.setup_instruments WHERE NAME = %s AND ENABLED = 'YES'", (name,)
                )
                for name in instruments
            ) and not self._refused("SELECT 1 FROM performance_schema.metadata_locks LIMIT 1")
        except MysqlError as error:
            if error.errno in DENIED | NO_SUCH_TABLE:
                return False
            raise


def running(row: Mapping[str, object], age_s: float) -> Session:
    """Given a row with id, user, host, info and optionally query (the statement's id), return its session."""
    text = str(row["info"])
    return Session(
        key=(row["id"], row.get("query", text)),
        connection_id=number(row["id"]),
        account=account(row),
        activity="has been running",
        age_s=age_s,
        own_clock=False,
        statement=words(text),
    )


def words(text: str) -> str:
    """Return the first words of a statement, without comments and literals."""
    return first_words(code(text)) if text else ""


def account(row: Mapping[str, object]) -> str:
    """Return user@host of a session, without its port."""
    host = str(row["host"] or "").rsplit(":", 1)[0]
    return f"{row['user'] or '?'}@{host or '?'}"


def seconds(value: object) -> float:
    """Return a server's number, 0 for NULL."""
    return float(str(value)) if value is not None else 0.0


def number(value: object) -> int:
    """Return a server's whole number, 0 for NULL."""
    return int(str(value)) if value is not None else 0
