"""Restores that were cut short: what each left, and how it is removed or finished."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.restore.destination import resolve_record
from snapmgr.system.host import is_alive

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.catalog.manifest import RestoreRecord
    from snapmgr.context import Context


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """What a restore that was cut short left; from `unfinished_restores`."""

    place: str
    """The folder or volume that it concerns."""
    active: bool
    """It is under way: nothing is left over."""
    what: str
    """In words."""
    repair: str
    """What `resolve` does, in words."""
    job: str | None = None
    """The job whose lock `resolve` needs."""
    resolve: Callable[[], str]
    """Removes it (or, if only the last step was missing, finishes it), and says in words what was done. Idempotent;
    touches nothing else. Raises SnapmgrError if something is in the way."""


def unfinished_restores(ctx: Context) -> tuple[Unfinished, ...]:
    """Return what restores that were cut short left, as far as the state directory knows, oldest first. Looks only."""
    return tuple(_unfinished(ctx, record) for record in ctx.catalog.restorations()[0])


def _unfinished(ctx: Context, record: RestoreRecord) -> Unfinished:
    active = is_alive(record.holder)
    hidden = os.path.join(record.dest, record.hidden)
    if active:
        what = f"{record.snapshot_id} is being restored to {record.dest} (pid {record.holder.pid})"
    elif os.path.lexists(hidden):
        what = f"{hidden} is what an interrupted restore of {record.snapshot_id} left"
    else:
        what = f"a restore of {record.snapshot_id} to {record.dest} was interrupted"
    said = {
        "active": f"the restore to {record.dest} is under way after all",
        "finished": f"the restore to {record.dest} is finished: only its last step was missing",
        "removed": f"what the interrupted restore left in {record.dest} is removed",
    }
    return Unfinished(
        place=record.dest,
        active=active,
        what=what,
        repair="removes it, or finishes it if only the last step is missing",
        resolve=lambda: said[resolve_record(ctx.catalog, record)],
    )
