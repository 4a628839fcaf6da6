"""``snapmgr verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapmgr.cli.output import print_lines
from snapmgr.cli.params import ShareText, SnapshotName, dry_run_option, json_option
from snapmgr.contract.errors import EXIT_OK, VerificationError
from snapmgr.contract.units import format_duration

if TYPE_CHECKING:
    from snapmgr.catalog.store import Entry
    from snapmgr.cli.session import Session
    from snapmgr.config.model import Verify
    from snapmgr.contract.errors import SnapmgrError


@click.command(
    epilog="""\b
Examples:
  snapmgr verify latest
  snapmgr verify nightly@latest --check extended
  snapmgr verify 3f9a2c1b --tables 10%
"""
)
@click.argument("snapshot", metavar="ID", type=SnapshotName())
@click.option("--check", type=click.Choice(["none", "quick", "extended"]), help="How thoroughly CHECK TABLE checks.")
@click.option("--tables", metavar="SHARE", type=ShareText(), help='Share of the tables to check: "all" or "20%".')
@dry_run_option
@json_option
@click.pass_obj
def command(session: Session, snapshot: str, *, check: str | None, tables: float | None, dry_run: bool) -> int:
    """Test on a writable clone that a snapshot can be restored.

    A throwaway server starts on the clone, recovers, and checks tables as the job's [verify] table says. For a
    directory the job's check command runs on the clone. The result is recorded. Exit code 6: the snapshot does not
    restore. Exit code 7: a requirement is missing (a program, a privilege, a plugin or an encryption key), so that the
    snapshot is only partly verified, or not at all.
    """
    from snapmgr.cli.documents import show_findings
    from snapmgr.verify.run import incomplete, verify

    ctx = session.context()
    entry = ctx.resolve(snapshot)
    how = _how(session, entry, check, tables)
    if dry_run:
        return _plan(session, entry, how)
    try:
        result = verify(ctx, entry, how)
    except VerificationError as error:
        if session.json:
            _document(session, ctx.catalog.load(entry.manifest.id), error, dry_run=False)
        raise
    missing = incomplete(entry.manifest, result)
    if session.json:
        _document(session, ctx.catalog.load(entry.manifest.id), missing, dry_run=False)
    else:
        verdict = "proved restorable" if missing is None else "partly proved restorable"
        lines = [f"  {line}" for line in show_findings(result)]
        print_lines([f"{entry.manifest.id}: {verdict}; the proof took {format_duration(result.duration_s)}", *lines])
    if missing is not None:
        raise missing
    return EXIT_OK


def _how(session: Session, entry: Entry, check: str | None, tables: float | None) -> Verify:
    """Return the job's verify table, overridden by the command line."""
    import msgspec

    from snapmgr.config.model import Verify

    manifest = entry.manifest
    job = session.config().jobs.get(manifest.job)
    if job is None:
        session.console.warn(f"job {manifest.job} is no longer configured: verifying with the defaults")
    how = job.verify if job is not None else Verify()
    given = {"check": check, "tables_share": tables}
    given = {key: value for key, value in given.items() if value is not None}
    if given and manifest.source == "directory":
        raise click.UsageError(f"--check and --tables are for databases; {manifest.id} is of a directory.")
    return msgspec.structs.replace(how, **given)


def _plan(session: Session, entry: Entry, how: Verify) -> int:
    manifest = entry.manifest
    manifest.require_ready("verified")
    if session.json:
        _document(session, entry, None, dry_run=True)
    elif manifest.source == "directory":
        command_line = " ".join(how.command) or "no command (none is configured)"
        print_lines([f"would run {command_line} on a clone of {manifest.id}"])
    else:
        share = "all" if how.tables_share >= 1 else f"{how.tables_share:.0%} of the"
        print_lines([f"would start a server on a clone of {manifest.id}; check {how.check} of {share} tables"])
    return EXIT_OK


def _document(session: Session, entry: Entry, error: SnapmgrError | None, *, dry_run: bool) -> None:
    from snapmgr.cli.documents import snapshot

    code = error.exit_code if error else EXIT_OK
    session.document(code, error, dry_run=dry_run, snapshot=snapshot(entry, ()))
