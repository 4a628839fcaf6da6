"""Checks the tables of a server on a copy, and runs the user's assertions on them."""

from __future__ import annotations

import math
import random
import re
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Literal, TypeVar

from msgspec import Struct

from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError, quote
from snapmgr.mysql.datadir.engines import SYSTEM_SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapmgr.mysql.connect.client import Connection

_T = TypeVar("_T")

Depth = Literal["none", "quick", "extended"]

_LOGGED_SHOWN = 3
# Views of memory, not tables on disk.
_NOT_ON_DISK = ("information_schema", "performance_schema", "sys")
# CHECK TABLE's last line for an intact table (reference manual, "CHECK TABLE output").
_INTACT = ("ok", "table is already up to date")
_NO_CHECK = ("doesn't support check", "not supported for this")
# The server cannot open the table, so nothing is known about it, which is not damage.
_NOT_LOADED = re.compile(r"unknown (?:storage|table) engine '?(?P<engine>\w+)", re.IGNORECASE)
_NO_KEY = re.compile(r"Initialization of encryption failed|find master key from keyring|used key_id is not available")
_KEY_ABSENT = "its encryption key is not available"
# Engines whose tables have no data in a snapshot: in memory, in other tables, or elsewhere.
_DATA_ELSEWHERE = frozenset(
    {"MEMORY", "BLACKHOLE", "MRG_MYISAM", "FEDERATED", "CONNECT", "SPIDER", "SPHINX", "OQGRAPH", "PERFORMANCE_SCHEMA"}
)
# MariaDB's tablespaces whose current key it cannot get (ENCRYPTION_KEY_VERSION_INVALID). Names are as file names.
_KEYLESS = (
    "SELECT CONVERT(CONVERT(CAST(SUBSTRING_INDEX(NAME, '/', 1) AS BINARY) USING filename) USING utf8mb4) AS s, "
    "CONVERT(CONVERT(CAST(SUBSTRING_INDEX(SUBSTRING_INDEX(SUBSTRING_INDEX(NAME, '/', -1), '#P#', 1), '#p#', 1) "
    "AS BINARY) USING filename) USING utf8mb4) AS t FROM information_schema.INNODB_TABLESPACES_ENCRYPTION "
    "WHERE ENCRYPTION_SCHEME = 1 AND CURRENT_KEY_VERSION = 4294967295"
)


class CheckReport(Struct, frozen=True, kw_only=True):
    """The results of CHECK TABLE."""

    tables_checked: int
    """Tables that CHECK TABLE could judge."""
    tables_total: int
    """All base tables, sampled or not."""
    failures: tuple[str, ...]
    """One sentence each; empty means that every checked table is intact."""
    unchecked: tuple[str, ...] = ()
    """One sentence for each table that could not be looked at: its engine or its encryption key is missing."""
    user_tables_checked: int = 0
    """Those of `tables_checked` that are not the server's own."""
    notes: tuple[str, ...] = ()
    """Warnings (a MyISAM table that was open), and tables without data of their own."""


class TableVerdict(Struct, frozen=True, kw_only=True):
    """The meaning of CHECK TABLE's lines for one table."""

    failure: str | None = None
    unchecked: str | None = None
    """Why it could not be looked at."""
    note: str | None = None
    unsupported: bool = False
    """Whether its engine has no check."""

    @property
    def checked(self) -> bool:
        """Whether the table was looked at."""
        return self.unchecked is None and not self.unsupported


def check_tables(
    connection: Connection,
    *,
    depth: Depth,
    share: float,
    seed: str,
    deadline: float,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    complaints: Callable[[], tuple[str, ...]] = lambda: (),
) -> CheckReport:
    """Run CHECK TABLE on base tables of all schemas, the system's own included.

    Args:
        connection: to the throwaway server; its read timeout is changed.
        depth: "none" only counts the tables; "quick" and "extended" are options of CHECK TABLE. "extended" also reads
            every InnoDB row by CHECKSUM TABLE: CHECK TABLE never reads BLOBs outside their row.
        share: of the tables, above 0 up to 1; at least one is checked.
        seed: the snapshot's id: the same snapshot gives the same sample, another snapshot another one.
        deadline: time.monotonic() after which no further check begins and the current one is abandoned.
        progress: called with (tables done, tables to do).
        complaints: `ThrowawayServer.complaints`; lines that it returns after a table's check are a failure of that
            table: a server returns an empty value for an unreadable BLOB and only logs the reason.

    Damage, a crash of the server and a passed deadline are failures in the report; none of them raises an error.
    """
    try:
        tables = _tables(connection)
    except MysqlError as error:
        return CheckReport(
            tables_checked=0, tables_total=0, failures=(f"cannot read the list of tables: {error.message}",)
        )
    chosen = [] if depth == "none" else sample(tables, share, seed)
    failures: list[str] = []
    unchecked: list[str] = []
    notes: list[str] = []
    checked: list[str] = []
    # Skip earlier lines: recovery repaired that damage, or the checks will find it again.
    complaints()
    for done, (schema, table, engine) in enumerate(chosen):
        name = f"{quote(schema)}.{quote(table)}"
        progress(done, len(chosen))
        left = deadline - time.monotonic()
        if left <= 0:
            failures.append(f"the time limit was reached after {done} of {len(chosen)} tables")
            break
        try:
            verdict = _check(connection, name, engine, depth, deadline)
        except ConnectionLostError as error:
            late = time.monotonic() >= deadline
            why = "the time limit was reached" if late else f"the server ended or hung ({error.message})"
            failures.append(f"{name}: {why} while checking it, after {done} of {len(chosen)} tables")
            break
        except MysqlError as error:
            verdict = TableVerdict(failure=error.message)
        # MariaDB lists a tablespace only after somebody opened it.
        keyless = verdict.failure is not None and (schema, table) in _keyless_tables(connection)
        verdict = _completed(verdict, complaints(), keyless=keyless)
        if verdict.checked:
            checked.append(schema)
        for said, sentences in ((verdict.failure, failures), (verdict.unchecked, unchecked), (verdict.note, notes)):
            if said:
                sentences.append(f"{name}: {said}")
    else:
        progress(len(chosen), len(chosen))
    return CheckReport(
        tables_checked=len(checked),
        tables_total=len(tables),
        failures=tuple(failures),
        unchecked=tuple(unchecked),
        user_tables_checked=sum(schema not in SYSTEM_SCHEMAS for schema in checked),
        notes=tuple(notes),
    )


def _keyless_tables(connection: Connection) -> frozenset[tuple[str, str]]:
    """Return the opened InnoDB tables, as (schema, name), whose keys MariaDB does not have; MySQL has no such list."""
    try:
        return frozenset((str(row["s"]), str(row["t"])) for row in connection.rows(_KEYLESS))
    except MysqlError:
        return frozenset()


def _completed(verdict: TableVerdict, logged: Sequence[str], *, keyless: bool) -> TableVerdict:
    """Return a verdict with what the server's log and the known keys say about the table."""
    if verdict.failure and keyless:
        return TableVerdict(unchecked=_KEY_ABSENT)
    if logged and verdict.failure is None and verdict.unchecked is None:
        return TableVerdict(failure="the server's log says: " + "; ".join(logged[:_LOGGED_SHOWN]))
    return verdict


def _check(connection: Connection, name: str, engine: str, depth: Depth, deadline: float) -> TableVerdict:
    """Check one table. Raises MysqlError, ConnectionLostError also at the deadline."""
    connection.set_read_timeout(max(deadline - time.monotonic(), 0.001))
    lines = connection.rows(f"CHECK TABLE {name} {depth.upper()}")
    verdict = judge([(str(line["Msg_type"]), str(line["Msg_text"])) for line in lines])
    if verdict.unsupported and engine.upper() in _DATA_ELSEWHERE:
        return TableVerdict(note=f"not checked: {engine} keeps no data here", unsupported=True)
    if not verdict.unsupported and (depth != "extended" or engine != "InnoDB" or verdict.failure or verdict.unchecked):
        return verdict
    connection.set_read_timeout(max(deadline - time.monotonic(), 0.001))
    read = connection.rows(f"CHECKSUM TABLE {name} EXTENDED")
    if verdict.unsupported:
        # NULL: it could not be read, and the reason is a warning.
        unread = not read or next(reversed(read[0].values())) is None
        return TableVerdict(unchecked=f"its engine {engine} cannot check it" if unread else None)
    return verdict


def sample(tables: Sequence[_T], share: float, seed: str) -> list[_T]:
    """Return `share` of the tables (rounded up, at least one if any exist), chosen by `seed`, in their order."""
    if not 0 < share <= 1:
        raise ValueError(f"a share of tables is above 0 and at most 1, not {share}")
    count = min(len(tables), max(1, math.ceil(len(tables) * share)))
    # Not cryptography: the same snapshot must give the same tables.
    chosen = random.Random(seed).sample(range(len(tables)), count)  # noqa: S311
    return [tables[index] for index in sorted(chosen)]


def judge(lines: Sequence[tuple[str, str]]) -> TableVerdict:
    """Given CHECK TABLE's lines for one table as (Msg_type, Msg_text), return their meaning.

    A failure is any error, or a last status other than OK. "1 client is using or hasn't closed the table properly" is a
    warning about a copy of an open table, not damage.
    """
    kinds = [(kind.lower(), text) for kind, text in lines]
    said = [text for _, text in kinds]
    if unchecked := next(filter(None, map(cannot_open, said)), None):
        return TableVerdict(unchecked=unchecked)
    if any(words in text.lower() for text in said for words in _NO_CHECK):
        return TableVerdict(unsupported=True)
    errors = [text for kind, text in kinds if kind == "error"]
    status = next((text for kind, text in reversed(kinds) if kind == "status"), None)
    if status is None and not errors:
        return TableVerdict(failure="CHECK TABLE gave no status: " + ("; ".join(said) or "nothing"))
    if errors or (status is not None and status.lower() not in _INTACT):
        return TableVerdict(failure="; ".join(dict.fromkeys(said)))
    warnings = [text for kind, text in kinds if kind in ("warning", "note", "info")]
    return TableVerdict(note="; ".join(warnings) or None)


def cannot_open(said: str) -> str | None:
    """Given a server's message, return why it cannot open a table that may be intact; None for other messages."""
    if engine := _NOT_LOADED.search(said):
        return f"its engine {engine['engine']} is not loaded"
    return _KEY_ABSENT if _NO_KEY.search(said) else None


def run_assertions(
    connection: Connection, assertions: Sequence[str], *, deadline: float, unchecked: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Run the user's statements; each must return one row with one true value.

    Return a sentence for each failure, and one for each that needs a table that cannot be opened here, such as those of
    `unchecked` (`CheckReport.unchecked`).
    The statement in progress at `deadline` (time.monotonic()) is abandoned, and its connection is lost.

    True is a number other than 0, as in MySQL. A sentence has the assertion's number (from 1) and not its text, which
    may hold data that do not belong in a log. After a lost connection the remaining assertions are not run.
    """
    failures: list[str] = []
    untried: list[str] = []
    names = [sentence.partition(": ")[0] for sentence in unchecked]
    for number, sql in enumerate(assertions, start=1):
        try:
            connection.set_read_timeout(max(deadline - time.monotonic(), 0.001))
            rows = connection.rows(sql)
        except ConnectionLostError as error:
            why = "the time limit was reached" if time.monotonic() >= deadline else error.message
            failures.append(f"assertion {number}: {why}; {len(assertions) - number} more were not run")
            break
        except MysqlError as error:
            unopened = cannot_open(error.message) or any(name in error.message for name in names)
            (untried if unopened else failures).append(f"assertion {number}: {error.message}")
            continue
        if len(rows) != 1 or len(rows[0]) != 1:
            columns = f" of {len(rows[0])} columns" if rows else ""
            failures.append(f"assertion {number}: gave {len(rows)} rows{columns}, not one value")
        elif not is_true(next(iter(rows[0].values()))):
            failures.append(f"assertion {number}: is not true")
    return tuple(failures), tuple(untried)


def is_true(value: object) -> bool:
    """Return whether a value is true for MySQL: a number other than 0, also as text; a BIT with a bit set."""
    if isinstance(value, bool | int | float | Decimal):
        return bool(value)
    if isinstance(value, bytes):
        return any(value)
    try:
        return float(str(value)) != 0
    except ValueError:
        return False


def _tables(connection: Connection) -> list[tuple[str, str, str]]:
    """Return every table as (schema, name, engine)."""
    rows = connection.rows(
        "SELECT TABLE_SCHEMA AS s, TABLE_NAME AS t, ENGINE AS e FROM information_schema.TABLES "
        "WHERE TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED', 'SEQUENCE') AND TABLE_SCHEMA NOT IN %s "
        "ORDER BY TABLE_SCHEMA, TABLE_NAME",
        (_NOT_ON_DISK,),
    )
    return [(str(row["s"]), str(row["t"]), str(row["e"])) for row in rows]
