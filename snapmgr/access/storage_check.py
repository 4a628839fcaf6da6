"""Checks that the storage holds the catalog's snapshots: somebody may have deleted one, or unplugged the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from snapmgr.capacity.read import lost_members
from snapmgr.contract.errors import SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.catalog.summary import Summary
    from snapmgr.context import Context
    from snapmgr.contract.records import Found, Pool

Presence = Literal["complete", "altered", "lost", "incomplete", "gone", "unknown"]
"""All members exist; all exist, but somebody changed one by hand, or one overflowed and cannot be read; some exist;
none exists; or a storage did not answer, so that nothing is known."""


def check_storage(
    ctx: Context, manifests: Iterable[Manifest | Summary], seen: dict[Pool, tuple[Found, ...]] | None = None
) -> dict[str, Presence]:
    """Return for each snapshot, by its id, whether the storage holds it; warn about storage that does not answer.

    `seen` keeps the inventories of pools for the next call; without it, or if it lacks a pool, the storage is read.
    """
    seen = {} if seen is None else seen
    manifests = list(manifests)
    held: set[tuple[str, str, str]] = set()
    altered: set[tuple[str, str, str]] = set()
    lost: set[tuple[str, str, str]] = set()
    silent: set[Pool] = set()
    for pool in dict.fromkeys(ref.pool for manifest in manifests for ref in manifest.refs):
        try:
            found = seen[pool] if pool in seen else ctx.backend(pool.backend).inventory((pool,), notes=False)
            lost |= lost_members(ctx, pool)
        except SnapmgrError as error:
            ctx.tell(f"warning: {error.message}")
            silent.add(pool)
        else:
            seen[pool] = found
            held |= {one.ref.identity for one in found if one.kind == "snapshot" and one.ref is not None}
            # An inventory lists as debris with its identity what is complete, but can no longer be trusted.
            altered |= {one.ref.identity for one in found if one.kind == "debris" and one.ref is not None}
    return {manifest.id: _judge(manifest, held, altered, lost, silent) for manifest in manifests}


def remaining_ids(ctx: Context, manifests: Iterable[Manifest]) -> set[str]:
    """Return the ids of which the storage may hold anything, at least debris; also those whose storage is silent."""
    manifests = list(manifests)
    left: set[str] = set()
    for pool in dict.fromkeys(intent.pool for manifest in manifests for intent in manifest.intents):
        try:
            found = ctx.backend(pool.backend).inventory((pool,), notes=False)
            left |= {one.snapshot_id for one in found if one.snapshot_id}
        except SnapmgrError as error:
            ctx.tell(f"warning: {error.message}")
            left |= {one.id for one in manifests if any(intent.pool == pool for intent in one.intents)}
    return left


def _judge(
    manifest: Manifest | Summary,
    held: set[tuple[str, str, str]],
    altered: set[tuple[str, str, str]],
    lost: set[tuple[str, str, str]],
    silent: set[Pool],
) -> Presence:
    if silent and any(ref.pool in silent for ref in manifest.refs):
        return "unknown"
    identities = {ref.identity for ref in manifest.refs}
    missing = identities - held - altered
    if missing:
        return "gone" if missing == identities else "incomplete"
    if identities & lost:
        return "lost"
    return "altered" if identities & altered else "complete"
