"""Deletes the storage of a snapshot, and the remains of one that was never proved."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.contract.errors import InUseError, NoRoomError, SnapmgrError
from snapmgr.system.probe import require_pools_answer

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context
    from snapmgr.contract.records import Pool


def delete(ctx: Context, snapshot_id: str, *, pinned: bool = False) -> None:
    """Delete a snapshot's storage and then its manifest; a pinned snapshot only with `pinned`.

    Raises InUseError while somebody uses it, or if it is pinned. After a failure in the middle it stays DELETING.
    """
    with ctx.catalog.deleting(snapshot_id):
        # Pinning takes this lock, too: somebody may have pinned it since the deletion was planned.
        manifest = ctx.catalog.load(snapshot_id).manifest
        if manifest.pinned and manifest.state == "ready" and not pinned:
            raise InUseError(f"snapshot {manifest.id} is pinned", hint=f"snapmgr unpin {manifest.short_id}")
        require_storage_answers(ctx, manifest)
        deleting = manifest.with_state("deleting", reason=manifest.reason)
        try:
            ctx.catalog.write(deleting)
        except NoRoomError as error:
            # Deleting frees the space. If we are killed now, it is READY without storage: doctor and prune notice.
            ctx.tell(f"{manifest.id}: deleting it although its state cannot be written: {error.message}")
        backend = ctx.backend(manifest.backend)
        for number, member in enumerate(manifest.members):
            try:
                backend.delete(member.ref)
            except SnapmgrError as error:
                # In use, and nothing is deleted yet: it is as good as before. Otherwise there may be space by now.
                untouched = number == 0 and isinstance(error, InUseError)
                with suppress(NoRoomError):
                    ctx.catalog.write(manifest if untouched else deleting)
                raise
        ctx.catalog.forget(manifest.id)


def await_space(ctx: Context, manifest: Manifest) -> None:
    """Wait until the space of a deleted snapshot is free. Raises the storage's errors, also at its time limit."""
    for member in manifest.members:
        # Deleting it again is not an error; this call only waits until its space is free.
        ctx.backend(member.ref.backend).delete(member.ref, wait="space")


def remove_traces(ctx: Context, manifest: Manifest) -> None:
    """Remove everything that the storage's own inventory lists for a snapshot without proof."""
    if not manifest.intents:
        return
    require_storage_answers(ctx, manifest)
    backend = ctx.backend(manifest.backend)
    for found in backend.inventory(intended_pools(manifest)):
        if found.snapshot_id != manifest.id:
            continue
        if found.ref is not None and found.kind == "snapshot":
            backend.delete(found.ref)
        elif found.kind == "debris":
            backend.repair(found)


def require_storage_answers(ctx: Context, manifest: Manifest) -> None:
    """Raise StorageError if the storage of a snapshot hangs."""
    pools = (*intended_pools(manifest), *(member.ref.pool for member in manifest.members))
    require_pools_answer(pools, ctx.mounter.mounts())


def intended_pools(manifest: Manifest) -> tuple[Pool, ...]:
    """Return the pools in which a backup had announced that it would create something."""
    return tuple(dict.fromkeys(intent.pool for intent in manifest.intents))
