"""Holding a server still: the tries to get its lock, and how long they may make others wait.

`snapmgr.mysql.lock.levels` chooses the lock; `snapmgr.mysql.lock.heldlock` holds it. Measured, not documented: an FTWRL
that failed may still hold part of its locks until the connection ends. Hence after any failure the connection is
dropped.
"""

from __future__ import annotations

import math
import random
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.contract.units import format_duration
from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError, connect
from snapmgr.mysql.connect.standby import ConnectionKiller
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
# Flushing dirty data may take minutes, longer than an administrator lets connections idle; nobody is blocked meanwhile.
_SYNC_IDLE_S = 600
# The same while DDL is held off: a second flush is short, unless the storage or we hang.
_BEGUN_IDLE_S = 120
# FLUSH TABLES WITH READ LOCK waits for the global lock, for tables in use and for commits, each for lock_wait_timeout.
_WAITS = 3
# The first try's wait, doubled by each further one.
_FIRST_WAIT_S = 0.2
_DOUBLINGS = 20


@dataclass(frozen=True, kw_only=True)
class LockBounds:
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
    request = _Request(credentials, abilities, choice, bounds, check=check, sync=sync, tell=tell)
    with closing(request.standby), closing(request.acquire()) as lock:
        try:
            yield lock
        except BaseException:
            lock.end()
            raise


class _Request:
    """Asking for a lock, as often as it may be asked for, and what that has cost so far."""

    def __init__(
        self,
        credentials: Credentials,
        abilities: Abilities,
        choice: LockChoice,
        bounds: LockBounds,
        *,
        check: Callable[[Connection], None],
        sync: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self._abilities = abilities
        self._choice = choice
        self._bounds = bounds
        self.standby = ConnectionKiller(credentials)
        self._attempts = 0
        self._waited_s = 0.0
        self._stall_s = 0.0
        self._asked = 0.0
        self._granted = 0.0
        self._replica = False
        self._rows_ahead = False
        self._credentials = credentials
        self._check = check
        self._sync = sync
        self._tell = tell
        self._patience_s = bounds.blocker_wait_s
        """How long we may still wait for what would hold the lock off."""

    def acquire(self) -> HeldLock:
        """Return the lock. Raises NotQuiescedError if no try got it; whatever is raised, nothing is locked then."""
        bounds, failure = self._bounds, "no try was made"
        while self._attempts < bounds.lock_attempts:
            if self._attempts > 0:
                # Jitter: two backup tools that collide must not go on colliding.
                time.sleep(random.uniform(0.5, 1.5) * min(self._attempts, 4) * 0.2)  # noqa: S311 - no cryptography here
            self._attempts += 1
            connection = connect(self._credentials)
            try:
                self._prepare(connection)
                try:
                    self._begin(connection)
                    self._lock(connection)
                except MysqlError as error:
                    if error.errno not in _WAITED_TOO_LONG:
                        raise
                    # Not UNLOCK: a lock that failed half-way is only surely gone with its connection.
                    connection.drop()
                    failure = error.message
                else:
                    return self._hold(connection)
            except BaseException:
                connection.drop()
                raise
        raise NotQuiescedError(
            f"the {self._choice.level} was not granted in {bounds.lock_attempts} tries of up to "
            f"{format_duration(bounds.lock_wait_s)} ({failure})",
            hint="a long statement, an open DDL or another backup holds it off: see SHOW FULL PROCESSLIST; "
            "or raise lock_wait or lock_attempts",
        )

    def _prepare(self, connection: Connection) -> None:
        """Do all that nobody has to wait for. Raises what `check` and `sync` raise, NotQuiescedError, MysqlError."""
        self._check(connection)
        self._bound_answers(connection)
        wait_s = math.ceil(self._bounds.lock_wait_s)
        connection.execute(f"SET SESSION lock_wait_timeout = {wait_s}, SESSION wait_timeout = {_SYNC_IDLE_S}")
        self._look_at_replication(connection)
        # This flush may take long; the one in `_begin` leaves little dirty for the storage call.
        self._sync()
        self._wait_for_blockers(connection)
        if not self._abilities.statement_time:
            self.standby.get_ready()

    def _look_at_replication(self, connection: Connection) -> None:
        channels = read_channels(connection, self._abilities)
        self._replica = bool(channels)
        self._rows_ahead = rows_are_ahead(
            connection,
            self._abilities,
            channels,
            global_read_lock=self._choice.global_read_lock,
            only_innodb=self._choice.only_innodb,
        )
        if self._rows_ahead and self._choice.position:
            self._tell(
                "warning: no position will be recorded: the replica's applier writes tables that are not InnoDB ahead "
                "of the binary log; stop_replica = true makes it exact"
            )

    def _wait_for_blockers(self, connection: Connection) -> None:
        start = time.monotonic()
        wait_for_blockers(
            connection,
            self._abilities,
            "global-read-lock" if self._choice.level == "global-read-lock" else "backup-lock",
            at_most_s=self._patience_s,
            kill_selects_after_s=self._bounds.kill_selects_after_s,
            tell=self._tell,
        )
        self._patience_s = max(self._patience_s - (time.monotonic() - start), 0.0)

    def _begin(self, connection: Connection) -> None:
        """Keep other backups and DDL off, and flush what was dirtied meanwhile. Raises MysqlError."""
        if self._choice.begin:
            start = time.monotonic()
            try:
                self._execute(connection, self._choice.begin, start, self._bounds.lock_wait_s)
            finally:
                self._waited_s += time.monotonic() - start
            connection.execute(f"SET SESSION wait_timeout = {_BEGUN_IDLE_S}")
            # What was made elsewhere before it was granted is seen now; afterwards MySQL makes nothing.
            self._check(connection)
            self._bound_answers(connection)
        self._sync()

    def _lock(self, connection: Connection) -> None:
        """Stop writers. Raises MysqlError; then they go on once the connection is gone."""
        # From here on the server itself frees the lock, even while all our processes are stopped.
        connection.execute(f"SET SESSION wait_timeout = {idle_s(self._bounds.lock_hold_s)}")
        self._asked = time.monotonic()
        wait_s = self._lock_wait_s()
        try:
            self._execute(connection, self._choice.lock, self._asked, wait_s)
        except BaseException:
            self._stall_s = max(self._stall_s, time.monotonic() - self._asked)
            raise
        finally:
            self._granted = time.monotonic()
            self._waited_s += self._granted - self._asked
        if self._granted - self._asked > wait_s + 1:
            # We were stopped while it was granted: its time began before we knew of it.
            raise LockLostError("we did not run for longer than the lock may be waited for", hint="try again")

    def _hold(self, connection: Connection) -> HeldLock:
        """Return the lock that was granted. Raises MysqlError, LockLostError; then it is gone."""
        grant = Grant(
            connection=connection,
            standby=self.standby,
            abilities=self._abilities,
            choice=self._choice,
            hold_s=self._bounds.lock_hold_s,
            replica=self._replica,
            rows_ahead=self._rows_ahead,
            attempts=self._attempts,
            waited_s=self._waited_s,
            stall_s=self._stall_s,
            asked=self._asked,
            granted=self._granted,
        )
        try:
            return HeldLock(grant)
        except BaseException:
            self.standby.end(connection)
            raise

    def _lock_wait_s(self) -> float:
        """Return how long this try may let writers wait: the last one lock_wait, those before it less.

        A statement that waits for a row holds FLUSH TABLES WITH READ LOCK off, and the row's owner may by then wait
        behind that lock: nothing but our giving up ends such a circle. Who is let in at all is let in quickly.
        """
        if self._attempts >= self._bounds.lock_attempts:
            return self._bounds.lock_wait_s
        return min(self._bounds.lock_wait_s, math.ldexp(_FIRST_WAIT_S, min(self._attempts - 1, _DOUBLINGS)))

    def _execute(self, connection: Connection, statements: tuple[str, ...], asked: float, wait_s: float) -> None:
        """Run statements that together wait for at most `wait_s`.

        lock_wait_timeout counts for each lock that a statement waits for, one after another, while the writers that
        the first one stopped go on waiting.
        """
        for statement in statements:
            left = max(asked + wait_s - time.monotonic(), 0.001)
            try:
                if self._abilities.statement_time:
                    connection.execute(f"SET STATEMENT max_statement_time = {left:.3f} FOR {statement}")
                    continue
                # MySQL bounds nothing but SELECT: we wait no longer, and end the statement by another connection.
                connection.set_read_timeout(left)
                connection.execute(statement)
                self._bound_answers(connection)
            except BaseException as error:
                gave_up = time.monotonic() >= asked + wait_s
                self.standby.end(connection, asked + _WAITS * math.ceil(self._bounds.lock_wait_s))
                if isinstance(error, ConnectionLostError) and gave_up and not self._abilities.statement_time:
                    raise MysqlError(f"{statement}: not granted within {format_duration(wait_s)}", errno=1205) from None
                raise

    def _bound_answers(self, connection: Connection) -> None:
        # A little longer than the server itself lets a statement wait for a lock.
        connection.set_read_timeout(self._bounds.lock_wait_s + 5)
