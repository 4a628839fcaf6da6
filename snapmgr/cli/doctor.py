"""``snapmgr doctor``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from snapmgr.cli.output import clean, format_table, is_terminal, print_lines
from snapmgr.cli.params import JobName, json_option
from snapmgr.errors import ConfigError

if TYPE_CHECKING:
    from snapmgr.cli.session import Session
    from snapmgr.jobs.doctor import Finding


@click.command(
    epilog="""\b
Examples:
  snapmgr doctor
  snapmgr doctor nightly
  snapmgr doctor --json | jq '.findings[] | select(.level != "ok")'
"""
)
@click.argument("jobs", metavar="[JOB...]", nargs=-1, type=JobName())
@json_option
@click.pass_obj
def command(session: Session, jobs: tuple[str, ...]) -> int:
    """Look for what is lacking here, wrong with a job, or left over.

    Nothing is changed or locked. Looked at are the storage backends, each job's server, account, files and storage, and
    the state directory against what the storage really holds. The exit code is 1 if there is a problem, else 7 if
    something is lacking, else 0.
    """
    from snapmgr.jobs.doctor import Finding, examine, examine_backends, exit_code

    try:
        session.config()
    except ConfigError as error:
        # Even so it can be said what this machine lacks.
        if jobs:
            raise
        problems = error.message.split("\n")
        findings = [Finding(area="config", subject="", level="problem", what=line, hint=None) for line in problems]
        findings += examine_backends(None)
    else:
        findings = examine(session.context(), session.jobs(jobs or session.config().jobs), everything=not jobs)
    code = exit_code(findings)
    if session.json:
        documents = [
            {"area": one.area, "subject": one.subject, "level": one.level, "what": one.what, "hint": one.hint}
            for one in findings
        ]
        session.document(code, findings=documents)
    else:
        _print(findings)
    return code


def _print(findings: list[Finding]) -> None:
    rows = [(one.level, f"{one.area} {one.subject}".strip(), *_words(one)) for one in findings]
    heads = ("", "WHERE", "WHAT", "WHAT TO DO")
    if is_terminal(sys.stdout):
        from snapmgr.cli.render import print_table

        print_table(heads, [[clean(cell) for cell in row] for row in rows])
        return
    # Long texts in columns are unreadable without a terminal's wrapping: the last goes on a line of its own.
    lines = format_table(heads[:2], [row[:2] for row in rows])
    for line, (_, _, what, hint) in zip(lines[1:], rows, strict=True):
        print_lines([f"{line.ljust(len(max(lines, key=len)))}  {what}", *([f"    hint: {hint}"] if hint else [])])


def _words(finding: Finding) -> tuple[str, str]:
    return finding.what, finding.hint or ""
