"""Attaches the backup in a snapshot to prepare a copy or clone of it; the lease ends with the context."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.access.attach import attached, data_path, reached
from snapmgr.capacity.lost import removing_if_lost
from snapmgr.contract.abilities import FolderCloning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context
    from snapmgr.contract.backend import Backend
    from snapmgr.physical.prepare.order import PrepareOrder


def placed(order: PrepareOrder, beside: str | None, name: str) -> PrepareOrder:
    """Return the order with the place of its result.

    Args:
        order: the prepare of a snapshot's backup.
        beside: folder for a result in the storage: the job's staging folder. None: the result goes to scratch.
        name: of a fresh result.
    """
    order = replace(order, name=name)
    # The place beside the snapshot itself is the backend's own store.
    return replace(order, beside=beside) if beside else replace(order, result=order.result or "scratch")


@contextmanager
def reached_backup(ctx: Context, entry: Entry) -> Iterator[tuple[str, Backend | None]]:
    """Yield the folder of a READY physical backup, for reading only, and its storage if that can clone it."""
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
