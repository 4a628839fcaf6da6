"""Lists the files that a server's process has open for writing, because its variables and tables omit some of them.

MariaDB's --master-info-file, --log-ddl-recovery and --log-tc, for example, are options without a variable.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

# Few servers have such a file outside their datadir: each expression is built at its first use.
_KINDS = (
    ("replication state", r"(multi-)?master.*\.info|relay-log.*\.info"),
    ("DDL recovery log", r"ddl_(recovery|log).*\.log"),
    ("transaction coordinator's log", r"tc\.log"),
    ("redo log", r"ib_logfile\d+|#ib_redo\d+.*|#innodb_redo"),
    ("undo tablespaces", r"undo_?\d+|.+\.ibu"),
    ("doublewrite buffer", r".+\.dblwr"),
    ("system tablespace", r"ibdata\d*"),
    ("Aria log", r"aria_log.*"),
    ("tablespace", r".+\.ibd"),
    ("table", r".+\.(MYD|MYI|MAD|MAI|CSV|ARZ)"),
)
# Tables that an ALTER or a query makes: they come and go.
_TEMPORARY = r"#sql.*|.*ibtmp\d+|temp_\d+\.ibt"
_STANDARD_STREAMS = ("0", "1", "2")


def kind_of(name: str) -> str | None:
    """Return the kind of data in a server's file of this name; None if the name is unknown."""
    return next((what for what, pattern in _KINDS if re.fullmatch(pattern, name)), None)


def open_files(pid: int, known: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the files outside `known` that a process has open for writing: data files with their kind, and the others.

    Args:
        pid: of the server.
        known: folders and files, resolved, that we skip.

    Leaves out files that only grow (logs for people), deleted files, temporary tables, and files that are not at their
    path (a process in its own mount namespace). Misses files that the server closes between uses. Raises
    PermissionError.
    """
    found: dict[str, str] = {}
    unknown: set[str] = set()
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
        if re.fullmatch(_TEMPORARY, name):
            continue
        what = kind_of(name)
        if what is None:
            unknown.add(path)
        else:
            found[path] = what
    return found, tuple(sorted(unknown))


def _is_in(path: str, known: Collection[str]) -> bool:
    # Go upwards: there may be 100,000 known and 100,000 open files.
    while path != "/":
        if path in known:
            return True
        path = os.path.dirname(path)
    return False


def write_flags(pid: int, number: str, path: str) -> int:
    """Return the open(2) flags of descriptor `number` if it has the regular file at `path` open for writing, else 0.

    Raises FileNotFoundError if the descriptor or the file is gone.
    """
    theirs, ours = os.stat(f"/proc/{pid}/fd/{number}"), os.lstat(path)
    with open(f"/proc/{pid}/fdinfo/{number}", encoding="ascii") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    same = (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino) and stat.S_ISREG(theirs.st_mode)
    return flags if same and flags & os.O_ACCMODE != os.O_RDONLY else 0
