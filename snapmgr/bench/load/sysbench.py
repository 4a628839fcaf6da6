"""Runs sysbench against a private server and parses its output."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.contract.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapmgr.contract.records import Completed

_TEST = "oltp_read_write"
_DATABASE = "sbtest"
# Each second has a line with number, transactions, queries by kind, the latency's percentile in ms, and errors.
_SECOND = re.compile(r"^\[ (\d+)s \] thds: \d+ tps: ([\d.]+) .*lat \(ms,95%\): ([\d.]+)", re.MULTILINE)
_TRANSACTIONS = re.compile(r"^\s*transactions:\s+(\d+)\s+\(([\d.]+) per sec\.\)", re.MULTILINE)
_PERCENTILE = re.compile(r"^\s*95th percentile:\s+([\d.]+)", re.MULTILINE)
_LONGEST = re.compile(r"^\s*max:\s+([\d.]+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one run."""

    tps: float
    """Transactions per second."""
    p95_s: float
    """Latency of a transaction."""
    max_s: float
    seconds_tps: tuple[float, ...]
    """Transactions in each second."""
    seconds_p95_s: tuple[float, ...]


def parse(text: str) -> Report:
    """Parse the output of sysbench 1.0 with a report each second. Raises CommandError if it is something else."""
    total, percentile, longest = _TRANSACTIONS.search(text), _PERCENTILE.search(text), _LONGEST.search(text)
    if total is None or percentile is None or longest is None:
        raise CommandError(f"sysbench printed no result: {text.strip()[-500:] or 'nothing at all'}")
    seconds = _SECOND.findall(text)
    return Report(
        tps=float(total[2]),
        p95_s=float(percentile[1]) / 1000,
        max_s=float(longest[1]) / 1000,
        seconds_tps=tuple(float(tps) for _, tps, _ in seconds),
        seconds_p95_s=tuple(float(latency) / 1000 for _, _, latency in seconds),
    )


@dataclass(frozen=True, kw_only=True)
class Sysbench:
    """The read-write test of sysbench on a server: its tables and the number of clients."""

    run_program: Callable[..., Completed]
    """`Workbench.run`."""
    socket: str
    tables: int
    rows: int
    """Rows per table."""
    threads: int
    seed: int

    def _words(self, *more: str) -> Sequence[str]:
        return [
            *("sysbench", _TEST, "--db-driver=mysql", f"--mysql-socket={self.socket}", "--mysql-user=root"),
            *(f"--mysql-db={_DATABASE}", f"--tables={self.tables}", f"--table-size={self.rows}"),
            *(f"--rand-seed={self.seed}", "--rand-type=uniform", *more),
        ]

    def prepare(self) -> None:
        """Make the tables; their database must exist."""
        self.run_program(self._words(f"--threads={self.tables}", "prepare"), timeout_s=None)

    def run(self, seconds: float) -> Report:
        """Let all clients work for `seconds`."""
        words = (f"--threads={self.threads}", f"--time={seconds:.0f}", "--report-interval=1", "--percentile=95", "run")
        return parse(self.run_program(self._words(*words), timeout_s=seconds * 3 + 60).stdout)
