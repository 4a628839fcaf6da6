"""Whether the tables of a started copy are whole, and whether it holds what the user says it must."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Literal, TypeVar

from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError, quote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapmgr.mysql.connect.client import Connection

_T = TypeVar("_T")

Depth = Literal["none", "quick", "extended"]

_LOGGED_SHOWN = 3
# Views of memory, not tables on disk.
_NOT_ON_DISK = ("information_schema", "performance_schema", "sys")
# CHECK TABLE's last line for a table that is whole (reference manual, "CHECK TABLE output").
_WHOLE = ("ok", "table is already up to date")
# The engine cannot check, or is not loaded: nothing is known of the table, which is not damage.
_CANNOT_CHECK = ("doesn't support check", "unknown storage engine", "unknown table engine", "not supported for this")


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What CHECK TABLE said."""

    tables_checked: int
    """Tables of which it is known whether they are whole."""
    tables_total: int
    """All base tables, sampled or not."""
    failures: tuple[str, ...]
    """One sentence each; empty means that every checked table is whole."""
    notes: tuple[str, ...] = ()
    """Warnings (a MyISAM table that was open), and tables that could not be checked."""


@dataclass(frozen=True, kw_only=True)
class TableVerdict:
    """What CHECK TABLE's lines mean for one table."""

    failure: str | None = None
    note: str | None = None
    checked: bool = True


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
        depth: "none" only counts the tables; "quick" and "extended" are CHECK TABLE's words. "extended" also reads
            every InnoDB row by CHECKSUM TABLE: CHECK TABLE never looks at BLOBs outside of their row.
        share: of the tables, above 0 to 1; at least one is checked.
        seed: the snapshot's id: the same snapshot gives the same sample, another one another.
        deadline: time.monotonic() after which no further table is begun and a check under way is given up.
        progress: called with (tables done, tables to do).
        complaints: `ThrowawayServer.complaints`; what it returns after a table's check is a failure of that table, for
            a server answers with an empty value where a BLOB cannot be read, and only logs why.

    Damage, a server that dies over it and a passed deadline are failures in the report; nothing is raised for them.
    """
    try:
        tables = _tables(connection)
    except MysqlError as error:
        return CheckReport(
            tables_checked=0, tables_total=0, failures=(f"the list of tables cannot be read: {error.message}",)
        )
    chosen = [] if depth == "none" else sample(tables, share, seed)
    failures: list[str] = []
    notes: list[str] = []
    checked = 0
    # What was logged before, while it recovered, was mended or will be met again.
    complaints()
    for done, (schema, table, engine) in enumerate(chosen):
        name = f"{quote(schema)}.{quote(table)}"
        progress(done, len(chosen))
        left = deadline - time.monotonic()
        if left <= 0:
            failures.append(f"the time limit was reached after {done} of {len(chosen)} tables")
            break
        try:
            connection.set_read_timeout(left)
            lines = connection.rows(f"CHECK TABLE {name} {depth.upper()}")
            verdict = judge([(str(line["Msg_type"]), str(line["Msg_text"])) for line in lines])
            if depth == "extended" and engine == "InnoDB" and verdict.failure is None and verdict.checked:
                connection.set_read_timeout(max(deadline - time.monotonic(), 0.001))
                connection.execute(f"CHECKSUM TABLE {name} EXTENDED")
        except ConnectionLostError as error:
            late = time.monotonic() >= deadline
            why = "the time limit was reached" if late else f"the server ended or hung ({error.message})"
            failures.append(f"{name}: {why} while checking it, after {done} of {len(chosen)} tables")
            break
        except MysqlError as error:
            verdict = TableVerdict(failure=error.message)
        logged = complaints()
        if logged and verdict.failure is None:
            verdict = TableVerdict(failure="the server's log says: " + "; ".join(logged[:_LOGGED_SHOWN]))
        checked += verdict.checked
        if verdict.failure:
            failures.append(f"{name}: {verdict.failure}")
        if verdict.note:
            notes.append(f"{name}: {verdict.note}")
    else:
        progress(len(chosen), len(chosen))
    return CheckReport(tables_checked=checked, tables_total=len(tables), failures=tuple(failures), notes=tuple(notes))


def sample(tables: Sequence[_T], share: float, seed: str) -> list[_T]:
    """Return `share` of the tables (rounded up, at least one if there are any), chosen by `seed`, in their order."""
    if not 0 < share <= 1:
        raise ValueError(f"a share of tables is above 0 and at most 1, not {share}")
    count = min(len(tables), max(1, math.ceil(len(tables) * share)))
    # Not cryptography: the same snapshot must give the same tables.
    chosen = random.Random(seed).sample(range(len(tables)), count)  # noqa: S311
    return [tables[index] for index in sorted(chosen)]


def judge(lines: Sequence[tuple[str, str]]) -> TableVerdict:
    """Given CHECK TABLE's lines for one table as (Msg_type, Msg_text), return what they mean.

    A failure is any error, or a last status other than OK. "1 client is using or hasn't closed the table properly" is a
    warning about a copy of an open table, and no damage.
    """
    kinds = [(kind.lower(), text) for kind, text in lines]
    said = [text for _, text in kinds]
    if any(words in text.lower() for text in said for words in _CANNOT_CHECK):
        return TableVerdict(note=f"not checked: {said[0]}", checked=False)
    errors = [text for kind, text in kinds if kind == "error"]
    status = next((text for kind, text in reversed(kinds) if kind == "status"), None)
    if status is None and not errors:
        return TableVerdict(failure="CHECK TABLE gave no status: " + ("; ".join(said) or "nothing"))
    if errors or (status is not None and status.lower() not in _WHOLE):
        return TableVerdict(failure="; ".join(dict.fromkeys(said)))
    warnings = [text for kind, text in kinds if kind in ("warning", "note", "info")]
    return TableVerdict(note="; ".join(warnings) or None)


def run_assertions(connection: Connection, assertions: Sequence[str], *, deadline: float) -> tuple[str, ...]:
    """Run the user's statements; each must give one row with one true value. Return a sentence for each that does not.

    The one under way at `deadline` (time.monotonic()) is given up; its connection is lost then.

    True is what MySQL calls true: a number other than 0. A sentence has the assertion's number (from 1) and not its
    text, which may hold what should not be in a log. After a lost connection the remaining ones are not run.
    """
    failures = []
    for number, sql in enumerate(assertions, start=1):
        try:
            connection.set_read_timeout(max(deadline - time.monotonic(), 0.001))
            rows = connection.rows(sql)
        except ConnectionLostError as error:
            why = "the time limit was reached" if time.monotonic() >= deadline else error.message
            failures.append(f"assertion {number}: {why}; {len(assertions) - number} more were not run")
            break
        except MysqlError as error:
            failures.append(f"assertion {number}: {error.message}")
            continue
        if len(rows) != 1 or len(rows[0]) != 1:
            columns = f" of {len(rows[0])} columns" if rows else ""
            failures.append(f"assertion {number}: gave {len(rows)} rows{columns}, not one value")
        elif not is_true(next(iter(rows[0].values()))):
            failures.append(f"assertion {number}: is not true")
    return tuple(failures)


def is_true(value: object) -> bool:
    """Return whether MySQL would call a value true: a number other than 0, also as text; a BIT with a bit set."""
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
    marks = ", ".join(["%s"] * len(_NOT_ON_DISK))
    rows = connection.rows(
        "SELECT TABLE_SCHEMA AS s, TABLE_NAME AS t, ENGINE AS e FROM information_schema.TABLES "  # noqa: S608 - only marks are added
        f"WHERE TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED', 'SEQUENCE') AND TABLE_SCHEMA NOT IN ({marks}) "
        "ORDER BY TABLE_SCHEMA, TABLE_NAME",
        _NOT_ON_DISK,
    )
    return [(str(row["s"]), str(row["t"]), str(row["e"])) for row in rows]
