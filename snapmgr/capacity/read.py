"""Samples the capacity of pools, and keeps the samples for forecasts.

They are kept in ``STATE/capacity``, one file a pool: beside the manifests rather than in them, because capacity that
all snapshots of a pool share is sampled as well, and because this needs nobody's lock. A lost file costs the forecast
until there are two samples again.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from snapmgr.capacity.series import PoolCapacity, add_samples
from snapmgr.catalog.manifest import decode, encode
from snapmgr.contract.abilities import CapacityReporting, ScratchAttaching
from snapmgr.contract.errors import CatalogError, NotFoundError, SnapmgrError
from snapmgr.system.files import read_file, write_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from snapmgr.catalog.manifest import Lease, Manifest
    from snapmgr.catalog.store import Catalog
    from snapmgr.context import Context
    from snapmgr.contract.records import Pool, PoolKey, Reason

Capacities = dict["PoolKey", PoolCapacity]


def read_capacity(catalog: Catalog, pool: Pool) -> PoolCapacity | None:
    """Return what was seen of a pool; None if nothing was, or if it cannot be read (it begins anew then)."""
    path = _path(catalog, pool)
    with suppress(NotFoundError, CatalogError):
        capacity = decode(read_file(path), PoolCapacity, str(path))
        if (capacity.backend, capacity.pool_id) == pool.key:
            return capacity
    return None


def read_capacities(catalog: Catalog, manifests: Iterable[Manifest]) -> Capacities:
    """Return the samples of the pools of READY snapshots. Raises MissingRequirementError without the right to look."""
    capacities = {}
    for pool in _pools(manifests):
        capacity = read_capacity(catalog, pool)
        if capacity is not None:
            capacities[pool.key] = capacity
    return capacities


def sample_capacity(ctx: Context, manifests: Iterable[Manifest]) -> Capacities:
    """Ask the storage of these snapshots how full it is, where it can run full, and write down a sample.

    Each pool is asked once. One that does not answer is told, and says nothing.
    """
    capacities = {}
    for pool in _pools(manifests):
        try:
            capacity = sample_pool(ctx, pool)
        except SnapmgrError as error:
            ctx.tell(f"warning: how full {pool.hint} is cannot be told: {error.message}")
            continue
        if capacity is not None:
            capacities[pool.key] = capacity
            _write(ctx, pool, capacity)
    return capacities


def sample_pool(ctx: Context, pool: Pool) -> PoolCapacity | None:
    """Ask a pool how full it is, and return it with what was known before; None where nothing can run full.

    Writes nothing down. Raises what the storage raises.
    """
    backend = ctx.backend(pool.backend)
    if not isinstance(backend, CapacityReporting):
        return None
    return add_samples(read_capacity(ctx.catalog, pool), pool, backend.gauges((pool,)), datetime.now(UTC))


def _write(ctx: Context, pool: Pool, capacity: PoolCapacity) -> None:
    path = _path(ctx.catalog, pool)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_file(path, encode(capacity))
    except (CatalogError, OSError) as error:
        # Only the forecast suffers.
        ctx.tell(f"warning: the sample of how full {pool.hint} is could not be kept: {error}")


def _path(catalog: Catalog, pool: Pool) -> Path:
    # An id may be a path.
    name = hashlib.sha256(f"{pool.backend}\0{pool.id}".encode(errors="surrogateescape")).hexdigest()[:32]
    return catalog.path / "capacity" / f"{name}.json"


def _pools(manifests: Iterable[Manifest]) -> dict[Pool, None]:
    return dict.fromkeys(member.ref.pool for manifest in manifests for member in manifest.members)


def lost_members(ctx: Context, pool: Pool) -> set[tuple[str, str, str]]:
    """Return the snapshots in a pool that ran full, by their identity. Raises what the storage raises."""
    backend = ctx.backend(pool.backend)
    if not isinstance(backend, CapacityReporting):
        return set()
    return {one.ref.identity for one in backend.gauges((pool,)) if one.ref is not None and not one.valid}


def attachment_problem(ctx: Context, lease: Lease) -> Reason | None:
    """Return why what is read through an attachment is not to be believed. Raises what the storage raises."""
    for part in lease.parts:
        backend = ctx.backend(part.record.ref.backend)
        if isinstance(backend, ScratchAttaching):
            problem = backend.attachment_problem(part.record)
            if problem is not None:
                return problem
    return None
