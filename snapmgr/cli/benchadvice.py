"""Prints the advice of a benchmark's report: the first screen of ``snapmgr bench show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snapmgr.cli.output import format_table
from snapmgr.contract.units import format_quantity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FIRST = {
    "lead": "",
    "guarantee": "  ",
    "avoid": "  avoid ",
    "not shown": "  no difference: ",
    "confidence": "  how sure: ",
}
_LATER = {"because": "", "costs": "cost: ", "limits": "limit: "}
# More of a kind does not fit on a screen.
_MOST = 4
_LOCKS = {"short": "short, or none", "frozen": "server frozen"}


def advice_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Given ``recommendation`` of the report, yield the advice for each use, and the table of storages."""
    for use in found["uses"]:
        yield from _said(use, _FIRST)
        yield ""
    if found["storages"]:
        yield from _table(found["storages"])
        yield ""
    for use in found["uses"]:
        yield from _said(use, _LATER)
    yield from (f"limit: {one['text']}" for one in found["sentences"] if one["kind"] == "limits" and _alone(one, found))


def _said(use: Mapping[str, Any], kinds: Mapping[str, str]) -> Iterator[str]:
    for kind, before in kinds.items():
        texts = [one["text"] for one in use["sentences"] if one["kind"] == kind]
        most = len(texts) if kind == "lead" else _MOST
        yield from (before + text for text in texts[:most])
        if len(texts) > most:
            yield f"{before}… and {len(texts) - most} more: on the page (-o FILE.html)"


def _alone(sentence: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    return all(sentence not in use["sentences"] for use in found["uses"])


def _table(storages: list[dict[str, Any]]) -> list[str]:
    against = next((cost["against"] for row in storages for cost in (row["writes"], row["reads"]) if cost), None)
    titles = ("STORAGE", "GUARANTEE", "LOCK", "SNAPSHOT CALL", "COST OF WRITES", "COST OF READS")
    rows = [
        [
            row["stack"],
            _guarantee(row),
            _LOCKS.get(row["lock"], "-"),
            "-" if row["create_s"] is None else format_quantity(row["create_s"], "s"),
            *(_cost(row, name, against) for name in ("writes", "reads")),
        ]
        for row in storages
    ]
    note = (
        [] if against is None else [f"Costs: as many times that of {against}, with the interval; * no difference shown"]
    )
    return [*format_table(titles, rows), *note]


def _guarantee(row: Mapping[str, Any]) -> str:
    if row["control"]:
        return "no snapshots"
    if row["guarantee"] is None:
        return "not known"
    words = "per volume" if row["guarantee"]["atomicity"] == "volume" else "per file"
    return words if row["guarantee"]["survives_origin"] else f"{words}, dies with origin"


def _cost(row: Mapping[str, Any], name: str, against: str | None) -> str:
    cost = row[name]
    if cost is None:
        return "1" if row["stack"] == against else "-"
    text: str = cost["cost_text"]
    return text + (" *" if cost["verdict"] == "not shown" else "")
