"""``snapmgr doctor``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.output import clean, error_document, format_table, is_terminal, print_lines
from snapmgr.cli.params import JobName, dry_run_option, json_option
from snapmgr.contract.errors import ConfigError, gravest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.cli.session import Session
    from snapmgr.doctor.finding import Finding
    from snapmgr.doctor.fix import Action, Fixed


@click.command(
    epilog="""\b
Examples:
  snapmgr doctor
  snapmgr doctor nightly
  snapmgr doctor --fix --dry-run
  snapmgr doctor --fix
  snapmgr doctor --fix --pool /mnt/old-disk
  snapmgr doctor --json | jq '.findings[] | select(.level != "ok")'
"""
)
@click.argument("jobs", metavar="[JOB...]", nargs=-1, type=JobName())
@click.option("--fix", "repair", is_flag=True, help="Repair everything that can be repaired without losing data.")
@click.option(
    "--pool",
    "pool_paths",
    metavar="PATH",
    multiple=True,
    type=click.Path(),
    help="Also check the storage at PATH, for snapshots whose job or source is gone.",
)
@dry_run_option
@json_option
@click.pass_obj
def command(
    session: Session, jobs: tuple[str, ...], *, repair: bool, pool_paths: tuple[str, ...], dry_run: bool
) -> int:
    """Check requirements, jobs and leftovers; --fix repairs what it can.

    doctor checks the storage backends, each job's server, account, files and storage, and compares the state directory
    with the storage. Without --fix it changes and locks nothing. --fix completes or removes what interrupted runs left,
    and rebuilds a lost state directory from the notes beside the snapshots; docs/how-to/repair.md lists its
    repairs. If you name JOBs, only those are checked. The exit code is 1 if there is a problem (with --fix: if one is
    left), else 7 if a requirement is missing (a program, a privilege, or a kernel feature), else 0.
    """
    if dry_run and not repair:
        raise click.UsageError("--dry-run needs --fix: without --fix nothing is changed.")
    if jobs and pool_paths and not repair:
        raise click.UsageError("JOB and --pool can be combined only with --fix: leave one of them out.")
    from snapmgr.doctor.finding import exit_code

    fixed: Fixed | None = None
    try:
        session.config()
    except ConfigError as error:
        # Missing requirements can be checked without a configuration.
        if jobs or repair or pool_paths:
            raise
        findings = _without_config(error)
    else:
        findings, fixed = _examine(session, jobs, pool_paths, repair=repair, dry_run=dry_run)
    actions = fixed.actions if fixed is not None else ()
    failed = [action for action in actions if action.result in ("failed", "left")]
    code = gravest([exit_code(findings), *([1] if failed else [])])
    if session.json:
        session.document(
            code,
            fix=repair,
            dry_run=dry_run,
            thawed=list(fixed.thawed) if fixed is not None else [],
            actions=[_action(action) for action in actions],
            findings=[_document(finding) for finding in findings],
        )
        return code
    if fixed is not None:
        _print_actions(session, fixed)
    _print(findings)
    curable = sum(finding.repair is not None for finding in findings)
    if curable and not repair:
        session.console.tell(f"snapmgr doctor --fix repairs {curable} of these")
    return code


def _without_config(error: ConfigError) -> list[Finding]:
    from snapmgr.doctor.examine import examine_backends
    from snapmgr.doctor.finding import Finding

    problems = [Finding(area="config", subject="", level="problem", what=line) for line in error.message.split("\n")]
    return problems + examine_backends(None)


def _examine(
    session: Session, names: tuple[str, ...], pool_paths: tuple[str, ...], *, repair: bool, dry_run: bool
) -> tuple[list[Finding], Fixed | None]:
    from snapmgr.doctor.collect import collect_facts, pools_at
    from snapmgr.doctor.diagnose import diagnose
    from snapmgr.doctor.examine import examine_jobs
    from snapmgr.doctor.fix import fix, plan_fix

    ctx = session.context()
    named = [pool for path in pool_paths for pool in pools_at(ctx, path)]
    findings, pools = examine_jobs(ctx, session.jobs(names or session.config().jobs))
    if repair:
        fixed = (plan_fix if dry_run else fix)(ctx, pools, named, jobs=names or None)
        done = {one.repair.kind for one in fixed.actions if one.result == "done"}
        if "clear-restore" in done or (done and any(one.level == "problem" for one in findings)):
            # The repair may have mounted the source of a job again, or resumed its volume.
            findings = examine_jobs(ctx, session.jobs(names or session.config().jobs))[0]
        return findings + list(fixed.findings), fixed
    return findings + ([] if names else diagnose(collect_facts(ctx, pools, named))), None


def _document(finding: Finding) -> dict[str, Any]:
    from snapmgr.cli.documents import fields

    found = fields(finding, "area", "subject", "level", "what", "hint", "job")
    return found | {"fix": finding.repair.text if finding.repair is not None else None}


def _action(action: Action) -> dict[str, Any]:
    from snapmgr.cli.documents import fields

    return {
        "kind": action.repair.kind,
        **fields(action.finding, "area", "subject", "job", "what"),
        "fix": action.repair.text,
        "result": action.result,
        "error": error_document(action.error),
    }


def _print_actions(session: Session, fixed: Fixed) -> None:
    """Print what was done or would be done; actions that failed are printed as errors on stderr."""
    print_lines(fixed.thawed)
    rows = [
        (
            action.result,
            f"{action.finding.area} {action.finding.subject}",
            f"{action.finding.what}: {action.repair.text}",
        )
        for action in fixed.actions
    ]
    if not rows and not fixed.thawed:
        print_lines(["there is nothing to fix"])
    if rows:
        _print_rows([(*row, "") for row in rows])
    for action in fixed.actions:
        if action.error is not None:
            session.console.fail(action.error)
    print_lines([""])


def _print(findings: Sequence[Finding]) -> None:
    _print_rows([(one.level, f"{one.area} {one.subject}".strip(), *_words(one)) for one in findings])


def _print_rows(rows: Sequence[tuple[str, str, str, str]]) -> None:
    """Print a line for each row and its hint below it, as such long texts are unreadable in columns."""
    lines = format_table(("", ""), [row[:2] for row in rows])[1:]
    width = max(len(line) for line in lines)
    for line, (word, _, what, hint) in zip(lines, rows, strict=True):
        rest = clean(f"{line.ljust(width)[len(word) :]}  {what}")
        if is_terminal(sys.stdout):
            from snapmgr.cli.render import print_line

            print_line(word, rest)
        else:
            print_lines([word + rest])
        if hint:
            print_lines([f"    hint: {hint}"])


def _words(finding: Finding) -> tuple[str, str]:
    if finding.repair is None:
        return finding.what, finding.hint or ""
    by_hand = f"; or: {finding.hint}" if finding.hint else ""
    return finding.what, f"snapmgr doctor --fix {finding.repair.text}{by_hand}"
