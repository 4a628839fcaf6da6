"""``snapmgr delete``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.output import ask_for_word, end_document, print_lines
from snapmgr.cli.params import SnapshotName, dry_run_option, json_option
from snapmgr.contract.errors import gravest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.cli.session import Session
    from snapmgr.context import Context
    from snapmgr.contract.records import Found, Pool
    from snapmgr.keep.delete import Deletion, Verdict


@click.command(
    epilog="""\b
Examples:
  snapmgr delete 3f9a2c1b --dry-run
  snapmgr delete 3f9a2c1b 77c1e0d4 --wait
  snapmgr delete --force nightly@latest
"""
)
@click.argument("snapshots", metavar="ID...", nargs=-1, required=True, type=SnapshotName())
@click.option("--force", is_flag=True, help="Also delete the newest READY or VERIFIED snapshot, and pinned ones.")
@click.option("-y", "--yes", is_flag=True, help="With --force: do not ask for confirmation.")
@click.option("--wait", is_flag=True, help="Wait until the space is free again, not only the names.")
@dry_run_option
@json_option
@click.pass_obj
def command(session: Session, snapshots: tuple[str, ...], *, force: bool, yes: bool, wait: bool, dry_run: bool) -> int:
    """Delete the named snapshots.

    The newest READY and the newest VERIFIED snapshot of a job and pinned snapshots are refused. --force deletes them
    too, after it has printed what is lost and asked for confirmation. Snapshots that are mounted or being read are
    never deleted. All snapshots are checked before the first is deleted.
    """
    from snapmgr.keep.delete import Deletion, delete_snapshots, examine

    ctx = session.context()
    seen: dict[Pool, tuple[Found, ...]] = {}
    verdicts = examine(ctx, snapshots, seen)
    checked = tuple(Deletion(verdict=verdict, error=verdict.refusal(force=force)) for verdict in verdicts)
    if force:
        _tell_losses(session, ctx, verdicts)
    if dry_run or any(one.error for one in checked):
        return _finish(session, checked, dry_run=dry_run)
    if force and not yes:
        _ask([verdict for verdict in verdicts if verdict.rules])
        # The answer may have taken minutes.
        seen.clear()
    return _finish(session, delete_snapshots(ctx, verdicts, force=force, wait=wait, seen=seen), dry_run=False)


def _tell_losses(session: Session, ctx: Context, verdicts: Sequence[Verdict]) -> None:
    """Warn about the protected snapshots that --force deletes."""
    from snapmgr.cli.documents import show_time, show_verified

    for verdict in verdicts:
        if verdict.rules:
            manifest, verification = verdict.entry.manifest, verdict.entry.verification
            verified = f"verified {show_verified(verification)}" if verification else "never verified"
            session.console.warn(
                f"{manifest.id} is protected: {', '.join(verdict.rules)}; of {manifest.path}, taken "
                f"{show_time(manifest.taken_at)}, {verified}"
            )
    going = {verdict.id for verdict in verdicts}
    for job in dict.fromkeys(verdict.entry.manifest.job for verdict in verdicts):
        ready = [one for one in ctx.catalog.summaries(job)[0] if one.job == job and one.state == "ready"]
        left = [one for one in ready if one.id not in going]
        if ready and not left:
            session.console.warn(f"job {job} will have no snapshot left")
        elif any(one.verified for one in ready) and not any(one.verified for one in left):
            session.console.warn(f"job {job} will have no VERIFIED snapshot left")


def _ask(protected: Sequence[Verdict]) -> None:
    if protected:
        word = protected[0].entry.manifest.short_id if len(protected) == 1 else "yes"
        why = "--force deletes protected snapshots"
        ask_for_word(word, to="delete protected snapshots", why=why, nothing="deleted")


def _finish(session: Session, deletions: Sequence[Deletion], *, dry_run: bool) -> int:
    errors = [one.error for one in deletions if one.error is not None]
    for error in errors:
        session.console.fail(error)
    code = gravest([error.exit_code for error in errors])
    if session.json:
        session.document(code, dry_run=dry_run, snapshots=[_document(one) for one in deletions])
        return code
    would = dry_run and not errors
    print_lines([_line(one, "would delete" if would else "deleted") for one in deletions if one.deleted or would])
    if errors and not any(one.deleted for one in deletions):
        session.console.tell("nothing was deleted")
    return code


def _line(deletion: Deletion, what: str) -> str:
    verdict = deletion.verdict
    manifest = verdict.entry.manifest
    about = [*verdict.rules]
    if verdict.presence == "gone":
        about.append("its storage was gone already")
    elif verdict.presence == "incomplete":
        about.append("part of its storage was gone already")
    elif verdict.presence == "lost":
        about.append("it was lost: its own space overflowed")
    elif manifest.state != "ready":
        about.append(manifest.state.upper())
    return f"{what} {manifest.id}" + (f" ({', '.join(about)})" if about else "")


def _document(deletion: Deletion) -> dict[str, Any]:
    from snapmgr.cli.documents import fields

    return {
        **fields(deletion.verdict.entry.manifest, "id", "job", "state"),
        "protected_by": list(deletion.verdict.rules),
        "storage": deletion.verdict.presence,
        "deleted": deletion.deleted,
        **end_document(deletion.error),
    }
