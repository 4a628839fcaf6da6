"""Flash counts as steady when its last rounds neither scatter nor climb nor fall, and for no other reason."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.bench import fio
from snapmgr.bench.device.precondition import ROUNDS, WINDOW, is_steady, make_steady
from snapmgr.contract.records import Completed
from support.bench.fakes import FakeClock, FakeTarget

_NOTHING = {"total_ios": 0, "io_bytes": 0, "runtime": 0}


@given(st.lists(st.floats(1, 1e7), max_size=WINDOW - 1))
def test_few_rounds_say_nothing(rounds):
    assert not is_steady(rounds)


@given(st.floats(1, 1e7), st.lists(st.floats(0, 0.04), min_size=WINDOW, max_size=WINDOW), st.lists(st.floats(0, 1e9)))
def test_rounds_that_are_alike_are_steady_whatever_was_before(rate, noise, before):
    assert is_steady([*before, *(rate * (1 + one) for one in noise)])


@given(st.floats(1, 1e7), st.floats(0.23, 0.9), st.permutations(range(WINDOW)))
def test_one_round_far_from_the_others_is_none(rate, less, order):
    rounds = [rate] * (WINDOW - 1) + [rate * (1 - less)]
    assert not is_steady([rounds[at] for at in order])


@given(st.floats(1, 1e7), st.booleans())
def test_a_lasting_fall_or_climb_is_none_even_within_the_scatter(rate, falls):
    line = [rate * (1 + 0.04 * at) for at in range(WINDOW)]
    assert max(line) - min(line) < 0.2 * rate
    assert not is_steady(line[::-1] if falls else line)


@given(st.lists(st.integers(0, 10_000_000), min_size=WINDOW))
def test_the_unit_does_not_matter(rounds):
    assert is_steady(rounds) == is_steady([8.0 * one for one in rounds])


def test_a_device_that_fails_altogether_is_none():
    assert not is_steady([0.0] * WINDOW)


class _Disk:
    """Runs fio on a disk that does so many writes a second in each round; each second of it is one of the clock's."""

    def __init__(self, clock, *, bytes_s, rounds):
        self.clock, self.bytes_s, self.rounds = clock, bytes_s, list(rounds)
        self.jobs = []
        self.slows_to = 0

    def run(self, argv, **_options):
        folder = next(word for word in argv if word.startswith("--chdir=")).removeprefix("--chdir=")
        with open(f"{folder}/{argv[-1]}", encoding="ascii") as file:
            text = file.read()
        self.jobs.append((tuple(argv), text))
        options = dict(line.partition("=")[::2] for line in text.splitlines())
        limit = int(options["runtime"])
        if options["rw"] == "write":
            wanted = int(options["size"]) * int(options["loops"])
            if len(self.jobs) > 1:
                self.bytes_s = self.slows_to or self.bytes_s
            seconds = min(limit, wanted / self.bytes_s)
            moved = min(wanted, int(limit * self.bytes_s))
            write = {"io_bytes": moved, "total_ios": moved / (128 << 10)}
        else:
            seconds, rate = limit, self.rounds.pop(0)
            write = {"io_bytes": 0, "total_ios": rate * seconds}
        self.clock.now += seconds
        job = {"jobname": "job", "error": 0, "read": _NOTHING, "write": {**write, "runtime": int(seconds * 1000)}}
        return Completed(argv=tuple(argv), returncode=0, stdout=json.dumps({"jobs": [job]}), stderr="")


@pytest.fixture
def target(monkeypatch):
    monkeypatch.setattr(fio, "find_program", lambda name: f"/usr/bin/{name}")
    target = FakeTarget("/dev/sdz")
    target.size_bytes = 100 << 20
    return target


@pytest.fixture
def steadied(target, tmp_path):
    def run(disk, within_s):
        said = []
        done = make_steady(target, within_s=within_s, folder=tmp_path, runner=disk, tell=said.append, clock=disk.clock)
        return done, said

    return run


def test_it_is_written_twice_and_then_until_it_is_steady(steadied, target):
    disk = _Disk(FakeClock(), bytes_s=10 << 20, rounds=[9000, 5000, 3000, 2000, 1800, 1790, 1810, 1800, 1795])
    done, said = steadied(disk, 3600)
    assert done.steady
    assert done.rounds == (9000, 5000, 3000, 2000, 1800, 1790, 1810, 1800)
    assert done.written_bytes == 200 << 20
    assert done.seconds == pytest.approx(5 + 20 + 8 * 60, abs=1)
    assert target.asked == ["check"] * 10, "before each time that it is written to"
    assert said[-1] == "/dev/sdz is in a steady state: 5 rounds within 20%, after 8"
    (argv, text), *_ = disk.jobs
    assert argv[:3] == ("setpriv", "--pdeathsig", "KILL"), "a killed run must not write on to a device that is free"
    assert "filename=sdz\n" in text
    assert "directory=/dev\n" in text
    assert f"size={100 << 20}\n" in text, "what lies behind is not ours"
    assert "thread\n" in text


def test_a_device_that_never_settles_is_told_so_at_last(steadied):
    disk = _Disk(FakeClock(), bytes_s=10 << 20, rounds=[9000, 3000] * ROUNDS)
    done, said = steadied(disk, 3600)
    assert not done.steady
    assert len(done.rounds) == ROUNDS
    assert "is not in a steady state" in said[-1]


def test_a_device_too_large_for_the_time_is_told_so_without_a_round(steadied):
    disk = _Disk(FakeClock(), bytes_s=1 << 20, rounds=[])
    done, _ = steadied(disk, 60)
    assert (done.steady, done.rounds) == (False, ())
    assert done.why == "at 1.0 MiB a second, 2 × 100.0 MiB are too much for 1 min"
    assert len(disk.jobs) == 1, "not worn for nothing"


def test_a_device_that_slows_down_is_told_so(steadied):
    disk = _Disk(FakeClock(), bytes_s=4 << 20, rounds=[])
    disk.slows_to = 1 << 20
    done, _ = steadied(disk, 65)
    assert (done.steady, done.rounds) == (False, ())
    assert done.why == "60.0 MiB of 2 × 100.0 MiB were written in 1 min 5 s"
