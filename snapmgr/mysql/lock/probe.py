"""Who holds what a backup's lock would have to wait for: asked of the server, as it shows it best.

The servers differ in what holds a lock off and in where they show it: `snapmgr.mysql.lock.probe_mysql` and
`snapmgr.mysql.lock.probe_mariadb`. What they go by was measured, and is in docs/explanation/locks.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.mysql.connect.abilities import is_on
from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError
from snapmgr.mysql.connect.statements import code, first_words

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.lock.levels import LockLevel

# Enough to see what a statement is; whole ones may be megabytes.
TEXT_CHARS = 1024
DENIED = frozenset({1044, 1142, 1143, 1227})
NO_SUCH_TABLE = frozenset({1109, 1146})


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session that holds what our lock would wait for."""

    key: Hashable
    """The same for as long as it holds the same for the same statement."""
    connection_id: int | None
    """None where the server does not tell whose it is."""
    account: str
    """user@host."""
    what: str
    """What it does; " for 5 s" can be put behind it."""
    age_s: float | None
    """Since when; None where no clock of the server says it."""
    statement: str = ""
    """The first words, without literals."""
    own_clock: bool = True
    """Whether `age_s` is that of what holds it; False: it may be a procedure's, whose present statement is younger."""
    idle: bool = False
    """No statement runs."""
    only_reads: bool = False
    """A running SELECT of an ordinary client, which holds nothing but tables open for reading."""
    system: bool = False
    """A thread of the server's own, such as a replica's applier."""


class LockProbe(ABC):
    """Sees who would hold one level of lock off, through a connection, which itself never counts."""

    def __init__(self, connection: Connection, level: LockLevel) -> None:
        """Look through `connection`; nothing is asked before the first `look`."""
        self._connection = connection
        self._level = level
        self.complaints: list[str] = []
        """What could not be seen, and why: sentences, each once."""

    def look(self, min_age_s: float) -> list[Session]:
        """Return who holds it off now; of those whose age is known, the ones of at least `min_age_s`.

        Raises ConnectionLostError. Whatever else fails is a complaint, and then nobody is seen.
        """
        try:
            found = self._look(min_age_s)
        except ConnectionLostError:
            raise
        except MysqlError as error:
            self._complain(f"what would hold the lock off cannot be seen: {error.message}")
            return []
        return [holder for holder in found if holder.age_s is None or holder.age_s >= min_age_s]

    def held_up_by(self) -> dict[int, int]:
        """Return, for connections that wait for a row lock, a connection that holds it; empty if it cannot be seen."""
        try:
            rows = self._connection.rows(self._row_lock_waits)
        except ConnectionLostError:
            raise
        except MysqlError:
            return {}
        return {number(row["id"]): number(row["holder"]) for row in rows}

    _row_lock_waits: str

    @abstractmethod
    def _look(self, min_age_s: float) -> list[Session]:
        """Return who holds it off now. Raises MysqlError."""

    def _complain(self, text: str) -> None:
        if text not in self.complaints:
            self.complaints.append(text)

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
        # The list of processes would just be shorter; this table asks for the same privilege, and says so.
        if self._refused("SELECT trx_id FROM information_schema.INNODB_TRX LIMIT 1"):
            self._complain("what others run cannot be seen: the account lacks the privilege PROCESS")

    def _performance_schema_shows(self, *instruments: str) -> bool:
        """Return whether performance_schema is on, open to us, and has these instruments on."""
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
    """Given a row with id, user, host, info and perhaps query (an id of the statement), return its session."""
    text = str(row["info"])
    return Session(
        key=(row["id"], row.get("query", text)),
        connection_id=number(row["id"]),
        account=account(row),
        what="has been running",
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
