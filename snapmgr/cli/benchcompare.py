"""``snapmgr bench compare``."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.output import format_table, print_lines
from snapmgr.cli.params import json_option
from snapmgr.errors import EXIT_OK, CatalogError, SnapmgrError
from snapmgr.units import format_quantity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.cli.session import Session

_TOLERANCE_PERCENT = 10.0


@click.command(
    epilog="""\b
Examples:
  snapmgr bench compare before after
  snapmgr bench compare before after --tolerance 25 --json

\b
Exit code 1 for a regression (the whole interval of new ÷ old is beyond the
tolerance), and where nothing can be said because the machine has changed.
"""
)
@click.argument("old", metavar="OLD", type=click.Path(path_type=Path))
@click.argument("new", metavar="NEW", type=click.Path(path_type=Path))
@click.option(
    "--tolerance",
    "tolerance_percent",
    metavar="PERCENT",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=_TOLERANCE_PERCENT,
    help=f"What is no regression yet.  [default: {_TOLERANCE_PERCENT:g}]",
)
@json_option
@click.pass_obj
def compare(session: Session, old: Path, new: Path, *, tolerance_percent: float) -> int:
    """Say what has become slower from one run to another.

    OLD and NEW are folders of results, made on the same machine by the same command. Storages without snapshots are the
    witnesses: if their figures have moved, the machine has changed, and no regression is said.
    """
    from snapmgr.bench.compare import compare as compared

    before, now = _samples(old), _samples(new)
    document = compared(before, now, tolerance=tolerance_percent / 100)
    error = _verdict(document)
    if session.json:
        session.document(error.exit_code if error else EXIT_OK, error, **document)
    else:
        print_lines(list(_lines(document)))
    if error is not None:
        raise error
    return EXIT_OK


def _samples(folder: Path) -> list[dict[str, Any]]:
    from snapmgr.bench.results import read

    found = read([folder])
    if found.problems:
        raise CatalogError(
            "\n".join(found.problems), hint="a comparison of what is left would mislead: restore these files"
        )
    return found.samples


def _verdict(document: dict[str, Any]) -> SnapmgrError | None:
    if document["obstacles"]:
        return SnapmgrError("\n".join(document["obstacles"]), hint="measure both on the same machine in the same state")
    if not document["rows"]:
        return SnapmgrError("there is nothing to compare", hint="; ".join(document["left_out"]) or None)
    if document["regressions"]:
        worse = [
            f"{row['experiment']} on {row['stack']}: {row['title']}, {row['ratio']['text']} times"
            for row in document["rows"]
            if row["verdict"] == "regression"
        ]
        return SnapmgrError(f"{document['regressions']} became worse: {'; '.join(worse)}")
    return None


def _lines(document: dict[str, Any]) -> Iterator[str]:
    rows = [
        [
            row["experiment"],
            row["stack"],
            row["title"],
            format_quantity(median(row["old"]), row["unit"]),
            format_quantity(median(row["new"]), row["unit"]),
            row["ratio"]["text"] if row["ratio"] else "-",
            row["verdict"],
        ]
        for row in document["rows"]
    ]
    yield from format_table(("EXPERIMENT", "STACK", "FIGURE", "OLD", "NEW", "NEW ÷ OLD, 95 %", "VERDICT"), rows)
    yield from document["left_out"]
