"""A lock that is held: until when, the position under it, and the proof that it held.

Measured, not documented: a lock dies silently with its connection (KILL, wait_timeout) and writers go on at once. Hence
a snapshot counts only if the same connection still answers afterwards and the position has not moved.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.catalog.manifest import QuiesceRecord
from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.client import MysqlError
from snapmgr.mysql.lock.position import PositionReading, read_position
from snapmgr.mysql.lock.redo import await_redo
from snapmgr.mysql.lock.replication import settle_sources

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Position, SourcePosition
    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.connect.standby import ConnectionKiller
    from snapmgr.mysql.lock.levels import LockChoice

# From the thaw of a frozen server to the proof; stopping it takes a part of it too.
_THAWED_IDLE_S = 3
_WHO_WROTE = (
    "try again; MySQL lets FLUSH PRIVILEGES, FLUSH STATUS, FLUSH OPTIMIZER_COSTS and ANALYZE TABLE write to its binary "
    "log under these locks: is one of them run again and again?"
)


class LockLostError(NotQuiescedError):
    """The lock did not hold until the proof: the snapshot is worth nothing."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """A lock that was granted, and what it took to get it."""

    connection: Connection
    """The one that holds it."""
    standby: ConnectionKiller
    abilities: Abilities
    choice: LockChoice
    hold_s: float
    """How long it may be held."""
    replica: bool
    """Whether the server has a source that it replicates from."""
    rows_ahead: bool
    """Whether a replica's applier may have written what no position tells."""
    attempts: int
    waited_s: float
    stall_s: float
    """The longest that writers can have queued behind a try that failed."""
    asked: float
    """time.monotonic() at which it began to stop writers."""
    granted: float
    """time.monotonic()"""


class HeldLock:
    """A granted lock and its connection."""

    def __init__(self, grant: Grant) -> None:
        """Read the position. Raises MysqlError, NotQuiescedError; the caller ends the connection then."""
        self._grant = grant
        self._choice = grant.choice
        self._connection = grant.connection
        self._held_s: float | None = None
        self._proof: str | None = None
        self.deadline = grant.granted + grant.hold_s
        """time.monotonic() at which the lock must be gone."""
        self._idle_s = idle_s(grant.hold_s)
        self._bound_time()
        for statement in self._choice.flush:
            self._connection.execute(statement)
        if self._choice.redo_lags and grant.abilities.flavor == "mariadb":
            await_redo(self._connection, self.deadline)
        self.sources = self._read_sources()
        """How far a replica has executed, as exactly as can be known under this lock."""
        self._before = self._sight()
        self._bound_time()

    @property
    def position(self) -> Position | None:
        """The binlog position, if it stands still while the lock holds; None without binary log."""
        known = self._choice.position and not self._grant.rows_ahead
        return self._before.position if known else None

    def _read_sources(self) -> tuple[SourcePosition, ...]:
        # Asked before the lock whether there is any: most servers have none, and every round trip counts here.
        if not self._choice.position or not self._grant.replica:
            return ()
        return settle_sources(
            self._connection,
            self._grant.abilities,
            deadline=self.deadline,
            global_read_lock=self._choice.global_read_lock,
            only_innodb=self._choice.only_innodb,
        )

    def _bound_time(self) -> None:
        """Let reads end at the deadline, and the server free the lock a little later should we be stopped now."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise LockLostError("the lock's time was over before the snapshot was proven")
        self._connection.set_read_timeout(left)
        # The server counts anew from each statement. It counts in whole seconds, so mostly there is nothing to change.
        self._shorten_idleness(idle_s(left))

    def expect_freeze(self) -> None:
        """Be told that the server process will now be stopped: it counts idle time anew once it goes on."""
        self._shorten_idleness(_THAWED_IDLE_S)

    def _shorten_idleness(self, idle_s: int) -> None:
        if idle_s < self._idle_s:
            self._idle_s = idle_s
            self._connection.execute(f"SET SESSION wait_timeout = {idle_s}")

    def _sight(self) -> PositionReading:
        self._bound_time()
        return read_position(self._connection, self._grant.abilities)

    def prove(self) -> None:
        """Show that the lock still holds: same connection, same position. Raises LockLostError."""
        try:
            after = self._sight()
        except MysqlError as error:
            raise LockLostError(
                f"the lock was lost during the snapshot: {error.message}",
                hint="somebody killed the connection, or the server went away; look into its log",
            ) from None
        if after.connection_id != self._before.connection_id or after.connection_id != self._connection.connection_id:
            raise LockLostError("the lock was lost during the snapshot: another connection answers")
        self._proof = f"connection {after.connection_id} answered after the snapshot"
        if not self._choice.position:
            return
        if after.position != self._before.position:
            raise LockLostError(
                f"the position moved under the lock: {self._before.position} to {after.position}", hint=_WHO_WROTE
            )
        self._proof += " and the position had not moved"

    def release(self) -> None:
        """Give the lock back; cut the connection if that does not work at once. Never raises: the proof is done."""
        try:
            self._connection.set_read_timeout(max(self.deadline - time.monotonic(), 0.1))
            for statement in self._choice.unlock:
                self._connection.execute(statement)
        except MysqlError:
            self._connection.drop()
        self._held_s = time.monotonic() - self._grant.granted

    def end(self) -> None:
        """Have the server end the connection, and with it the lock if it still holds; raises no SnapmgrError."""
        self._grant.standby.end(self._connection)

    def close(self) -> None:
        """Close the connection; never raises."""
        self._connection.close()

    def record(self) -> QuiesceRecord:
        """Return how it went; after `prove` and `release`."""
        if self._proof is None or self._held_s is None:
            raise AssertionError("a lock without proof has no record")
        return QuiesceRecord(
            level=self._choice.name,
            why=self._choice.why,
            proof=self._proof,
            attempts=self._grant.attempts,
            waited_s=self._grant.waited_s,
            held_s=self._held_s,
            stall_s=max(self._grant.stall_s, self._grant.granted - self._grant.asked + self._held_s),
            position_from="server" if self.position is not None else "nowhere",
        )


def idle_s(left_s: float) -> int:
    """Return the wait_timeout that frees a lock soon after its time, and never before."""
    return math.ceil(left_s) + 1
