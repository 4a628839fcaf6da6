"""Samples the capacity of pools, and keeps the samples for forecasts.

The samples are in ``STATE/capacity``, one file a pool. They are not in the manifests, because they also describe
capacity that all snapshots of a pool share, and because writing them must not need a lock. A lost file costs the
forecast until there are two samples again.
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
    """Return the samples of a pool; None if there are none or they cannot be read (the next sample starts anew)."""
    path = _path(catalog, pool)
    with suppress(NotFoundError, CatalogError):
        capacity = decode(read_file(path), PoolCapacity, str(path))
        if (capacity.backend, capacity.pool_id) == pool.key:
            return capacity
    return None


def read_capacities(catalog: Catalog, manifests: Iterable[Manifest]) -> Capacities:
    """Return the samples of the pools of READY snapshots. Raises MissingRequirementError without the right to read."""
    capacities = {}
    for pool in _pools(manifests):
        capacity = read_capacity(catalog, pool)
        if capacity is not None:
            capacities[pool.key] = capacity
    return capacities


def sample_capacity(ctx: Context, manifests: Iterable[Manifest]) -> Capacities:
    """Sample the storage of these snapshots, each pool once, and keep the samples; skip pools that cannot run full.

    Warns about a pool that does not answer, and leaves it out.
    """
    capacities = {}
    for pool in _pools(manifests):
        try:
            capacity = sample_pool(ctx, pool)
        except SnapmgrError as error:
            ctx.tell(f"warning: cannot read how full {pool.hint} is: {error.message}")
            continue
        if capacity is not None:
            capacities[pool.key] = capacity
            _write(ctx, pool, capacity)
    return capacities


def sample_pool(ctx: Context, pool: Pool) -> PoolCapacity | None:
    """Sample a pool and return it with its earlier samples; None if nothing in it can run full.

    Writes nothing to disk. Raises the storage's errors.
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
        # This costs only the forecast.
        ctx.tell(f"warning: the capacity sample of {pool.hint} could not be kept: {error}")


def _path(catalog: Catalog, pool: Pool) -> Path:
    # Hashed because an id may be a path.
    name = hashlib.sha256(f"{pool.backend}\0{pool.id}".encode(errors="surrogateescape")).hexdigest()[:32]
    return catalog.path / "capacity" / f"{name}.json"


def _pools(manifests: Iterable[Manifest]) -> dict[Pool, None]:
    return dict.fromkeys(member.ref.pool for manifest in manifests for member in manifest.members)


def lost_members(ctx: Context, pool: Pool) -> set[tuple[str, str, str]]:
    """Return the identities of the overflowed snapshots in a pool. Raises the storage's errors."""
    backend = ctx.backend(pool.backend)
    if not isinstance(backend, CapacityReporting):
        return set()
    return {one.ref.identity for one in backend.gauges((pool,)) if one.ref is not None and not one.valid}


def attachment_problem(ctx: Context, lease: Lease) -> Reason | None:
    """Return why data read through an attachment cannot be trusted, or None. Raises the storage's errors."""
    for part in lease.parts:
        backend = ctx.backend(part.record.ref.backend)
        if isinstance(backend, ScratchAttaching):
            problem = backend.attachment_problem(part.record)
            if problem is not None:
                return problem
    return None
