"""Checks that the storage holds the catalog's snapshots: somebody may have deleted one, or unplugged the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from snapmgr.capacity.read import lost_members
from snapmgr.contract.errors import SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context
    from snapmgr.contract.records import Pool

Presence = Literal["complete", "lost", "incomplete", "gone", "unknown"]
"""All members exist; all exist, but one overflowed and cannot be read; some exist; none exists; or a storage did not
answer, so that nothing is known."""


def check_storage(ctx: Context, manifests: Iterable[Manifest]) -> dict[str, Presence]:
    """Return for each snapshot, by its id, whether the storage holds it; warn about storage that does not answer."""
    manifests = list(manifests)
    held: set[tuple[str, str, str]] = set()
    lost: set[tuple[str, str, str]] = set()
    silent: set[Pool] = set()
    for pool in dict.fromkeys(member.ref.pool for manifest in manifests for member in manifest.members):
        try:
            found = ctx.backend(pool.backend).inventory((pool,))
            lost |= lost_members(ctx, pool)
        except SnapmgrError as error:
            ctx.tell(f"warning: {error.message}")
            silent.add(pool)
        else:
            held |= {one.ref.identity for one in found if one.kind == "snapshot" and one.ref is not None}
    return {manifest.id: _judge(manifest, held, lost, silent) for manifest in manifests}


def _judge(
    manifest: Manifest, held: set[tuple[str, str, str]], lost: set[tuple[str, str, str]], silent: set[Pool]
) -> Presence:
    refs = [member.ref for member in manifest.members]
    if any(ref.pool in silent for ref in refs):
        return "unknown"
    existing = sum(ref.identity in held for ref in refs)
    if existing == len(refs):
        return "lost" if any(ref.identity in lost for ref in refs) else "complete"
    return "incomplete" if existing else "gone"
