"""Kills a connection through a second one: a server may keep a statement waiting after its client is gone."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.contract.errors import SnapmgrError
from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError, connect

if TYPE_CHECKING:
    from snapmgr.mysql.connect.client import Connection, Credentials

_TOO_MANY_CONNECTIONS = 1040
_IDLE_S = 600
_KILL_S = 2.0
_RETRY_S = 0.005


class ConnectionKiller:
    """Kills connections of its own account, which needs no privilege."""

    def __init__(self, credentials: Credentials) -> None:
        """Connect later: at `connect_early` or at the first `kill`."""
        self._credentials = credentials
        self._connection: Connection | None = None

    def connect_early(self) -> None:
        """Connect before clients wait: those that queue behind a lock may use up all connections.

        Raises no MysqlError: `kill` tries again.
        """
        if self._connection is None:
            with suppress(MysqlError):
                self._connection = connect(self._credentials, timeout_s=_KILL_S)
                self._connection.execute(f"SET SESSION wait_timeout = {_IDLE_S}")

    def close(self) -> None:
        """Disconnect; never raises."""
        if self._connection is not None:
            self._connection.close()

    def kill(self, connection: Connection, until: float = 0.0) -> None:
        """Cut `connection` and return once the server has ended it; raises no SnapmgrError.

        Tries for two seconds. If all connections are taken, it tries until `until` (time.monotonic()), the time when
        the server gives up by itself, if that is later.
        """
        connection.drop()
        until = max(until, time.monotonic() + _KILL_S)
        while time.monotonic() < until:
            try:
                if self._connection is None:
                    self._connection = connect(self._credentials, timeout_s=_KILL_S)
                self._connection.execute(f"KILL {connection.connection_id}")
            except ConnectionLostError:
                self._connection = None
            except SnapmgrError as error:
                if not isinstance(error, MysqlError) or error.errno != _TOO_MANY_CONNECTIONS:
                    # 1094, no such thread: it is gone. Any other error: the server is gone, or we can no longer log in.
                    return
            time.sleep(_RETRY_S)
