"""The decision table, on the measured runs and at its edges."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.trace.counters import Counted, growth, read_counters
from snapmgr.trace.verdict import TraceFacts, facts_from_counters, judge

numbers = st.integers(0, 10**13)
seconds = st.floats(0, 1e6)
QUIET = Counted(
    operations={},
    operations_sum=0,
    operation_s={},
    read_bytes=0,
    written_bytes=0,
    gets=0,
    get_bytes=0,
    get_s=0.0,
    puts=0,
    put_bytes=0,
    put_s=0.0,
    cache_hits=0,
    cache_misses=0,
    evictions=0,
    compactions=0,
    compaction_bytes=0,
    cpu_s=0.0,
    staged_bytes=0,
)
# The default prepare: 105 s, cache of 200 MiB, 15 ms a GET and 25 ms a PUT.
DEFAULT = replace(
    QUIET,
    operations={"read": 46_800, "fsync": 91},
    operation_s={"read": 90.0, "fsync": 27.0, "write": 2.0},
    written_bytes=500_000_000,
    gets=18_000,
    get_bytes=8_000_000_000,
    get_s=350.0,
    puts=29_900,
    put_bytes=6_500_000_000,
    put_s=810.0,
    cache_hits=30_000,
    cache_misses=18_000,
    evictions=9_000,
    compactions=95,
    compaction_bytes=6_300_000_000,
    cpu_s=70.0,
)


def actions(facts):
    return [finding.action for finding in judge(facts).findings]


def other_actions(counted, wall_s, **changed):
    """Of a program that prepares no backup."""
    return actions(replace(facts_from_counters(counted, wall_s, **changed), prepares=False))


def test_a_prepare_is_told_the_quickest_way_first_with_its_folder():
    facts = facts_from_counters(DEFAULT, 105.0, folder="/mnt/jfs/full of it")
    first, second, *_ = judge(facts).findings
    assert (first.bottleneck, first.action) == ("fsync", "scratch")
    assert "snapmgr prepare '/mnt/jfs/full of it' --strategy scratch; or stay on the mount: " in first.advice
    assert second.advice.endswith("snapmgr prepare '/mnt/jfs/full of it' --mount-option writeback")
    # Without room for a copy there is no such way.
    small = replace(facts, data_bytes=2 << 30, scratch_free_bytes=1 << 30)
    assert judge(small).findings[0].action == "use-memory"
    # Another program is not one of ours.
    assert all("snapmgr prepare" not in one.advice for one in judge(replace(facts, prepares=False)).findings)


def test_the_default_prepare_wants_memory_then_writeback_then_cache():
    verdict = judge(facts_from_counters(DEFAULT, 105.0))
    assert [finding.action for finding in verdict.findings] == ["scratch", "writeback", "cache-size", "scratch"]
    assert verdict.bottleneck == "fsync"
    assert verdict.why == "91 fsyncs took up to 27.0 s of 1 min 45 s (26 %)"
    assert "--use-memory" in verdict.advice


def test_with_memory_enough_uploads_are_next():
    counted = replace(DEFAULT, operations={"fsync": 15}, operation_s={"read": 80.0, "fsync": 25.0})
    assert judge(facts_from_counters(counted, 91.0)).bottleneck == "upload"


def test_few_downloads_and_small_uploads_want_writeback():
    counted = replace(DEFAULT, gets=90, get_s=2.0, evictions=0, operation_s={"read": 80.0}, compaction_bytes=0)
    assert other_actions(counted, 98.0) == ["writeback"]
    assert other_actions(counted, 98.0, writeback=True) == ["upload-delay"]
    assert other_actions(counted, 98.0, writeback_allowed=False) == ["flush-method"]


def test_where_downloads_weigh_more_the_cache_comes_first():
    counted = replace(DEFAULT, get_s=900.0, operations={}, operation_s={"read": 80.0}, compaction_bytes=0)
    assert other_actions(counted, 98.0) == ["cache-size", "writeback"]
    cold = replace(counted, evictions=0)
    assert other_actions(cold, 98.0) == ["warm-up", "writeback"]
    # The size of a cache that others use is not ours to set.
    assert other_actions(counted, 98.0, writeback_allowed=False) == ["warm-up", "flush-method"]


def test_a_busy_client_that_nobody_waits_for_is_bound_by_the_processor():
    counted = replace(QUIET, operation_s={"read": 5.0, "write": 3.0}, cpu_s=28.0)
    verdict = judge(facts_from_counters(counted, 30.0))
    assert (verdict.bottleneck, verdict.findings[0].action) == ("cpu", "scratch")
    assert judge(facts_from_counters(replace(counted, cpu_s=3.0), 30.0)).bottleneck == "program"


def test_compaction_is_told_when_it_rewrites_more_than_five_times():
    counted = replace(QUIET, written_bytes=100, compaction_bytes=501)
    assert judge(facts_from_counters(counted, 10.0)).bottleneck == "compaction"
    assert judge(facts_from_counters(replace(counted, compaction_bytes=500), 10.0)).bottleneck == "program"


def test_too_small_a_scratch_disk_is_said():
    counted = replace(QUIET, written_bytes=100, compaction_bytes=600)
    small = judge(facts_from_counters(counted, 10.0, data_bytes=2 << 30, scratch_free_bytes=1 << 30))
    assert "1.0 GiB free are too little for a copy of 2.0 GiB" in small.advice
    large = judge(facts_from_counters(counted, 10.0, data_bytes=2 << 30, scratch_free_bytes=3 << 30))
    assert "--strategy scratch" in large.advice


def test_the_log_alone_tells_that_reads_are_slow_and_not_why():
    verdict = judge(TraceFacts(wall_s=10.0, read_s=9.0))
    assert (verdict.bottleneck, verdict.findings[0].action) == ("read", "record")
    assert judge(TraceFacts(wall_s=10.0, write_s=9.0)).bottleneck == "write"


def test_parallel_operations_are_never_more_than_all_of_the_time():
    counted = replace(DEFAULT, operations={"fsync": 50}, operation_s={"read": 183.0, "write": 40.0, "fsync": 30.0})
    verdict = judge(facts_from_counters(counted, 13.5))
    assert verdict.findings[0].why == "50 fsyncs overlapped, 2.2 at once on average over 13.5 s"
    assert verdict.findings[1].why.startswith("reads overlapped, 13.6 at once on average over 13.5 s, and ")


@given(read_s=seconds, write_s=seconds, fsync_s=seconds, wall_s=st.floats(0.1, 1e4), cpu_s=seconds)
def test_no_sentence_has_more_than_100_percent(read_s, write_s, fsync_s, wall_s, cpu_s):
    counted = replace(DEFAULT, cpu_s=cpu_s, operation_s={"read": read_s, "write": write_s, "fsync": fsync_s})
    for finding in judge(facts_from_counters(counted, wall_s)).findings:
        assert all(int(share) <= 100 for share in re.findall(r"(\d+) %", finding.why)), finding.why


def test_with_lines_missing_there_is_no_verdict():
    verdict = judge(replace(facts_from_counters(DEFAULT, 105.0), missing={"read": 500, "write": 0, "fsync": 3}))
    assert verdict.bottleneck == "unknown"
    assert verdict.why.startswith("503 operations are missing in the log (500 read, 3 fsync), so there is no verdict")


@pytest.mark.parametrize(("fsync_s", "fsyncs", "expected"), [(2.0, 20, False), (2.1, 20, True), (2.1, 19, False)])
def test_the_edge_of_fsync(fsync_s, fsyncs, expected):
    assert ("use-memory" in actions(TraceFacts(wall_s=10.0, fsync_s=fsync_s, fsyncs=fsyncs))) is expected


def test_a_few_long_fsyncs_wait_for_uploads():
    verdict = judge(TraceFacts(wall_s=10.0, fsync_s=2.1, fsyncs=19))
    assert (verdict.bottleneck, verdict.findings[0].action) == ("fsync", "writeback")


def test_nothing_recorded():
    assert judge(TraceFacts(wall_s=0.0)).bottleneck == "unknown"


@given(
    facts=st.builds(
        TraceFacts,
        wall_s=seconds,
        read_s=seconds,
        write_s=seconds,
        fsync_s=seconds,
        fsyncs=numbers,
        counted=st.none()
        | st.builds(
            Counted,
            operations=st.just({}),
            operation_s=st.just({}),
            **{name: numbers for name in vars(QUIET) if name not in {"operations", "operation_s"}},
        ),
        writeback=st.none() | st.booleans(),
        writeback_allowed=st.booleans(),
        data_bytes=st.none() | numbers,
        scratch_free_bytes=st.none() | numbers,
        missing=st.dictionaries(st.sampled_from(["read", "write"]), numbers),
    )
)
def test_there_is_always_a_verdict(facts):
    verdict = judge(facts)
    assert verdict.why
    assert verdict.advice
    # A mount that is not ours is never to be changed.
    if not facts.writeback_allowed:
        assert not {"writeback", "cache-size", "upload-delay"} & {finding.action for finding in verdict.findings}


def test_counters_are_read_and_subtracted():
    start = read_counters("juicefs_uptime 5\njuicefs_fuse_ops_total_read 10\nodd line here\njuicefs_x NaN\n")
    end = read_counters(
        "juicefs_uptime 9\njuicefs_fuse_ops_total_read 17\njuicefs_fuse_ops_total_fsync 3\n"
        "juicefs_object_request_durations_histogram_seconds_GET_total 4\njuicefs_object_request_data_bytes_GET 4096\n"
        "juicefs_staging_block_bytes 7\n"
    )
    assert start == {"juicefs_uptime": 5.0, "juicefs_fuse_ops_total_read": 10.0}
    counted = growth(start, end)
    assert counted.operations == {"read": 7, "fsync": 3}
    assert (counted.gets, counted.get_bytes, counted.staged_bytes, counted.puts) == (4, 4096, 7, 0)
    with pytest.raises(ValueError, match="was remounted"):
        growth(end, start)
