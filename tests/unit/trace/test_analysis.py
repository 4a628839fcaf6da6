"""The sums, and what is found missing, on logs made by hand."""

from __future__ import annotations

import json
import random

import pytest

from snapmgr.trace.accesslog import HEADER, TRAILER
from snapmgr.trace.analysis import analyse, facts_of
from snapmgr.trace.verdict import judge
from support.accesslog import read_blocks

STATS = 0x7FFF_FFFF_0000_0003
RECORDER = 77


def line(end_us, duration_us, thread, what):
    second, micro = divmod(end_us, 1_000_000)
    return (
        f"2026.11.21 08:{second // 60:02}:{second % 60:02}.{micro:06} [uid:0,gid:0,pid:{thread}] {what} "
        f"<{duration_us // 1_000_000}.{duration_us % 1_000_000:06}>\n"
    ).encode()


def read(end_us, duration_us, inode=5, thread=1, got=4096):
    return line(end_us, duration_us, thread, f"read ({inode},8192,0,9): ({got}) - OK")


def mark(end_us, thread=RECORDER):
    return line(end_us, 200, thread, f"open ({STATS},0x8000) [fh:9] - OK")


def counters(uptime, **operations):
    return {"juicefs_uptime": uptime} | {f"juicefs_fuse_ops_total_{kind}": count for kind, count in operations.items()}


def recorded(lines, start, end, **trailer):
    header = {"format": 1, "thread": RECORDER, "stats_inode": STATS, "writeback": False, "counters": start}
    around = HEADER + json.dumps(header).encode() + b"\n", TRAILER + json.dumps({"counters": end} | trailer).encode()
    return read_blocks([around[0], *lines, around[1], b"\n"])


def total(analysis, by, key):
    return next(total for total in analysis.totals[by] if total.key == key)


def test_sums_latencies_and_what_is_under_way():
    log = [read(1_000_000 + 10_000 * number, 1000 * number, got=100) for number in range(1, 101)]
    log += [line(3_000_000, 1_500_000, 2, "fsync (6,1) - OK"), line(3_000_001, 5, 2, "unlink (1,x) - file exists")]
    analysis = analyse(read_blocks(log))
    reads = total(analysis, "operation", "read")
    assert (reads.count, reads.failed, reads.size_bytes, reads.total_us) == (100, 0, 10_000, 5_050_000)
    assert (reads.p50_us, reads.p95_us, reads.p99_us, reads.max_us) == (50_000, 95_000, 99_000, 100_000)
    assert total(analysis, "operation", "unlink").failed == 1
    assert [(one.key, one.count) for one in analysis.totals["file"]] == [("inode 5", 100), ("inode 6", 1), ("/", 1)]
    assert [one.key for one in analysis.totals["thread"]] == ["1", "2"]
    assert analysis.busy_s["fsync"] == 1.5
    assert (analysis.first_us, analysis.last_us) == (log_us(1_009_000), log_us(3_000_001))
    assert analysis.wall_s == pytest.approx(1.991001)
    assert analysis.mean_under_way == pytest.approx((5.05 + 1.500005) / 1.991001)
    # The last read began at 1.9 s, when those that end at 1.91 s and later, and the fsync, had begun.
    assert analysis.max_under_way == 11
    assert (analysis.missing, analysis.counted) == (None, None)


def log_us(micros):
    return 1_795_248_000_000_000 + micros


def test_what_is_under_way_at_once_is_not_counted_twice():
    log = [read(10, 10, thread=thread) for thread in range(4)] + [read(20, 10), read(25, 10)]
    analysis = analyse(read_blocks(log))
    assert analysis.busy_s["read"] == pytest.approx(25e-6)
    assert analysis.max_under_way == 4


def test_the_most_under_way_is_that_of_every_instant():
    random.seed(3)
    spans = [(end, random.randrange(1, 60)) for end in (random.randrange(100, 400) for _ in range(200))]
    expected = max(sum(end - took <= at < end for end, took in spans) for at in range(400))
    assert analyse(read_blocks([read(1000 + end, took) for end, took in spans])).max_under_way == expected


def test_a_whole_log_lacks_nothing():
    log = [read(700, 5), mark(1000), read(2000, 5), read(3000, 5), mark(4000), read(60_000, 5), read(60_005, 5)]
    analysis = analyse(recorded(log, counters(1, read=10, open=3), counters(2, read=12, open=4), wall_s=0.5))
    assert analysis.missing == {}
    assert analysis.wall_s == 0.5


def test_each_thread_s_line_in_the_making_may_come_after_the_mark():
    log = [mark(1000), read(2000, 5), mark(4000), read(5000, 5, thread=1), read(6000, 5, thread=2)]
    log += [read(7000, 5, thread=thread) for thread in (1, 2)]
    for counted, missing in ((3, {}), (4, {"read": 1}), (5, {"read": 2})):
        assert analyse(recorded(log, counters(1), counters(2, read=counted))).missing == missing


def test_what_lies_behind_the_recording_takes_none_of_its_time():
    log = [mark(1000), read(2000, 5), mark(4000), read(900_000, 5), line(900_000, 5, 1, "fsync (5,1) - OK")]
    busy_s = analyse(recorded(log, counters(1), counters(2, read=1))).busy_s
    assert (busy_s["read"], busy_s["fsync"]) == (pytest.approx(5e-6), 0.0)


def test_what_is_missing_is_told_by_kind():
    log = [read(700, 5), mark(1000), read(2000, 5), mark(4000), read(60_000, 5)]
    end = counters(2, read=16, open=4, fsync=7)
    trace = recorded(log, counters(1, read=10, open=3), end, wall_s=0.5)
    analysis = analyse(trace)
    # Of what was read before the counters were, and after, only the first line after may have been counted.
    assert analysis.missing == {"read": 4, "fsync": 7}
    verdict = judge(facts_of(trace, analysis))
    assert verdict.bottleneck == "unknown"
    assert verdict.why.startswith("11 operations are missing in the log (7 fsync, 4 read)")


def test_where_the_recorder_has_another_number_its_marks_are_found_by_the_file():
    log = [read(700, 5), mark(1000, 0), read(2000, 5), mark(4000, 0), read(900_000, 5)]
    end = counters(2, read=14)
    assert analyse(recorded(log, counters(1, read=10), end)).missing == {"read": 2}


def test_an_older_client_counts_only_the_sum():
    name = "juicefs_fuse_ops_durations_histogram_seconds_total"
    log = [mark(1000), read(2000, 5), mark(4000)]
    trace = recorded(log, {"juicefs_uptime": 1, name: 5}, {"juicefs_uptime": 2, name: 12})
    assert analyse(trace).missing == {"any": 4}


def test_a_mount_made_anew_has_no_counters_to_compare_with():
    trace = recorded([mark(1000), read(2000, 5)], counters(100, read=500), counters(2, read=1))
    assert analyse(trace).missing is None


@pytest.mark.parametrize("document", ["[]", '{"counters": 5}', '{"counters": {"juicefs_uptime": "x"}}', "{"])
def test_an_odd_header_is_no_header(document):
    trace = read_blocks([HEADER + document.encode() + b"\n", read(10, 5), TRAILER + document.encode() + b"\n"])
    assert analyse(trace).operations == 1
    assert analyse(trace).missing is None


def test_an_empty_log():
    trace = read_blocks([])
    analysis = analyse(trace)
    assert (analysis.operations, analysis.wall_s, analysis.max_under_way) == (0, 0.0, 0)
    assert judge(facts_of(trace, analysis)).bottleneck == "unknown"
