"""Requests the server's lock, in several bounded tries, and limits how long they may block other sessions.

`snapmgr.mysql.lock.levels` chooses the lock; `snapmgr.mysql.lock.heldlock` holds it. Measured, not documented: a failed
FLUSH TABLES WITH READ LOCK may still hold part of its locks until the connection ends. So we drop the connection after
any failure.
"""

from __future__ import annotations

import math
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.contract.units import format_duration
from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError, connect
from snapmgr.mysql.connect.killer import ConnectionKiller
from snapmgr.mysql.lock.blockers import wait_for_blockers
from snapmgr.mysql.lock.heldlock import Grant, HeldLock, LockLostError, idle_s
from snapmgr.mysql.lock.replication import read_channels, rows_are_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection, Credentials
    from snapmgr.mysql.lock.levels import LockChoice

# lock_wait_timeout, and MariaDB's max_statement_time.
_WAITED_TOO_LONG = frozenset({1205, 1969})
# A flush of dirty data may take minutes, longer than the server lets connections idle; it blocks nobody.
_SYNC_IDLE_S = 600
# The same while DDL is blocked: a second flush is short, unless the storage or we hang.
_BEGUN_IDLE_S = 120
# FLUSH TABLES WITH READ LOCK waits for the global lock, for tables in use and for commits, each for lock_wait_timeout.
_WAITS = 3
# The first try's wait, doubled by each further one.
_FIRST_WAIT_S = 0.2
_DOUBLINGS = 20


class LockBounds(Struct, frozen=True, kw_only=True):
    """Limits on how long we may block other sessions, in seconds."""

    max_stall_s: float
    """How long writers may queue behind our waiting lock in the last try; earlier tries wait less."""
    lock_attempts: int
    lock_hold_s: float
    """From granted to released; at its end the connection is dropped in any case."""
    blocker_wait_s: float = 0.0
    """Over all tries: how long we wait for sessions that would block the lock; nobody waits for us meanwhile."""
    kill_selects_after_s: float | None = None
    """SELECTs that block the lock and have run longer are killed; None: none is."""
    blocker_age_s: float = 1.0
    """A session that would block the lock counts once it has done so for this long."""

    @property
    def brief(self) -> LockBounds:
        """For a lock that is not indispensable: one short try, and only if nobody would block it."""
        wait_s = min(self.max_stall_s, _FIRST_WAIT_S)
        return replace(self, max_stall_s=wait_s, lock_attempts=1, blocker_wait_s=0.0, kill_selects_after_s=None)


class NotGrantedError(NotQuiescedError):
    """The lock was not granted. `stall_s`: the longest time that writers can have queued behind the request."""

    def __init__(self, message: str, *, hint: str, stall_s: float) -> None:
        super().__init__(message, hint=hint)
        self.stall_s = stall_s


@contextmanager
def locked(
    credentials: Credentials,
    abilities: Abilities,
    choice: LockChoice,
    bounds: LockBounds,
    *,
    check: Callable[[Connection], None],
    sync: Callable[[], None],
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[HeldLock]:
    """Lock the server while the context lasts; afterwards the connection is closed and the lock gone in any case.

    Args:
        credentials: how to log in.
        abilities: what the server can do.
        choice: which lock.
        bounds: tries, wait and hold.
        check: checks each new connection (identity, layout) and raises if it is the wrong server; called before the
            lock, and again once DDL is blocked.
        sync: flushes dirty data; last called just before anybody is blocked.
        tell: receives messages for the user about waits.

    Raises NotQuiescedError if no try got the lock; then nothing is locked.
    """
    request = _Request(
        credentials=credentials,
        abilities=abilities,
        choice=choice,
        bounds=bounds,
        check=check,
        sync=sync,
        tell=tell,
        killer=ConnectionKiller(credentials),
        _blocker_wait_s=bounds.blocker_wait_s,
    )
    with closing(request.killer), closing(request.acquire()) as lock:
        try:
            yield lock
        except BaseException:
            lock.end()
            raise


class _Request(Struct, kw_only=True):
    """A request for a lock: its tries, and their cost so far. The arguments are those of `locked`."""

    credentials: Credentials
    abilities: Abilities
    choice: LockChoice
    bounds: LockBounds
    check: Callable[[Connection], None]
    sync: Callable[[], None]
    tell: Callable[[str], None]
    killer: ConnectionKiller
    _attempts: int = 0
    _waited_s: float = 0.0
    _stall_s: float = 0.0
    _asked: float = 0.0
    _granted: float = 0.0
    _replica: bool = False
    _rows_ahead: bool = False
    _killed: tuple[str, ...] = ()
    _blocker_wait_s: float
    """Remaining time to wait for sessions that would block the lock."""

    def acquire(self) -> HeldLock:
        """Return the lock. Raises NotQuiescedError if no try got it; after any error nothing is locked."""
        bounds, failure = self.bounds, "no try was made"
        while self._attempts < bounds.lock_attempts:
            if self._attempts > 0:
                import random  # noqa: PLC0415 - slow, and most locks are granted at once

                # Jitter: two backup tools that collide must not collide again.
                time.sleep(random.uniform(0.5, 1.5) * min(self._attempts, 4) * 0.2)  # noqa: S311 - no cryptography here
            self._attempts += 1
            connection = connect(self.credentials)
            try:
                self._prepare(connection)
                try:
                    self._begin(connection)
                    self._lock(connection)
                except MysqlError as error:
                    if error.errno not in _WAITED_TOO_LONG:
                        raise
                    # UNLOCK is not enough: only the end of the connection surely releases a lock that failed half-way.
                    connection.drop()
                    failure = error.message
                else:
                    return self._hold(connection)
            except BaseException:
                connection.drop()
                raise
        tries = "one try" if bounds.lock_attempts == 1 else f"{bounds.lock_attempts} tries"
        raise NotGrantedError(
            f"the {self.choice.level} was not granted in {tries} of up to "
            f"{format_duration(bounds.max_stall_s)} ({failure})",
            hint=", or ".join((*self.choice.ways, "raise max_stall, if writers may wait longer, or lock_attempts")),
            stall_s=self._stall_s,
        )

    def _prepare(self, connection: Connection) -> None:
        """Do all work that blocks nobody. Raises the errors of `check` and `sync`, NotQuiescedError, MysqlError."""
        self.check(connection)
        self._bound_answers(connection)
        wait_s = math.ceil(self.bounds.max_stall_s)
        connection.execute(f"SET SESSION lock_wait_timeout = {wait_s}, SESSION wait_timeout = {_SYNC_IDLE_S}")
        self._read_replication(connection)
        # This flush may take long; the one in `_begin` leaves little dirty data for the storage call.
        self.sync()
        self._wait_for_blockers(connection)
        if not self.abilities.statement_time:
            self.killer.connect_early()

    def _read_replication(self, connection: Connection) -> None:
        channels = read_channels(connection, self.abilities)
        self._replica = bool(channels)
        self._rows_ahead = rows_are_ahead(
            connection,
            self.abilities,
            channels,
            global_read_lock=self.choice.global_read_lock,
            only_innodb=self.choice.only_innodb,
        )
        if self._rows_ahead and self.choice.position:
            self.tell(
                "warning: no position will be recorded: the replica's applier writes tables that are not InnoDB ahead "
                "of the binary log; stop_replica = true makes the position exact"
            )

    def _wait_for_blockers(self, connection: Connection) -> None:
        start = time.monotonic()
        self._killed += wait_for_blockers(
            connection,
            self.abilities,
            "global-read-lock" if self.choice.level == "global-read-lock" else "backup-lock",
            at_most_s=self._blocker_wait_s,
            min_age_s=self.bounds.blocker_age_s,
            kill_selects_after_s=self.bounds.kill_selects_after_s,
            ways=self.choice.ways,
            tell=self.tell,
        )
        self._blocker_wait_s = max(self._blocker_wait_s - (time.monotonic() - start), 0.0)

    def _begin(self, connection: Connection) -> None:
        """Block other backups and DDL, and flush data that became dirty meanwhile. Raises MysqlError."""
        if self.choice.begin:
            start = time.monotonic()
            try:
                self._execute(connection, self.choice.begin, start, self.bounds.max_stall_s)
            finally:
                self._waited_s += time.monotonic() - start
            connection.execute(f"SET SESSION wait_timeout = {_BEGUN_IDLE_S}")
            # This check sees tables that were made elsewhere before the grant; MySQL makes none after it.
            self.check(connection)
            self._bound_answers(connection)
        self.sync()

    def _lock(self, connection: Connection) -> None:
        """Stop writers. Raises MysqlError; then writers continue once the connection is gone."""
        # From here on the server itself frees the lock, even if all our processes are stopped.
        connection.execute(f"SET SESSION wait_timeout = {idle_s(self.bounds.lock_hold_s)}")
        self._asked = time.monotonic()
        wait_s = self._lock_wait_s()
        try:
            self._execute(connection, self.choice.lock, self._asked, wait_s)
        except BaseException:
            self._stall_s = max(self._stall_s, time.monotonic() - self._asked)
            raise
        finally:
            self._granted = time.monotonic()
            self._waited_s += self._granted - self._asked
        if self._granted - self._asked > wait_s + 1:
            # We were stopped when it was granted: its time began before we noticed.
            raise LockLostError("snapmgr itself was stopped for longer than max_stall", hint="try again")

    def _hold(self, connection: Connection) -> HeldLock:
        """Return the granted lock. Raises MysqlError, LockLostError; then the lock is gone."""
        grant = Grant(
            connection=connection,
            killer=self.killer,
            abilities=self.abilities,
            choice=self.choice,
            hold_s=self.bounds.lock_hold_s,
            replica=self._replica,
            rows_ahead=self._rows_ahead,
            attempts=self._attempts,
            waited_s=self._waited_s,
            stall_s=self._stall_s,
            asked=self._asked,
            granted=self._granted,
            killed=self._killed,
        )
        try:
            return HeldLock(grant)
        except BaseException:
            self.killer.kill(connection)
            raise

    def _lock_wait_s(self) -> float:
        """Return the time for which this try may block writers: the last one max_stall, earlier ones less.

        A statement that waits for a row blocks FLUSH TABLES WITH READ LOCK, and the row's owner may wait behind that
        lock: such a deadlock ends only when we give up. Locks that are granted at all are mostly granted quickly.
        """
        if self._attempts >= self.bounds.lock_attempts:
            return self.bounds.max_stall_s
        return min(self.bounds.max_stall_s, math.ldexp(_FIRST_WAIT_S, min(self._attempts - 1, _DOUBLINGS)))

    def _execute(self, connection: Connection, statements: tuple[str, ...], asked: float, wait_s: float) -> None:
        """Run statements that together wait for at most `wait_s`.

        lock_wait_timeout counts separately for each lock that a statement waits for, while the writers that the first
        lock stopped keep waiting.
        """
        for statement in statements:
            left = max(asked + wait_s - time.monotonic(), 0.001)
            try:
                if self.abilities.statement_time:
                    connection.execute(f"SET STATEMENT max_statement_time = {left:.3f} FOR {statement}")
                    continue
                # MySQL bounds only SELECT: we stop waiting, and kill the statement by another connection.
                connection.set_read_timeout(left)
                connection.execute(statement)
                self._bound_answers(connection)
            except BaseException as error:
                gave_up = time.monotonic() >= asked + wait_s
                self.killer.kill(connection, asked + _WAITS * math.ceil(self.bounds.max_stall_s))
                if isinstance(error, ConnectionLostError) and gave_up and not self.abilities.statement_time:
                    raise MysqlError(f"{statement}: not granted within {format_duration(wait_s)}", errno=1205) from None
                raise

    def _bound_answers(self, connection: Connection) -> None:
        # A little longer than the server itself lets a statement wait for a lock.
        connection.set_read_timeout(self.bounds.max_stall_s + 5)
