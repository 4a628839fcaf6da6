"""Prepares a copy or clone of a physical backup's snapshot; no lease stays."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from snapmgr.access.attach import attached, data_path, reached
from snapmgr.capacity.lost import removing_if_lost
from snapmgr.contract.abilities import FolderCloning
from snapmgr.physical.prepare.run import plan, prepare_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context
    from snapmgr.contract.backend import Backend
    from snapmgr.physical.prepare.order import PreparedBackup, PrepareOrder, PreparePlan


def prepare_backup(
    ctx: Context, entry: Entry, order: Callable[[str], PrepareOrder], *, beside: str | None
) -> PreparedBackup:
    """Prepare a copy of a READY physical backup that its tool has left raw; the snapshot does not change.

    Args:
        ctx: the job's surroundings.
        entry: the snapshot.
        order: given the folder of the backup, returns the order.
        beside: folder for a result in the storage: the job's staging folder. None: the result goes to scratch.

    Raises as `snapmgr.physical.prepare.run.prepare_folder`, and what attaching raises.
    """
    with _reached(ctx, entry) as (folder, storage):
        placed = _placed(order(folder), beside, entry.manifest.short_id)
        return prepare_folder(placed, storage if beside else None, tell=ctx.tell, progress=ctx.progress)


def plan_backup_prepare(
    ctx: Context, entry: Entry, order: Callable[[str], PrepareOrder], *, beside: str | None
) -> PreparePlan:
    """Return what `prepare_backup` would do; it leaves no trace."""
    with _reached(ctx, entry) as (folder, storage):
        return plan(_placed(order(folder), beside, entry.manifest.short_id), storage if beside else None)


def _placed(order: PrepareOrder, beside: str | None, name: str) -> PrepareOrder:
    order = replace(order, name=name)
    # Beside the snapshot itself is the backend's own store.
    return replace(order, beside=beside) if beside else replace(order, result=order.result or "scratch")


@contextmanager
def _reached(ctx: Context, entry: Entry) -> Iterator[tuple[str, Backend | None]]:
    """Yield the backup's folder; in the storage itself if that can clone it."""
    backend = ctx.backend(entry.manifest.backend)
    if isinstance(backend, FolderCloning):
        with reached(ctx, entry, why="prepare") as folder:
            yield folder, backend
    else:
        with (
            removing_if_lost(ctx, entry.manifest),
            attached(ctx, entry, writable=False, why="prepare") as lease,
        ):
            yield str(data_path(lease)), None
