"""Copies of a running server's datadir, and looks at the throwaway servers on them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from snapmgr.mysql.server.check import check_tables
from support.processes import halt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.mysql.server.check import CheckReport
    from snapmgr.mysql.server.throwaway import ThrowawayServer
    from support.server import PrivateServer

MEMORY = 96 * 1024 * 1024
"""Enough for a throwaway server."""
ROWS = 5000
"""In each of the large tables."""


@contextmanager
def frozen(server: PrivateServer) -> Iterator[None]:
    """Stop the process while the context lasts, so that a file-by-file copy is of one instant."""
    try:
        halt(server.pid)
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def check(server: ThrowawayServer, depth: Literal["quick", "extended"] = "extended", **options: Any) -> CheckReport:
    """Check all tables, unless `options` of `check_tables` say otherwise."""
    arguments: dict[str, Any] = {
        "share": 1.0,
        "seed": "x",
        "deadline": time.monotonic() + 60,
        "complaints": server.complaints,
    }
    with server.connect() as connection:
        return check_tables(connection, depth=depth, **(arguments | options))
