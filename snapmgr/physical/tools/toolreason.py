"""Explains the failure of a backup tool by the lines of its log, with a remedy. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from msgspec import Struct

from snapmgr.contract.errors import MissingRequirementError, SnapmgrError, StorageError
from snapmgr.physical.tools.request import BrokenChainError, FullError

_SHOWN_LINES = 4
_SHOWN_CHARS = 1200
_TELLING = re.compile(
    r"fatal|error|fail|cannot|can't|unable|missing required|denied|gone away|lost|no space|corrupt|assert|signal \d"
    r"|unknown|abort|not to be proper|only able to copy|wrapped around|optimized .* DDL",
    re.IGNORECASE,
)
_STAMP = re.compile(
    r"^(\[\d\d\] )?(FATAL ERROR: |Error: )?(\d{4}-\d\d-\d\d[T ]\s?\d?\d:\d\d:\d\d(\.\d+)?(\S*Z)?) ?(\d+ )?"
)
_PRIVILEGES = re.compile(
    r"missing required privilege (?P<a>[A-Z_ ]+?) (?:privilege )?on (?P<on>\S+)"
    r"|at least one of\) the (?P<b>[A-Z_, ]+?) privilege",
    re.IGNORECASE,
)


class _Reason(Struct, frozen=True, kw_only=True):
    """One known way to fail."""

    pattern: str
    words: str
    hint: str
    kind: Callable[..., SnapmgrError] = StorageError


# The most specific come first. Seen with mariadb-backup 10.11.19 and 11.8.6, or (*) known from the tools' manuals.
_REASONS = (
    _Reason(
        pattern="No space left on device|Disk quota exceeded|errno: 28\\b|errno: 122\\b",
        words="the staging folder's file system is full",
        hint="make room there, or prune; this backup is unusable",
        kind=FullError,
    ),
    _Reason(
        pattern="Unsupported server version|version .* is not supported|unknown (?:redo )?log (?:record|format)",
        words="the tool does not fit the server's version",
        hint="install the tool in the server's own version",
        kind=MissingRequirementError,
    ),
    _Reason(
        pattern="only able to copy log from|has wrapped around|log block .* mismatch|redo log .* overwritten",
        words="the server overwrote redo log that was not copied yet",
        hint="enlarge innodb_log_file_size (MySQL: innodb_redo_log_capacity), or lower the load",
    ),
    _Reason(
        pattern="(?:optimized|without redo logging).*DDL|DDL.*without redo log",
        words="a table was changed without writing redo log",
        hint="back up again when no DDL runs",
        kind=BrokenChainError,
    ),
    _Reason(
        pattern="seems not to be proper for the target",
        words="the increment does not fit the backup",
        hint="a full backup is needed",
        kind=BrokenChainError,
    ),
    _Reason(
        pattern="needs a prepared target|needs target prepared",
        words="an increment can only be applied to a backup whose redo log was applied",
        hint="prepare it first",
    ),
    _Reason(
        pattern="gone away|Lost connection|Server shutdown in progress|server has closed|Connection was killed",
        words="the connection to the server was lost",
        hint="did the server stop, or was the connection killed? See its error log",
    ),
    _Reason(
        pattern="Failed to connect|Can't connect",
        words="the server could not be reached",
        hint="is it running?",
    ),
    _Reason(
        pattern="Too many open files|errno: 24\\b",
        words="the tool may not open as many files as there are tables",
        hint="raise the limit of open files (ulimit -n, LimitNOFILE=) or give --open-files-limit as a tool option",
        kind=MissingRequirementError,
    ),
    _Reason(
        pattern="Read-only file system|errno: 30|Input/output error|errno: 5\\b|Stale file handle",
        words="the storage failed",
        hint="look at the kernel's log and at the storage",
    ),
    _Reason(
        pattern="Can't open backup-my.cnf|failed to read metadata|cannot open .*checkpoints",
        words="the folder holds no finished backup",
        hint="name the folder that the tool has made",
    ),
    _Reason(
        pattern="corrupt|checksum mismatch|Database page",
        words="a page of the data is damaged",
        hint="check the server's tables (CHECK TABLE) and its disk",
    ),
    _Reason(
        pattern="Missing (?:MLOG|FILE)_CHECKPOINT|decrypt|encryption key",
        words="the data are encrypted, or their redo log cannot be read",
        hint="the tool needs the server's key plugin and its options",
        kind=MissingRequirementError,
    ),
)


def telling_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last lines that name an error, without their time stamps; otherwise the very last lines."""
    telling = [line for line in lines if _TELLING.search(line) and "[Note]" not in line]
    chosen = telling[-_SHOWN_LINES:] or [line for line in lines if line.strip()][-_SHOWN_LINES:]
    return tuple(dict.fromkeys(_STAMP.sub("", line).strip() for line in chosen))


def explain(lines: Sequence[str], returncode: int, *, what: str, log: str, account: str) -> SnapmgrError:
    """Return the error for a tool that failed.

    Args:
        lines: its log.
        returncode: its exit code, negative for a signal.
        what: the failed step, the beginning of the message.
        log: the log's path.
        account: the account of the GRANT statement.
    """
    excerpt = "; ".join(telling_lines(lines))[-_SHOWN_CHARS:]
    granted = missing_privileges(lines)
    if granted:
        statement = f"GRANT {', '.join(granted)} ON *.* TO {account}"
        return MissingRequirementError(
            f"{what} failed: the account lacks rights: {', '.join(granted)}", hint=f"{statement};"
        )
    text = "\n".join(lines)
    for reason in _REASONS:
        if re.search(reason.pattern, text, re.IGNORECASE):
            return reason.kind(f"{what} failed: {reason.words} ({excerpt})", hint=f"{reason.hint}; the log: {log}")
    if returncode == 0:
        return StorageError(
            f'{what} failed: the tool ended without its final "completed OK!" ({excerpt})', hint=f"the log: {log}"
        )
    how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    return StorageError(f"{what} failed ({how}): {excerpt or 'it said nothing'}", hint=f"the log: {log}")


def missing_privileges(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the privileges that the tool or the server named as missing; of alternatives the last, least one."""
    found: dict[str, None] = {}
    for line in lines:
        for match in _PRIVILEGES.finditer(line):
            names = (match["a"] or match["b"]).split(",")
            found[names[-1].strip().upper()] = None
    return tuple(found)
