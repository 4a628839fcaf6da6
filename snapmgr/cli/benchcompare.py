"""``snapmgr bench compare``."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.output import format_table, print_lines
from snapmgr.cli.params import json_option
from snapmgr.contract.errors import EXIT_OK, CatalogError, SnapmgrError
from snapmgr.contract.units import format_quantity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.cli.session import Session

PUBLISHED = "published"
_TOLERANCE_PERCENT = 10.0


@click.command(
    epilog="""\b
Examples:
  snapmgr bench compare before after
  snapmgr bench compare before after --tolerance 25 --json
  snapmgr bench compare published results

\b
Exit code 1 for a regression (the whole interval of new ÷ old is beyond the
tolerance), and if the machine has changed, so that nothing can be concluded.
A published conclusion that does not hold here is no error: exit code 0.
"""
)
@click.argument("old", metavar="OLD|published", type=click.Path(path_type=Path))
@click.argument("new", metavar="NEW...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--tolerance",
    "tolerance_percent",
    metavar="PERCENT",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=_TOLERANCE_PERCENT,
    help=f"Largest change that is not a regression.  [default: {_TOLERANCE_PERCENT:g}]",
)
@json_option
@click.pass_obj
def compare(session: Session, old: Path, new: tuple[Path, ...], *, tolerance_percent: float) -> int:
    """Show what became slower between two runs, or which published conclusions hold here.

    OLD and NEW are folders of results from the same command on the same machine. Storages without snapshots are the
    controls: if their figures have changed, the machine has changed, and no regression is reported. "published" stands
    for the published experiments that the scenarios repeat.
    """
    if str(old) == PUBLISHED:
        return _compare_published(session, new)
    from snapmgr.bench.statistics.changes import compare as compared

    if len(new) != 1:
        raise click.UsageError("give two folders, OLD and NEW.")
    document = compared(_samples((old,)), _samples(new), tolerance=tolerance_percent / 100)
    error = _verdict(document)
    if session.json:
        session.document(error.exit_code if error else EXIT_OK, error, **document)
    else:
        print_lines(list(_lines(document)))
    if error is not None:
        raise error
    return EXIT_OK


def _compare_published(session: Session, folders: tuple[Path, ...]) -> int:
    from snapmgr.bench.published.judgement import compare_published

    document = compare_published(_samples(folders))
    if session.json:
        session.document(EXIT_OK, **document)
        return EXIT_OK
    rows = [
        [
            row["experiment"] or "-",
            row["title"],
            row["published_text"],
            row["ours_text"],
            _conclusion(row),
            row["words"],
        ]
        for row in document["rows"]
    ]
    lines = format_table(("EXPERIMENT", "FIGURE", "PUBLISHED", "HERE, 95 %", "CONCLUSION", "WHY"), rows)
    for row in document["rows"]:
        if row["obstacles"]:
            lines.append(f"not comparable: {row['experiment']}, {row['title']}: {'; '.join(row['obstacles'])}")
        if row["remark"]:
            lines.append(f"about {row['title']}: {row['remark']}")
    print_lines(lines)
    return EXIT_OK


def _conclusion(row: dict[str, Any]) -> str:
    """Return the verdict, marked if our measurement is not comparable with the published one."""
    judged = row["verdict"] in {"holds", "does not hold"}
    return f"{row['verdict']} (not comparable)" if judged and row["obstacles"] else str(row["verdict"])


def _samples(folders: tuple[Path, ...]) -> list[dict[str, Any]]:
    from snapmgr.bench.results.samples import read

    found = read(folders)
    if found.problems:
        raise CatalogError(
            "\n".join(found.problems), hint="a comparison of the other files would mislead: restore these files"
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
