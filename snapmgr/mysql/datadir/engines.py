"""Counts the tables of each engine, from what an account may see and from the files of a datadir."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from snapmgr.mysql.connect.client import Connection

SYSTEM_SCHEMAS = ("mysql", "information_schema", "performance_schema", "sys")
ENGINE_FILES = {".MYI": "MyISAM", ".MAI": "Aria", ".CSV": "CSV", ".ARZ": "ARCHIVE"}
"""Engines whose tables we can count by file, for an account that may not see the tables themselves."""

# Engines whose tables need not be visible: counted by files, or without files that a snapshot must hold.
_NEED_NOT_SEE = frozenset(
    {
        *("InnoDB", *ENGINE_FILES.values()),
        *("MEMORY", "MRG_MyISAM", "MRG_MYISAM", "BLACKHOLE", "FEDERATED", "SEQUENCE", "PERFORMANCE_SCHEMA", "SPIDER"),
        *("ndbcluster", "ndbinfo", "TempTable"),
    }
)


def hidden_tables(connection: Connection, datadir: Path) -> list[str]:
    """Return the ARCHIVE tables, as paths in the datadir, that a MariaDB server without this engine does not list.

    MariaDB writes the definition of such a table only when somebody opens it; until then it is in the data file alone.
    Raises MysqlError.
    """
    loaded = "SELECT 1 AS one FROM information_schema.ENGINES WHERE ENGINE = 'ARCHIVE' AND SUPPORT <> 'NO'"
    found = [path for path in sorted(datadir.glob("*/*.ARZ")) if not path.with_suffix(".frm").exists()]
    return [str(path.relative_to(datadir)) for path in found] if found and not connection.rows(loaded) else []


def count_tables(connection: Connection, files: Mapping[str, int]) -> dict[str, int]:
    """Return the number of tables by engine, system schemas excluded.

    Where the account may not see all tables, the engines of `files` are counted by files, and any other engine of the
    server that may have tables gets 0.
    """
    rows = connection.rows(
        "SELECT ENGINE AS engine, COUNT(*) AS tables FROM information_schema.TABLES "
        "WHERE TABLE_TYPE <> 'VIEW' AND TABLE_SCHEMA NOT IN %s AND ENGINE IS NOT NULL GROUP BY ENGINE",
        (SYSTEM_SCHEMAS,),
    )
    counts = {str(row["engine"]): int(str(row["tables"])) for row in rows}
    for engine in _unseen(connection):
        counts.setdefault(engine, 0)
    for engine, tables in files.items():
        counts[engine] = max(counts.get(engine, 0), tables)
    return dict(sorted(counts.items()))


def _unseen(connection: Connection) -> Iterator[str]:
    """Yield the engines that may have tables which neither this account nor their files show."""
    # This lists only the account's own privileges, not those of its roles.
    sees_all = connection.rows(
        "SELECT 1 AS one FROM information_schema.USER_PRIVILEGES WHERE PRIVILEGE_TYPE = 'SELECT' "
        "AND REPLACE(GRANTEE, '''', '') = CURRENT_USER() LIMIT 1"
    )
    if sees_all:
        return
    rows = connection.rows("SELECT ENGINE AS engine FROM information_schema.ENGINES WHERE SUPPORT <> 'NO'")
    yield from {str(row["engine"]) for row in rows} - _NEED_NOT_SEE
