"""Two sets of results against each other: what has become slower, and when that may be said."""

from __future__ import annotations

import json
import math
import random
from itertools import combinations

import pytest

from snapmgr.bench.statistics.changes import compare
from snapmgr.bench.statistics.unpaired import rank_sum_rank, unpaired_ratio
from support.bench.samples import HOST, altered, blogs, random_updates
from support.thoroughness import CAMPAIGN

UPDATE = "update_first_s"


def lognormal(rng, n, sigma=0.5, factor=1.0):
    return [factor * rng.lognormvariate(0, sigma) for _ in range(n)]


@pytest.mark.parametrize(("n", "m"), [(2, 3), (4, 4), (3, 6)])
@pytest.mark.parametrize("error", [0.01, 0.09, 0.3, 0.77])
def test_ranks_are_those_of_arrangements_counted_one_by_one(n, m, error):
    counts = [0] * (n * m + 1)
    for chosen in combinations(range(n + m), n):
        counts[sum(place - rank for rank, place in enumerate(chosen))] += 1
    within = [total for total in range(len(counts)) if sum(counts[: total + 1]) <= error / 2 * sum(counts)]
    assert rank_sum_rank(n, m, error) == len(within)


# Critical values of Mann and Whitney's U (two-sided, 5 %) in tables: U at most that is significant.
@pytest.mark.parametrize(("n", "m", "critical"), [(5, 5, 2), (6, 6, 5), (8, 8, 13), (10, 10, 23), (6, 12, 14)])
def test_ranks_are_those_of_the_tables(n, m, critical):
    assert rank_sum_rank(n, m, 0.05) == critical + 1


def test_the_exact_and_the_normal_rank_meet():
    exact = rank_sum_rank(30, 30, 0.05)
    normal = int(450 - 1.959964 * math.sqrt(900 * 61 / 12))
    assert abs(exact - normal) <= 1
    assert rank_sum_rank(31, 31, 0.05) > exact


def test_equal_sets_are_seldom_shown_to_differ():
    rng, tries = random.Random(5), 1000 if CAMPAIGN else 120
    shown = sum(unpaired_ratio(lognormal(rng, 6), lognormal(rng, 6), seed=1).shown for _ in range(tries))
    # 5 % and three standard deviations.
    assert shown <= 0.05 * tries + 3 * math.sqrt(0.05 * tries)


def test_a_known_difference_is_found_and_lies_in_the_interval():
    rng = random.Random(6)
    found = [unpaired_ratio(lognormal(rng, 12, 0.1, 1.5), lognormal(rng, 12, 0.1), seed=1) for _ in range(50)]
    assert all(ratio.shown for ratio in found)
    assert sum(ratio.low <= 1.5 <= ratio.high for ratio in found) >= 45
    assert all(ratio.low <= ratio.value <= ratio.high for ratio in found)


def test_too_few_figures_for_the_level_say_nothing():
    ratio = unpaired_ratio([2.0] * 6, [1.0] * 6, seed=1, comparisons=1000)
    assert (ratio.low, ratio.high) == (0.0, math.inf)
    assert not ratio.shown


@pytest.mark.parametrize(("first", "second"), [([], [1.0]), ([1.0], []), ([0.0], [1.0]), ([1.0], [math.inf])])
def test_figures_without_a_ratio_are_refused(first, second):
    with pytest.raises(ValueError, match="ratio"):
        unpaired_ratio(first, second, seed=1)


def rows(found, stack="btrfs", metric=UPDATE):
    return next(row for row in found["rows"] if (row["stack"], row["metric"]) == (stack, metric))


def test_a_slowed_stack_is_a_regression_and_nothing_else_is():
    old = random_updates(blocks=10)
    new = altered(random_updates(blocks=10, seed=2), stack="btrfs", metric=UPDATE, factor=1.6, run="run-2")
    found = compare(old, new)
    assert found["comparable"]
    assert found["obstacles"] == []
    assert [(row["stack"], row["metric"]) for row in found["rows"] if row["verdict"] == "regression"] == [
        ("btrfs", UPDATE)
    ]
    assert found["regressions"] == 1
    assert 1.4 < rows(found)["ratio"]["value"] < 1.8
    json.dumps(found, allow_nan=False)


def test_where_more_is_better_less_is_a_regression():
    old = random_updates(blocks=10)
    new = altered(random_updates(blocks=10, seed=2), stack="btrfs", metric="read_after_bytes_s", factor=0.5)
    assert rows(compare(old, new), metric="read_after_bytes_s")["verdict"] == "regression"
    assert rows(compare(new, old), metric="read_after_bytes_s")["verdict"] == "better"


def test_within_the_tolerance_there_is_no_regression():
    old = random_updates(blocks=12, noise=0.01)
    new = altered(random_updates(blocks=12, noise=0.01, seed=2), stack="btrfs", metric=UPDATE, factor=1.15)
    assert rows(compare(old, new, tolerance=0.3))["verdict"] == "same"
    assert rows(compare(old, new, tolerance=0.05))["verdict"] == "regression"


def test_where_the_same_stack_measured_twice_differs_nothing_is_a_regression():
    old = random_updates(blocks=10)
    new = altered(random_updates(blocks=10, seed=2), stack="btrfs", metric=UPDATE, factor=1.6, run="run-2")
    for one in (*old, *new):
        if one["kind"] == "a/a":
            one["metrics"][UPDATE] *= 1.5
    found = compare(old, new)
    assert rows(found)["verdict"] == "not shown"
    assert rows(found)["ratio"]["shown"]
    assert found["regressions"] == 0


def test_on_another_machine_nothing_is_a_regression():
    old = random_updates(blocks=10)
    other = {**HOST, "kernel": "6.18.1"}
    new = altered(random_updates(blocks=10, seed=2), stack="btrfs", metric=UPDATE, factor=1.6, host=other)
    found = compare(old, new)
    assert not found["comparable"]
    assert "kernel: 6.12.30 before, 6.18.1 now" in found["obstacles"][0]
    assert rows(found)["verdict"] == "worse"
    assert found["regressions"] == 0


def test_names_that_the_kernel_gives_anew_are_no_other_machine():
    old = random_updates(blocks=6)
    named = {**HOST, "device": {**HOST["device"], "name": "sdb"}, "packages": {"snapmgr": "9"}, "python": "3.14"}
    assert (
        compare(old, altered(old, stack="", metric="", factor=1, host={**named, "packages": {}}))["comparable"] is False
    )
    without = altered(old, stack="", metric="", factor=1, host={**HOST, "packages": {"snapmgr": "8"}})
    assert compare(without, altered(old, stack="", metric="", factor=1, host=named))["comparable"]


def test_a_control_that_moved_tells_that_the_machine_did():
    old = random_updates(blocks=10)
    new = random_updates(blocks=10, seed=2)
    for stack in ("btrfs", "xfs-reflink", "lvm-thin+xfs", "ext4"):
        new = altered(new, stack=stack, metric=UPDATE, factor=1.6)
    found = compare(old, new)
    assert not found["comparable"]
    assert "control ext4 has changed" in found["obstacles"][0]
    assert found["regressions"] == 0


def test_other_parameters_and_lone_experiments_are_left_out():
    old = random_updates(blocks=6)
    new = [{**one, "parameters": {**one["parameters"], "size_bytes": 1}} for one in old]
    found = compare([*old, *blogs()], new)
    assert found["rows"] == []
    assert found["left_out"] == [
        "blog: only the old results have it.",
        "random-update database: other sizes or settings than before, which is no change of the storage.",
    ]


def test_five_samples_are_too_few_and_zeros_have_no_ratio():
    old = random_updates(blocks=5)
    found = compare(old, altered(old, stack="btrfs", metric=UPDATE, factor=9))
    assert rows(found)["verdict"] == "not shown"
    assert rows(found)["words"].startswith("too few")
    found = compare(old, altered(old, stack="btrfs", metric=UPDATE, factor=0))
    assert rows(found)["ratio"] is None
    assert rows(found)["words"] == "no ratio: one of them is 0"
