"""Pinning: a snapshot that stays whatever retention says."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from snapmgr.access.note import store_note
from snapmgr.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context

_REASON_AT_MOST = 500


def pin(ctx: Context, snapshot_id: str, reason: str | None = None) -> Manifest:
    """Pin a READY snapshot and return its manifest; pinned again it keeps its reason unless there is a new one.

    Raises ConfigError for a reason that is too long, StorageError for a snapshot that is not READY, InUseError if it is
    being deleted, and what the backend raises: then nothing is changed, except perhaps the note beside the snapshot.
    """
    if reason is not None:
        reason = os.fsencode(reason).decode("utf-8", "backslashreplace").strip()
        if len(reason) > _REASON_AT_MOST:
            raise ConfigError(f"the reason has {len(reason)} characters", hint=f"{_REASON_AT_MOST} are the most")
    return _change(ctx, snapshot_id, lambda old: replace(old, pinned=True, pin_reason=reason or old.pin_reason))


def unpin(ctx: Context, snapshot_id: str) -> Manifest:
    """Leave a READY snapshot to retention again and return its manifest. Raises as `pin` does."""
    return _change(ctx, snapshot_id, lambda old: replace(old, pinned=False, pin_reason=None))


def _change(ctx: Context, snapshot_id: str, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Write a changed manifest, and the note beside the snapshot.

    The job's lock is not needed, so that a long backup keeps nobody from pinning: as a reader we keep deleters away,
    and a deleter reads the manifest again when it is alone. The note goes first, so that a note that cannot be stored
    changes nothing; a crash in between leaves it ahead of the manifest, which is what counts.
    """
    with ctx.catalog.reading(snapshot_id):
        entry = ctx.catalog.load(snapshot_id)
        entry.manifest.require_ready("pinned")
        entry = replace(entry, manifest=change(entry.manifest))
        store_note(ctx, entry)
        ctx.catalog.write(entry.manifest)
    return entry.manifest
