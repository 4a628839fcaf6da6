"""Samples the capacity of pools, keeps the samples for forecasts, and refuses a backup that would fill a pool.

The samples are in ``STATE/capacity``, one file a pool. They are not in the manifests, because they also describe
capacity that all snapshots of a pool share, and because writing them must not need a lock. A lost file costs the
forecast until there are two samples again.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.capacity.series import (
    PoolCapacity,
    Reading,
    add_sample,
    add_samples,
    alarm,
    capacity_limits,
    forecast,
    short_of,
)
from snapmgr.catalog.manifest import decode, encode
from snapmgr.contract.abilities import CapacityReporting, ScratchAttaching, SpaceSharing
from snapmgr.contract.errors import CatalogError, NotFoundError, ShortOfSpaceError, SnapmgrError
from snapmgr.system.files import read_file, write_file
from snapmgr.system.probe import require_pools_answer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from snapmgr.catalog.manifest import Lease, Manifest
    from snapmgr.catalog.store import Catalog
    from snapmgr.catalog.summary import Summary
    from snapmgr.config.model import Job
    from snapmgr.context import Context, PoolReading
    from snapmgr.contract.records import Gauge, Pool, PoolKey, Reason, Reservoir, Volume

# One reading of a storage whose snapshots share its space does for the steps of a run, and for the next jobs.
_RECENT_S = 5.0

Capacities = dict["PoolKey", PoolCapacity]

# A file's name ends at 255 bytes.
_LONGEST = 200


def read_capacity(catalog: Catalog, pool: Pool) -> PoolCapacity | None:
    """Return the samples of a pool; None if there are none or they cannot be read (the next sample starts anew)."""
    path = _path(catalog, pool)
    with suppress(NotFoundError, CatalogError):
        capacity = decode(read_file(path), PoolCapacity, str(path))
        if (capacity.backend, capacity.pool_id) == pool.key:
            return capacity
    return None


def pools_of(manifests: Iterable[Manifest | Summary]) -> dict[Pool, None]:
    """Return the pools that hold these snapshots."""
    return dict.fromkeys(ref.pool for manifest in manifests for ref in manifest.refs)


def read_capacities(catalog: Catalog, pools: Iterable[Pool]) -> Capacities:
    """Return the samples of pools that have some. Raises MissingRequirementError without the right to read."""
    capacities = {}
    for pool in pools:
        capacity = read_capacity(catalog, pool)
        if capacity is not None:
            capacities[pool.key] = capacity
    return capacities


def sample_capacity(ctx: Context, manifests: Iterable[Manifest | Summary]) -> Capacities:
    """Sample the storage of these snapshots as `sample_pools` does."""
    return sample_pools(ctx, pools_of(manifests))


def sample_pools(ctx: Context, pools: Iterable[Pool]) -> Capacities:
    """Sample each of these pools, and keep the samples; skip pools that cannot run full.

    Warns about a pool that does not answer, and leaves it out.
    """
    capacities = {}
    for pool in pools:
        try:
            recent = _recent(ctx, pool)
            if recent is None:
                require_pools_answer((pool,), ctx.mounter.mounts())
            elif recent.kept and (kept := read_capacity(ctx.catalog, pool)) is not None:
                capacities[pool.key] = kept
                continue
            capacity = sample_pool(ctx, pool)
        except SnapmgrError as error:
            ctx.tell(f"warning: cannot read how full {pool.hint} is: {error.message}")
            continue
        if capacity is not None:
            capacities[pool.key] = capacity
            _write(ctx, pool, capacity)
            if pool.key in ctx.readings:
                ctx.readings[pool.key].kept = True
    return capacities


def sample_pool(ctx: Context, pool: Pool) -> PoolCapacity | None:
    """Sample a pool and return it with its earlier samples; None if nothing in it can run full.

    Writes nothing to disk. Raises the storage's errors.
    """
    backend = ctx.backend(pool.backend)
    if not isinstance(backend, CapacityReporting):
        return None
    return add_samples(read_capacity(ctx.catalog, pool), pool, _gauges(ctx, backend, pool), datetime.now(UTC))


def _gauges(ctx: Context, backend: CapacityReporting, pool: Pool) -> tuple[Gauge, ...]:
    if not isinstance(backend, SpaceSharing):
        return backend.gauges((pool,))
    recent = _recent(ctx, pool)
    if recent is None:
        recent = ctx.remember(pool, backend.gauges((pool,)))
    return recent.gauges


def _recent(ctx: Context, pool: Pool) -> PoolReading | None:
    """Return what this process has just read of a pool, perhaps for another job."""
    recent = ctx.readings.get(pool.key)
    return recent if recent is not None and time.monotonic() < recent.at_s + _RECENT_S else None


def _write(ctx: Context, pool: Pool, capacity: PoolCapacity) -> None:
    path = _path(ctx.catalog, pool)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # Not worth a flush: without it there is no forecast until there are two samples again.
        write_file(path, encode(capacity), durably=False)
    except (CatalogError, OSError) as error:
        # This costs only the forecast.
        ctx.tell(f"warning: the capacity sample of {pool.hint} could not be kept: {error}")


def _path(catalog: Catalog, pool: Pool) -> Path:
    name = f"{pool.backend}-{pool.id}"
    if not (name.isascii() and name.replace("-", "").replace("_", "").isalnum() and len(name) <= _LONGEST):
        # An id may be a path.
        import hashlib  # noqa: PLC0415 - it loads OpenSSL

        name = hashlib.sha256(f"{pool.backend}\0{pool.id}".encode(errors="surrogateescape")).hexdigest()[:32]
    return catalog.path / "capacity" / f"{name}.json"


def lost_members(ctx: Context, pool: Pool) -> set[tuple[str, str, str]]:
    """Return the identities of the overflowed snapshots in a pool. Raises the storage's errors."""
    backend = ctx.backend(pool.backend)
    if not isinstance(backend, CapacityReporting) or isinstance(backend, SpaceSharing):
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


# -------------------------------------------------------------------------------------------------- room for a backup


def read_headroom(ctx: Context, job: Job, volumes: Iterable[Volume], now: datetime) -> tuple[Reading, ...]:
    """Return a reading of each space that a backup of `volumes` can fill, judged by the job's limits.

    Volumes in one pool share its spaces; what their snapshots will allocate is added up. Raises the storage's errors.
    """
    found: dict[tuple[PoolKey, str], Reservoir] = {}
    for volume in volumes:
        for one in _headroom(ctx, volume):
            key = (volume.pool.key, one.name)
            wanted_bytes = one.wanted_bytes + (found[key].wanted_bytes if key in found else 0)
            found[key] = replace(one, wanted_bytes=wanted_bytes)
    known = {volume.pool.key: read_capacity(ctx.catalog, volume.pool) for volume in volumes}
    limits = capacity_limits(job, now)
    readings = []
    for (pool_key, name), one in found.items():
        capacity = known[pool_key]
        series = add_sample(capacity.of_name(name) if capacity is not None else None, one, now)
        foreseen = forecast(series, now)
        readings.append(Reading(series=series, forecast=foreseen, alarm=alarm(series, foreseen, limits, now)))
    return tuple(readings)


def _headroom(ctx: Context, volume: Volume) -> tuple[Reservoir, ...]:
    backend = ctx.backend(volume.backend)
    if isinstance(backend, SpaceSharing) and isinstance(backend, CapacityReporting):
        return _gauges(ctx, backend, volume.pool)
    return backend.headroom(volume)


class Room(Struct, frozen=True, kw_only=True):
    """What the pools of a job have to say before its backup."""

    warnings: tuple[str, ...]
    refusal: ShortOfSpaceError | None
    """Why there is too little space for a backup; None if there is enough, or if nothing is known."""


def examine_room(ctx: Context, job: Job, volumes: tuple[Volume, ...]) -> Room:
    """Return the warnings about the pools of `volumes`, and whether less than the job's `free_min` is free there.

    A pool that cannot be read is a warning: it must not prevent every backup from then on.
    """
    try:
        readings = read_headroom(ctx, job, volumes, datetime.now(UTC))
    except SnapmgrError as error:
        what = f"cannot read how much space is free, so free_min is not checked: {error.message}"
        return Room(warnings=(what,), refusal=None)
    alarms = tuple(one.alarm for one in readings if one.alarm is not None)
    short = short_of(job.free_min, [one.series for one in readings])
    if not short:
        return Room(warnings=("; ".join(alarms),) if alarms else (), refusal=None)
    pools = {volume.pool.key for volume in volumes}
    held = Counter(
        one.job
        for one in ctx.catalog.summaries()[0]
        if one.state == "ready" and any(ref.pool.key in pools for ref in one.refs)
    )
    users = ", ".join(f"{count} of job {name}" for name, count in sorted(held.items())) or "none of snapmgr's"
    refusal = ShortOfSpaceError(
        f"too little space for a backup of {job.name}: {'; '.join(short)}; snapshots there: {users}",
        hint=f"snapmgr prune {job.name}, delete snapshots or files, add space, or lower free_min of the job",
    )
    return Room(warnings=(), refusal=refusal)
