"""``snapmgr mount``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from snapmgr.cli.output import format_table, print_lines
from snapmgr.cli.params import DurationText, SnapshotName, dry_run_option, json_option
from snapmgr.contract.errors import EXIT_OK

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Lease
    from snapmgr.cli.session import Session


@click.command(
    epilog="""\b
Examples:
  snapmgr mount latest                          # a writable clone, in the scratch directory
  snapmgr mount nightly@latest /mnt/look --read-only
  cd "$(snapmgr --quiet mount 3f9a2c1b --for 2h)"
  snapmgr mount --list
"""
)
@click.argument("snapshot", metavar="ID", required=False, type=SnapshotName())
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--read-only", is_flag=True, help="Mount the snapshot itself, read-only, instead of a writable clone.")
@click.option(
    "--for",
    "for_s",
    metavar="TIME",
    type=DurationText(),
    help='How long you need it ("2h"); after that doctor reports it.',
)
@click.option("--list", "list_mounts", is_flag=True, help="List mounts.")
@dry_run_option
@json_option
@click.pass_obj
def command(
    session: Session,
    snapshot: str | None,
    folder: Path | None,
    *,
    read_only: bool,
    for_s: float | None,
    list_mounts: bool,
    dry_run: bool,
) -> int:
    """Mount a writable clone of a snapshot, or the snapshot itself, and print its path.

    The snapshot never changes, and is not pruned while it is mounted. "snapmgr umount" unmounts it and removes the
    clone.
    """
    if list_mounts:
        if snapshot is not None:
            raise click.UsageError("--list takes no ID.")
        return _list(session)
    if snapshot is None:
        raise click.UsageError("Missing argument 'ID'.")
    from snapmgr.access.attach import attach, data_path
    from snapmgr.capacity.lost import removing_if_lost
    from snapmgr.cli.documents import mount

    ctx = session.context()
    entry = ctx.resolve(snapshot)
    point = Path(os.path.abspath(folder)) if folder is not None else None
    if dry_run:
        manifest = entry.manifest
        manifest.require_ready("mounted")
        what = "the snapshot itself, read-only" if read_only else "a writable clone"
        where = f"at {point}" if point else f"in a new folder of {ctx.config.scratch_dir}"
        lines = [f"would mount {what} of {manifest.id} {where}"]
        return session.report(lines, dry_run=True, mount=None, snapshot_id=manifest.id)
    if entry.failed:
        # To examine it is a reason to mount it.
        session.console.warn(f"{entry.manifest.id} failed its verification")
    with removing_if_lost(ctx, entry.manifest):
        lease = attach(ctx, entry, writable=not read_only, why="mount", point=point, for_s=for_s)
    if session.json:
        session.document(EXIT_OK, dry_run=False, mount=mount(lease), snapshot_id=entry.manifest.id)
    else:
        session.console.tell(f"{entry.manifest.id}: to unmount it: snapmgr umount {lease.point}")
        print_lines([str(data_path(lease))])
    return EXIT_OK


def _list(session: Session) -> int:
    from snapmgr.cli.documents import mount, show_time

    leases, damaged = session.catalog().leases()
    problems = session.damaged(damaged)
    code = 1 if problems else EXIT_OK
    if session.json:
        session.document(code, mounts=[mount(lease) for lease in leases], damaged=problems)
    elif leases:
        heads = ("POINT", "SNAPSHOT", "ACCESS", "WHY", "USER", "SINCE", "UNTIL")
        rows = [_row(lease, show_time(lease.created_at), show_time(lease.until)) for lease in leases]
        print_lines(format_table(heads, rows))
    else:
        session.console.tell("nothing is mounted")
    return code


def _row(lease: Lease, since: str, until: str) -> tuple[str, ...]:
    access = "writable" if lease.writable else "read-only"
    return (lease.point, lease.snapshot_id, access, lease.why, lease.user, since, until)
