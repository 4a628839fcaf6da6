"""Which files a server's process has open for writing: those that no variable and no table of the server names.

MariaDB's --master-info-file, --log-ddl-recovery and --log-tc, for example, are options without a variable.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_KINDS = (
    ("replication state", re.compile(r"(multi-)?master.*\.info|relay-log.*\.info")),
    ("DDL recovery log", re.compile(r"ddl_(recovery|log).*\.log")),
    ("transaction coordinator's log", re.compile(r"tc\.log")),
    ("redo log", re.compile(r"ib_logfile\d+|#ib_redo\d+.*|#innodb_redo")),
    ("undo tablespaces", re.compile(r"undo_?\d+|.+\.ibu")),
    ("doublewrite buffer", re.compile(r".+\.dblwr")),
    ("system tablespace", re.compile(r"ibdata\d*")),
    ("Aria log", re.compile(r"aria_log.*")),
    ("tablespace", re.compile(r".+\.ibd")),
    ("table", re.compile(r".+\.(MYD|MYI|MAD|MAI|CSV|ARZ)")),
)
# Tables that ALTER or a query is making: they come and go.
_FLEETING = re.compile(r"#sql.*|.*ibtmp\d+|temp_\d+\.ibt")
_STANDARD_STREAMS = ("0", "1", "2")


def kind_of(name: str) -> str | None:
    """Return what a server keeps in a file of this name; None if the name tells nothing."""
    return next((what for what, pattern in _KINDS if pattern.fullmatch(name)), None)


def open_files(pid: int, known: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return what a process has open for writing beyond `known`: files of data and what they are, and all others.

    Args:
        pid: of the server.
        known: folders and files, resolved, that are not looked at.

    Left out is what only grows (logs for people), is deleted, is a temporary table, or is not where its name says: a
    process in a mount namespace of its own. What is closed between two uses is not seen. Raises PermissionError.
    """
    found: dict[str, str] = {}
    strangers: set[str] = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        if number in _STANDARD_STREAMS:
            continue
        try:
            path = os.readlink(f"/proc/{pid}/fd/{number}")
            if not path.startswith("/") or _is_in(path, known):
                continue
            flags = write_flags(pid, number, path)
            if not flags or flags & os.O_APPEND:
                continue
        except (FileNotFoundError, NotADirectoryError):
            continue
        name = os.path.basename(path)
        if _FLEETING.fullmatch(name):
            continue
        what = kind_of(name)
        if what is None:
            strangers.add(path)
        else:
            found[path] = what
    return found, tuple(sorted(strangers))


def _is_in(path: str, known: Collection[str]) -> bool:
    # Upwards, for there may be 100,000 of both.
    while path != "/":
        if path in known:
            return True
        path = os.path.dirname(path)
    return False


def write_flags(pid: int, number: str, path: str) -> int:
    """Return the flags (open(2)) with which descriptor `number` has the file at `path` open for writing; 0 if not so.

    A regular file that we see there. Raises FileNotFoundError if either is gone.
    """
    theirs, ours = os.stat(f"/proc/{pid}/fd/{number}"), os.lstat(path)
    with open(f"/proc/{pid}/fdinfo/{number}", encoding="ascii") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    same = (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino) and stat.S_ISREG(theirs.st_mode)
    return flags if same and flags & os.O_ACCMODE != os.O_RDONLY else 0
