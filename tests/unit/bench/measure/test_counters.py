"""Counters of devices and processors, from texts of the kernel and from this machine."""

from __future__ import annotations

import os
import time

import pytest

from snapmgr.bench.measure import counters
from snapmgr.bench.measure.counters import Counters, CpuCounts, DeviceCounts, parse_cpu, parse_diskstats
from snapmgr.contract.errors import StorageError

_DISKSTATS = """\
   7       3 loop3 10 1 800 5 20 2 1600 6 0 9 11 3 0 99 1 4 2
 253       0 vda 1 0 8 0 2 0 16 0 0 0 0
 259       1 oddly-short 1 2 3 4
"""
_STAT = "cpu  100 20 30 4000 500 6 7 80 50 9\ncpu0 50 10 15 2000 250 3 3 40 25 4\nintr 1\n"


def test_device_counts_are_sectors_of_512_bytes():
    found = parse_diskstats(_DISKSTATS)
    assert found["7:3"] == DeviceCounts(reads=10, read_bytes=800 * 512, writes=20, written_bytes=1600 * 512)
    # As kernels before 4.18 print it.
    assert found["253:0"].written_bytes == 16 * 512
    assert "259:1" not in found


def test_waiting_and_stolen_time_are_not_busy():
    # 100 + 20 + 30 + 6 + 7 ticks; a guest's 50 are in the 100.
    assert parse_cpu(_STAT, ticks_per_s=100) == CpuCounts(busy_s=1.63, steal_s=0.8)


@pytest.fixture
def device(monkeypatch):
    """Return what writes to a device that only the kernel's text knows."""
    state = {"written": 0, "gone": False}

    class _File:
        def __init__(self, path):
            self.path = path

        def read_text(self, **_):
            if self.path == "/proc/stat":
                return _STAT
            sectors = 1600 + state["written"] // 512
            return (
                "" if state["gone"] else f" 7 3 loop3 10 1 800 5 {20 + bool(state['written'])} 2 {sectors} 6 0 9 11\n"
            )

    monkeypatch.setattr(counters, "Path", _File)
    monkeypatch.setattr(counters, "device_number", lambda _: "7:3")
    return state


def test_part_gets_what_happened_in_it_and_each_device_once(device):
    with Counters(["/dev/loop3", "/dev/disk/by-id/the-same"]).measured() as part:
        device["written"] = 4096
        with pytest.raises(RuntimeError):
            _ = part.spent
    device["written"] = 1 << 20
    assert (part.spent.writes, part.spent.written_bytes) == (1, 4096)
    assert (part.spent.reads, part.spent.read_bytes, part.spent.cpu_seconds) == (0, 0, 0)


def test_device_that_vanishes_is_told(device):
    measured = Counters(["/dev/loop3"]).measured()
    measured.__enter__()
    device["gone"] = True
    with pytest.raises(StorageError, match="/dev/loop3 is gone"):
        measured.__exit__(None, None, None)


def test_failure_of_the_part_is_not_hidden_by_the_device(device):
    measured = Counters(["/dev/loop3"]).measured()
    measured.__enter__()
    device["gone"] = True
    error = ZeroDivisionError()
    assert not measured.__exit__(type(error), error, None)


@pytest.mark.parametrize("name", ["/dev/null", "/nowhere/at/all"])
def test_what_is_no_block_device_is_refused(name):
    with pytest.raises(StorageError, match=name):
        Counters([name])


def test_without_devices_processors_are_counted():
    with Counters([]).measured() as part:
        begin = os.times()
        while sum(os.times()[:2]) - sum(begin[:2]) < 0.1:
            pass
    assert part.spent.cpu_seconds >= 0.08
    assert part.spent.seconds >= 0.08
    assert part.spent.written_bytes == part.spent.reads == 0


@pytest.mark.usefixtures("device")
def test_sleeping_is_no_work_of_ours():
    # The machine's own counters stand still here: what is left is the clock.
    with Counters([]).measured() as part:
        time.sleep(0.02)
    assert part.spent.seconds >= 0.02
    assert part.spent.cpu_seconds == part.spent.steal_seconds == 0
