"""Holding a server still: for how long at most, and the proof that it was.

Which lock: `snapmgr.mysql.levels`. Measured, not documented: an FTWRL that failed may still hold part of its locks
until the connection ends; a lock dies silently with its connection (KILL, wait_timeout) and writers go on at once.
Hence: after any failure the connection is dropped, and a snapshot counts only if the same connection still answers
afterwards and the position has not moved.
"""

from __future__ import annotations

import math
import random
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.errors import NotQuiescedError
from snapmgr.manifest import QuiesceRecord
from snapmgr.mysql.blockers import wait_for_blockers
from snapmgr.mysql.client import ConnectionLostError, MysqlError, connect
from snapmgr.mysql.position import Sighting, sight
from snapmgr.mysql.redo import await_redo
from snapmgr.mysql.replication import read_channels, rows_are_ahead, settle_sources
from snapmgr.mysql.standby import Standby
from snapmgr.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.manifest import Position, SourcePosition
    from snapmgr.mysql.abilities import Abilities
    from snapmgr.mysql.client import Connection, Credentials
    from snapmgr.mysql.levels import Choice

# lock_wait_timeout, and MariaDB's max_statement_time.
_WAITED_TOO_LONG = frozenset({1205, 1969})
# Flushing dirty data may take minutes, longer than an administrator lets connections idle; nobody is blocked meanwhile.
_SYNC_IDLE_S = 600
# The same while DDL is held off: a second flush is short, unless the storage or we hang.
_BEGUN_IDLE_S = 120
# From the thaw of a frozen server to the proof; stopping it takes a part of it too.
_THAWED_IDLE_S = 3
# FLUSH TABLES WITH READ LOCK waits for the global lock, for tables in use and for commits, each for lock_wait_timeout.
_WAITS = 3
_WHO_WROTE = (
    "try again; MySQL lets FLUSH PRIVILEGES, FLUSH STATUS, FLUSH OPTIMIZER_COSTS and ANALYZE TABLE write to its binary "
    "log under these locks: is one of them run again and again?"
)
# The first try's wait, doubled by each further one.
_FIRST_WAIT_S = 0.2
_DOUBLINGS = 20


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How long we may be a nuisance. Seconds."""

    lock_wait_s: float
    """Writers may queue behind our waiting lock this long, in the last try; in those before it less."""
    lock_attempts: int
    lock_hold_s: float
    """From granted to released; the connection is dropped at its end, whatever happens."""
    blocker_wait_s: float = 0.0
    """Over all tries: waiting for what would hold the lock off, while nobody waits for us."""
    kill_selects_after_s: float | None = None
    """SELECTs that hold the lock off and run longer are killed; None: none is."""


class LockLostError(NotQuiescedError):
    """The lock did not hold until the proof: the snapshot is worth nothing."""


class HeldLock:
    """A granted lock and its connection."""

    def __init__(self, connection: Connection, waiting: _Waiting) -> None:
        self._connection = connection
        self._waiting = waiting
        self._choice = waiting.choice
        self._granted = waiting.granted
        self._held_s: float | None = None
        self._proof: str | None = None
        self.deadline = self._granted + waiting.bounds.lock_hold_s
        """time.monotonic() at which the lock must be gone."""
        self._idle_s = _idle_s(waiting.bounds.lock_hold_s)
        self._bound_time()
        for statement in self._choice.flush:
            connection.execute(statement)
        if self._choice.redo_lags and waiting.abilities.flavor == "mariadb":
            await_redo(connection, self.deadline)
        self.sources = self._read_sources()
        """How far a replica has executed, as exactly as can be known under this lock."""
        self._before = self._sight()
        self._bound_time()

    @property
    def position(self) -> Position | None:
        """The binlog position, if it stands still while the lock holds; None without binary log."""
        known = self._choice.position and not self._waiting.rows_ahead
        return self._before.position if known else None

    def _read_sources(self) -> tuple[SourcePosition, ...]:
        # Asked before the lock whether there is any: most servers have none, and every round trip counts here.
        if not self._choice.position or not self._waiting.replica:
            return ()
        return settle_sources(
            self._connection,
            self._waiting.abilities,
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
        self._shorten_idleness(_idle_s(left))

    def expect_freeze(self) -> None:
        """Be told that the server process will now be stopped: it counts idle time anew once it goes on."""
        self._shorten_idleness(_THAWED_IDLE_S)

    def _shorten_idleness(self, idle_s: int) -> None:
        if idle_s < self._idle_s:
            self._idle_s = idle_s
            self._connection.execute(f"SET SESSION wait_timeout = {idle_s}")

    def _sight(self) -> Sighting:
        self._bound_time()
        return sight(self._connection, self._waiting.abilities)

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
        self._held_s = time.monotonic() - self._granted

    def record(self) -> QuiesceRecord:
        """Return how it went; after `prove` and `release`."""
        if self._proof is None or self._held_s is None:
            raise AssertionError("a lock without proof has no record")
        return QuiesceRecord(
            level=self._choice.name,
            why=self._choice.why,
            proof=self._proof,
            attempts=self._waiting.attempts,
            waited_s=self._waiting.waited_s,
            held_s=self._held_s,
            stall_s=max(self._waiting.stall_s, self._granted - self._waiting.asked + self._held_s),
            position_from="server" if self.position is not None else "nowhere",
        )


@contextmanager
def locked(
    credentials: Credentials,
    abilities: Abilities,
    choice: Choice,
    bounds: Bounds,
    *,
    check: Callable[[Connection], None],
    sync: Callable[[], None],
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[HeldLock]:
    """Lock the server while the context lasts; whatever leaves it, the connection is closed and the lock gone.

    Args:
        credentials: how to log in.
        abilities: what the server can do.
        choice: which lock.
        bounds: tries, wait and hold.
        check: looks at each new connection before its lock (identity, layout) and raises if it is the wrong server;
            and again once DDL is held off.
        sync: flushes dirty data; called until right before anybody is blocked.
        tell: for people: what is waited for.

    Raises NotQuiescedError when no try got the lock: nothing is locked then.
    """
    waiting = _Waiting(credentials, abilities, choice, bounds)
    with closing(waiting.standby):
        lock = _acquire(waiting, check, sync, tell)
        connection = lock._connection  # noqa: SLF001 - one module
        try:
            yield lock
        except BaseException:
            waiting.standby.end(connection)
            raise
        finally:
            connection.close()


class _Waiting:
    """What asking for the lock has cost so far."""

    def __init__(self, credentials: Credentials, abilities: Abilities, choice: Choice, bounds: Bounds) -> None:
        self.credentials = credentials
        self.abilities = abilities
        self.choice = choice
        self.bounds = bounds
        self.attempts = 0
        self.rows_ahead = False
        """Whether a replica's applier may have written what no position tells."""
        self.replica = False
        """Whether the server has a source that it replicates from."""
        self.waited_s = 0.0
        self.stall_s = 0.0
        """The longest that writers can have queued behind a try that failed."""
        self.asked = 0.0
        """time.monotonic() at which the last try began to stop writers."""
        self.granted = 0.0
        self.standby = Standby(credentials)

    def look_at_replication(self, connection: Connection, tell: Callable[[str], None]) -> None:
        """Find out what the server replicates, before anybody waits. Raises MysqlError."""
        channels = read_channels(connection, self.abilities)
        self.replica = bool(channels)
        self.rows_ahead = rows_are_ahead(
            connection,
            self.abilities,
            channels,
            global_read_lock=self.choice.global_read_lock,
            only_innodb=self.choice.only_innodb,
        )
        if self.rows_ahead and self.choice.position:
            tell(
                "warning: no position will be recorded: the replica's applier writes tables that are not InnoDB ahead "
                "of the binary log; stop_replica = true makes it exact"
            )

    def begin(self, connection: Connection) -> None:
        """Keep other backups and DDL off. Raises MysqlError."""
        start = time.monotonic()
        try:
            self._execute(connection, self.choice.begin, start, self.bounds.lock_wait_s)
        finally:
            self.waited_s += time.monotonic() - start

    def lock(self, connection: Connection) -> None:
        """Stop writers. Raises MysqlError; then they go on once the connection is gone."""
        self.asked = time.monotonic()
        wait_s = self._lock_wait_s()
        try:
            self._execute(connection, self.choice.lock, self.asked, wait_s)
        except BaseException:
            self.stall_s = max(self.stall_s, time.monotonic() - self.asked)
            raise
        finally:
            self.granted = time.monotonic()
            self.waited_s += self.granted - self.asked
        if self.granted - self.asked > wait_s + 1:
            # We were stopped while it was granted: its time began before we knew of it.
            raise LockLostError("we did not run for longer than the lock may be waited for", hint="try again")

    def hold(self, connection: Connection) -> HeldLock:
        """Return the lock that was granted. Raises MysqlError, LockLostError; then it is gone."""
        try:
            return HeldLock(connection, self)
        except BaseException:
            self.standby.end(connection)
            raise

    def _lock_wait_s(self) -> float:
        """Return how long this try may let writers wait: the last one lock_wait, those before it less.

        A statement that waits for a row holds FLUSH TABLES WITH READ LOCK off, and the row's owner may by then wait
        behind that lock: nothing but our giving up ends such a circle. Who is let in at all is let in quickly.
        """
        if self.attempts >= self.bounds.lock_attempts:
            return self.bounds.lock_wait_s
        return min(self.bounds.lock_wait_s, math.ldexp(_FIRST_WAIT_S, min(self.attempts - 1, _DOUBLINGS)))

    def _execute(self, connection: Connection, statements: tuple[str, ...], asked: float, wait_s: float) -> None:
        """Run statements that together wait for at most `wait_s`.

        lock_wait_timeout counts for each lock that a statement waits for, one after another, while the writers that
        the first one stopped go on waiting.
        """
        for statement in statements:
            left = max(asked + wait_s - time.monotonic(), 0.001)
            try:
                if self.abilities.statement_time:
                    connection.execute(f"SET STATEMENT max_statement_time = {left:.3f} FOR {statement}")
                    continue
                # MySQL bounds nothing but SELECT: we wait no longer, and end the statement by another connection.
                connection.set_read_timeout(left)
                connection.execute(statement)
                connection.set_read_timeout(self.bounds.lock_wait_s + 5)
            except BaseException as error:
                gave_up = time.monotonic() >= asked + wait_s
                self.standby.end(connection, asked + _WAITS * math.ceil(self.bounds.lock_wait_s))
                if isinstance(error, ConnectionLostError) and gave_up and not self.abilities.statement_time:
                    raise MysqlError(f"{statement}: not granted within {format_duration(wait_s)}", errno=1205) from None
                raise


def _idle_s(left_s: float) -> int:
    """Return the wait_timeout that frees a lock soon after its time, and never before."""
    return math.ceil(left_s) + 1


def _acquire(
    waiting: _Waiting, check: Callable[[Connection], None], sync: Callable[[], None], tell: Callable[[str], None]
) -> HeldLock:
    choice, bounds = waiting.choice, waiting.bounds
    failure: MysqlError | None = None
    patience_s = bounds.blocker_wait_s
    for attempt in range(1, bounds.lock_attempts + 1):
        if attempt > 1:
            # Jitter: two backup tools that collide must not go on colliding.
            time.sleep(random.uniform(0.5, 1.5) * min(attempt - 1, 4) * 0.2)  # noqa: S311 - no cryptography here
        waiting.attempts = attempt
        connection = connect(waiting.credentials)
        try:
            check(connection)
            connection.set_read_timeout(bounds.lock_wait_s + 5)
            wait_s = math.ceil(bounds.lock_wait_s)
            connection.execute(f"SET SESSION lock_wait_timeout = {wait_s}, SESSION wait_timeout = {_SYNC_IDLE_S}")
            waiting.look_at_replication(connection, tell)
            # Twice: the first may take long, the second is what leaves little dirty for the storage call.
            sync()
            start = time.monotonic()
            wait_for_blockers(
                connection,
                waiting.abilities,
                "global-read-lock" if choice.level == "global-read-lock" else "backup-lock",
                at_most_s=patience_s,
                kill_selects_after_s=bounds.kill_selects_after_s,
                tell=tell,
            )
            patience_s = max(patience_s - (time.monotonic() - start), 0.0)
            if not waiting.abilities.statement_time:
                waiting.standby.get_ready()
            try:
                waiting.begin(connection)
                if choice.begin:
                    connection.execute(f"SET SESSION wait_timeout = {_BEGUN_IDLE_S}")
                    # What was made elsewhere before it was granted is seen now; afterwards MySQL makes nothing.
                    check(connection)
                    connection.set_read_timeout(bounds.lock_wait_s + 5)
                sync()
                # From here on the server itself frees the lock, even while all our processes are stopped.
                connection.execute(f"SET SESSION wait_timeout = {_idle_s(bounds.lock_hold_s)}")
                waiting.lock(connection)
            except MysqlError as error:
                failure = error
                if error.errno in _WAITED_TOO_LONG:
                    # Not UNLOCK: a lock that failed half-way is only surely gone with its connection.
                    connection.drop()
                    continue
                raise
            return waiting.hold(connection)
        except BaseException:
            connection.drop()
            raise
    raise NotQuiescedError(
        f"the {choice.level} was not granted in {bounds.lock_attempts} tries of up to "
        f"{format_duration(bounds.lock_wait_s)} "
        f"({failure.message if failure else 'no try was made'})",
        hint="a long statement, an open DDL or another backup holds it off: see SHOW FULL PROCESSLIST; "
        "or raise lock_wait or lock_attempts",
    )
