"""Runs a backup tool: keeps its output in a log file, hides its password, and never lets it outlive us."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from msgspec import Struct

from snapmgr.contract.errors import CatalogError, StorageError
from snapmgr.contract.units import format_duration
from snapmgr.mysql.connect.client import login_options
from snapmgr.physical.tools.toolreason import explain
from snapmgr.system.command import dying_with_us, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from snapmgr.mysql.connect.client import Credentials

COMPLETED = "completed OK!"
"""The tools' last words. Exit status 0 without them is a failure (both manuals)."""
# mariadb-backup ignores SIGTERM (10.11.19, even while it waits): only SIGKILL ends it, and its locks with its
# connections.
_GRACE_S = 0.5
_POLL_S = 0.1
_CHUNK = 1 << 20
_KEPT_LINE = 4000
_KEPT_LINES = 20_000
# Before the hash of an account's password in SHOW GRANTS.
_HASHED = (b"IDENTIFIED BY PASSWORD '", b"IDENTIFIED VIA ", b"IDENTIFIED WITH ")


@contextmanager
def login_file(credentials: Credentials) -> Iterator[str]:
    """Yield the path of an option file for client programs: only we can read it; it is in memory and ends with us."""
    fd = os.memfd_create("login", os.MFD_CLOEXEC)
    try:
        # Anyone can read a new memory file, and client programs ignore such an option file.
        os.fchmod(fd, 0o600)
        os.write(fd, login_options(credentials))
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


class Ended(Struct, frozen=True, kw_only=True):
    """Exit status and last output of a tool."""

    returncode: int
    log: str
    lines: tuple[str, ...]
    """The last 20,000 lines of its output."""

    @property
    def completed(self) -> bool:
        """Whether the tool itself reports success."""
        return self.returncode == 0 and any(line.rstrip().endswith(COMPLETED) for line in self.lines[-3:])


class LogFile:
    """The log of a running tool, read while it grows. The end of this context removes password hashes from the log."""

    def __init__(self, path: str) -> None:
        """Replace the file at `path` by an empty one, of mode 0600. Raises CatalogError."""
        self.path = path
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CatalogError(f"cannot write the tool's log {path}: {error.strerror}") from None
        self.file = os.fdopen(fd, "r+b", buffering=0)
        self.lines: list[str] = []
        self._offset = 0
        self._half = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hide_hashes()
        self.file.close()

    def read(self) -> list[str]:
        """Return the whole lines since the last call."""
        fresh: list[str] = []
        while piece := os.pread(self.file.fileno(), _CHUNK, self._offset):
            self._offset += len(piece)
            *whole, self._half = (self._half + piece).split(b"\n")
            fresh += [_clean(line) for line in whole]
        self.lines += fresh
        # A server with 100,000 tables has a log of more than 200,000 lines; its last lines show how it ended.
        del self.lines[:-_KEPT_LINES]
        return fresh

    def close_up(self) -> None:
        """Treat an unfinished last line as a whole line."""
        self.read()
        if self._half:
            self.lines.append(_clean(self._half))
            self._half = b""

    def hide_hashes(self) -> None:
        """Blank out hashes of passwords: the tools print an account's grants when one is missing."""
        # Open the file again: with O_APPEND its own descriptor would write only at the end.
        with open(f"/proc/self/fd/{self.file.fileno()}", "r+b", buffering=0) as file:
            for at, length in _hash_places(os.pread(file.fileno(), 64 * _CHUNK, 0)):
                os.pwrite(file.fileno(), b"*" * length, at)


def _clean(line: bytes) -> str:
    for at, length in _hash_places(line):
        line = line[:at] + b"*" * length + line[at + length :]
    return line[:_KEPT_LINE].decode("utf-8", "replace").rstrip("\r")


def _hash_places(text: bytes) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the text after each IDENTIFIED … up to the end of its line."""
    for words in _HASHED:
        at = text.find(words)
        while at >= 0:
            start = at + len(words)
            end = text.find(b"\n", start)
            yield start, (len(text) if end < 0 else end) - start
            at = text.find(words, start)


def run_tool(
    argv: Sequence[str],
    *,
    log: str,
    time_limit_s: float | None = None,
    watch: Callable[[int, list[str]], None] = lambda _pid, _lines: None,
) -> Ended:
    """Run a tool to its end and return its result; an interruption ends its whole process group.

    Args:
        argv: the program, by its path, and its arguments.
        log: file that takes its stdout and stderr.
        time_limit_s: None: no limit.
        watch: called several times a second with its pid and its new lines.

    The tool also ends when we are killed. Raises StorageError after `time_limit_s`, CatalogError if the log cannot be
    written.
    """
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    with LogFile(log) as file, running([*dying_with_us(), *argv], output=file.file, grace_s=_GRACE_S) as process:
        while process.poll() is None:
            watch(process.pid, file.read())
            if deadline is not None and time.monotonic() > deadline:
                raise StorageError(
                    f"{os.path.basename(argv[0])} did not finish within {format_duration(time_limit_s or 0)}",
                    hint=f"raise the time limit, or see its log: {log}",
                )
            time.sleep(_POLL_S)
        file.close_up()
        return Ended(returncode=process.returncode, log=log, lines=tuple(file.lines))


def require_completed(ended: Ended, what: str, *, account: str = "the account") -> None:
    """Raise the error that explains a tool's failure (StorageError, MissingRequirementError, …), unless it completed.

    Args:
        ended: from `run_tool`.
        what: the failed step, after the tool's name: "mariadb-backup: the backup".
        account: the account of a GRANT statement.
    """
    if not ended.completed:
        raise explain(ended.lines, ended.returncode, what=what, log=ended.log, account=account)


def written_bytes(pid: int) -> int:
    """Return the bytes that a process has written so far (proc_pid_io(5)); 0 if they are not visible.

    Writes by io_uring, such as a prepare's pages, count only as bytes to the storage, not as written characters.
    """
    counted = {"wchar": 0, "write_bytes": 0}
    with suppress(OSError, ValueError), open(f"/proc/{pid}/io", encoding="ascii") as file:
        for name, _, value in (line.partition(":") for line in file):
            if name in counted:
                counted[name] = int(value)
    return max(counted.values())
