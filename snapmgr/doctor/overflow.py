"""Finds snapshots and pools that have overflowed, or soon will. Pure: facts in, findings out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.capacity.series import alarm, forecast, overflow_reason, overflowed_series, own_series
from snapmgr.doctor.finding import Finding, Repair

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapmgr.capacity.series import PoolCapacity
    from snapmgr.catalog.summary import StoredPart, Summary
    from snapmgr.contract.records import PoolKey
    from snapmgr.doctor.facts import Facts

ENLARGE = "delete it if it is not needed, or enlarge it; see docs/how-to/watch-capacity.md"


def lost_snapshots(facts: Facts) -> dict[str, Finding]:
    """Return a finding, with its repair, for each READY snapshot that has overflowed, by its id."""
    capacities = _capacities(facts)
    found = {}
    for manifest in facts.snapshots if _has_own(capacities) else ():
        why = overflow_reason(manifest, capacities) if manifest.state == "ready" else None
        if why is not None:
            found[manifest.id] = Finding(
                area="storage",
                subject=manifest.refs[0].pool.title,
                level="problem",
                what=f"{manifest.id} is lost: {why}",
                hint="use another snapshot",
                job=manifest.job,
                repair=Repair(kind="mark-lost", text="marks it BROKEN and deletes its storage", about=manifest),
            )
    return found


def overflowed_members(facts: Facts, manifest: Summary) -> tuple[str, ...]:
    """Return the names of a snapshot's members that have overflowed and still exist."""
    lost = {series.native_id for series in overflowed_series(manifest.refs, _capacities(facts))}
    return tuple(ref.name for ref in manifest.refs if ref.native_id in lost)


def remaining_members(manifest: Summary, members: Sequence[StoredPart]) -> Finding:
    """Return the finding for the members of a set that remain when others are missing or lost."""
    return Finding(
        area="storage",
        subject=members[0].pool.title,
        level="note",
        what=f"{manifest.id} is BROKEN, and part of it remains: {', '.join(ref.name for ref in members)}",
        hint=f"save the data that you need; then: snapmgr delete {manifest.short_id} --force",
        job=manifest.job,
    )


def diagnose_capacity(facts: Facts) -> Iterator[Finding]:
    """Return a finding for each snapshot that will soon overflow, and for each pool that is full."""
    capacities = _capacities(facts)
    for manifest in facts.snapshots if _has_own(capacities) else ():
        if manifest.state == "ready":
            yield from _soon_full(facts, manifest, capacities)
    for pool in facts.pools:
        for series in pool.capacity.shared if pool.capacity is not None else ():
            # `examine` reports pools that are not full, for each job.
            if series.full_since is not None:
                what = f"{series.name} is full or damaged: the database itself cannot write"
                hint = "enlarge it; see docs/how-to/watch-capacity.md"
                yield Finding(area="storage", subject=pool.pool.title, level="problem", what=what, hint=hint)


def _soon_full(facts: Facts, manifest: Summary, capacities: dict[PoolKey, PoolCapacity]) -> Iterator[Finding]:
    limits = facts.limits.get(manifest.job)
    for series in own_series(manifest.refs, capacities) if limits is not None else ():
        foreseen = forecast(series, facts.now, manifest.at)
        what = alarm(series, foreseen, limits, facts.now) if limits is not None else None
        if what is not None and series.full_since is None:
            yield Finding(
                area="storage",
                subject=manifest.refs[0].pool.title,
                level="problem",
                what=what,
                hint=ENLARGE,
                job=manifest.job,
            )


def _has_own(capacities: dict[PoolKey, PoolCapacity]) -> bool:
    """Whether any snapshot has space of its own; otherwise none needs to be looked at."""
    return any(series.native_id for capacity in capacities.values() for series in capacity.series)


def _capacities(facts: Facts) -> dict[PoolKey, PoolCapacity]:
    return {one.pool.key: one.capacity for one in facts.pools if one.capacity is not None}
