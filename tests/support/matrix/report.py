"""The matrix as Markdown tables, from its results alone."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from support.matrix.cells import BARE_LAYOUTS, LAYOUTS, all_cells
from support.matrix.results import by_cell
from support.samples import quantile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from support.matrix.cells import Cell
    from support.matrix.results import Result

MARGIN_S = 0.002
"""What a lock may be held longer than a bare snapshot call takes, medians compared."""
_LOCKS = ("backup-lock", "global-read-lock")


def write_report(results: Sequence[Result]) -> str:
    """Return the tables and the sums. Times are in milliseconds: median / 95th percentile / longest."""
    cells = by_cell(results)
    known = [cell for cell in all_cells() if cell.id in cells]
    blocks = [
        _table(
            "Server | Level | Engines | Layout | Snapshots | Invariant held | Position exact | Replay equal | Wait | "
            "Hold | Bare call | Writers' worst stall",
            [_snapshot_row(cell, cells[cell.id]) for cell in known if _of(cells[cell.id], "snapshot")],
        ),
        _table("Server | Level | Engines | Layout | Refused", list(_refusal_rows(known, cells))),
        _table("Server | Layout | Level | Hold p50 | Bare p50 | Difference", list(_margin_rows(known, cells))),
    ]
    failures = [f"- FAILED {cell.id}: {one.text}" for cell in known for one in cells[cell.id] if one.kind == "failed"]
    wrong = [f"- WRONG {one.cell} ({one.at}): {'; '.join(one.wrong)}" for one in results if one.wrong]
    layouts = [f"- {name}: {text}" for name, text in LAYOUTS.items()]
    return "\n\n".join("\n".join(block) for block in [*blocks, layouts, wrong, failures, _sums(known, cells)] if block)


def _of(results: Iterable[Result], kind: str) -> list[Result]:
    return [result for result in results if result.kind == kind]


def _table(header: str, rows: Sequence[Sequence[str]]) -> list[str]:
    columns = header.split(" | ")
    if not rows:
        return []
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return lines + ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]


def _snapshot_row(cell: Cell, results: Sequence[Result]) -> list[str]:
    taken = _of(results, "snapshot")
    used = sorted({one.level for one in taken} - {cell.level})
    replays = [one.replay for one in taken if one.replay is not None]
    exact = sum(one.position in ("exact", "absent") for one in taken)
    return [
        cell.server,
        cell.level + (f" ({', '.join(used)})" if used else ""),
        cell.engines,
        cell.layout,
        str(len(taken)),
        _share(sum(not one.invariant and not one.lost for one in taken), len(taken)),
        # Of a stopped server none is recorded; then it is the end of its logs that was compared.
        _share(exact, len(taken)) + (" (none recorded)" if all(one.position == "absent" for one in taken) else ""),
        _share(replays.count(""), len(replays)),
        *(_quantiles(taken, name) for name in ("wait", "hold", "bare")),
        _quantiles(taken, "stall"),
    ]


def _share(good: int, number: int) -> str:
    return f"{good}/{number}" if good == number else f"**{good}/{number}**"


def _quantiles(taken: Sequence[Result], name: str) -> str:
    values = [one.times[name] * 1000 for one in taken if name in one.times]
    if not values:
        return "–"
    return " / ".join(f"{value:.1f}" for value in (quantile(values, 0.5), quantile(values, 0.95), max(values)))


def _refusal_rows(known: Sequence[Cell], cells: dict[str, list[Result]]) -> Iterator[list[str]]:
    """Yield the refused cells; those with one reason in one row."""
    rows: dict[tuple[str, str, str], tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for cell in known:
        for one in _of(cells[cell.id], "refused")[-1:]:
            servers, engines = rows[cell.level, cell.layout, one.text]
            servers.add(cell.server)
            engines.add(cell.engines)
    for (level, layout, text), (servers, engines) in sorted(rows.items()):
        yield [", ".join(sorted(servers)), level, ", ".join(sorted(engines)), layout, f"refused: {text}"]


def _margin_rows(known: Sequence[Cell], cells: dict[str, list[Result]]) -> Iterator[list[str]]:
    """Yield what the locks add to a bare call on the same subvolume under the same load, all engines together."""
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for cell in known:
        for one in _of(cells[cell.id], "snapshot"):
            if one.level in _LOCKS and cell.layout in BARE_LAYOUTS:
                groups[cell.server, cell.layout, one.level].append(one)
    for key, taken in sorted(groups.items()):
        hold_s = quantile([one.times["hold"] for one in taken], 0.5)
        bare_s = quantile([one.times["bare"] for one in taken], 0.5)
        within = "within" if hold_s <= bare_s + MARGIN_S else "**beyond**"
        yield [
            *key,
            f"{hold_s * 1000:.2f}",
            f"{bare_s * 1000:.2f}",
            f"{(hold_s - bare_s) * 1000:+.2f}, {within} {MARGIN_S * 1000:.0f} ms",
        ]


def _sums(known: Sequence[Cell], cells: dict[str, list[Result]]) -> list[str]:
    results = [one for cell in known for one in cells[cell.id]]
    taken = _of(results, "snapshot")
    replays = [one.replay for one in taken if one.replay is not None]
    versions = sorted({one.version for one in results} - {""})
    missing = sum(not any(one.kind != "failed" for one in cells.get(cell.id, [])) for cell in all_cells())
    return [
        f"{len(taken)} snapshots on {', '.join(versions) or 'no server'}: "
        f"{sum(one.position not in ('exact', 'absent') for one in taken)} wrong positions, "
        f"{sum(bool(one.invariant) for one in taken)} broken invariants, "
        f"{sum(bool(one.lost) for one in taken)} with acknowledged writes lost or later ones in them; "
        f"{replays.count('')} of {len(replays)} replays equal; "
        f"{sum(bool(_of(cells[cell.id], 'refused')) for cell in known)} cells refused as they must be; "
        f"{missing} of {len(all_cells())} cells without a result."
    ]
