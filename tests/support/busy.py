"""A server with many busy clients: sysbench read-write, more connections than processors, and some thousand rows.

Most of their statements are milliseconds of work, but wait for a processor, the disk or a row.
"""

from __future__ import annotations

import re
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from support.processes import wait_until
from support.storage import shielded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.server import PrivateServer

_TABLES = 4
_ROWS_EACH = 10
"""For each client, in each table."""
_SECOND = re.compile(r"^\[ (\d+)s \].* tps: ([\d.]+) .*lat \(ms,100%\): ([\d.]+)", re.MULTILINE)
_START_S = 120.0


def server_options(connections: int) -> tuple[str, ...]:
    """Return the options of a server for that many clients, and some more."""
    return (
        f"--max-connections={connections + 100}",
        f"--back-log={connections}",
        "--max-prepared-stmt-count=1000000",
        "--open-files-limit=20000",
        "--table-open-cache=8000",
    )


class BusyClients:
    """sysbench at work; its report has a line for each second."""

    def __init__(self, process: subprocess.Popen[bytes], report: Path) -> None:
        self._process = process
        self._report = report

    def check_alive(self) -> None:
        """Assert that the clients are still at work."""
        assert self._process.poll() is None, self._report.read_text()[-1000:]

    def seconds(self) -> list[tuple[float, float]]:
        """Return transactions per second and the longest transaction that ended (s), for each second so far."""
        found = _SECOND.findall(self._report.read_text(errors="replace"))
        return [(float(tps), float(longest) / 1000) for _, tps, longest in found]

    def wait_for_seconds(self, count: int, timeout_s: float = _START_S) -> None:
        """Wait until the report has so many seconds more."""
        wanted = len(self.seconds()) + count
        wait_until(lambda: self._process.poll() is not None or len(self.seconds()) >= wanted, timeout_s)
        self.check_alive()


@contextmanager
def busy_clients(server: PrivateServer, folder: Path, connections: int) -> Iterator[BusyClients]:
    """Let `connections` clients work on `server` while the context lasts; yield when all of them do."""
    server.query("CREATE DATABASE IF NOT EXISTS sbtest")
    words = [
        *("sysbench", "oltp_read_write", "--db-driver=mysql", f"--mysql-socket={server.socket}", "--mysql-user=root"),
        *(f"--tables={_TABLES}", f"--table-size={_ROWS_EACH * connections}", "--percentile=100"),
    ]
    subprocess.run([*words, f"--threads={_TABLES}", "prepare"], check=True, capture_output=True)
    report = folder / "sysbench.txt"
    with report.open("wb") as output, shielded():
        process = subprocess.Popen(
            [*words, f"--threads={connections}", "--time=0", "--report-interval=1", "run"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        clients = BusyClients(process, report)
        clients.wait_for_seconds(2)
        yield clients
    finally:
        process.kill()
        process.wait()
        # The server notices only when it answers; a stop would wait for each of them.
        limit = time.monotonic() + _START_S
        while time.monotonic() < limit and server.query("SHOW STATUS LIKE 'Threads_connected'")[0][1] > "2":
            time.sleep(0.2)
