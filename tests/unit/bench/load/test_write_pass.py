"""Figures and curves of a pass of writes: what was not measured is absent, never 0."""

from __future__ import annotations

from snapmgr.bench.fio import Windows
from snapmgr.bench.load.write_pass import WritePass, add_write_curve, write_figures, write_infos
from snapmgr.bench.model import Outcome, Spent


def _pass(**changed):
    spent = Spent(seconds=9, cpu_seconds=4, read_bytes=500, written_bytes=3000, reads=1, writes=2, steal_seconds=0)
    values = {
        "seconds": 2.0,
        "sync_s": 0.5,
        "asked_bytes": 1000,
        "spent": spent,
        "latencies_s": {"p50": 1e-3, "p99": 2e-3, "p99.9": 3e-3, "max": 4e-3},
        "sync_latencies_s": {"p50": 5e-3, "p99": 6e-3, "p99.9": 7e-3, "max": 8e-3},
        "windows": Windows(read=(0, 0, 0), write=(7.0, 0, 9.0)),
    }
    return WritePass(**(values | changed))


def test_figures_have_the_names_that_are_explained():
    found = write_figures("update", _pass())
    assert found == {
        "update_s": 2.5,
        "update_unsynced_s": 2.0,
        "update_cpu_s": 4,
        "update_p50_s": 1e-3,
        "update_p99_s": 2e-3,
        "update_p999_s": 3e-3,
        "update_max_s": 4e-3,
        "update_sync_p99_s": 6e-3,
        "update_windows_without_write": 1.0,
        "update_written_per_byte": 3.0,
        "update_read_per_byte": 0.5,
    }
    assert set(found) == {info.name for info in write_infos("update", "Update")}


def test_what_was_not_measured_is_absent():
    nothing = Spent(seconds=1, cpu_seconds=0, read_bytes=0, written_bytes=0, reads=0, writes=0, steal_seconds=0)
    found = write_figures("update", _pass(latencies_s={}, sync_latencies_s={}, windows=None, spent=nothing))
    assert set(found) == {"update_s", "update_unsynced_s", "update_cpu_s"}
    # Shorter than a window: whether one had been without a write is not known.
    assert "update_windows_without_write" not in write_figures("update", _pass(windows=Windows(read=(), write=())))


def test_curve_is_of_whole_seconds_and_of_some():
    found = Outcome()
    add_write_curve(found, "first", "First", _pass())
    add_write_curve(found, "second", "Second", _pass(windows=None))
    assert found.series == {"first_each_s": (7.0, 0, 9.0)}
    assert found.axes["first_each_s"]["x"] == [1.0, 2.0, 3.0]
    assert found.axes["first_each_s"]["unit"] == "B/s"
    short = Windows(read=(0, 0), write=(1.0, 1.0))
    none = Outcome()
    add_write_curve(none, "first", "First", _pass(windows=short))
    assert none == Outcome()
