"""Holding a server still: which lock, for how long at most, and the proof that it held.

Sources: MariaDB's documentation of BACKUP STAGE and FLUSH TABLES WITH READ LOCK. Measured, not documented: a failed
FTWRL may still hold part of its locks until the connection ends; a lock dies silently with its connection (KILL,
wait_timeout) and writers go on at once. Hence: after any failure the connection is dropped, and a snapshot counts only
if the same connection still answers afterwards and the position has not moved.
"""

from __future__ import annotations

import math
import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from snapmgr.errors import NotQuiescedError
from snapmgr.manifest import QuiesceRecord
from snapmgr.mysql.client import MysqlError, connect
from snapmgr.mysql.position import Sighting, sight
from snapmgr.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.manifest import Level, Position
    from snapmgr.mysql.client import Connection, Credentials

LockLevel = Literal["backup-lock", "global-read-lock"]

# lock_wait_timeout, and MariaDB's max_statement_time.
_WAITED_TOO_LONG = frozenset({1205, 1969})
# Flushing dirty data may take minutes, longer than an administrator lets connections idle; nobody is blocked meanwhile.
_SYNC_IDLE_S = 600
# What comes before the last flush of dirty data: START keeps other backups off, and blocks nobody else.
_BEFORE = {"backup-lock": ("BACKUP STAGE START",), "global-read-lock": ()}
_LOCK = {
    # Each stage is quick by itself; only BLOCK_COMMIT stops writers. An error in between ends with the connection.
    "backup-lock": (
        "BACKUP STAGE FLUSH",
        "BACKUP STAGE BLOCK_DDL",
        "BACKUP STAGE BLOCK_COMMIT",
    ),
    "global-read-lock": ("FLUSH TABLES WITH READ LOCK",),
}
_UNLOCK = {"backup-lock": "BACKUP STAGE END", "global-read-lock": "UNLOCK TABLES"}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How long we may be a nuisance. Seconds."""

    lock_wait_s: float
    """For each try: writers may queue behind our waiting lock this long."""
    lock_attempts: int
    lock_hold_s: float
    """From granted to released; the connection is dropped at its end, whatever happens."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A lock level and the reason for it, for people."""

    level: LockLevel
    why: str
    freeze: bool = False
    """Whether the process is frozen as well, while the lock is held (`snapmgr.mysql.freeze`)."""

    @property
    def name(self) -> Level:
        """What the job, the manifest and people call it."""
        return "freeze-process" if self.freeze else self.level


class LockLostError(NotQuiescedError):
    """The lock did not hold until the proof: the snapshot is worth nothing."""


def choose(asked: str, flavor: str) -> Choice:
    """Given the asked-for level and the server's flavor, return the lock to take.

    Raises NotQuiescedError for what is not supported here; "stopped" is not a lock and is the caller's business.
    """
    if flavor != "mariadb":
        raise NotQuiescedError(
            "this server is MySQL: its locks are not supported yet", hint='stop it and use quiesce = "stopped"'
        )
    if asked == "auto":
        return Choice(
            level="backup-lock", why="BACKUP STAGE BLOCK_COMMIT blocks commits only, and makes the position exact"
        )
    if asked == "backup-lock":
        return Choice(level="backup-lock", why="asked for by the job")
    if asked == "global-read-lock":
        return Choice(level="global-read-lock", why="asked for by the job")
    if asked == "freeze-process":
        return Choice(level="backup-lock", why="asked for by the job; the lock makes the position exact", freeze=True)
    raise NotQuiescedError(
        f'quiesce = "{asked}" is not supported yet',
        hint='use "auto", "backup-lock", "global-read-lock", "freeze-process" or "stopped"',
    )


class HeldLock:
    """A granted lock and its connection."""

    def __init__(
        self, connection: Connection, choice: Choice, bounds: Bounds, *, attempts: int, waited_s: float, granted: float
    ) -> None:
        self._connection = connection
        self._choice = choice
        self._attempts = attempts
        self._waited_s = waited_s
        self._granted = granted
        self._held_s: float | None = None
        self._proof: str | None = None
        self.deadline = granted + bounds.lock_hold_s
        """time.monotonic() at which the lock must be gone."""
        self._before = self._sight()

    @property
    def position(self) -> Position | None:
        """The binlog position, which stands still while the lock holds; None without binary log."""
        return self._before.position

    def _sight(self) -> Sighting:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise LockLostError("the lock's time was over before the snapshot was proven")
        self._connection.set_read_timeout(left)
        return sight(self._connection)

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
        if after.position != self._before.position:
            raise LockLostError(f"the position moved under the lock: {self._before.position} to {after.position}")
        self._proof = f"connection {after.connection_id} answered after the snapshot and the position had not moved"

    def release(self) -> None:
        """Give the lock back; cut the connection if that does not work at once. Never raises: the proof is done."""
        try:
            self._connection.set_read_timeout(max(self.deadline - time.monotonic(), 0.1))
            self._connection.execute(_UNLOCK[self._choice.level])
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
            attempts=self._attempts,
            waited_s=self._waited_s,
            held_s=self._held_s,
        )


@contextmanager
def locked(
    credentials: Credentials,
    choice: Choice,
    bounds: Bounds,
    *,
    check: Callable[[Connection], None],
    sync: Callable[[], None],
) -> Iterator[HeldLock]:
    """Lock the server while the context lasts; whatever leaves it, the connection is closed and the lock gone.

    Args:
        credentials: how to log in.
        choice: which lock.
        bounds: tries, wait and hold.
        check: looks at each new connection before its lock (identity, layout) and raises if it is the wrong server.
        sync: flushes dirty data; called until right before anybody is blocked.

    Raises NotQuiescedError when no try got the lock: nothing is locked then.
    """
    connection, lock = _acquire(credentials, choice, bounds, check, sync)
    try:
        yield lock
    except BaseException:
        connection.drop()
        raise
    finally:
        connection.close()


def _acquire(
    credentials: Credentials,
    choice: Choice,
    bounds: Bounds,
    check: Callable[[Connection], None],
    sync: Callable[[], None],
) -> tuple[Connection, HeldLock]:
    waited_s = 0.0
    failure: MysqlError | None = None
    for attempt in range(1, bounds.lock_attempts + 1):
        if attempt > 1:
            # Jitter: two backup tools that collide must not go on colliding.
            time.sleep(random.uniform(0.5, 1.5) * min(attempt - 1, 4) * 0.2)  # noqa: S311 - no cryptography here
        connection = connect(credentials)
        try:
            check(connection)
            connection.set_read_timeout(bounds.lock_wait_s + 5)
            connection.execute(
                f"SET SESSION lock_wait_timeout = {math.ceil(bounds.lock_wait_s)}, wait_timeout = {_SYNC_IDLE_S}"
            )
            # Twice: the first may take long, the second is what leaves little dirty for the storage call.
            sync()
            asked = time.monotonic()
            try:
                for statement in _BEFORE[choice.level]:
                    connection.execute(statement)
                waited_s += time.monotonic() - asked
                sync()
                # From here on the server itself frees the lock, even while all our processes are stopped.
                connection.execute(f"SET SESSION wait_timeout = {math.ceil(bounds.lock_hold_s) + 1}")
                asked = time.monotonic()
                for statement in _LOCK[choice.level]:
                    # lock_wait_timeout counts for each lock that a stage waits for, one after another, while the
                    # writers that the first one stopped go on waiting.
                    left = max(asked + bounds.lock_wait_s - time.monotonic(), 0.001)
                    connection.execute(f"SET STATEMENT max_statement_time = {left:.3f} FOR {statement}")
            except MysqlError as error:
                waited_s += time.monotonic() - asked
                failure = error
                if error.errno in _WAITED_TOO_LONG:
                    # Not UNLOCK: a lock that failed half-way is only surely gone with its connection.
                    connection.drop()
                    continue
                raise
            granted = time.monotonic()
            waited_s += granted - asked
            if granted - asked > bounds.lock_wait_s + 1:
                # We were stopped while it was granted: its time began before we knew of it.
                raise LockLostError("we did not run for longer than the lock may be waited for", hint="try again")  # noqa: TRY301 - dropped as all others
            lock = HeldLock(connection, choice, bounds, attempts=attempt, waited_s=waited_s, granted=granted)
        except BaseException:
            connection.drop()
            raise
        return connection, lock
    raise NotQuiescedError(
        f"the {choice.level} was not granted in {bounds.lock_attempts} tries of {format_duration(bounds.lock_wait_s)} "
        f"({failure.message if failure else 'no try was made'})",
        hint="a long statement, an open DDL or another backup holds it off: see SHOW FULL PROCESSLIST; "
        "or raise lock_wait or lock_attempts",
    )
