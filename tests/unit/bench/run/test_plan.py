"""What a benchmark is going to measure: sizes, what is absent and why, and what fits the budget."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from snapmgr.api import Reason
from snapmgr.bench.model import Needs
from snapmgr.bench.run.forecast import forecast, preparation_s, schedules_of
from snapmgr.bench.run.plan import PROFILE, Options, differences, make_plan
from snapmgr.bench.run.schedule import MeasuredSlot, complete_blocks, next_sample
from snapmgr.bench.scenarios import chosen
from snapmgr.bench.statistics.ratio import LEAST_PAIRS
from snapmgr.bench.storage.stacks import STACKS as REAL
from snapmgr.contract.errors import ConfigError
from support.bench.fakes import STACKS, FakeScenario

MIB = 1 << 20
GIB = 1 << 30


def _plan(*scenarios, missing_requirements=lambda _: (), room_bytes=100 * GIB, **options):
    options = {"stacks": ("one", "two"), "scenarios": ("work",)} | options
    return make_plan(
        Options(**options),
        scenarios=scenarios or (FakeScenario(),),
        stacks=STACKS,
        missing_requirements=missing_requirements,
        memory_bytes=GIB,
        room_bytes=room_bytes,
    )


def test_a_profile_says_how_much_and_how_often():
    for profile, facts in PROFILE.items():
        plan = _plan(profile=profile, room_bytes=1 << 50)
        (experiment,) = plan.experiments
        assert experiment.parameters.size_bytes == facts.size_bytes
        assert (plan.least, plan.most, plan.budget_s) == (facts.least, facts.most, facts.budget_s)


def test_what_is_given_goes_before_the_profile():
    plan = _plan(size_bytes=32 * MIB, repeats=9, budget_s=7.0, seed=4)
    (experiment,) = plan.experiments
    assert experiment.parameters.size_bytes == 32 * MIB
    assert (plan.least, plan.most, plan.budget_s, experiment.parameters.seed) == (9, 9, 7.0, 4)


def test_data_are_halved_until_they_fit():
    (experiment,) = _plan(profile="standard", room_bytes=3 * GIB).experiments
    assert experiment.parameters.size_bytes == GIB
    assert experiment.needs.space_bytes == 2 * GIB


def test_data_of_a_given_size_are_refused_if_they_do_not_fit():
    with pytest.raises(ConfigError, match=r"work with 1\.0 GiB of data needs 2\.0 GiB, and there are 1\.5 GiB"):
        _plan(size_bytes=GIB, room_bytes=3 * GIB // 2)


def test_too_little_room_for_anything_is_refused_for_a_named_scenario_and_told_of_others():
    with pytest.raises(ConfigError, match="work with .* needs"):
        _plan(room_bytes=20 * MIB)
    with pytest.raises(ConfigError, match="work with .* needs"):
        _plan(room_bytes=20 * MIB, scenarios=())
    small = FakeScenario("small")
    small.needs = lambda _: Needs(space_bytes=1, seconds=1)
    plan = _plan(FakeScenario(), small, room_bytes=20 * MIB, scenarios=())
    assert [experiment.name for experiment in plan.experiments] == ["small"]
    assert [absent.stack.name for absent in plan.absent] == ["one", "two"]
    assert "needs" in plan.absent[0].why


def test_what_the_machine_lacks_is_a_row_that_says_why():
    plan = _plan(
        FakeScenario("work", unfit=("three",)),
        FakeScenario("other", lacks="no fio"),
        stacks=("one", "two", "three"),
        missing_requirements=lambda stack: (
            (Reason(what="no device-mapper", hint="load it"),) if stack.name == "two" else ()
        ),
    )
    assert [(e.name, [s.name for s in e.stacks]) for e in plan.experiments] == [("work", ["one"])]
    assert [(a.scenario.name, a.stack.name, a.why) for a in plan.absent] == [
        ("work", "two", "no device-mapper (load it)"),
        ("work", "three", "THREE is not fit for it"),
        ("other", "one", "no fio (install it)"),
        ("other", "two", "no fio (install it)"),
        ("other", "three", "no fio (install it)"),
    ]


def test_names_that_do_not_exist_are_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="unknown stack 'zfs'") as error:
        _plan(stacks=("one", "zfs"))
    assert error.value.hint == "there are: one, two, three, control"
    with pytest.raises(ConfigError, match="no scenario has a variant 'printed'"):
        _plan(variant="printed")


def test_threads_reach_the_scenarios_that_sweep_them_and_no_other():
    with pytest.raises(ConfigError, match="none of these does"):
        _plan(threads=(1, 8))
    both = [FakeScenario("work"), FakeScenario("other")]
    both[0].sweeps_threads = True
    first, second = _plan(*both, threads=(1, 8)).experiments
    assert (first.parameters.extra["threads"], "threads" in second.parameters.extra) == ((1, 8), False)


def test_a_variant_is_for_the_scenarios_that_have_it():
    plan = _plan(FakeScenario("work", variants=("database", "printed")), FakeScenario("other"), variant="printed")
    assert [experiment.name for experiment in plan.experiments] == ["work printed", "other"]
    assert [e.name for e in _plan(FakeScenario("work", variants=("database", "printed"))).experiments] == [
        "work database"
    ]


def test_steps_are_whole_blocks_with_time_and_space_and_say_what_does_not_fit():
    clear = _plan(FakeScenario(seconds=8.5), budget_s=1000.0)
    steps, over = forecast(clear, spent_s=0.0)
    assert over == ()
    assert [step.what for step in steps][:2] == ["work: pilot", "work: block 1 of 6 or more"]
    assert len(steps) == 1 + 6
    assert sorted(steps[0].stacks) == ["one", "two"]
    # One of them twice: the A/A pair. Provisioning takes a while beside.
    assert [len(step.stacks) for step in steps[1:]] == [3] * 6
    assert steps[0].seconds == 2 * (8.5 + 1.0)
    assert {step.space_bytes for step in steps} == {128 * MIB}
    assert all(step.fits for step in steps)


def test_what_the_budget_has_no_room_for_is_told():
    plan = _plan(FakeScenario("work", seconds=1.0), FakeScenario("long", seconds=100.0), budget_s=60.0)
    steps, over = forecast(plan, spent_s=1.0)
    assert {step.what.partition(":")[0] for step in steps if step.fits} == {"work"}
    assert {step.what.partition(":")[0] for step in steps if not step.fits} == {"long"}
    (sentence,) = over
    assert sentence.startswith("long is left out")


def test_arguments_that_differ_are_named():
    before, now = _plan(size_bytes=32 * MIB).deciding(), _plan(size_bytes=64 * MIB, seed=5).deciding()
    assert differences(before, before) == []
    assert differences(before, now) == [
        "seed: 1 the first time, 5 now",
        "experiments, work, parameters, size_bytes: 32.0 MiB the first time, 64.0 MiB now",
        "experiments, work, parameters, seed: 1 the first time, 5 now",
    ]
    fewer = _plan(size_bytes=32 * MIB, stacks=("one",)).deciding()
    assert "experiments, work, stacks: one, two the first time, one now" in differences(before, fewer)
    # As JSON has it, and whatever else may be decided anew.
    again = json.loads(json.dumps(before))
    assert differences(again, _plan(size_bytes=32 * MIB, budget_s=1e6).deciding()) == []


def test_without_names_the_profiles_storages_are_compared_or_all_that_suit_a_scenario():
    usual = PROFILE["quick"].stacks
    stacks = {name: replace(STACKS["one"], name=name) for name in (*usual, "special", "other")}
    plan = make_plan(
        Options(),
        scenarios=(FakeScenario("work"), FakeScenario("narrow", unfit=(*usual[1:], "other"))),
        stacks=stacks,
        missing_requirements=lambda stack: (Reason(what="gone", hint=""),) if stack.name == usual[0] else (),
        memory_bytes=GIB,
        room_bytes=GIB,
    )
    assert [(e.name, [s.name for s in e.stacks]) for e in plan.experiments] == [
        ("work", list(usual[1:])),
        ("narrow", ["special"]),
    ]
    assert [(a.scenario.name, a.stack.name, a.why) for a in plan.absent] == [
        ("work", usual[0], "gone"),
        ("narrow", usual[0], "gone"),
    ]


def _quick(*, missing_requirements=lambda _: ()):
    """Return the plan of `bench run` without arguments."""
    return make_plan(
        Options(),
        scenarios=chosen(PROFILE["quick"].scenarios),
        stacks=REAL,
        missing_requirements=missing_requirements,
        memory_bytes=8 * GIB,
        room_bytes=10 * GIB,
    )


def _no_lvm(stack):
    return (Reason(what="no device-mapper", hint=""),) if stack.backend == "lvm" else ()


@pytest.mark.parametrize("lacking", [lambda _: (), _no_lvm], ids=["every storage", "no LVM"])
def test_without_arguments_both_scenarios_fit_the_budget_with_pairs_enough_to_say_something(lacking):
    plan = _quick(missing_requirements=lacking)
    spent_s = preparation_s(plan.file_bytes, None, steady_s=plan.steady_s)
    steps, over = forecast(plan, spent_s=spent_s)
    assert over == ()
    assert all(step.fits for step in steps)
    assert [e.name for e in plan.experiments] == ["random-update database", "snapshot-ops"]
    for experiment in plan.experiments:
        blocks = [set(step.stacks) for step in steps if step.what.startswith(f"{experiment.name}: block")]
        # Each pair of storages, once a block.
        assert blocks.count({stack.name for stack in experiment.stacks}) >= LEAST_PAIRS


def test_without_arguments_both_scenarios_end_with_pairs_enough_where_each_sample_takes_as_long_as_planned():
    """What the run itself decides, sample after sample, with intervals that never get narrow."""
    plan = _quick()
    schedules = schedules_of(plan)
    done = {schedule.name: [] for schedule in schedules}
    spent_s = preparation_s(plan.file_bytes, None, steady_s=plan.steady_s)
    while found := next_sample(schedules, done, narrow=lambda *_: False, budget_s=plan.budget_s, spent_s=spent_s):
        schedule, slot = found
        done[schedule.name].append(MeasuredSlot(slot=slot, seconds=schedule.sample_s))
        spent_s += schedule.sample_s
    for schedule in schedules:
        assert complete_blocks(schedule, [one.slot for one in done[schedule.name]]) >= LEAST_PAIRS
    assert spent_s <= plan.budget_s


def test_a_storage_without_snapshots_is_not_absent_from_their_operations_unless_it_was_requested():
    plan = _quick()
    assert plan.absent == ()
    assert "ext4" in [stack.name for stack in plan.experiments[0].stacks]
    assert "ext4" not in [stack.name for stack in plan.experiments[1].stacks]
    requested = make_plan(
        Options(scenarios=("snapshot-ops",), stacks=("btrfs", "ext4")),
        scenarios=chosen(("snapshot-ops",)),
        stacks=REAL,
        missing_requirements=lambda _: (),
        memory_bytes=8 * GIB,
        room_bytes=10 * GIB,
    )
    assert [(a.stack.name, a.why) for a in requested.absent] == [("ext4", "it has no snapshots")]
