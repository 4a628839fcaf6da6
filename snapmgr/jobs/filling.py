"""Looking at how full storage is: samples for forecasts, and snapshots that were lost because their room ran full.

The samples of a pool are kept in ``STATE/gauges``, a file each: beside the manifests rather than in them, because what
all snapshots of a pool share is sampled as well, and because nobody's lock is needed. A lost file costs the forecast
until there are two samples again.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from snapmgr.api import Filling, ScratchAttaching
from snapmgr.errors import CatalogError, LackingError, LostError, NotFoundError, SnapmgrError
from snapmgr.files import read_file, write_file
from snapmgr.jobs.facts import key_of
from snapmgr.jobs.fill import PoolFill, add_samples, loss_of, lost_series, was_lost
from snapmgr.manifest import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from snapmgr.catalog import Catalog
    from snapmgr.jobs.context import Context
    from snapmgr.jobs.facts import PoolKey
    from snapmgr.manifest import Lease, Manifest
    from snapmgr.records import Pool, Reason

Fills = dict["PoolKey", PoolFill]


def read_fill(catalog: Catalog, pool: Pool) -> PoolFill | None:
    """Return what was seen of a pool; None if nothing was, or if it cannot be read (it begins anew then)."""
    path = _path(catalog, pool)
    with suppress(NotFoundError, CatalogError):
        fill = decode(read_file(path), PoolFill, str(path))
        if (fill.backend, fill.pool_id) == key_of(pool):
            return fill
    return None


def read_fills(catalog: Catalog, manifests: Iterable[Manifest]) -> Fills:
    """Return what was seen of the pools of READY snapshots. Raises LackingError without the right to look."""
    fills = {}
    for pool in _pools(manifests):
        fill = read_fill(catalog, pool)
        if fill is not None:
            fills[key_of(pool)] = fill
    return fills


def look_at_gauges(ctx: Context, manifests: Iterable[Manifest]) -> Fills:
    """Ask the storage of these snapshots how full it is, where it can run full, and write down a sample.

    Each pool is asked once. One that does not answer is told, and says nothing.
    """
    fills = {}
    for pool in _pools(manifests):
        try:
            fill = peek(ctx, pool)
        except SnapmgrError as error:
            ctx.tell(f"warning: how full {pool.hint} is cannot be told: {error.message}")
            continue
        if fill is not None:
            fills[key_of(pool)] = fill
            _write_fill(ctx, pool, fill)
    return fills


def peek(ctx: Context, pool: Pool) -> PoolFill | None:
    """Ask a pool how full it is, and return it with what was known before; None where nothing can run full.

    Writes nothing down. Raises what the storage raises.
    """
    backend = ctx.backend(pool.backend)
    if not isinstance(backend, Filling):
        return None
    return add_samples(read_fill(ctx.catalog, pool), pool, backend.gauges((pool,)), datetime.now(UTC))


def _write_fill(ctx: Context, pool: Pool, fill: PoolFill) -> None:
    path = _path(ctx.catalog, pool)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_file(path, encode(fill))
    except (CatalogError, OSError) as error:
        # Only the forecast suffers.
        ctx.tell(f"warning: the sample of how full {pool.hint} is could not be kept: {error}")


def _path(catalog: Catalog, pool: Pool) -> Path:
    # An id may be a path.
    name = hashlib.sha256(f"{pool.backend}\0{pool.id}".encode(errors="surrogateescape")).hexdigest()[:32]
    return catalog.path / "gauges" / f"{name}.json"


def _pools(manifests: Iterable[Manifest]) -> dict[Pool, None]:
    return dict.fromkeys(member.ref.pool for manifest in manifests for member in manifest.members)


# --------------------------------------------------------------------------------------------------------------- losses


def refuse_lost(ctx: Context, manifest: Manifest) -> None:
    """Raise LostError if a snapshot ran full; it is BROKEN then."""
    error = lose(ctx, manifest, look_at_gauges(ctx, (manifest,)))
    if error is not None:
        raise error


def lose(ctx: Context, manifest: Manifest, fills: Mapping[PoolKey, PoolFill]) -> LostError | None:
    """If a snapshot ran full, mark it BROKEN, remove what is lost unless it is in use, and return the error.

    The job's lock is not needed: as a reader we keep deleters away, and nobody else changes a READY manifest but who
    pins it. What is in use is removed by a later run of the job.
    """
    why = loss_of(manifest, fills)
    if why is None:
        return None
    with ctx.catalog.reading(manifest.id):
        there = ctx.catalog.load(manifest.id).manifest
        if there.state in ("ready", "pending") and there.proved_at is not None:
            ctx.catalog.write(there.with_state("broken", reason=why))
    try:
        _remove_lost(ctx, manifest, fills)
    except SnapmgrError as error:
        ctx.tell(f"{manifest.id}: what is left of it could not be removed now: {error.message}")
    return LostError(
        f"snapshot {manifest.id} is lost: {why}",
        hint="use another one; give the next one more room (cow_size), or keep it for a shorter time",
    )


def _remove_lost(ctx: Context, manifest: Manifest, fills: Mapping[PoolKey, PoolFill]) -> None:
    """Remove the storage of what ran full; idempotent. Raises InUseError while somebody has it attached.

    Other members of a set stay until somebody deletes them: they may be the last copy of what they hold.
    """
    with ctx.catalog.deleting(manifest.id):
        for member in manifest.members:
            if lost_series((member,), fills):
                ctx.backend(member.ref.backend).delete(member.ref)


def settle_losses(ctx: Context, manifests: Iterable[Manifest]) -> tuple[SnapmgrError, ...]:
    """Look at the storage of a job's snapshots; those that ran full become BROKEN. Return an error for each.

    The job's lock must be held. What was lost earlier and could not be removed is removed; an error for what is still
    in use.
    """
    manifests = [one for one in manifests if one.state == "ready" or was_lost(one)]
    fills = look_at_gauges(ctx, manifests)
    failures: list[SnapmgrError] = []
    for manifest in manifests:
        try:
            if manifest.state == "broken":
                if lost_series(manifest.members, fills):
                    _remove_lost(ctx, manifest, fills)
            elif (lost := lose(ctx, manifest, fills)) is not None:
                ctx.tell(f"warning: {lost.message}")
                failures.append(lost)
        except SnapmgrError as error:
            ctx.tell(f"could not be cleared up now, and will be tried again: {error.message}")
            failures.append(error)
    return tuple(failures)


def lost_members(ctx: Context, pool: Pool) -> set[tuple[str, str, str]]:
    """Return the snapshots in a pool that ran full, by their identity. Raises what the storage raises."""
    backend = ctx.backend(pool.backend)
    if not isinstance(backend, Filling):
        return set()
    return {one.ref.identity for one in backend.gauges((pool,)) if one.ref is not None and not one.valid}


def require_believable(ctx: Context, lease: Lease, manifest: Manifest) -> None:
    """Raise LostError or LackingError if what was read through an attachment is not to be believed.

    Asked after the use and before its result counts: writes to scratch space that is full still seem to succeed.
    """
    problem = attachment_problem(ctx, lease)
    if problem is not None:
        refuse_lost(ctx, manifest)
        raise LackingError(f"{manifest.id}: {problem.what}", hint=problem.hint)


def attachment_problem(ctx: Context, lease: Lease) -> Reason | None:
    """Return why what is read through an attachment is not to be believed. Raises what the storage raises."""
    for part in lease.parts:
        backend = ctx.backend(part.record.ref.backend)
        if isinstance(backend, ScratchAttaching):
            problem = backend.attachment_problem(part.record)
            if problem is not None:
                return problem
    return None
