"""Proves, without a lock (level "crash-consistent"), that no statement ran that crash recovery may not repair.

InnoDB recovers from any one instant. DDL and account changes may not: they touch files and tables of several engines.
The server counts each such statement when it begins (Com_…). A statement that began before our first read of these
counters may still run. On MySQL, a LOCK INSTANCE FOR BACKUP that is granted for a moment rules that out. On MariaDB,
where BACKUP STAGE BLOCK_DDL does not wait for an ALTER that copies or waits, the process list shows it.
"""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.catalog.manifest import QuiesceRecord
from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.client import MysqlError, connect
from snapmgr.mysql.connect.statements import code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection, Credentials
    from snapmgr.mysql.lock.levels import LockChoice
    from snapmgr.mysql.lock.quiesce import LockBounds

# Counters, without "Com_", of statements that change files, the data dictionary or accounts. MySQL counts temporary
# tables with the others, although they change neither.
_CHANGES = (
    *("alter_", "create_", "drop_", "rename_", "truncate", "optimize", "repair", "import", "reset"),
    *("grant", "revoke", "set_password", "install_", "uninstall_"),
)
_HARMLESS = ("create_temporary_table", "drop_temporary_table")
# The same, as statements: the server shows the statements inside a procedure. EXECUTE may run anything.
_STRUCTURE = (
    r"(?i)(?:ALTER|CREATE|DROP|RENAME|TRUNCATE|OPTIMIZE|REPAIR|IMPORT|GRANT|REVOKE|SET\s+PASSWORD|INSTALL|UNINSTALL"
    r"|EXECUTE)\b"
)
_LOCK_WAIT_TIMEOUT = 1205
# The storage call does not block anyone; this bounds a call that hangs.
_FIRE_S = 60.0
_IDLE_S = 600


class StructureChangedError(NotQuiescedError):
    """DDL or an account change was under way, or began: the snapshot may hold a half of it. A lock would prevent it."""


class NoLock:
    """A server that keeps writing, and its counters of structural changes before the snapshot."""

    def __init__(self, connection: Connection, choice: LockChoice, before: dict[str, int], waited_s: float) -> None:
        self._connection = connection
        self._choice = choice
        self._before = before
        self._waited_s = waited_s
        self._proven = False
        self.deadline = time.monotonic() + _FIRE_S
        """time.monotonic() by which the storage call must end."""

    def prove(self) -> None:
        """Check that no DDL and no account change began since. Raises NotQuiescedError."""
        self._connection.set_read_timeout(_FIRE_S)
        try:
            after = _count_changes(self._connection)
        except MysqlError as error:
            raise NotQuiescedError(
                f"the server did not answer after the snapshot: {error.message}", hint="see its log"
            ) from None
        changed = sorted(name for name, count in after.items() if count != self._before.get(name, 0))
        if changed:
            raise StructureChangedError(
                f"DDL or an account change ran during the snapshot, which took no lock: {', '.join(changed)}",
                hint='try again when none runs, or use quiesce = "auto"',
            )
        self._proven = True

    def record(self) -> QuiesceRecord:
        """Return the record for the manifest; call after `prove`."""
        if not self._proven:
            raise AssertionError("without proof there is no record")
        return QuiesceRecord(
            level="crash-consistent",
            why=self._choice.why,
            proof="no DDL and no account change was under way or began",
            attempts=1,
            waited_s=self._waited_s,
            held_s=0.0,
            position_from="binlog" if self._choice.tail else "nowhere",
        )


@contextmanager
def lockless(
    credentials: Credentials,
    abilities: Abilities,
    choice: LockChoice,
    bounds: LockBounds,
    *,
    check: Callable[[Connection], None],
    sync: Callable[[], None],
) -> Iterator[NoLock]:
    """Watch the server for structural changes while the context lasts; the arguments are those of `locked`.

    Raises NotQuiescedError if DDL is in progress and does not end within max_stall.
    """
    with connect(credentials) as connection:
        check(connection)
        connection.set_read_timeout(bounds.max_stall_s * 3 + 5)
        connection.execute(f"SET SESSION lock_wait_timeout = {max(int(bounds.max_stall_s), 1)}")
        connection.execute(f"SET SESSION wait_timeout = {_IDLE_S}")
        sync()
        before = _count_changes(connection)
        asked = time.monotonic()
        _require_no_ddl(connection, abilities)
        # This check sees changes from before the counters were read.
        check(connection)
        yield NoLock(connection, choice, before, time.monotonic() - asked)


def _require_no_ddl(connection: Connection, abilities: Abilities) -> None:
    """Raise NotQuiescedError if DDL or an account change is in progress."""
    try:
        if abilities.instance_lock:
            connection.execute("LOCK INSTANCE FOR BACKUP")
            connection.execute("UNLOCK INSTANCE")
            return
        # Without PROCESS this fails, whereas the process list would only be incomplete.
        connection.execute("SELECT COUNT(*) FROM information_schema.INNODB_TRX")
        rows = connection.rows(
            "SELECT ID AS id, INFO AS info FROM information_schema.PROCESSLIST "
            "WHERE INFO IS NOT NULL AND ID <> CONNECTION_ID()"
        )
    except MysqlError as error:
        connection.drop()
        failure = StructureChangedError if error.errno == _LOCK_WAIT_TIMEOUT else NotQuiescedError
        raise failure(
            f"cannot make sure that no DDL is under way: {error.message}",
            hint=error.hint or "try again when it has ended (SHOW FULL PROCESSLIST)",
        ) from None
    running = [str(row["id"]) for row in rows if re.match(_STRUCTURE, code(str(row["info"])))]
    if running:
        raise StructureChangedError(
            f"DDL or an account change is under way (connection {', '.join(running)})",
            hint='try again when it has ended, or use quiesce = "auto"',
        )


def _count_changes(connection: Connection) -> dict[str, int]:
    """Return the counters of statements that change the server's structure, by their name without "Com_"."""
    counts: dict[str, int] = {}
    for row in connection.rows("SHOW GLOBAL STATUS LIKE 'Com\\_%'"):
        name = str(row["Variable_name"]).lower().removeprefix("com_")
        if name.startswith(_CHANGES) and name not in _HARMLESS:
            counts[name] = int(str(row["Value"]))
    return counts
