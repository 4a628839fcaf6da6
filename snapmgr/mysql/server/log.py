"""What a server's error log says about its end: the lines that matter, and whether the data or the machine is why."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SHOWN_LINES = 10
_SHOWN_CHARS = 1800
_MATTERS = re.compile(
    r"\[ERROR\]|\bFATAL\b|Assertion|assertion failure|got signal|corrupt|Segmentation"
    r"|unknown (?:option|variable) '(?!loose)"
    r"|^/?\S*mysqld: |^/?\S*mariadbd: ",
    re.IGNORECASE,
)
# A damaged page that a statement met: the server may answer all the same (an unreadable BLOB comes back empty).
_DAMAGE = re.compile(
    r"\[ERROR\].*(?:corrupt|checksum mismatch|Failed to read page|read in from|is missing!)", re.IGNORECASE
)
# MySQL's InnoDB without its keyring; MariaDB's without its plugin, at the start.
_NO_KEYS = re.compile(
    r"\[ERROR\].*(?:keyring is (?:not )?loaded|find master key|key management plugin was not found"
    r"|Initialization of encryption failed|encryption service or used key_id is not available)"
)
# MariaDB, when it opens a table: with keys that would be damage.
_ENCRYPTED = re.compile(r"\[ERROR\].*(?:Encrypted page \[|compressed or encrypted but uncompress or decrypt failed)")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d[T ]\s?\d{1,2}:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?\s+(?:0x[0-9a-f]+|\d+)\s+")
# The machine is why: it says nothing about the data.
_MACHINE = (
    (
        re.compile(
            r"No space left|Disk is full|out of disk space|(?:errno|errcode|error|number):? 28\b",
            re.IGNORECASE,
        ),
        "make room for the copy's changes",
    ),
    (
        re.compile(r"Cannot allocate memory|Out of memory|Can't allocate|errno:? 12\b", re.IGNORECASE),
        "give the throwaway server less memory",
    ),
    (re.compile(r"unknown (?:option|variable) "), "is the server program of the version that made the data?"),
    (
        re.compile(
            r"(?:Up|Down)grade (?:after a crash )?is (?:not|only)|Cannot boot server version|Cannot downgrade"
            r"|Unsupported redo log format",
            re.IGNORECASE,
        ),
        "start the copy with a server program of the version that made the data",
    ),
    (
        re.compile(r"Different lower_case_table_names settings"),
        "a copy of a stopped server tells not how its names are: set verify.options to "
        '["--lower-case-table-names=1"] (or 0, 2)',
    ),
    (_NO_KEYS, "the data are encrypted, and the server has not got their keys: docs/explanation/verification.md"),
    (re.compile(r"Bind on (?:unix socket|TCP/IP port)|Too many open files"), "see the message"),
)
# The data are why, and more can be said.
_DATA = (
    (
        re.compile(r"Found \d+ prepared transactions", re.IGNORECASE),
        "its binary log is missing or of another instant: binary log and datadir belong into one snapshot",
    ),
    (
        re.compile(
            r"is in the future|Missing redo log|Missing FILE_CHECKPOINT"
            r"|Neither found #innodb_redo|Redo log .{0,60}(?:missing|corrupt)",
            re.IGNORECASE,
        ),
        "redo log and data files are not of one instant, or the redo log is incomplete",
    ),
    (
        re.compile(r"Permission denied|must be writable|errno: 13\b|Operating system error number 13", re.IGNORECASE),
        "files in the datadir do not belong to the owner of the datadir",
    ),
    (
        re.compile(r"Unable to lock|another (?:mysqld|mariadbd) process"),
        "another server has files of the copy open: does it hold paths that lead out of it?",
    ),
)
_KILLED = -9


@dataclass(frozen=True, kw_only=True)
class ServerEnd:
    """How a server ended."""

    text: str
    hint: str | None
    machine: bool
    """The machine (memory, space, program) is why; the data were not judged."""


def describe_end(log: str, returncode: int | None) -> ServerEnd:
    """Given the log and the exit code (None: still running, negative: a signal), return what to tell.

    Pure. The text is bounded: the last lines that matter, without time stamps, else the last lines.
    """
    text = excerpt(log)
    if returncode is not None:
        how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
        text = f"{text} ({how})" if text else f"it printed nothing ({how})"
    errors = "\n".join(line for line in log.splitlines() if "[Warning]" not in line and "[Note]" not in line)
    for patterns, machine in ((_MACHINE, True), (_DATA, False)):
        for pattern, hint in patterns:
            if pattern.search(errors):
                return ServerEnd(text=text, hint=hint, machine=machine)
    if returncode == _KILLED:
        return ServerEnd(text=text, hint="was it the kernel, for lack of memory? See dmesg", machine=True)
    return ServerEnd(text=text, hint=None, machine=False)


def damage(log: str) -> tuple[str, ...]:
    """Return the errors about damaged data, each once, without time stamps. Pure."""
    found = (_STAMP.sub("", line).strip() for line in log.splitlines() if _DAMAGE.search(line))
    return tuple(dict.fromkeys(found))


def lacks_keys(log: str, *, given: bool) -> bool:
    """Return whether a server met encrypted data without their keys. Pure.

    Args:
        log: all of it.
        given: whether it has keys: MariaDB's words for a page that it cannot decrypt then mean that it is damaged.
    """
    return _NO_KEYS.search(log) is not None or (not given and _ENCRYPTED.search(log) is not None)


def excerpt(log: str) -> str:
    """Return the last lines that matter (errors, crashes), else the last lines, joined by "; " and bounded."""
    lines = [_STAMP.sub("", line).strip() for line in log.splitlines() if line.strip()]
    chosen = list(dict.fromkeys(line for line in lines if _MATTERS.search(line))) or lines
    text = "; ".join(chosen[-_SHOWN_LINES:])
    return text if len(text) <= _SHOWN_CHARS else "…" + text[-_SHOWN_CHARS:]
