"""Whether the job's account may do what a backup needs, and the statement that would let it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from snapmgr.mysql.client import quote

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapmgr.mysql.client import Connection

_GLOBAL = re.compile(r"GRANT (?P<privileges>.+?) ON \*\.\* TO ", re.IGNORECASE)
# MariaDB's documentation of GRANT; tried on 10.11. Each with what else gives the same right.
_MARIADB = {
    # BACKUP STAGE and FLUSH TABLES WITH READ LOCK.
    "RELOAD": frozenset({"RELOAD"}),
    # SHOW MASTER STATUS; REPLICATION CLIENT was its name before 10.5.
    "BINLOG MONITOR": frozenset({"BINLOG MONITOR", "REPLICATION CLIENT", "SUPER"}),
    # InnoDB's list of tablespaces, which may lie outside of the datadir.
    "PROCESS": frozenset({"PROCESS"}),
}


def missing_privileges(grants: Iterable[str]) -> tuple[str, ...]:
    """Given the lines of SHOW GRANTS (those of active roles are among them), return what a backup lacks."""
    held: set[str] = set()
    for line in grants:
        match = _GLOBAL.match(line)
        if match:
            held |= {privilege.strip().upper() for privilege in match["privileges"].split(",")}
    if "ALL PRIVILEGES" in held or "ALL" in held:
        return ()
    return tuple(name for name, enough in _MARIADB.items() if not held & enough)


def read_grants(connection: Connection) -> list[str]:
    """Return the lines of SHOW GRANTS. They hold password hashes: for `missing_privileges`, never for people."""
    return [str(next(iter(row.values()))) for row in connection.rows("SHOW GRANTS")]


def grant_statement(account: str, privileges: tuple[str, ...]) -> str:
    """Given CURRENT_USER() ("snapmgr@localhost") and privileges, return the GRANT that an administrator would run."""
    user, _, host = account.rpartition("@")
    return f"GRANT {', '.join(privileges)} ON *.* TO {quote(user)}@{quote(host)};"
