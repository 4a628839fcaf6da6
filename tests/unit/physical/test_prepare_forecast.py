"""Forecasts of ways to prepare: the measured setting, and what must hold in any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.physical.prepare.forecast import (
    Facts,
    Speeds,
    changed_block_bytes,
    choose,
    forecast,
    touched_bytes,
    touched_pages,
)

MB, GB = 10**6, 10**9

MEASURED = Facts(
    file_bytes=(500 * MB,) * 4 + (10 * MB,) * 10,
    redo_bytes=128 << 20,
    speeds=Speeds(
        read_latency_s=0.015,
        write_latency_s=0.025,
        stream_bytes_s=225 * MB,
        total_bytes_s=450 * MB,
        scratch_bytes_s=800 * MB,
    ),
    remote=True,
    scratch_free_bytes=100 * GB,
    storage_free_bytes=1 << 50,
    can_clone=True,
    can_remount=True,
    can_overlay=True,
)


def _seconds(facts, way, result=None):
    return next(one.seconds for one in forecast(facts, result) if one.way == way)


def test_the_measured_setting():
    assert touched_pages(MEASURED.data_bytes, MEASURED.redo_bytes) == pytest.approx(32_000, rel=0.05)
    assert 95 < _seconds(MEASURED, "storage") < 120
    writeback = next(one for one in forecast(MEASURED) if one.way == "writeback")
    assert 27 < dict(writeback.parts)["prepare there"] < 37
    assert 6 < _seconds(MEASURED, "scratch") < 8.5
    assert 9.5 < _seconds(MEASURED, "overlay", "scratch") < 13
    choice = choose(MEASURED)
    assert choice is not None
    assert (choice.way, choice.result) == ("scratch", "scratch")
    assert "copied to scratch: about" in choice.why
    assert "on a clone in the storage" in choice.why


def test_total_bandwidth_decides_for_large_data():
    large = replace(MEASURED, file_bytes=(1 * GB,) * 115, scratch_free_bytes=200 * GB)
    slow = replace(large, speeds=replace(large.speeds, total_bytes_s=110 * MB, stream_bytes_s=100 * MB))
    assert _seconds(slow, "scratch") > 115 * GB / (110 * MB)
    # Little redo in much data: not worth a copy.
    little = replace(slow, redo_bytes=4 << 20)
    choice = choose(little)
    assert choice is not None
    assert choice.way in {"storage", "writeback"}
    quick = replace(large, speeds=replace(large.speeds, total_bytes_s=1100 * MB))
    assert _seconds(quick, "scratch") < _seconds(slow, "scratch") / 4


def test_an_overlay_is_worth_it_where_few_of_many_files_change():
    files = (1 * MB,) * 20_000 + (10 * GB,)
    pages = 300
    assert touched_bytes(files, pages) < 11 * GB
    assert touched_bytes((5 * MB,) * 10_000, pages) == pytest.approx(300 * 5 * MB, rel=0.05)
    assert touched_bytes((5 * MB,), pages) == 5 * MB
    assert touched_bytes((), pages) == 0


def test_a_local_storage_is_used_where_it_is():
    local = replace(
        MEASURED,
        remote=False,
        can_remount=False,
        speeds=replace(MEASURED.speeds, read_latency_s=0.0001, write_latency_s=0.002, total_bytes_s=GB),
    )
    choice = choose(local)
    assert choice is not None
    assert (choice.way, choice.result) == ("storage", "storage")


@pytest.mark.parametrize(
    ("change", "way"),
    [
        ({"scratch_free_bytes": 1500 * MB}, "writeback"),
        ({"scratch_free_bytes": 1 * GB, "can_remount": False}, "storage"),
        ({"can_clone": False}, "scratch"),
        ({"can_clone": False, "scratch_free_bytes": 1 * GB}, None),
    ],
)
def test_what_is_not_possible_is_not_chosen(change, way):
    choice = choose(replace(MEASURED, can_overlay=False, **change))
    assert (choice.way if choice else None) == way


def test_the_result_bounds_the_ways():
    back = choose(MEASURED, result="storage")
    assert back is not None
    assert back.result == "storage"
    assert _seconds(MEASURED, "scratch", "storage") > _seconds(MEASURED, "scratch")
    there = {one.way: one.obstacle for one in forecast(MEASURED, "scratch")}
    assert there["storage"] is not None
    assert there["scratch"] is None
    forced = choose(MEASURED, strategy="storage")
    assert forced is not None
    assert forced.way == "writeback"


_rates = st.floats(min_value=1e6, max_value=1e10)
_speeds = st.builds(
    Speeds,
    read_latency_s=st.floats(min_value=1e-6, max_value=1.0),
    write_latency_s=st.floats(min_value=1e-6, max_value=1.0),
    stream_bytes_s=_rates,
    total_bytes_s=_rates,
    scratch_bytes_s=_rates,
)
_facts = st.builds(
    Facts,
    file_bytes=st.lists(st.integers(min_value=0, max_value=10**12), min_size=1, max_size=20).map(tuple),
    redo_bytes=st.integers(min_value=0, max_value=10**12),
    speeds=_speeds,
    remote=st.booleans(),
    scratch_free_bytes=st.integers(min_value=0, max_value=10**14),
    storage_free_bytes=st.integers(min_value=0, max_value=10**14),
    can_clone=st.booleans(),
    can_remount=st.booleans(),
    can_overlay=st.booleans(),
)
_results = st.sampled_from([None, "scratch", "storage"])


@given(_facts, _results)
def test_the_shortest_possible_way_is_chosen(facts, result):
    found = forecast(facts, result)
    assert {one.way for one in found} == {"storage", "writeback", "scratch", "overlay"}
    assert all(one.seconds > 0 for one in found)
    choice = choose(facts, result=result)
    possible = [one for one in found if one.obstacle is None]
    if choice is None:
        assert not possible
    else:
        assert choice.way == min(possible, key=lambda one: one.seconds).way
        assert choice.result == (result or choice.result)


@given(_facts, _results, st.floats(min_value=1.0, max_value=100.0))
def test_nothing_gets_quicker_by_a_slower_storage_or_more_redo(facts, result, factor):
    speeds = facts.speeds
    slower = replace(
        facts,
        speeds=Speeds(
            read_latency_s=speeds.read_latency_s * factor,
            write_latency_s=speeds.write_latency_s * factor,
            stream_bytes_s=speeds.stream_bytes_s / factor,
            total_bytes_s=speeds.total_bytes_s / factor,
            scratch_bytes_s=speeds.scratch_bytes_s / factor,
        ),
    )
    more = replace(facts, redo_bytes=round(facts.redo_bytes * factor))
    for way in ("storage", "writeback", "scratch", "overlay"):
        assert _seconds(slower, way, result) >= _seconds(facts, way, result) * 0.999
        assert _seconds(more, way, result) >= _seconds(facts, way, result) * 0.999


@given(st.integers(min_value=0, max_value=10**13), st.integers(min_value=0, max_value=10**13))
def test_no_more_is_touched_than_there_is(data_bytes, redo_bytes):
    pages = touched_pages(data_bytes, redo_bytes)
    assert 0 <= pages <= data_bytes / (16 << 10) + 1
    assert 0 <= changed_block_bytes(data_bytes, pages) <= data_bytes
    assert 0 <= touched_bytes((data_bytes,), pages) <= data_bytes
