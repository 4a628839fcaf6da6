"""Resumes servers that killed runs left frozen or with replication stopped; every command does it first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapmgr.catalog.store import Catalog


def resume_servers(catalog: Catalog) -> tuple[str, ...]:
    """Resume the servers that a killed run and its killed guard left; return a line for people for each server."""
    lines: list[str] = []
    # Not Path.exists, which raises without the right to read the folder.
    if os.path.exists(catalog.frozen):
        from snapmgr.mysql.lock.freeze import thaw_leftovers  # noqa: PLC0415 - every command runs this

        lines += thaw_leftovers(catalog.frozen)
    if os.path.exists(catalog.appliers):
        from snapmgr.mysql.lock.applier import restart_leftovers  # noqa: PLC0415 - the same

        lines += restart_leftovers(catalog.appliers)
    return tuple(lines)
