"""Forecasts and alarms of storage that runs full."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.capacity.series import (
    SAMPLES_KEPT,
    CapacityLimits,
    CapacitySample,
    CapacitySeries,
    PoolCapacity,
    add_samples,
    alarm,
    describe,
    forecast,
    overflow_reason,
    readings_of,
    short_of,
    thin,
)
from snapmgr.catalog.manifest import decode, encode
from snapmgr.contract.errors import CatalogError
from snapmgr.contract.records import Gauge
from support.sample import NOW, POOL, manifest

GIB, MIB = 1 << 30, 1 << 20
HOUR = timedelta(hours=1)
OWN = manifest().members[0].ref
LIMITS = CapacityLimits(share=0.8, until=NOW + 24 * HOUR)


def series(*points, size=GIB, own=True, **fields):
    """Return a series of (hours from NOW, bytes used)."""
    samples = tuple(CapacitySample(at=NOW + hours * HOUR, used_bytes=used, size_bytes=size) for hours, used in points)
    when = "snapshot_lost" if own else "origin_errors"
    values = {"name": "CoW table of vg/s", "when_full": when, "samples": samples, "size_bytes": size}
    return CapacitySeries(**(values | {"native_id": "n0" if own else ""} | fields))


def gauge(used=MIB, *, own=True, valid=True, size=GIB, name="CoW table of vg/s"):
    when = "snapshot_lost" if own else "origin_errors"
    ref = OWN if own else None
    return Gauge(name=name, size_bytes=size, used_bytes=used, when_full=when, pool=POOL, ref=ref, valid=valid)


def test_a_steady_rate_is_carried_on():
    found = forecast(series((-2, 100 * MIB), (-1, 200 * MIB), (0, 300 * MIB)), NOW)
    assert found.rate_bytes_s == pytest.approx(100 * MIB / 3600)
    assert found.full_at == NOW + timedelta(seconds=724 * 36)
    assert found.words(NOW) == "full in 7 h 14 min"


def test_the_time_since_the_last_sample_is_taken_off():
    found = forecast(series((-4, 0), (-2, 512 * MIB)), NOW)
    assert found.words(NOW) == "may be full by now"
    assert forecast(series((-4, 0), (-3, 512 * MIB)), NOW - 2.5 * HOUR).words(NOW - 2.5 * HOUR) == "full in 30 min"


@pytest.mark.parametrize("points", [(), ((0, MIB),), ((-1 / 120, 0), (0, MIB))])
def test_nothing_is_said_from_too_little(points):
    found = forecast(series(*points), NOW)
    assert (found.rate_bytes_s, found.full_at, found.words(NOW)) == (None, None, "")


def test_a_table_was_empty_when_its_snapshot_was_taken():
    found = forecast(series((0, 100 * MIB)), NOW, since=NOW - HOUR)
    assert found.rate_bytes_s == pytest.approx(100 * MIB / 3600)


def test_what_stands_still_or_shrinks_is_not_filling():
    for points in (((-2, MIB), (0, MIB)), ((-2, 2 * MIB), (0, MIB))):
        assert forecast(series(*points), NOW).words(NOW) == "not filling"


def test_a_burst_in_the_last_hours_counts_for_a_snapshot_and_not_for_what_is_shared():
    points = ((-48, 0), (-24, MIB), (-2, 2 * MIB), (-1, 3 * MIB), (0, 203 * MIB))
    assert forecast(series(*points), NOW).rate_bytes_s == pytest.approx(200 * MIB / 3600)
    shared = forecast(series(*points, own=False), NOW).rate_bytes_s
    assert shared < 10 * MIB / 3600


def test_a_clock_that_was_set_back_hides_the_samples_of_the_future():
    found = forecast(series((-2, 0), (-1, 100 * MIB), (5, 900 * MIB)), NOW)
    assert found.rate_bytes_s == pytest.approx(100 * MIB / 3600)
    again = add_samples(None, POOL, (gauge(MIB),), NOW + 5 * HOUR)
    again = add_samples(again, POOL, (gauge(2 * MIB),), NOW)
    assert [sample.used_bytes for sample in again.series[0].samples] == [2 * MIB]


def test_room_that_was_added_puts_the_end_off_and_leaves_the_rate():
    before = series((-2, 0), (-1, 100 * MIB), size=200 * MIB)
    more = replace(
        before, samples=(*before.samples, CapacitySample(at=NOW, used_bytes=200 * MIB, size_bytes=400 * MIB))
    )
    found = forecast(more, NOW)
    assert found.rate_bytes_s == pytest.approx(100 * MIB / 3600)
    assert found.words(NOW) == "full in 2 h"


@given(
    st.lists(st.tuples(st.floats(-200, 5), st.integers(0, 2**50)), max_size=30),
    st.integers(0, 2**50),
    st.booleans(),
    st.none() | st.floats(-300, 1),
)
def test_no_forecast_is_of_a_time_before_what_was_seen(points, size, own, since):
    found = series(*sorted(points), size=size, own=own)
    foreseen = forecast(found, NOW, NOW + since * HOUR if since is not None else None)
    if foreseen.full_at is not None:
        assert foreseen.rate_bytes_s > 0
        assert foreseen.full_at >= max(one.at for one in found.samples if one.at <= NOW + timedelta(minutes=5))
    foreseen.words(NOW)
    describe(found, foreseen, NOW)
    alarm(found, foreseen, LIMITS, NOW)


@given(st.integers(2, 40), st.integers(10**5, 10**9), st.floats(0.2, 100), st.integers(0, 10**12))
def test_the_forecast_of_a_straight_line_is_exact(count, bytes_an_hour, step_hours, start):
    points = [
        ((number - count + 1) * step_hours, start + round(number * step_hours * bytes_an_hour))
        for number in range(count)
    ]
    points = [point for point in points if point[0] >= -168]
    size = points[-1][1] + 10 * bytes_an_hour
    found = forecast(series(*points, size=size), NOW)
    if len(points) > 1:
        assert found.full_at is not None
        assert (found.full_at - NOW).total_seconds() == pytest.approx(36000, rel=0.02, abs=60)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=100))
def test_few_samples_are_kept_the_first_and_the_last_among_them(gaps_s):
    samples, at = [], NOW
    for number, gap_s in enumerate(gaps_s):
        samples.append(CapacitySample(at=at, used_bytes=number, size_bytes=1000))
        at += timedelta(seconds=gap_s)
    kept = thin(samples)
    assert len(kept) == min(len(samples), SAMPLES_KEPT)
    assert (kept[0], kept[-1]) == (samples[0], samples[-1])
    assert list(kept) == [one for one in samples if one in kept]


def test_looking_each_hour_for_a_month_keeps_the_first_and_is_denser_lately():
    fill = None
    for number in range(720):
        fill = add_samples(fill, POOL, (gauge(number * 1000),), NOW + number * HOUR)
    samples = fill.series[0].samples
    assert len(samples) == SAMPLES_KEPT
    assert samples[0].at == NOW
    assert samples[-1].at - samples[-2].at == HOUR
    assert sum(one.at > samples[-1].at - timedelta(days=7) for one in samples) >= 4


def test_what_is_not_there_any_more_is_forgotten_and_what_is_shared_is_known_by_its_name():
    fill = add_samples(None, POOL, (gauge(), gauge(own=False, name="data of vg/pool")), NOW)
    fill = add_samples(fill, POOL, (gauge(own=False, name="data of vg/pool"),), NOW + HOUR)
    assert [(one.name, len(one.samples)) for one in fill.series] == [("data of vg/pool", 2)]
    assert fill.of_snapshot("") is None


def test_a_snapshot_is_lost_between_the_last_time_that_it_was_whole_and_the_first_that_it_was_not():
    fill = add_samples(None, POOL, (gauge(900 * MIB),), NOW + HOUR)
    fill = add_samples(fill, POOL, (gauge(GIB, valid=False),), NOW + 2 * HOUR)
    fill = add_samples(fill, POOL, (gauge(GIB, valid=False),), NOW + 3 * HOUR)
    why = overflow_reason(manifest(), {("reflink", POOL.id): fill})
    assert why == "its CoW table overflowed between 2026-01-31T03:30:00Z and 2026-01-31T04:30:00Z: 1.0 GiB of 1.0 GiB"


def test_a_snapshot_that_was_never_seen_whole_was_so_when_it_was_taken():
    fill = add_samples(None, POOL, (gauge(GIB, valid=False),), NOW + HOUR)
    assert "between 2026-01-31T02:30:00Z and 2026-01-31T03:30:00Z" in overflow_reason(
        manifest(), {("reflink", POOL.id): fill}
    )
    assert overflow_reason(manifest(1), {("reflink", POOL.id): fill}) is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (series((-2, 0), (0, 1)), None),
        (
            series((0, 850 * MIB)),
            "CoW table of vg/s is 83% full (850.0 MiB of 1.0 GiB); once it is full, the snapshot is lost",
        ),
        (
            series((-2, 0), (0, 512 * MIB)),
            "CoW table of vg/s is 50% full (512.0 MiB of 1.0 GiB), full in 2 h; once it is full, the snapshot is lost",
        ),
        (series((-24, 0), (0, 100 * MIB)), None),
        (series(full_since=NOW), "CoW table of vg/s overflowed: the snapshot is lost"),
        (
            series((0, MIB), own=False, name="data of vg/pool", full_since=NOW),
            "data of vg/pool ran full or is damaged: the database itself cannot write",
        ),
        (series(), None),
    ],
)
def test_alarms(found, said):
    assert alarm(found, forecast(found, NOW), LIMITS, NOW) == said


def test_a_volume_group_may_be_full_as_long_as_the_next_snapshot_has_room():
    group = series((0, GIB - 2 * MIB), own=False, name="the volume group vg", when_full="no_snapshots")
    assert alarm(replace(group, wanted_bytes=2 * MIB), forecast(group, NOW), LIMITS, NOW) is None
    assert alarm(replace(group, wanted_bytes=3 * MIB), forecast(group, NOW), LIMITS, NOW) == (
        "the volume group vg has 2.0 MiB free, and the next snapshot takes about 3.0 MiB: no snapshot can be taken"
    )


def test_a_volume_group_that_was_given_away_in_pieces_has_no_forecast():
    pieces = ((-2, 0), (-1, 100 * MIB), (0, 200 * MIB))
    assert forecast(series(*pieces, own=False), NOW).full_at is not None
    group = forecast(series(*pieces, own=False, when_full="no_snapshots", wanted_bytes=MIB), NOW)
    assert (group.rate_bytes_s, group.words(NOW)) == (None, "")


def test_a_file_system_that_is_allocated_completely_is_not_full():
    allocation = series((-2, 0), (0, GIB), own=False, name="allocation", when_full="no_growth")
    assert alarm(allocation, forecast(allocation, NOW), LIMITS, NOW) is None
    assert short_of("5%", (allocation,)) == ()


def test_what_is_shared_alarms_only_the_jobs_that_it_concerns():
    def alarms(*volume_ids):
        one = replace(gauge(used=GIB - MIB, own=False, name="data"), volume_ids=volume_ids)
        fill = add_samples(None, POOL, (one,), NOW)
        found = readings_of((manifest(),), {POOL.key: fill}, LIMITS, NOW)
        return [reading.series.name for reading in found if reading.alarm is not None]

    assert alarms() == alarms("another", OWN.volume_id) == ["data"]
    assert alarms("another") == []


def test_an_old_sample_is_told_with_its_age():
    found = series((-5, 0), (-3, 512 * MIB))
    words = "CoW table of vg/s was 50% full 3 h ago (512.0 MiB of 1.0 GiB), may be full by now"
    assert describe(found, forecast(found, NOW), NOW) == words


def test_samples_are_read_back_as_they_were_written_and_a_time_without_zone_is_refused():
    fill = add_samples(None, POOL, (gauge(), gauge(own=False, name="data", valid=False)), NOW)
    assert decode(encode(fill), PoolCapacity, "x") == fill
    with pytest.raises(CatalogError, match="damaged"):
        decode(encode(fill).replace(b"02:30:00Z", b"02:30:00"), PoolCapacity, "x")


def test_free_min_is_kept_where_a_full_storage_stops_the_database():
    data = series((0, 9 * GIB), own=False, name="data", size=10 * GIB)
    metadata = series((0, 90 * MIB), own=False, name="metadata", size=100 * MIB)
    assert short_of("10%", (data, metadata)) == ()
    assert short_of("0", (data, metadata)) == ()
    assert short_of("11%", (data,)) == ("data has 1.0 GiB of 10.0 GiB free; free_min = 11% keeps 1.1 GiB free",)
    # A size is a share of the largest: 1 GiB of 10 GiB asks 10 MiB of 100 MiB.
    assert short_of("1G", (data, metadata)) == ()
    assert [text.split()[0] for text in short_of("1.1G", (data, metadata))] == ["data", "metadata"]
    # What a copy takes counts; what it stores somewhere else must only fit.
    assert short_of("5%", (replace(data, wanted_bytes=600 * MIB),)) == (
        "data has 1.0 GiB of 10.0 GiB free, of which the backup takes 600.0 MiB; free_min = 5% keeps 512.0 MiB free",
    )
    group = series((0, GIB - 2 * MIB), own=False, name="vg", when_full="no_snapshots", wanted_bytes=2 * MIB)
    assert short_of("50%", (group,)) == ()
    assert short_of("50%", (replace(group, wanted_bytes=3 * MIB),)) == (
        "vg has 2.0 MiB of 1.0 GiB free, of which the backup takes 3.0 MiB",
    )
