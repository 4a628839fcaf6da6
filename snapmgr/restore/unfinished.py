"""Lists unfinished restores, and how each of them is finished or removed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.restore.destination import resolve_record
from snapmgr.system.host import is_alive

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.catalog.manifest import RestoreRecord
    from snapmgr.context import Context


class Unfinished(Struct, frozen=True, kw_only=True):
    """A restore that is active or was interrupted; from `unfinished_restores` or `unfinished_inplace`."""

    place: str
    """The folder or volume that it concerns."""
    active: bool
    """Whether it is still running."""
    what: str
    """Its description."""
    repair: str
    """The description of `resolve`."""
    job: str | None = None
    """The job whose lock `resolve` needs."""
    resolve: Callable[[], str]
    """Removes it, or finishes it if only the last step was missing, and returns a line that says which. Idempotent;
    touches nothing else. Raises SnapmgrError if that is not possible."""


def unfinished_restores(ctx: Context) -> tuple[Unfinished, ...]:
    """Return the restores to a directory that the state directory knows, oldest first. Changes nothing."""
    return tuple(_unfinished(ctx, record) for record in ctx.catalog.restorations()[0])


def _unfinished(ctx: Context, record: RestoreRecord) -> Unfinished:
    active = is_alive(record.holder)
    hidden = os.path.join(record.dest, record.hidden)
    if active:
        what = f"{record.snapshot_id} is being restored to {record.dest} (pid {record.holder.pid})"
    elif os.path.lexists(hidden):
        what = f"{hidden} is left from an interrupted restore of {record.snapshot_id}"
    else:
        what = f"a restore of {record.snapshot_id} to {record.dest} was interrupted"
    lines = {
        "active": f"the restore to {record.dest} is still active",
        "finished": f"the restore to {record.dest} is finished: only its last step was missing",
        "removed": f"the leftovers of the interrupted restore in {record.dest} are removed",
    }
    return Unfinished(
        place=record.dest,
        active=active,
        what=what,
        repair="removes it, or finishes it if only the last step is missing",
        resolve=lambda: lines[resolve_record(ctx.catalog, record)],
    )
