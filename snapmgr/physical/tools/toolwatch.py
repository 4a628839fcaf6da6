"""Follows the progress of a running tool by its log and by the kernel's counters of its writes."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from snapmgr.contract.errors import StorageError
from snapmgr.contract.units import format_size
from snapmgr.physical.tools.request import Progress
from snapmgr.physical.tools.toolrun import written_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_EVERY_S = 0.5
_SCANNED = re.compile(r"log scanned up to \((?P<lsn>\d{1,20})\)")
# mariadb-backup, once a second, while it waits for more log or finds the next part overwritten.
_WAITING = re.compile(r"Retrying read of log at LSN=(?P<lsn>\d{1,20})")
# A prepare's first and last LSN, and its progress; only a log of several batches has them.
_RECOVERY = re.compile(
    r"crash recovery from checkpoint LSN ?= ?(?P<start>\d{1,20})|End of log at LSN ?= ?(?P<end>\d{1,20})"
)
_RECOVERED = re.compile(r"To recover: LSN (?P<reached>\d{1,20})/(?P<end>\d{1,20})")
_PHASES = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (r"Starting BACKUP STAGE BLOCK_COMMIT|Executing FLUSH TABLES WITH READ LOCK", "commits are blocked"),
        (r"Starting BACKUP STAGE END|All tables unlocked", "finishing"),
        (r"Starting BACKUP STAGE FLUSH|BACKUP STAGE BLOCK_DDL|non-InnoDB tables", "copying tables of other engines"),
        (r"Copying \S+ to |Starting \d+ threads|Streaming ", "copying data files"),
        (r"Applying \S+ to ", "applying changed pages"),
        (r"Starting crash recovery|Starting InnoDB instance for recovery|Doing recovery", "applying redo log"),
        (r"Starting shutdown", "writing changed pages"),
    )
)


def phase_of(line: str) -> str | None:
    """Return the phase that a tool enters with this line; None if the line is not about phases."""
    return next((phase for pattern, phase in _PHASES if pattern.search(line)), None)


class Watch:
    """Reports the progress of one run of a tool."""

    def __init__(
        self,
        tell: Callable[[Progress], None],
        expected_bytes: int | None = None,
        *,
        current_lsn: Callable[[], int | None] = lambda: None,
        redo_bytes: int | None = None,
    ) -> None:
        """Report progress to `tell`.

        Args:
            tell: receives the progress.
            expected_bytes: approximate number of bytes that the tool will write.
            current_lsn: returns the LSN of the copied server, if any.
            redo_bytes: size of the redo log that the server keeps.
        """
        self._tell = tell
        self._expected_bytes = expected_bytes
        self._current_lsn = current_lsn
        self._redo_bytes = redo_bytes
        # LSN at which the tool waits for log, the server's LSN read after that, and the number of that look.
        self._waiting: tuple[int, int, int] | None = None
        self._looks = 0
        self._phase = "starting"
        self._scanned: int | None = None
        self._recovered: int | None = None
        self._log_end: int | None = None
        self._next = 0.0

    def look(self, pid: int, lines: list[str]) -> None:
        """Read new lines of the tool's log, and report the progress regularly and at each new phase.

        Raises StorageError once redo log that the tool still needs has certainly been overwritten: the tool itself
        reports that only after it has copied everything.
        """
        before = self._phase
        self._looks += 1
        for line in lines:
            self._phase = phase_of(line) or self._phase
            if match := _SCANNED.search(line):
                self._scanned = int(match["lsn"])
            if match := _WAITING.search(line):
                self._wait_at(int(match["lsn"]))
            if match := _RECOVERED.search(line):
                self._recovered, self._log_end = int(match["reached"]), int(match["end"])
            elif match := _RECOVERY.search(line):
                self._recovered = int(match["start"]) if match["start"] else self._recovered
                self._log_end = int(match["end"]) if match["end"] else self._log_end
        if self._phase == before and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_S
        self._tell(
            Progress(
                phase=self._phase,
                done_bytes=written_bytes(pid),
                expected_bytes=self._expected_bytes,
                lag_bytes=self._lag_bytes(),
            )
        )

    def _lag_bytes(self) -> int | None:
        if self._recovered is not None and self._log_end is not None:
            return max(0, self._log_end - self._recovered)
        if self._scanned is None:
            return None
        # The last line of the tool says nothing about its later progress.
        scanned, self._scanned = self._scanned, None
        now = self._current_lsn()
        return None if now is None else max(0, now - scanned)

    def _wait_at(self, lsn: int) -> None:
        self._scanned = lsn
        if self._waiting is None or self._waiting[0] != lsn:
            now = self._current_lsn()
            self._waiting = None if now is None else (lsn, now, self._looks)
            return
        _, then, look = self._waiting
        # Lines of the next look may be older than the server's answer; those of the look after it are newer.
        if self._looks < look + 2:
            return
        # So the tool was still at its LSN when the server had reached the other one; the server keeps only this much.
        behind = then - lsn
        if self._redo_bytes is not None and behind > self._redo_bytes:
            raise StorageError(
                f"the server overwrote redo log that was not copied yet: it keeps {format_size(self._redo_bytes)}, but "
                f"the tool is {format_size(behind)} behind",
                hint="enlarge innodb_log_file_size (MySQL: innodb_redo_log_capacity), or lower the load",
            )
        self._waiting = None
