"""Pins snapshots: keeps them regardless of the retention rules."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.access.note import store_note
from snapmgr.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context

_REASON_AT_MOST = 500


def pin(ctx: Context, snapshot_id: str, reason: str | None = None) -> Manifest:
    """Pin a READY snapshot and return its manifest; without a new reason a pinned snapshot keeps its old one.

    Raises ConfigError for a reason that is too long, StorageError for a snapshot that is not READY, InUseError while it
    is being deleted, and the backend's errors. After an error nothing is changed, except perhaps the note beside the
    snapshot.
    """
    if reason is not None:
        reason = os.fsencode(reason).decode("utf-8", "backslashreplace").strip()
        if len(reason) > _REASON_AT_MOST:
            raise ConfigError(
                f"the reason is too long: {len(reason)} characters", hint=f"use at most {_REASON_AT_MOST} characters"
            )
    return _change(ctx, snapshot_id, lambda old: replace(old, pinned=True, pin_reason=reason or old.pin_reason))


def unpin(ctx: Context, snapshot_id: str) -> Manifest:
    """Unpin a READY snapshot, so that the retention rules apply again; return its manifest. Raises as `pin` does."""
    return _change(ctx, snapshot_id, lambda old: replace(old, pinned=False, pin_reason=None))


def _change(ctx: Context, snapshot_id: str, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Write a changed manifest, and the note beside the snapshot.

    The job's lock is not needed, so that pinning need not wait for a long backup: as a reader we keep deleters away,
    and a deleter reads the manifest again when it has the exclusive lock. The note is written first, so that a failure
    to store it changes nothing. After a crash in between the note is ahead of the manifest; the manifest is valid.
    """
    with ctx.catalog.reading(snapshot_id):
        entry = ctx.catalog.load(snapshot_id)
        entry.manifest.require_ready("pinned")
        entry = replace(entry, manifest=change(entry.manifest))
        store_note(ctx, entry)
        ctx.catalog.write(entry.manifest)
    return entry.manifest
