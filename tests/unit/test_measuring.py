"""What the measuring scripts make of what they measured."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

from support import commandcounts
from support.commandcounts import COMMITTED, check, compare, counted
from support.cost import Counts, read_trace
from support.slope import last_step, slope

TRACE = """\
101   execve("/usr/bin/python3", [...], 0x7ffd /* 9 vars */) = 0
101   openat(AT_FDCWD, "/etc/ld.so.cache", O_RDONLY|O_CLOEXEC) = 3
101   openat(AT_FDCWD, "/usr/lib/x86_64-linux-gnu/libc.so.6", O_RDONLY|O_CLOEXEC) = 3
101   openat(AT_FDCWD, "/usr/lib/python3.11/__pycache__/os.cpython-311.pyc", O_RDONLY|O_CLOEXEC) = 3
101   openat(AT_FDCWD, "/usr/lib/python3.11/os.py", O_RDONLY|O_CLOEXEC) = 3
101   openat(AT_FDCWD, "/v/snapmgr/x.py", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or directory)
101   openat(AT_FDCWD, "/v/msgspec/_core.cpython-311-x86_64-linux-gnu.so", O_RDONLY|O_CLOEXEC) = 3
101   clone(child_stack=NULL, flags=CLONE_CHILD_CLEARTID|SIGCHLD, child_tidptr=0x7f) = 102
101   clone3({flags=CLONE_VM|CLONE_THREAD, child_tid=0x7f}, 88 <unfinished ...>
102   fsync(5 <unfinished ...>
101   <... clone3 resumed> => {parent_tid=[103]}, 88) = 103
102   <... fsync resumed>)             = 0
102   +++ exited with 0 +++
101   --- SIGCHLD {si_signo=SIGCHLD} ---
101   vfork(<unfinished ...>
101   exit_group(0)                     = ?
"""


def test_a_trace_is_counted_once_a_call_and_threads_are_no_processes():
    counts = read_trace(TRACE.splitlines())
    assert counts.calls == {
        "execve": 1,
        "openat": 6,
        "clone": 1,
        "thread": 1,
        "fsync": 1,
        "vfork": 1,
        "exit_group": 1,
    }
    assert counts.processes == 3
    # One module, whichever of its files is read; a library of C is none, nor what is not there.
    assert {name.rsplit("/", 1)[1] for name in counts.modules} == {"os", "_core"}


def test_waits_are_not_counted():
    numbers = counted(Counts(calls={"futex": 9, "read": 2, "fsync": 1}, modules=frozenset()))
    assert numbers == {"modules": 0, "modules of snapmgr": 0, "processes": 1, "system calls": 3, "fsync": 1, "read": 2}


MEASURED = {
    "interpreter": "Python 3.11, x86_64",
    "commands": {"backup": {"modules": 100, "modules of snapmgr": 40, "processes": 7, "read": 200, "fsync": 11}},
    "ratios": {"help ÷ import click": 1.4, "backup ÷ bare call": 400.0},
}


def _bad(**changes: float) -> list[str]:
    now = deepcopy(MEASURED)
    now["commands"]["backup"].update(changes)
    return [line.what for line in compare(MEASURED, now) if not line.good]


@pytest.mark.parametrize(
    ("changes", "bad"),
    [
        ({}, []),
        ({"modules": 115, "read": 240}, []),
        ({"modules": 116}, ["backup: modules"]),
        ({"read": 241}, ["backup: read"]),
        ({"read": 1, "modules": 1}, []),
        ({"lseek": 10}, []),
        ({"lseek": 11}, ["backup: lseek"]),
        ({"fsync": 10}, ["backup: fsync"]),
        ({"fsync": 12}, ["backup: fsync"]),
        ({"fdatasync": 1}, ["backup: fdatasync"]),
        ({"processes": 11}, []),
        ({"processes": 12}, ["backup: processes"]),
    ],
)
def test_more_than_a_share_is_a_regression_and_flushes_stay_as_many(changes, bad):
    assert _bad(**changes) == bad


def test_ratios_have_wide_bounds():
    now = deepcopy(MEASURED) | {"ratios": {"help ÷ import click": 2.05, "backup ÷ bare call": 1300.0}}
    assert [line.good for line in compare(MEASURED, now)][-2:] == [True, False]


def test_of_another_interpreter_only_what_is_ours_is_compared():
    now = deepcopy(MEASURED) | {"interpreter": "Python 3.13, x86_64"}
    now["commands"]["backup"] |= {"modules": 200, "read": 900, "modules of snapmgr": 60}
    assert [line.what for line in compare(MEASURED, now) if not line.good] == ["backup: modules of snapmgr"]


def test_the_committed_numbers_can_be_compared():
    committed = json.loads(COMMITTED.read_text())
    lines = list(compare(committed, committed))
    assert {line.what.partition(":")[0] for line in lines} >= {"help", "backup", "list", "prune"}
    assert all(line.good for line in lines)


def test_a_regression_is_told_and_renewed_away(tmp_path, monkeypatch):
    committed = json.loads(COMMITTED.read_text())
    worse = json.loads(COMMITTED.read_text())
    worse["commands"]["list"]["modules"] *= 2
    file = tmp_path / "commands.json"
    file.write_text(json.dumps(committed))
    monkeypatch.setattr(commandcounts, "COMMITTED", file)
    monkeypatch.setattr(commandcounts, "measure", lambda: worse)
    table, good = check(renew=False)
    assert not good
    assert any("list: modules " in line and line.endswith("REGRESSION") for line in table.splitlines())
    assert check(renew=True)[1]
    assert check(renew=False)[1]


def _slope(costs):
    found = slope(costs)
    assert found is not None
    return found


SIZES = (10, 100, 1000, 10_000)


@pytest.mark.parametrize("power", [0.0, 0.1, 1.0, 2.0])
def test_the_slope_is_the_power_by_which_a_cost_grows(power):
    found = _slope({work: [3.0 * work**power] * 3 for work in SIZES})
    assert (found.value, found.low, found.high) == pytest.approx((power, power, power), abs=1e-6)
    assert found.verdict(power + 0.01) == "held"
    assert found.verdict(power - 0.01) == "missed"


def test_samples_that_scatter_widen_the_interval_until_nothing_is_shown():
    found = _slope({work: [1.0, 2.5, 0.4] for work in SIZES[:2]})
    assert found.low < 0.1 < found.high
    assert found.verdict(0.1) == "not shown"


def test_the_last_step_shows_what_a_constant_cost_hides():
    costs = {work: [200.0 + 0.1 * work, 201.0 + 0.1 * work] for work in SIZES}
    assert _slope(costs).value < 0.3
    last = last_step(costs)
    assert last is not None
    assert last.value == pytest.approx(0.602, abs=0.01)


def test_above_the_smallest_a_cost_that_grows_by_the_square_shows_behind_a_start_up():
    costs = {work: [200.0 + 1e-5 * work**2, 201.0 + 1e-5 * work**2] for work in SIZES}
    assert _slope(costs).verdict(1.05) == "held"
    last = last_step(costs, above_smallest=True)
    assert last is not None
    assert last.value > 1.5
    assert last_step({work: [200.0, 210.0] for work in SIZES}, above_smallest=True) is None


def test_counts_are_exact():
    last = last_step({10: [2642], 100: [3913], 1000: [16524]}, above_smallest=True, exact=True)
    assert last is not None
    assert str(last) == "1.00"
    assert last.verdict(1.05) == "held"


def test_a_slope_needs_two_amounts_and_three_costs():
    assert slope({10: [1.0, 1.1, 1.2]}) is None
    assert slope({10: [1.0], 100: [2.0]}) is None
    assert slope({10: [1.0, 1.1], 100: [2.0]}) is not None
