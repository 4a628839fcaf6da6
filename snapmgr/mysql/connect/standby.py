"""A second connection, to end the first one with: a server may let a statement wait whose client is long gone."""

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
_END_S = 2.0
_LOOK_AGAIN_S = 0.005


class ConnectionKiller:
    """Ends connections of the same account, which takes no privilege."""

    def __init__(self, credentials: Credentials) -> None:
        """Nothing is connected yet."""
        self._credentials = credentials
        self._connection: Connection | None = None

    def get_ready(self) -> None:
        """Connect before anybody waits: clients that pile up behind a lock may use up all connections.

        Raises no MysqlError: `end` tries again.
        """
        if self._connection is None:
            with suppress(MysqlError):
                self._connection = connect(self._credentials, timeout_s=_END_S)
                self._connection.execute(f"SET SESSION wait_timeout = {_IDLE_S}")

    def close(self) -> None:
        """Disconnect; never raises."""
        if self._connection is not None:
            self._connection.close()

    def end(self, connection: Connection, until: float = 0.0) -> None:
        """Cut `connection` and return once the server has ended it; raises no SnapmgrError.

        This tries for two seconds; should all connections be taken, until `until` (time.monotonic()) if that is later:
        the time when the server gives up by itself.
        """
        connection.drop()
        until = max(until, time.monotonic() + _END_S)
        while time.monotonic() < until:
            try:
                if self._connection is None:
                    self._connection = connect(self._credentials, timeout_s=_END_S)
                self._connection.execute(f"KILL {connection.connection_id}")
            except ConnectionLostError:
                self._connection = None
            except SnapmgrError as error:
                if not isinstance(error, MysqlError) or error.errno != _TOO_MANY_CONNECTIONS:
                    # 1094, no such thread: it is gone. Otherwise the server is, or we cannot log in any more.
                    return
            time.sleep(_LOOK_AGAIN_S)
