"""Finds in a server's error log why it ended: the relevant lines, and whether data or machine are the cause."""

from __future__ import annotations

import re

from msgspec import Struct

_SHOWN_LINES = 10
_SHOWN_CHARS = 1800
_RELEVANT = re.compile(
    r"\[ERROR\]|\bFATAL\b|Assertion|assertion failure|got signal|corrupt|Segmentation"
    r"|unknown (?:option|variable) '(?!loose)"
    r"|^/?\S*mysqld: |^/?\S*mariadbd: ",
    re.IGNORECASE,
)
# A damaged page that a statement read: the server may still answer (it returns an unreadable BLOB as empty).
_DAMAGE = re.compile(
    r"\[ERROR\].*(?:corrupt|checksum mismatch|Failed to read page|read in from|is missing!)", re.IGNORECASE
)
# MySQL's InnoDB without its keyring; MariaDB's without its plugin, at the start.
_NO_KEYS = re.compile(
    r"\[ERROR\].*(?:keyring is (?:not )?loaded|find master key|key management plugin was not found"
    r"|Initialization of encryption failed|encryption service or used key_id is not available"
    r"|Encryption key is not found for)"
)
# MariaDB, when it opens a table. With keys this means damage.
_ENCRYPTED = re.compile(r"\[ERROR\].*(?:Encrypted page \[|compressed or encrypted but uncompress or decrypt failed)")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d[T ]\s?\d{1,2}:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?\s+(?:0x[0-9a-f]+|\d+)\s+")
# The machine is the cause: no judgement about the data.
_MACHINE = (
    (
        re.compile(
            r"No space left|Disk is full|out of disk space|(?:errno|errcode|error|number):? 28\b",
            re.IGNORECASE,
        ),
        "free space for the copy's changes",
    ),
    (
        re.compile(r"Cannot allocate memory|Out of memory|Can't allocate|errno:? 12\b", re.IGNORECASE),
        "give the throwaway server less memory",
    ),
    (re.compile(r"unknown (?:option|variable) "), "does the server program have the version that wrote the data?"),
    (
        re.compile(
            r"(?:Up|Down)grade (?:after a crash )?is (?:not|only)|Cannot boot server version|Cannot downgrade"
            r"|Unsupported redo log format",
            re.IGNORECASE,
        ),
        "start the copy with a server program of the version that wrote the data",
    ),
    (
        re.compile(r"Different lower_case_table_names settings"),
        "a copy of a stopped server does not show this setting: set verify.options to "
        '["--lower-case-table-names=1"] (or 0, 2)',
    ),
    (_NO_KEYS, "the data are encrypted, and the server does not have their keys: docs/explanation/verification.md"),
    (re.compile(r"Bind on (?:unix socket|TCP/IP port)|Too many open files"), "see the message"),
)
# The data are the cause, with a more specific hint.
_DATA = (
    (
        re.compile(r"Found \d+ prepared transactions", re.IGNORECASE),
        "its binary log is missing or from another instant: binary log and datadir belong in one snapshot",
    ),
    (
        re.compile(
            r"is in the future|Missing redo log|Missing FILE_CHECKPOINT"
            r"|Neither found #innodb_redo|Redo log .{0,60}(?:missing|corrupt)",
            re.IGNORECASE,
        ),
        "redo log and data files are not from one instant, or the redo log is incomplete",
    ),
    (
        re.compile(r"Permission denied|must be writable|errno: 13\b|Operating system error number 13", re.IGNORECASE),
        "files in the datadir do not belong to the owner of the datadir",
    ),
    (
        re.compile(r"Unable to lock|another (?:mysqld|mariadbd) process"),
        "another server has files of the copy open: does the copy contain paths that lead outside it?",
    ),
)
_KILLED = -9
# MariaDB's advice, whatever the cause was: it could not read its binary logs.
_ADVICE = "(if it's, for example, out of memory error)"
_UNREADABLE_LOGS = "Can't init tc log"


class ServerEnd(Struct, frozen=True, kw_only=True):
    """How a server ended."""

    text: str
    hint: str | None
    machine: bool
    """Whether the machine (memory, space, program) is the cause; the data were not judged."""


def describe_end(log: str, returncode: int | None) -> ServerEnd:
    """Given the log and the exit code (None: still running, negative: a signal), return how the server ended.

    Pure. The text is bounded: the last relevant lines, without time stamps, else the last lines.
    """
    text = excerpt(log)
    if returncode is not None:
        how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
        text = f"{text} ({how})" if text else f"it printed nothing ({how})"
    errors = "\n".join(line for line in log.splitlines() if "[Warning]" not in line and "[Note]" not in line)
    errors = errors.replace(_ADVICE, "")
    for patterns, machine in ((_MACHINE, True), (_DATA, False)):
        for pattern, hint in patterns:
            if pattern.search(errors):
                return ServerEnd(text=text, hint=hint, machine=machine)
    if returncode == _KILLED:
        return ServerEnd(text=text, hint="did the kernel kill it because memory ran out? See dmesg", machine=True)
    return ServerEnd(text=text, hint=None, machine=False)


def damage(log: str) -> tuple[str, ...]:
    """Return the errors about damaged data, each once, without time stamps. Pure."""
    found = (_STAMP.sub("", line).strip() for line in log.splitlines() if _DAMAGE.search(line))
    return tuple(dict.fromkeys(found))


def lacks_keys(log: str, *, given: bool) -> bool:
    """Return whether a server read encrypted data without their keys. Pure.

    Args:
        log: all of it.
        given: whether it has keys: then MariaDB's message about a page that it cannot decrypt means damage.
    """
    return _NO_KEYS.search(log) is not None or (not given and _ENCRYPTED.search(log) is not None)


def unreadable_logs(log: str) -> bool:
    """Return whether a server could not read its binary logs after a crash. Pure."""
    return _UNREADABLE_LOGS in log


def excerpt(log: str) -> str:
    """Return the last relevant lines (errors, crashes), else the last lines, joined by "; " and bounded."""
    lines = [_STAMP.sub("", line).strip() for line in log.splitlines() if line.strip()]
    chosen = list(dict.fromkeys(line for line in lines if _RELEVANT.search(line))) or lines
    text = "; ".join(chosen[-_SHOWN_LINES:])
    return text if len(text) <= _SHOWN_CHARS else "…" + text[-_SHOWN_CHARS:]
