"""``snapmgr bench show``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.output import format_table, print_lines
from snapmgr.cli.params import json_option
from snapmgr.contract.errors import EXIT_OK, CatalogError, ConfigError, NotFoundError, SnapmgrError
from snapmgr.contract.units import format_quantity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from snapmgr.bench.results.samples import ReadResults
    from snapmgr.cli.session import Session

# Kinds of sentences, with the words before them: those above the table of storages, and those below.
_FIRST = {
    "lead": "",
    "guarantee": "  ",
    "avoid": "  avoid ",
    "not shown": "  no difference: ",
    "confidence": "  how sure: ",
}
_LATER = {"because": "", "costs": "cost: ", "limits": "limit: "}
# Sentences of a kind: more do not fit on a screen.
_MOST = 4
_LOCKS = {"short": "short, or none", "frozen": "server frozen"}


@click.command(
    epilog="""\b
Examples:
  snapmgr bench show results
  snapmgr bench show monday tuesday -o report.html
  snapmgr bench show results -o samples.csv
  snapmgr bench show results --json

\b
Exit code 1 if a file cannot be read; the other files are shown.
"""
)
@click.argument("folders", metavar="RESULTS...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE.html|FILE.csv",
    type=click.Path(path_type=Path),
    help="Write a page, or a table with the figures of all samples.",
)
@click.option("--all", "all_figures", is_flag=True, help="Show all figures, not only those that are compared.")
@json_option
@click.pass_obj
def show(session: Session, folders: tuple[Path, ...], *, output: Path | None, all_figures: bool) -> int:
    """Show the results of one or several runs.

    Ratios compare storages within a block of a run and come with confidence intervals; differences that were not shown
    are named as such. Failed samples do not count; their reasons are listed.
    """
    from snapmgr.bench.results.samples import read

    found = read(folders)
    document = _document(found)
    if output is not None:
        _write(session, found, document, output)
    error = _problem(found)
    if session.json:
        session.document(error.exit_code if error else EXIT_OK, error, **document)
    elif output is None:
        print_lines(list(_lines(document, all_figures=all_figures)))
    if error is not None:
        raise error
    return EXIT_OK


def write_page(folders: Sequence[Path], path: Path) -> dict[str, Any]:
    """Write the page of some folders of results and return its document. Raises SnapmgrError."""
    from snapmgr.bench.report import render
    from snapmgr.bench.results.samples import read

    document = _document(read(folders))
    _replace(path, render(document))
    return document


def results_document(folders: Sequence[Path]) -> tuple[dict[str, Any], SnapmgrError | None]:
    """Return the document of some folders of results, and an error about files that could not be read."""
    from snapmgr.bench.results.samples import read

    found = read(folders)
    return _document(found), _problem(found)


def _document(found: ReadResults) -> dict[str, Any]:
    from snapmgr.bench.report import document
    from snapmgr.bench.scenarios import scenarios

    known = scenarios()
    return document(
        found.samples,
        made_at=datetime.now(UTC),
        runs=found.runs,
        problems=found.problems,
        questions={scenario.name: scenario.title for scenario in known},
        labels={scenario.name: scenario.label for scenario in known},
    )


def _problem(found: ReadResults) -> SnapmgrError | None:
    if not found.problems:
        return None
    return CatalogError(
        "\n".join(found.problems), hint="only the other files are shown: restore these, or move them away"
    )


def _write(session: Session, found: ReadResults, document: dict[str, Any], path: Path) -> None:
    if path.suffix in {".html", ".htm"}:
        from snapmgr.bench.report import render

        _replace(path, render(document))
    elif path.suffix == ".csv":
        _replace(path, _table(found))
    else:
        raise ConfigError(f"{path} ends in neither .html nor .csv", hint=f"name it {path}.html")
    session.console.tell(f"wrote {path}")


def _table(found: ReadResults) -> str:
    import csv
    import io

    from snapmgr.bench.report import COLUMNS, rows

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows(found.samples))
    return text.getvalue()


def _replace(path: Path, text: str) -> None:
    from snapmgr.system.files import replace_file, space_hint

    if path.is_dir():
        raise ConfigError(f"{path} is a folder")
    try:
        replace_file(path, text.encode(), mode=0o644)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"the folder {path.parent} does not exist") from None
    except OSError as error:
        raise SnapmgrError(f"cannot write {path}: {error.strerror}", hint=space_hint(error)) from None


def _lines(document: dict[str, Any], *, all_figures: bool) -> Iterator[str]:
    yield document["subtitle"]
    yield from (f"note: {warning['text']}" for warning in document["warnings"])
    yield ""
    yield from advice_lines(document["recommendation"])
    for scenario in document["scenarios"]:
        yield ""
        yield f"{scenario['title']}: {scenario['subtitle']}"
        yield from _medians(scenario, all_figures=all_figures)
        if scenario["ratios"]:
            yield ""
            yield from _ratios(scenario)
        for note in scenario["notes"]:
            yield f"{', '.join(note['stacks'])}: {note['text']} ({note['n']} of {note['of']})"
    if document["absent"]:
        yield ""
        yield from (f"not here: {one['scenario']} on {one['stack']}: {one['reason']}" for one in document["absent"])
    if document["failed"]:
        yield ""
        yield from (f"failed: {one['id']}: {one['reason']}" for one in document["failed"])


def advice_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Given ``recommendation`` of the report, yield the advice for each use, and the table of storages."""
    for use in found["uses"]:
        yield from _said(use, _FIRST)
        yield ""
    if found["storages"]:
        yield from _storages(found["storages"])
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


def _storages(storages: list[dict[str, Any]]) -> list[str]:
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


def _medians(scenario: dict[str, Any], *, all_figures: bool) -> list[str]:
    shown = [metric for metric in scenario["metrics"] if all_figures or metric["headline"]]
    rows = []
    for metric in shown:
        by_stack = {cell["stack"]: cell for cell in metric["cells"]}
        cells = [
            format_quantity(by_stack[stack]["median"], metric["unit"]) if stack in by_stack else "-"
            for stack in scenario["stacks"]
        ]
        rows.append([metric["title"], *cells])
    lines = format_table(("MEDIAN", *(stack.upper() for stack in scenario["stacks"])), rows)
    more = len(scenario["metrics"]) - len(shown)
    return [*lines, f"… and {more} more figures: --all, or a page with -o"] if more else lines


def _ratios(scenario: dict[str, Any]) -> list[str]:
    rows = [
        [
            row["title"],
            f"{row['stack']} ÷ {row['against']}",
            row["ratio_text"],
            row["interval_text"],
            str(row["n"]),
            row["words"],
        ]
        for row in scenario["ratios"]
    ]
    return format_table(("RATIO", "OF", "VALUE", "95 %", "PAIRS", "WHAT IS SHOWN"), rows)
