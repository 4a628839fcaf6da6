"""What is to be said of storage that runs full, or did. Pure: facts in, findings out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.jobs.facts import key_of, where
from snapmgr.jobs.fill import alarm, forecast, loss_of, own_series
from snapmgr.jobs.finding import Cure, Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog import Entry
    from snapmgr.jobs.facts import Facts, PoolKey
    from snapmgr.jobs.fill import PoolFill

MORE_ROOM = "delete it if it is not needed, or give it more room; see docs/filling.md"


def losses(facts: Facts) -> dict[str, Finding]:
    """Return a finding, with its cure, for each READY snapshot that ran full, by its id."""
    fills = _fills(facts)
    found = {}
    for entry in facts.entries:
        manifest = entry.manifest
        why = loss_of(manifest, fills) if manifest.state == "ready" else None
        if why is not None:
            found[manifest.id] = Finding(
                area="storage",
                subject=where(manifest.members[0].ref.pool),
                level="problem",
                what=f"{manifest.id} is lost: {why}",
                hint="use another one",
                job=manifest.job,
                cure=Cure(kind="mark-lost", text="marks it BROKEN and deletes its storage", about=entry),
            )
    return found


def fullness(facts: Facts) -> Iterator[Finding]:
    """Say which snapshots will soon run full, and which pools did."""
    fills = _fills(facts)
    for entry in facts.entries:
        if entry.manifest.state == "ready":
            yield from _filling(facts, entry, fills)
    for pool in facts.pools:
        for series in pool.fill.shared if pool.fill is not None else ():
            # How full it is otherwise is said of each job.
            if series.full_since is not None:
                what = f"{series.name} ran full or is damaged: the database itself cannot write"
                hint = "enlarge it; see docs/filling.md"
                yield Finding(area="storage", subject=where(pool.pool), level="problem", what=what, hint=hint)


def _filling(facts: Facts, entry: Entry, fills: dict[PoolKey, PoolFill]) -> Iterator[Finding]:
    manifest = entry.manifest
    limits = facts.limits.get(manifest.job)
    for series in own_series(manifest, fills) if limits is not None else ():
        foreseen = forecast(series, facts.now, manifest.taken_at)
        what = alarm(series, foreseen, limits, facts.now) if limits is not None else None
        if what is not None and series.full_since is None:
            yield Finding(
                area="storage",
                subject=where(manifest.members[0].ref.pool),
                level="problem",
                what=what,
                hint=MORE_ROOM,
                job=manifest.job,
            )


def _fills(facts: Facts) -> dict[PoolKey, PoolFill]:
    return {key_of(one.pool): one.fill for one in facts.pools if one.fill is not None}
