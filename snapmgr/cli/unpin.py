"""``snapmgr unpin``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapmgr.cli.params import SnapshotName, dry_run_option, json_option
from snapmgr.cli.pin import change_pins

if TYPE_CHECKING:
    from snapmgr.cli.session import Session


@click.command(
    epilog="""\b
Examples:
  snapmgr unpin 3f9a2c1b
"""
)
@click.argument("snapshots", metavar="ID...", nargs=-1, required=True, type=SnapshotName())
@dry_run_option
@json_option
@click.pass_obj
def command(session: Session, snapshots: tuple[str, ...], *, dry_run: bool) -> int:
    """Apply the retention rules to pinned snapshots again."""
    from snapmgr.keep.pin import unpin

    return change_pins(session, snapshots, unpin, "unpinned", dry_run=dry_run)
