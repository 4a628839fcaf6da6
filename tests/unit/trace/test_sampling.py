"""Samples of a mount's counters: taken in a thread, and drawn as series."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.contract.errors import SnapmgrError
from snapmgr.trace import sampling
from snapmgr.trace.accesslog import HEADER, TRAILER, Trace
from snapmgr.trace.analysis import analyse
from snapmgr.trace.sampling import Sampler, series
from support.accesslog import read_blocks

FIELDS = ("at_us", "gets", "get_bytes", "puts", "put_bytes", "staged_blocks", "staged_bytes")
STATS = 0x7FFF_FFFF_0000_0003


def sampled(*rows):
    return Trace(trailer={"samples": [dict(zip(FIELDS, row, strict=True)) for row in rows]})


def test_rates_are_growth_over_time_and_staged_data_a_state():
    get, put, staged = series(
        sampled((0, 10, 1000, 0, 0, 0, 0), (500_000, 14, 3000, 0, 0, 2, 70), (1_500_000, 14, 3000, 7, 50, 0, 0))
    )
    assert (get.name, get.words, get.steps) == ("GET", "4 requests", ((0, 500_000, 4000.0), (500_000, 1_500_000, 0.0)))
    assert (put.words, put.steps[1]) == ("7 requests", (500_000, 1_500_000, 50.0))
    assert (staged.words, staged.unit) == ("at most 2 blocks", "bytes")
    assert [value for _, _, value in staged.steps] == [70, 0]


def test_what_did_not_happen_has_no_series():
    assert series(Trace()) == ()
    assert series(sampled((0, 1, 5, 1, 5, 0, 0), (1, 1, 5, 1, 5, 0, 0))) == ()
    # A remounted client counts from 0.
    assert series(sampled((0, 9, 900, 0, 0, 0, 0), (10, 0, 0, 0, 0, 0, 0))) == ()


odd = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)
)


@given(st.lists(odd | st.fixed_dictionaries(dict.fromkeys(FIELDS, st.floats() | st.integers())), max_size=5))
def test_an_odd_file_is_no_error(samples):
    series(Trace(trailer={"samples": samples}))


def test_the_sampler_samples_until_it_is_ended(monkeypatch):
    monkeypatch.setattr(sampling, "_EVERY_S", 0.01)
    monkeypatch.setattr(sampling, "_MOST", 8)
    answers = [{"juicefs_object_request_data_bytes_PUT": 5.0}]

    def counters():
        answers.append(answers[-1])
        if len(answers) == 3:
            raise SnapmgrError("it does not answer now")
        return answers[0]

    with Sampler(SimpleNamespace(stats_inode=STATS, counters=counters)) as sampler:
        time.sleep(0.4)
    assert not sampler.is_alive()
    assert 2 < len(sampler.samples) <= 9, "a longer recording is sampled less often"
    assert {sample["put_bytes"] for sample in sampler.samples} == {5.0}
    times = [sample["at_us"] for sample in sampler.samples]
    assert times == sorted(times)
    with Sampler(SimpleNamespace(stats_inode=None)) as idle:
        assert not idle.is_alive()


@pytest.mark.parametrize("known", [True, False])
def test_the_recorder_s_own_operations_are_not_the_program_s(known):
    def line(second, thread, what):
        return b"2026.11.22 23:00:%02d.000000 [uid:0,gid:0,pid:%d] %s\n" % (second, thread, what)

    stats = b"%d" % STATS
    log = [
        line(1, 7, b"open (" + stats + b",0x8000) [fh:9] - OK <0.030000>"),
        line(2, 5, b"read (5,4096,0,9): (4096) - OK <0.500000>"),
        line(3, 8, b"getattr (1): (1,[drwxrwxrwx:0040777,3,0,0,1,1,1,4096]) - OK <0.000162>"),
        line(3, 0, b"release (" + stats + b",9) - OK <0.000003>"),
        TRAILER + b'{"sampler": 8, "wall_s": 3.0}\n',
    ]
    header = [HEADER + b'{"thread": 7, "stats_inode": %s}\n' % stats] if known else []
    analysis = analyse(read_blocks([*header, *log]))
    assert analysis.operations == (1 if known else 4)
    assert len(analysis.totals["thread"]) == (1 if known else 4)
