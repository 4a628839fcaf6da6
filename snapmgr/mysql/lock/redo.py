"""Waiting for MariaDB's redo log: with innodb_flush_log_at_trx_commit=0 a commit is in memory only, for up to a second.

FLUSH ENGINE LOGS does nothing there (seen on 10.11; 11.8 does write it), and no other statement writes it without
changing anything. InnoDB's own thread does, every innodb_flush_log_at_timeout seconds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from snapmgr.contract.errors import NotQuiescedError

if TYPE_CHECKING:
    from snapmgr.mysql.connect.client import Connection

_LOOK_AGAIN_S = 0.01


def await_redo(connection: Connection, deadline: float) -> None:
    """Return once all redo that a MariaDB has made by now is in its log files; `deadline` is of time.monotonic().

    Raises NotQuiescedError when that is over, MysqlError.
    """
    current, flushed = _numbers(connection)
    while flushed < current:
        if time.monotonic() + _LOOK_AGAIN_S >= deadline:
            raise NotQuiescedError(
                "what was committed is not in InnoDB's log files yet, and the lock's time is over: "
                "innodb_flush_log_at_trx_commit is 0",
                hint="set it to 2 or 1, or innodb_flush_log_at_timeout to less than lock_hold",
            )
        time.sleep(_LOOK_AGAIN_S)
        _, flushed = _numbers(connection)


def _numbers(connection: Connection) -> tuple[int, int]:
    """Return how far the redo log is made and how far it is in its files."""
    found = connection.status("Innodb_lsn_current", "Innodb_lsn_flushed")
    return int(found["innodb_lsn_current"]), int(found["innodb_lsn_flushed"])
