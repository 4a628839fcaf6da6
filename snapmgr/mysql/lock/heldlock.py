"""Holds a granted lock: its deadline, the position read under it, and the proof that it held.

Measured, not documented: a lock dies silently with its connection (KILL, wait_timeout), and writers continue
immediately. So a snapshot counts only if the same connection still answers afterwards and the position has not moved.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.catalog.manifest import QuiesceRecord
from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.client import MysqlError
from snapmgr.mysql.lock.position import PositionReading, read_position
from snapmgr.mysql.lock.replication import settle_sources

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Position, SourcePosition
    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.connect.killer import ConnectionKiller
    from snapmgr.mysql.lock.levels import LockChoice

# From the thaw of a frozen server to the proof; stopping the server uses part of it too.
_THAWED_IDLE_S = 3
_REDO_POLL_S = 0.01
_WHO_WROTE = (
    "try again; MySQL lets FLUSH PRIVILEGES, FLUSH STATUS, FLUSH OPTIMIZER_COSTS and ANALYZE TABLE write to its binary "
    "log under these locks: is one of them run again and again?"
)


class LockLostError(NotQuiescedError):
    """The lock did not hold until the proof: the snapshot cannot be used."""


class Grant(Struct, frozen=True, kw_only=True):
    """A granted lock, and the cost of getting it."""

    connection: Connection
    """Holds the lock."""
    killer: ConnectionKiller
    abilities: Abilities
    choice: LockChoice
    hold_s: float
    """Maximum time to hold it."""
    replica: bool
    """Whether the server replicates from a source."""
    rows_ahead: bool
    """Whether a replica's applier may have written rows that no position covers yet."""
    attempts: int
    waited_s: float
    stall_s: float
    """The longest time that writers can have queued behind a failed try."""
    asked: float
    """time.monotonic() when the lock request began to stop writers."""
    granted: float
    """time.monotonic()"""
    killed: tuple[str, ...] = ()
    """The SELECTs that we killed for it, as text."""


class HeldLock:
    """A granted lock and its connection."""

    def __init__(self, grant: Grant) -> None:
        """Read the position. Raises MysqlError, NotQuiescedError; then the caller must end the connection."""
        self._grant = grant
        self.choice = grant.choice
        self._connection = grant.connection
        self._held_s: float | None = None
        self._proof: str | None = None
        self.deadline = grant.granted + grant.hold_s
        """time.monotonic() by which the lock must be released."""
        self._idle_s = idle_s(grant.hold_s)
        self._bound_time()
        for statement in self.choice.flush:
            self._connection.execute(statement)
        if self.choice.redo_lags and grant.abilities.flavor == "mariadb":
            await_redo(self._connection, self.deadline)
        self.sources = self._read_sources()
        """Positions that a replica has executed, as exactly as this lock allows."""
        self._before = self._read_position()
        self._bound_time()

    @property
    def connection(self) -> Connection:
        """The connection that took it; after `release` it may be used for anything, if it is not gone."""
        return self._connection

    @property
    def position(self) -> Position | None:
        """The binlog position, if the lock stops it from moving; None without binary log."""
        known = self.choice.position and not self._grant.rows_ahead
        return self._before.position if known else None

    def _read_sources(self) -> tuple[SourcePosition, ...]:
        # `replica` was read before the lock: most servers have no source, and every round trip counts here.
        if not self.choice.position or not self._grant.replica:
            return ()
        return settle_sources(
            self._connection,
            self._grant.abilities,
            deadline=self.deadline,
            global_read_lock=self.choice.global_read_lock,
            only_innodb=self.choice.only_innodb,
        )

    def _bound_time(self) -> None:
        """Make reads end at the deadline, and the server free the lock a little later in case we are stopped now."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise LockLostError("the lock's time was over before the snapshot was proven")
        self._connection.set_read_timeout(left)
        # The server restarts its count at each statement. It counts whole seconds, so there is rarely a change.
        self._shorten_idleness(idle_s(left))

    def expect_freeze(self) -> None:
        """Prepare for a stop of the server process: the server restarts its idle count when it resumes."""
        self._shorten_idleness(_THAWED_IDLE_S)

    def _shorten_idleness(self, idle_s: int) -> None:
        if idle_s < self._idle_s:
            self._idle_s = idle_s
            self._connection.execute(f"SET SESSION wait_timeout = {idle_s}")

    def _read_position(self) -> PositionReading:
        self._bound_time()
        return read_position(self._connection, self._grant.abilities)

    def prove(self) -> None:
        """Show that the lock still holds: same connection, same position. Raises LockLostError."""
        try:
            after = self._read_position()
        except MysqlError as error:
            raise LockLostError(
                f"the lock was lost during the snapshot: {error.message}",
                hint="somebody killed the connection, or the server went away; see the server's log",
            ) from None
        if after.connection_id != self._before.connection_id or after.connection_id != self._connection.connection_id:
            raise LockLostError("the lock was lost during the snapshot: another connection answers")
        self._proof = f"connection {after.connection_id} answered after the snapshot"
        if not self.choice.position:
            return
        if after.position != self._before.position:
            raise LockLostError(
                f"the position moved under the lock: {self._before.position} to {after.position}", hint=_WHO_WROTE
            )
        self._proof += " and the position had not moved"

    def release(self) -> None:
        """Release the lock, or cut the connection if that fails. Never raises: the proof is done."""
        try:
            self._connection.set_read_timeout(max(self.deadline - time.monotonic(), 0.1))
            for statement in self.choice.unlock:
                self._connection.execute(statement)
        except MysqlError:
            self._connection.drop()
        self._held_s = time.monotonic() - self._grant.granted

    def end(self) -> None:
        """Make the server end the connection, and with it any lock; raises no SnapmgrError."""
        self._grant.killer.kill(self._connection)

    def close(self) -> None:
        """Close the connection; never raises."""
        self._connection.close()

    def record(self) -> QuiesceRecord:
        """Return the record for the manifest; call after `prove` and `release`."""
        if self._proof is None or self._held_s is None:
            raise AssertionError("a lock without proof has no record")
        return QuiesceRecord(
            level=self.choice.name,
            why=self.choice.why,
            proof=self._proof,
            attempts=self._grant.attempts,
            waited_s=self._grant.waited_s,
            held_s=self._held_s,
            stall_s=max(self._grant.stall_s, self._grant.granted - self._grant.asked + self._held_s),
            position_from="server" if self.position is not None else "nowhere",
            killed=self._grant.killed,
        )


def idle_s(left_s: float) -> int:
    """Return the wait_timeout that frees a lock soon after its time, and never before."""
    return math.ceil(left_s) + 1


def await_redo(connection: Connection, deadline: float) -> None:
    """Wait until MariaDB has written all redo made so far to its log files; `deadline` is of time.monotonic().

    With innodb_flush_log_at_trx_commit=0 a commit stays in memory for up to a second. FLUSH ENGINE LOGS does not write
    it (seen on 10.11; 11.8 does), and no other statement does without changing data. InnoDB's own thread writes it
    every innodb_flush_log_at_timeout seconds. Raises NotQuiescedError at the deadline, MysqlError.
    """
    made, written = _redo_lsns(connection)
    while written < made:
        if time.monotonic() + _REDO_POLL_S >= deadline:
            raise NotQuiescedError(
                "the latest commits are not in InnoDB's log files yet, and the lock's time is over: "
                "innodb_flush_log_at_trx_commit is 0",
                hint="set it to 2 or 1, or innodb_flush_log_at_timeout to less than lock_hold",
            )
        time.sleep(_REDO_POLL_S)
        _, written = _redo_lsns(connection)


def _redo_lsns(connection: Connection) -> tuple[int, int]:
    """Return the LSN of the latest redo, and the LSN up to which the log files have it."""
    found = connection.status("Innodb_lsn_current", "Innodb_lsn_flushed")
    return int(found["innodb_lsn_current"]), int(found["innodb_lsn_flushed"])
