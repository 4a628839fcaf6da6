"""``snapmgr pin``, and the code that it shares with ``snapmgr unpin``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.output import end_document, print_lines
from snapmgr.cli.params import SnapshotName, dry_run_option, json_option
from snapmgr.contract.errors import SnapmgrError, gravest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.catalog.store import Entry
    from snapmgr.cli.session import Session
    from snapmgr.context import Context


@click.command(
    epilog="""\b
Examples:
  snapmgr pin 3f9a2c1b --reason "before the migration, ask Ines"
  snapmgr pin nightly@latest
"""
)
@click.argument("snapshots", metavar="ID...", nargs=-1, required=True, type=SnapshotName())
@click.option("--reason", metavar="TEXT", help="Why it is pinned; list, show, prune and delete print it.")
@dry_run_option
@json_option
@click.pass_obj
def command(session: Session, snapshots: tuple[str, ...], *, reason: str | None, dry_run: bool) -> int:
    """Keep snapshots regardless of the retention rules.

    Only `snapmgr delete --force` deletes a pinned snapshot. Pinning it again keeps its reason, unless you give a new
    one. It can be pinned while a run of its job is active.
    """
    from snapmgr.keep.pin import pin

    return change_pins(session, snapshots, lambda ctx, one: pin(ctx, one, reason), "pinned", dry_run=dry_run)


def change_pins(
    session: Session,
    names: Iterable[str],
    change: Callable[[Context, str], Manifest],
    what: str,
    *,
    dry_run: bool,
) -> int:
    """Resolve all names, then change each snapshot and report it."""
    ctx = session.context()
    chosen = {entry.manifest.id: entry for entry in (ctx.resolve(name) for name in names)}
    documents = [_change(session, ctx, entry, change, what, dry_run=dry_run) for entry in chosen.values()]
    code = gravest([document["exit_code"] for document in documents])
    if session.json:
        session.document(code, dry_run=dry_run, snapshots=documents)
    return code


def _change(
    session: Session,
    ctx: Context,
    entry: Entry,
    change: Callable[[Context, str], Manifest],
    what: str,
    *,
    dry_run: bool,
) -> dict[str, Any]:
    manifest, failure = entry.manifest, None
    try:
        if dry_run:
            manifest.require_ready("pinned")
        else:
            manifest = change(ctx, manifest.id)
        if not session.json:
            reason = f" ({manifest.pin_reason})" if manifest.pin_reason and not dry_run else ""
            print_lines([f"{f'would be {what}' if dry_run else what}: {manifest.id}{reason}"])
    except SnapmgrError as error:
        failure = error
        session.console.fail(error)
    return {
        "id": manifest.id,
        **end_document(failure),
        "pinned": manifest.pinned,
        "pin_reason": manifest.pin_reason,
    }
