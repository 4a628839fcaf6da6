"""Logs with missing lines: no verdict is false, whatever part of a real log is cut out."""

from __future__ import annotations

import gzip
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.trace.analysis import analyse, facts_of
from snapmgr.trace.verdict import MANY_FSYNCS, TraceFacts, judge
from support.accesslog import read_blocks

GOLDEN = Path(__file__).parents[2] / "golden" / "trace"
# Recorded with cat from real mounts: each is dominated by what its name says, "phases" by nothing.
RECORDED = {"reads": "read", "fsyncs": "fsync", "computes": "program", "phases": "program"}
# A shorter loss does not show by time.
UNSEEN_S = 0.1


@cache
def recorded(name):
    return gzip.decompress((GOLDEN / f"{name}.log.gz").read_bytes()).splitlines(keepends=True)


def judged(lines):
    trace = read_blocks(lines)
    analysis = analyse(trace)
    return judge(facts_of(trace, analysis)), analysis


def test_the_recordings_are_what_they_are_named_after():
    assert {name: judged(recorded(name))[0].bottleneck for name in RECORDED} == RECORDED


@pytest.mark.parametrize("name", RECORDED)
@given(data=st.data())
def test_no_part_that_is_cut_out_makes_a_verdict_false(name, data):
    lines = [line for line in recorded(name) if line != b"#\n"]
    # One line at either end is left, so that the time of the whole stays known.
    begin = data.draw(st.integers(1, len(lines) - 2))
    end = data.draw(st.integers(begin, len(lines) - 1))
    lost = analyse(read_blocks(lines[begin - 1 : end + 1])).wall_s
    verdict, analysis = judged(lines[:begin] + lines[end:])
    if verdict.bottleneck not in {"unknown", RECORDED[name]}:
        # What is left of it is on the edge of another verdict.
        assert lost < 2 * UNSEEN_S
    if verdict.bottleneck != "unknown":
        assert verdict.condition
        assert "has no counters" in analysis.caveats[0]
    if lost > 2 * UNSEEN_S and end > begin:
        assert analysis.holes


@pytest.mark.parametrize("name", sorted(RECORDED.keys() - {"fsyncs"}))
def test_without_its_middle_a_log_has_no_verdict(name):
    lines = [line for line in recorded(name) if line != b"#\n"]
    verdict, analysis = judged(lines[: len(lines) // 5] + lines[len(lines) * 4 // 5 :])
    assert verdict.bottleneck == "unknown"
    assert "so there is no verdict" in verdict.why
    assert verdict.findings[0].action == "record"
    assert len(analysis.holes) == 1


def test_a_verdict_that_holds_anyhow_is_given():
    # The fsyncs that are left took 20 % of the time of the whole.
    lines = recorded("fsyncs")
    verdict, analysis = judged(lines[: len(lines) // 5] + lines[len(lines) * 4 // 5 :])
    assert len(analysis.holes) == 1
    assert (verdict.bottleneck, verdict.condition is None) == ("fsync", False)


def test_the_marks_of_an_idle_mount_tell_idle_time_from_a_loss():
    lines = recorded("computes")
    assert lines.count(b"#\n") == 2
    verdict, analysis = judged(lines)
    assert (verdict.bottleneck, analysis.holes) == ("program", ())
    verdict, analysis = judged([line for line in lines if line != b"#\n"])
    assert [round((hole.to_us - hole.from_us) / 1e6, 1) for hole in analysis.holes] == [2.1, 1.4]
    assert verdict.bottleneck == "unknown"
    assert "If the program was idle then: program" in verdict.why


def line(second, micro, what):
    return b"2026.11.22 23:%02d:%02d.%06d [uid:0,gid:0,pid:1] %s\n" % (second // 60, second % 60, micro, what)


@pytest.mark.parametrize(("marks", "found"), [(0, 1), (5, 1), (8, 0), (9, 0), (10, 0)])
def test_marks_must_be_as_many_as_the_seconds(marks, found):
    read = b"read (2,4096,0,5): (4096) - OK <0.000020>"
    # Other marks, at another time, explain nothing.
    log = [line(1, 0, read), *[b"#\n"] * 20, line(20, 0, read), *[b"#\n"] * marks, line(30, 0, read)]
    assert len(judged(log)[1].holes) == found


def test_a_long_operation_is_no_hole():
    log = [line(1, 0, b"read (2,4096,0,5): (4096) - OK <0.000020>"), line(50, 0, b"fsync (2,0) - OK <48.900000>")]
    verdict, analysis = judged(log)
    assert analysis.holes == ()
    assert verdict.bottleneck == "fsync"


def test_a_short_silence_does_not_hide_a_clear_verdict():
    reads = [line(second, 0, b"read (2,4096,0,5): (4096) - OK <0.900000>") for second in range(1, 100)]
    verdict, analysis = judged(reads[:60] + reads[63:])
    assert len(analysis.holes) == 1
    assert verdict.bottleneck == "read"
    assert verdict.condition


def test_what_the_log_cannot_show_is_no_verdict():
    reads = [line(second, 0, b"read (2,4096,0,5): (4096) - OK <0.950000>") for second in range(1, 200)]
    assert judged([*reads, b"cat: .accesslog: interrupted\n"])[0].bottleneck == "read"
    assert judged([*reads, *[b"rubbish\n"] * 5])[0].why == "too many lines cannot be parsed, so there is no verdict"
    untimed = [b"[uid:0,gid:0,pid:1] read (2,4096,0,5): (4096) - OK <0.900000>\n"]
    assert judged(reads + untimed)[0].why == "1 operations have no time, so there is no verdict"


seconds = st.floats(0, 100)


@given(
    facts=st.builds(
        TraceFacts,
        wall_s=st.just(100.0),
        read_s=seconds,
        write_s=seconds,
        fsync_s=seconds,
        fsyncs=st.integers(0, 100),
        unchecked=st.just(True),
        silent_s=seconds,
    ),
    shares=st.tuples(*[st.floats(0, 1)] * 3),
    fsyncs=st.integers(0, 2 * MANY_FSYNCS),
)
def test_a_verdict_is_given_only_if_it_holds_whatever_happened_in_the_silence(facts, shares, fsyncs):
    verdict = judge(facts)
    read, write, fsync = (share * facts.silent_s for share in shares)
    truth = replace(
        facts,
        silent_s=0.0,
        read_s=facts.read_s + read,
        write_s=facts.write_s + write,
        fsync_s=facts.fsync_s + fsync,
        fsyncs=facts.fsyncs + fsyncs,
    )
    assert verdict.bottleneck in {"unknown", judge(truth).bottleneck}
