"""Letting servers go on that dead runs left frozen, or with their replication stopped: at every command."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapmgr.catalog.store import Catalog


def resume_servers(catalog: Catalog) -> tuple[str, ...]:
    """Undo what dead runs, and the processes that were to undo it, left; return a line for people for each server."""
    said: list[str] = []
    # Not Path.exists, which raises where we may not look.
    if os.path.exists(catalog.frozen):
        from snapmgr.mysql.lock.freeze import thaw_leftovers  # noqa: PLC0415 - every command comes by here

        said += thaw_leftovers(catalog.frozen)
    if os.path.exists(catalog.appliers):
        from snapmgr.mysql.lock.applier import restart_leftovers  # noqa: PLC0415 - the same

        said += restart_leftovers(catalog.appliers)
    return tuple(said)
