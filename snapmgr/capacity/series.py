"""Computes forecasts and alarms from samples of how full storage was. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from snapmgr.catalog.manifest import SCHEMA
from snapmgr.contract.units import format_duration, format_size, part_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.catalog.summary import StoredPart, Summary
    from snapmgr.config.model import Job
    from snapmgr.contract.records import Gauge, Pool, PoolKey, Reservoir, SnapshotRef

    _Ref = SnapshotRef | StoredPart

_OVERFLOWED = "its CoW table overflowed"
"""The reason of a snapshot that was lost because its own space ran out begins with this."""
SAMPLES_KEPT = 16
# Just after a snapshot nearly every write is the first one to its chunk: minutes do not predict a day.
_LEAST_SPAN_S = 600.0
# Shared space goes up and down with each prune: a week of samples shows the trend.
_PAST = timedelta(days=7)
_RECENT = timedelta(hours=1)
_FRESH_S = 120.0
# A clock that is set back leaves samples of the future; small daily corrections do not matter.
_CLOCK_SLACK = timedelta(minutes=5)
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_FOREVER_S = 10 * 365 * 86400.0

_Time = Annotated[datetime, msgspec.Meta(tz=True)]
_Bytes = Annotated[int, msgspec.Meta(ge=0)]


class CapacitySample(Struct, frozen=True, kw_only=True):
    """How full a pool or a CoW table was at one time."""

    at: _Time
    used_bytes: _Bytes
    size_bytes: _Bytes


class CapacitySeries(Struct, frozen=True, kw_only=True):
    """The samples of one thing that can run full."""

    name: str
    """For people; identifies shared space: "data of the thin pool vg0/pool"."""
    when_full: Literal["snapshot_lost", "origin_errors", "no_snapshots", "no_growth"]
    samples: tuple[CapacitySample, ...] = ()
    """Oldest first, at most `SAMPLES_KEPT`."""
    native_id: str = ""
    """`SnapshotRef.native_id` of the snapshot that owns the space; "" for shared space."""
    snapshot_id: str = ""
    volume_ids: tuple[str, ...] = ()
    """`Gauge.volume_ids`."""
    size_bytes: _Bytes = 0
    """The size now."""
    wanted_bytes: _Bytes = 0
    """`Reservoir.wanted_bytes`."""
    full_since: _Time | None = None
    """When it was first found overflowed; that was after the last sample."""

    @property
    def last(self) -> CapacitySample | None:
        """The newest sample."""
        return self.samples[-1] if self.samples else None

    @property
    def in_pieces(self) -> bool:
        """Whether snapshots take it in pieces when they are made, as in a volume group, and writes do not fill it."""
        return self.when_full == "no_snapshots" and self.wanted_bytes > 0

    @property
    def share(self) -> float:
        """How full it was at the last sample, 0 to 1."""
        if self.full_since is not None:
            return 1.0
        last = self.last
        return min(last.used_bytes / last.size_bytes, 1.0) if last is not None and last.size_bytes else 0.0


class PoolCapacity(Struct, frozen=True, kw_only=True):
    """Everything in one pool that can run full."""

    backend: str
    pool_id: str
    series: tuple[CapacitySeries, ...] = ()
    schema: int = SCHEMA

    def of_snapshot(self, native_id: str) -> CapacitySeries | None:
        """Return the series of a snapshot's own space."""
        return next((one for one in self.series if native_id and one.native_id == native_id), None)

    def of_name(self, name: str) -> CapacitySeries | None:
        """Return the series of shared space."""
        return next((one for one in self.series if one.name == name and not one.native_id), None)

    @property
    def shared(self) -> tuple[CapacitySeries, ...]:
        """The series of space that all snapshots of the pool share."""
        return tuple(one for one in self.series if not one.native_id)


class Forecast(Struct, frozen=True, kw_only=True):
    """The trend of the samples."""

    rate_bytes_s: float | None
    """None: unknown yet."""
    full_at: datetime | None = None
    """None: never, or unknown."""

    def words(self, now: datetime) -> str:
        """Return it for people: "full in 5 h 40 min", "may be full by now", "not filling", or "" if it is unknown."""
        if self.rate_bytes_s is None:
            return ""
        if self.full_at is None:
            return "not filling"
        left_s = (self.full_at - now).total_seconds()
        return f"full in {format_duration(left_s)}" if left_s > 0 else "may be full by now"


def add_samples(old: PoolCapacity | None, pool: Pool, gauges: Iterable[Gauge], now: datetime) -> PoolCapacity:
    """Return the capacity of a pool with one more sample of each gauge; series without a gauge are dropped.

    An overflowed series gets no further sample: its last one shows when it was still good.
    """
    series = []
    for gauge in gauges:
        ref = gauge.ref
        known = None
        if old is not None:
            known = old.of_snapshot(ref.native_id) if ref is not None else old.of_name(gauge.name)
        native_id, snapshot_id = (ref.native_id, ref.snapshot_id) if ref is not None else ("", "")
        if gauge.valid:
            one = add_sample(known, gauge, now)
        else:
            one = replace(
                known or CapacitySeries(name=gauge.name, when_full=gauge.when_full),
                size_bytes=gauge.size_bytes,
                full_since=known.full_since if known is not None and known.full_since is not None else now,
            )
        series.append(replace(one, native_id=native_id, snapshot_id=snapshot_id, volume_ids=gauge.volume_ids))
    return PoolCapacity(backend=pool.backend, pool_id=pool.id, series=tuple(series))


def add_sample(known: CapacitySeries | None, read: Reservoir, now: datetime) -> CapacitySeries:
    """Return the series of something that is not lost, with one more sample."""
    earlier = (one for one in known.samples if one.at <= now) if known is not None else ()
    fresh = CapacitySample(at=now, used_bytes=read.used_bytes, size_bytes=read.size_bytes)
    return CapacitySeries(
        name=read.name,
        when_full=read.when_full,
        samples=thin((*earlier, fresh)),
        native_id=known.native_id if known is not None else "",
        size_bytes=read.size_bytes,
        wanted_bytes=read.wanted_bytes,
    )


def thin(samples: Sequence[CapacitySample]) -> tuple[CapacitySample, ...]:
    """Return at most `SAMPLES_KEPT` of `samples`: the first, the last, and more of the recent than of the old ones."""
    kept = list(samples)
    while len(kept) > SAMPLES_KEPT:
        end = kept[-1].at

        def worth(number: int, end: datetime = end) -> float:
            gap_s = (kept[number + 1].at - kept[number - 1].at).total_seconds()
            return gap_s / ((end - kept[number].at).total_seconds() + 1.0)

        del kept[min(range(1, len(kept) - 1), key=worth)]
    return tuple(kept)


def forecast(series: CapacitySeries, now: datetime, since: datetime | None = None) -> Forecast:
    """Return when `series` will be full, by the straight line through its samples of the last week.

    Args:
        series: the samples.
        now: timezone-aware; later samples are ignored.
        since: when it was empty (for a snapshot's own space: when the snapshot was taken).

    For a snapshot's own space the rate of the last hour applies if it is higher: a lost snapshot cannot be recovered.
    An extended or reduced size changes the time that remains, but not the rate. A volume group gets no forecast:
    writes do not fill it, but whoever makes a volume takes a piece of it.
    """
    if series.in_pieces or series.when_full == "no_growth":
        return Forecast(rate_bytes_s=None)
    samples = [one for one in series.samples if one.at <= now + _CLOCK_SLACK]
    if not samples:
        return Forecast(rate_bytes_s=None)
    last = samples[-1]
    points = [(one.at, one.used_bytes) for one in samples if one.at >= last.at - _PAST]
    if since is not None and last.at - _PAST <= since < points[0][0]:
        points.insert(0, (since, 0))
    rate = _slope(points)
    if rate is None:
        return Forecast(rate_bytes_s=None)
    if series.native_id:
        before = [point for point in points if point[0] <= last.at - _RECENT]
        recent = _slope(points[len(before) - 1 :]) if before else None
        rate = max(rate, recent if recent is not None else rate)
    left_bytes = max(last.size_bytes - last.used_bytes, 0)
    if rate <= 0 or left_bytes > rate * _FOREVER_S:
        return Forecast(rate_bytes_s=max(rate, 0.0))
    return Forecast(rate_bytes_s=rate, full_at=last.at + timedelta(seconds=left_bytes / rate))


def _slope(points: Sequence[tuple[datetime, int]]) -> float | None:
    """Return the slope of the least-squares line, in bytes a second; None if the points are too close in time."""
    times = [(at - points[0][0]).total_seconds() for at, _ in points]
    if max(times) - min(times) < _LEAST_SPAN_S:
        return None
    middle = sum(times) / len(times)
    mean = sum(used for _, used in points) / len(points)
    over = sum((time - middle) * (used - mean) for time, (_, used) in zip(times, points, strict=True))
    return over / sum((time - middle) ** 2 for time in times)


def overflow_reason(manifest: Manifest | Summary, capacities: Mapping[PoolKey, PoolCapacity]) -> str | None:
    """Return why a snapshot is lost, as the reason of its manifest, or None; one lost member of a set is enough."""
    for series in overflowed_series(manifest.refs, capacities):
        if series.full_since is not None:
            last_good = series.last.at if series.last is not None else manifest.at
            # The clock may have been set back meanwhile.
            first, then = sorted((last_good, series.full_since))
            size = format_size(series.size_bytes)
            return f"{_OVERFLOWED} between {first:{_TIME}} and {then:{_TIME}}: {size} of {size}"
    return None


def overflowed_series(refs: Iterable[_Ref], capacities: Mapping[PoolKey, PoolCapacity]) -> tuple[CapacitySeries, ...]:
    """Return the series of the overflowed members of a snapshot that still exist in the storage."""
    return tuple(series for series in own_series(refs, capacities) if series.full_since is not None)


def was_overflowed(manifest: Manifest | Summary) -> bool:
    """Return whether a snapshot is BROKEN because it overflowed."""
    return manifest.state == "broken" and (manifest.reason or "").startswith(_OVERFLOWED)


# -------------------------------------------------------------------------------------------------------------- alarms

WHEN_FULL = {
    "snapshot_lost": "the snapshot is lost",
    "origin_errors": "the database itself cannot write",
    "no_snapshots": "no snapshot can be taken",
    "no_growth": "data and metadata cannot grow",
}


class CapacityLimits(Struct, frozen=True, kw_only=True):
    """Thresholds of the alarms."""

    share: float
    """Alarm if it is this full, 0 to 1."""
    until: datetime
    """Alarm if the forecast is that it is full before this time."""


def capacity_limits(job: Job, now: datetime, next_due: datetime | None = None) -> CapacityLimits:
    """Return the thresholds of a job."""
    until = now + timedelta(seconds=job.capacity_warn_within_s)
    return CapacityLimits(share=job.capacity_warn_share, until=max(until, next_due) if next_due is not None else until)


def alarm(series: CapacitySeries, expected: Forecast, limits: CapacityLimits, now: datetime) -> str | None:
    """Return the alarm in words, or None.

    A volume group may be allocated to its last byte: it matters only whether the next snapshot fits. So may space from
    which other spaces grow: their own sizes include what is left of it.
    """
    last = series.last
    then = WHEN_FULL[series.when_full]
    if series.full_since is not None:
        lost = series.when_full == "snapshot_lost"
        return f"{series.name} overflowed: {then}" if lost else f"{series.name} ran full or is damaged: {then}"
    if last is None or series.when_full == "no_growth":
        return None
    if series.in_pieces:
        free_bytes = max(last.size_bytes - last.used_bytes, 0)
        if series.wanted_bytes <= free_bytes:
            return None
        wanted = format_size(series.wanted_bytes)
        return f"{series.name} has {format_size(free_bytes)} free, and the next snapshot takes about {wanted}: {then}"
    soon = expected.full_at is not None and expected.full_at < limits.until
    if series.share < limits.share and not soon:
        return None
    return f"{describe(series, expected, now)}; once it is full, {then}"


def short_of(free_min: str, spaces: Sequence[CapacitySeries]) -> tuple[str, ...]:
    """Given a job's `free_min` and the spaces that its backup can fill, return in words where too little is free.

    Only a space whose end stops the database must keep `free_min` free. A size is a share of the largest of them, so
    that it asks no more of small metadata than of the data. From a volume group the next snapshot must only fit.
    """
    whole_bytes = max((one.size_bytes for one in spaces if one.when_full == "origin_errors"), default=0)
    share = part_of(free_min, whole_bytes) / whole_bytes if whole_bytes else 0.0
    short = []
    for one in spaces:
        if one.last is None:
            continue
        free_bytes = max(one.size_bytes - one.last.used_bytes, 0)
        least_bytes = int(share * one.size_bytes) if one.when_full == "origin_errors" else 0
        if free_bytes - one.wanted_bytes >= least_bytes:
            continue
        takes = f", of which the backup takes {format_size(one.wanted_bytes)}" if one.wanted_bytes else ""
        least = f"; free_min = {free_min} keeps {format_size(least_bytes)} free" if least_bytes else ""
        size = format_size(one.size_bytes)
        short.append(f"{one.name} has {format_size(free_bytes)} of {size} free{takes}{least}")
    return tuple(short)


def describe(series: CapacitySeries, expected: Forecast, now: datetime) -> str:
    """Return for people how full something is: "data of … is 81 % full (8.1 GiB of 10.0 GiB), full in 5 h 40 min"."""
    last = series.last
    if series.full_since is not None:
        return f"{series.name} overflowed"
    if last is None:
        return f"{series.name}: unknown"
    age_s = (now - last.at).total_seconds()
    was, ago = ("was", f" {format_duration(age_s)} ago") if age_s > _FRESH_S else ("is", "")
    sizes = f"{format_size(last.used_bytes)} of {format_size(last.size_bytes)}"
    words = expected.words(now)
    return f"{series.name} {was} {series.share:.0%} full{ago} ({sizes})" + (f", {words}" if words else "")


class Reading(Struct, frozen=True, kw_only=True):
    """One series with its forecast and its alarm."""

    series: CapacitySeries
    forecast: Forecast
    alarm: str | None
    """In words; None without an alarm."""


def readings_of(
    manifests: Iterable[Manifest | Summary],
    capacities: Mapping[PoolKey, PoolCapacity],
    limits: CapacityLimits,
    now: datetime,
) -> tuple[Reading, ...]:
    """Return a reading of all space that these snapshots use: first the shared space, then the own space of each."""
    manifests = list(manifests) if capacities else []
    volumes: dict[PoolKey, set[str]] = {}
    for key, volume_id in {(ref.identity[:2], ref.volume_id) for manifest in manifests for ref in manifest.refs}:
        volumes.setdefault(key, set()).add(volume_id)
    found: list[tuple[CapacitySeries, datetime | None]] = [
        (series, None)
        for key, ids in volumes.items()
        if key in capacities
        for series in capacities[key].shared
        # A job on one thin pool does not depend on another pool in the same volume group.
        if not series.volume_ids or not ids.isdisjoint(series.volume_ids)
    ]
    if any(series.native_id for capacity in capacities.values() for series in capacity.series):
        for manifest in manifests:
            found += [(series, manifest.at) for series in own_series(manifest.refs, capacities)]
    readings = []
    for series, since in found:
        expected = forecast(series, now, since)
        readings.append(Reading(series=series, forecast=expected, alarm=alarm(series, expected, limits, now)))
    return tuple(readings)


def own_series(refs: Iterable[_Ref], capacities: Mapping[PoolKey, PoolCapacity]) -> tuple[CapacitySeries, ...]:
    """Return the series of the own space of a snapshot's members, as far as it was sampled."""
    found = []
    for ref in refs:
        capacity = capacities.get(ref.identity[:2])
        series = capacity.of_snapshot(ref.native_id) if capacity is not None else None
        if series is not None:
            found.append(series)
    return tuple(found)
