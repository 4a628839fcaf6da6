"""``snapmgr bench advise``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.benchshow import results_document
from snapmgr.cli.output import print_lines
from snapmgr.cli.params import json_option
from snapmgr.contract.errors import EXIT_OK, SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.cli.session import Session

# Those of `snapmgr.bench.statistics.uses`, which needs scipy: --help does not.
USES = ("oltp", "staging", "files")
_HEADINGS = {
    "guarantee": "What its snapshots promise",
    "because": "Why",
    "avoid": "What to avoid, and why",
    "costs": "What it costs",
    "not shown": "Where no difference was shown",
    "confidence": "How sure this is",
    "limits": "What limits this",
}


@click.command(
    epilog="""\b
Examples:
  snapmgr bench advise --for oltp results
  snapmgr bench advise --for files monday tuesday --json

\b
Exit code 1 if the results say nothing about this use, or if a file cannot be
read. That no storage is recommended is no error: exit code 0.
"""
)
@click.option(
    "--for",
    "use",
    type=click.Choice(USES),
    help="oltp: a database with snapshots; staging: preparing physical backups; files: many small files.",
)
@click.argument("folders", metavar="RESULTS...", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
@click.pass_obj
def advise(session: Session, use: str | None, folders: tuple[Path, ...]) -> int:
    """Say which storage to use, which to avoid and why, how sure that is, and what its snapshots promise.

    Only the scenarios that matter for the use count. File systems without snapshots have an order of their own: it
    answers what a database without snapshots should be on. `bench show` has the figures behind each sentence.
    """
    if use is None:
        raise click.UsageError(f"say what the storage is for: --for {', --for '.join(USES)}")
    document, problem = results_document(folders)
    found = next((one for one in document["recommendation"]["uses"] if one["use"] == use), None)
    measured = {one["scenario"] for one in document["scenarios"]}
    if found is None or not measured & set(found["scenarios"]):
        raise _nothing(use)
    storages = document["recommendation"]["storages"]
    if session.json:
        session.document(problem.exit_code if problem else EXIT_OK, problem, **found, storages=storages)
    else:
        print_lines(list(_lines(document["subtitle"], found)))
    if problem is not None:
        raise problem
    return EXIT_OK


def _nothing(use: str) -> SnapmgrError:
    from snapmgr.bench.statistics.uses import USES as KNOWN

    one = next(one for name, one in KNOWN.items() if name == use)
    return SnapmgrError(
        f"these results say nothing about {one.title}",
        hint=f"measure for it: snapmgr bench run {' '.join(one.scenarios)}",
    )


def _lines(subtitle: str, found: dict[str, Any]) -> Iterator[str]:
    yield subtitle
    yield from _advice(found)
    if found["without"] is not None:
        yield from _advice(found["without"])


def _advice(found: dict[str, Any]) -> Iterator[str]:
    """Yield the sentences under a heading for each kind."""
    yield ""
    yield found["title"].upper()
    last = ""
    for one in found["sentences"]:
        if one["kind"] == "lead":
            yield one["text"]
            continue
        if one["kind"] != last:
            yield ""
            yield f"{_HEADINGS[one['kind']]}:"
            last = one["kind"]
        yield f"  {one['text']}"
