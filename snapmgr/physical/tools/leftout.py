"""Finds tables that a tool left out of a backup without an error: with a definition, but without a tablespace.

mariadb-backup 10.11 and 11.8 take DISCARD TABLESPACE in the redo log for the end of the table. A table imported since
the server's last checkpoint has one: "We assume the table was dropped", and "completed OK!".
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

from snapmgr.contract.errors import StorageError
from snapmgr.mysql.datadir.plainfile import open_plain
from snapmgr.physical.tools.request import ToolBackup

_IGNORED = re.compile(
    rb"assume the +table was dropped .* ignore the tablespace (?:\./)?(?P<name>[^/\n]+/[^/\n]+)\.ibd\b"
)
# The header of a .frm: its magic number, and at 3 the engine (legacy_db_type): InnoDB, or the partition engine.
_FRM_BYTES = 4
_FRM_MAGIC = b"\xfe\x01"
_ENGINES = (12, 20)
# A tablespace's names: in a backup, in an increment, and if it was made or changed since the backup began.
_COPIES = (".ibd", ".ibd.delta", ".new", ".new.delta")
_PARTITION = re.compile(r"#p#", re.IGNORECASE)
_SHOWN = 5


def left_out(folder: str, datadir: str, log: str) -> tuple[str, ...]:
    """Return "schema/table" of each tablespace that a tool left out of a fresh backup in `folder`, by its log.

    A table that really was dropped has no definition in the backup, and no tablespace in the server's `datadir`; one
    that was made again has another tablespace in the backup. Raises OSError.
    """
    with open(log, "rb") as lines:
        ignored = {os.fsdecode(match["name"]) for line in lines if (match := _IGNORED.search(line))}
    return tuple(
        name
        for name in sorted(ignored)
        if os.path.lexists(os.path.join(datadir, f"{name}.ibd"))
        and not any(os.path.lexists(os.path.join(folder, name + suffix)) for suffix in _COPIES)
        and _is_innodb(os.path.join(folder, f"{_PARTITION.split(name)[0]}.frm"))
    )


def require_all_tables(folder: str, datadir: str, log: str, backup: ToolBackup) -> None:
    """Raise StorageError, with their names, if the tool left tables out of the backup."""
    try:
        names = left_out(folder, datadir, log)
    except OSError as error:
        raise StorageError(f"cannot check that all tables are in the backup: {error}") from None
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise StorageError(
            f"{backup.tool} {backup.tool_version} left out tables, but reported a complete backup: "
            f"{', '.join(names[:_SHOWN])}{more}",
            hint="it does so for tablespaces imported since the server's last checkpoint: SET GLOBAL "
            "innodb_log_checkpoint_now = ON; (or innodb_max_dirty_pages_pct = 0 for a while), and back up again",
        )


def _is_innodb(frm: str) -> bool:
    with suppress(FileNotFoundError), open_plain(frm) as file:
        head = file.read(_FRM_BYTES)
        return head[:2] == _FRM_MAGIC and len(head) == _FRM_BYTES and head[3] in _ENGINES
    return False
