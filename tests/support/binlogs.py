"""Traffic for binary logs: a bit of everything that servers write there, and what they say themselves about it."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import pymysql

SETUP = (
    "CREATE DATABASE t",
    "USE t",
    "CREATE TABLE i (a INT PRIMARY KEY, b LONGBLOB) ENGINE=InnoDB",
    "CREATE TABLE m (a INT PRIMARY KEY, b LONGBLOB) ENGINE=MyISAM",
)
TRANSACTIONS = (
    "INSERT INTO i VALUES (1, 'x')",
    "INSERT INTO m VALUES (1, 'x')",
    "UPDATE i SET b = 'y'",
    "BEGIN",
    "INSERT INTO i VALUES (2, 'x')",
    "SAVEPOINT s",
    "INSERT INTO i VALUES (20, 'x')",
    "ROLLBACK TO s",
    "INSERT INTO i VALUES (3, 'COMMIT')",
    "COMMIT",
    "BEGIN",
    "INSERT INTO i VALUES (4, 'x')",
    "ROLLBACK",
    "TRUNCATE TABLE m",
    "CREATE TABLE z SELECT * FROM i",
    "ALTER TABLE i ADD COLUMN c INT DEFAULT 7",
    "ALTER TABLE i DROP COLUMN c",
    "DROP TABLE z",
    "CREATE USER x",
    "DROP USER x",
)
STATEMENTS = (
    "SET SESSION binlog_format = STATEMENT",
    "SET @u = 100",
    "INSERT INTO i VALUES (@u, 'statement')",
    "INSERT INTO m VALUES (@u + 1, 'statement')",
    "INSERT INTO i VALUES (5, RAND())",
    "INSERT INTO i VALUES (6, 'long {long}')",
    "SET SESSION binlog_format = ROW",
)
XA = (
    "XA START 'one'",
    "INSERT INTO i VALUES (7, 'x')",
    "XA END 'one'",
    "XA PREPARE 'one'",
    "XA COMMIT 'one'",
    "XA START 'two'",
    "INSERT INTO i VALUES (8, 'x')",
    "XA END 'two'",
    "XA PREPARE 'two'",
    "XA ROLLBACK 'two'",
    "XA START 'three'",
    "INSERT INTO i VALUES (9, 'x')",
    "XA END 'three'",
    "XA COMMIT 'three' ONE PHASE",
)
LARGE = (
    "INSERT INTO i VALUES (50, REPEAT('large ', 100000))",
    "INSERT INTO m VALUES (50, REPEAT('large ', 100000))",
    "DELETE FROM i WHERE a = 50",
)
MIXED_ENGINES = (
    "BEGIN",
    "INSERT INTO i VALUES (60, 'x')",
    "INSERT INTO m VALUES (60, 'x')",
    "ROLLBACK",
)
ROTATION = ("FLUSH BINARY LOGS", "INSERT INTO i VALUES (70, 'after')", "FLUSH BINARY LOGS")
MARIADB_DOMAINS = (
    "SET gtid_domain_id = 7",
    "INSERT INTO i VALUES (80, 'x')",
    "SET gtid_domain_id = 3, server_id = 99",
    "INSERT INTO i VALUES (81, 'x')",
    "SET server_id = 1",
    "INSERT INTO i VALUES (82, 'x')",
    "SET gtid_domain_id = 0",
)
MYSQL_TAGS = (
    "SET gtid_next = 'AUTOMATIC:tag_a'",
    "INSERT INTO i VALUES (200, 'x')",
    "CREATE TABLE tagged (a INT)",
    "SET gtid_next = 'aaaaaaaa-0000-0000-0000-ffffffffffff:5'",
    "INSERT INTO i VALUES (201, 'x')",
    "SET gtid_next = 'aaaaaaaa-0000-0000-0000-ffffffffffff:b:9223372036854775'",
    "INSERT INTO i VALUES (202, 'x')",
    "SET gtid_next = '00aaaaaa-0000-0000-0000-ffffffffffff:3'",
    "BEGIN",
    "COMMIT",
    "SET gtid_next = AUTOMATIC",
    "SET SESSION binlog_transaction_compression = ON",
    "INSERT INTO i VALUES (203, REPEAT('x', 200))",
    "SET SESSION binlog_transaction_compression = OFF",
)
UNFINISHED_XA = ("XA START 'four'", "INSERT INTO i VALUES (90, 'x')", "XA END 'four'", "XA PREPARE 'four'")


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a server said about its own binary logs at one moment."""

    file: str
    offset: int
    gtid: str


def say(cursor: pymysql.cursors.Cursor) -> Said:
    """Ask the server for its position. Exact while nothing else writes."""
    cursor.execute("SELECT VERSION()")
    (version,) = _row(cursor)
    mariadb = "MariaDB" in version
    cursor.execute("SHOW MASTER STATUS" if mariadb else "SHOW BINARY LOG STATUS")
    file, offset, *_ = _row(cursor)
    cursor.execute("SELECT @@GLOBAL.gtid_binlog_pos" if mariadb else "SELECT @@GLOBAL.gtid_executed")
    (gtid,) = _row(cursor)
    return Said(file=file, offset=offset, gtid=gtid.replace("\n", ""))


def _row(cursor: pymysql.cursors.Cursor) -> Sequence[Any]:
    row = cursor.fetchone()
    assert row is not None
    return row


def replay(cursor: pymysql.cursors.Cursor, statements: Iterable[str]) -> list[Said]:
    """Run the statements and return what the server said after each."""
    said = []
    for statement in statements:
        cursor.execute(statement.replace("{long}", "text " * 20000))
        said.append(say(cursor))
    return said


def events(cursor: pymysql.cursors.Cursor, file: str) -> list[tuple[int, str, int, int, str]]:
    """Return (offset, type's name, server id, next offset, text) of a file's events as the server shows them."""
    cursor.execute(f"SHOW BINLOG EVENTS IN '{file}'")
    return [(offset, kind, server_id, stop, text) for _, offset, kind, server_id, stop, text in cursor.fetchall()]


def logs(base: Path) -> list[Path]:
    """Return the log files of a base name in their order."""
    found = [path for path in base.parent.glob(f"{base.name}.*") if path.suffix[1:].isdigit()]
    return sorted(found, key=lambda path: int(path.suffix[1:]))


def shown_once(shown: Iterable[Sequence[Any]], size: int) -> list[tuple[int, str, int, int, str]]:
    """Given rows of `events` and the file's size, return one row an event, each with the offset where it ends.

    MySQL shows what is in a Transaction_payload as well; MariaDB does not show where events of a transaction end.
    """
    rows = [row for row in shown if row[0] != row[3]]
    stops = [*(row[0] for row in rows[1:]), size]
    assert all(row[3] in {stop, 0} for row, stop in zip(rows, stops, strict=True))
    return [(row[0], row[1], row[2], stop, row[4]) for row, stop in zip(rows, stops, strict=True)]


def made_event(kind: int, offset: int, body: bytes, *, server_id: int = 1, flags: int = 0) -> bytes:
    """Return an event with a checksum, as if at `offset` of a file."""
    size = 19 + len(body) + 4
    event = struct.pack("<IBIIIH", 0, kind, server_id, size, (offset + size) & 0xFFFFFFFF, flags) + body
    return event + zlib.crc32(event).to_bytes(4, "little")
