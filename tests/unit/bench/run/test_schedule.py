"""Which sample comes next: balanced blocks, the budget, and that an interruption changes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.bench.run.schedule import (
    MeasuredSlot,
    SampleSchedule,
    complete_blocks,
    expected_s,
    left_out,
    looks,
    missing,
    next_sample,
    slots,
    strangers,
    taken,
)

STACKS = ("btrfs", "ext4", "lvm+ext4", "lvm-thin+xfs", "xfs-reflink")
NEVER = lambda name, blocks: False  # noqa: E731, ARG005
schedules = st.builds(
    SampleSchedule,
    name=st.sampled_from(["random-update", "blog"]),
    stacks=st.integers(1, len(STACKS)).map(lambda number: STACKS[:number]),
    seed=st.integers(0, 10_000),
    sample_s=st.floats(10, 100),
    least=st.integers(1, 4).map(lambda pairs: 2 * pairs),
    most=st.integers(8, 16),
    twins=st.booleans(),
)
ONE = SampleSchedule(name="blog", stacks=("btrfs", "ext4"), seed=1, sample_s=10, most=30)


def play(plan, *, budget_s, narrow=NEVER, truth=lambda schedule, slot: 10.0, done=None, spent_s=0.0, samples=10**6):  # noqa: ARG005
    """Measure until the rule ends it, or after some samples; return what was done and the time spent."""
    done = {name: list(made) for name, made in (done or {}).items()}
    for _ in range(samples):
        step = next_sample(plan, done, narrow=narrow, budget_s=budget_s, spent_s=spent_s)
        if step is None:
            break
        schedule, slot = step
        seconds = truth(schedule, slot)
        done.setdefault(schedule.name, []).append(MeasuredSlot(slot=slot, seconds=seconds))
        spent_s += seconds
    return done, spent_s


def blocks_of(schedule, done):
    return complete_blocks(schedule, [one.slot for one in done.get(schedule.name, ())])


@given(schedules, st.integers(1, 40))
def test_each_stack_is_once_in_each_block_and_one_has_a_twin(schedule, block):
    made = slots(schedule, block)
    assert sorted(slot.stack for slot in made if slot.kind == "measured") == sorted(schedule.stacks)
    assert sum(slot.kind == "a/a" for slot in made) == schedule.twins
    assert [slot.position for slot in made] == list(range(len(made)))
    assert sorted(slot.stack for slot in slots(schedule, 0)) == sorted(schedule.stacks)
    assert {slot.kind for slot in slots(schedule, 0)} == {"pilot"}


@given(schedules, st.integers(0, 20))
def test_a_block_and_its_mirror_give_no_stack_the_better_place(schedule, pair):
    first, second = slots(schedule, 2 * pair + 1), slots(schedule, 2 * pair + 2)
    assert [(slot.stack, slot.kind) for slot in first] == [(slot.stack, slot.kind) for slot in reversed(second)]
    at = [{slot.stack: slot.position for slot in block if slot.kind == "measured"} for block in (first, second)]
    for one, other in combinations(schedule.stacks, 2):
        assert sorted(place[one] < place[other] for place in at) == [False, True]


@given(schedules)
def test_twins_are_shared_out_evenly_and_the_orders_differ(schedule):
    schedule = replace(schedule, twins=True)
    rounds = 2 * len(schedule.stacks)
    all_slots = [slot for block in range(1, rounds + 1) for slot in slots(schedule, block)]
    twins = Counter(slot.stack for slot in all_slots if slot.kind == "a/a")
    assert twins == dict.fromkeys(schedule.stacks, 2)
    orders = {
        tuple(slot.stack for slot in slots(schedule, block) if slot.kind == "measured") for block in range(1, 41, 2)
    }
    assert len(orders) > 1 or len(schedule.stacks) == 1


def test_orders_are_the_seeds_and_never_change():
    # Results of an older version are resumed by a newer one: these are on users' disks.
    made = [[f"{slot.stack} {slot.kind}" for slot in slots(ONE, block)] for block in range(4)]
    assert made == [
        ["ext4 pilot", "btrfs pilot"],
        ["ext4 measured", "btrfs measured", "btrfs a/a"],
        ["btrfs a/a", "btrfs measured", "ext4 measured"],
        ["btrfs measured", "ext4 measured", "ext4 a/a"],
    ]
    assert slots(replace(ONE, seed=4, stacks=STACKS), 1) != slots(replace(ONE, seed=5, stacks=STACKS), 1)


def test_looks_are_at_whole_mirrored_pairs_ever_farther_apart():
    assert list(looks(replace(ONE, most=40))) == [6, 10, 14, 20, 28, 38, 40]
    assert list(looks(replace(ONE, least=2, most=2))) == [2]


def test_it_ends_at_the_first_look_at_which_all_is_narrow_and_asks_at_no_other_time():
    asked = set()

    def narrow(name, blocks):  # noqa: ARG001
        asked.add(blocks)
        return blocks >= 12

    done, _ = play([ONE], budget_s=1e6, narrow=narrow)
    assert blocks_of(ONE, done) == 14
    assert asked == {6, 10, 14}


def test_it_ends_with_the_most_blocks():
    done, _ = play([replace(ONE, most=8)], budget_s=1e6)
    assert blocks_of(ONE, done) == 8
    (sentence,) = left_out([replace(ONE, most=8)], done, narrow=NEVER, budget_s=1e6, spent_s=0)
    assert "wider than asked" in sentence


@given(
    st.lists(schedules, min_size=1, max_size=2, unique_by=lambda schedule: schedule.name),
    st.floats(0, 3000),
    st.floats(0.1, 10),
    st.integers(0, 1000),
)
def test_a_run_is_longer_than_its_budget_by_less_than_one_sample_and_says_what_it_left_out(plan, budget_s, wrong, seed):
    random = Random(seed)
    takes = []

    def truth(schedule, slot):  # noqa: ARG001
        takes.append(schedule.sample_s * wrong * random.lognormvariate(0, 0.5))
        return takes[-1]

    done, spent_s = play(plan, budget_s=budget_s, truth=truth)
    assert spent_s - (takes[-1] if takes else 0) < max(budget_s, 1e-9)
    said = left_out(plan, done, narrow=NEVER, budget_s=budget_s, spent_s=spent_s)
    for schedule in plan:
        made = [one.slot for one in done.get(schedule.name, ())]
        assert len(made) == len(set(made))
        assert not strangers(schedule, made)
        # Only one block may be without some of its stacks.
        assert sum(0 < len(missing(schedule, made, block)) < len(slots(schedule, block)) for block in range(70)) <= 1
        if blocks_of(schedule, done) < schedule.most:
            assert any(sentence.startswith(schedule.name) for sentence in said), "silently dropped"


@given(
    st.lists(schedules, min_size=1, max_size=2, unique_by=lambda schedule: schedule.name),
    st.floats(10, 2000),
    st.integers(0, 60),
    st.integers(0, 1000),
)
def test_a_resumed_run_goes_on_as_if_it_had_not_been_interrupted(plan, budget_s, samples, seed):
    def truth(schedule, slot):
        return schedule.sample_s * Random(f"{seed} {schedule.name} {slot}").lognormvariate(0, 0.5)

    whole, _ = play(plan, budget_s=budget_s, truth=truth)
    part, spent_s = play(plan, budget_s=budget_s, truth=truth, samples=samples)
    shuffled = {name: Random(seed).sample(made, len(made)) for name, made in part.items()}
    assert next_sample(plan, shuffled, narrow=NEVER, budget_s=budget_s, spent_s=spent_s) == next_sample(
        plan, part, narrow=NEVER, budget_s=budget_s, spent_s=spent_s
    )
    resumed, _ = play(plan, budget_s=budget_s, truth=truth, done=part, spent_s=spent_s)
    assert resumed == whole


def test_a_block_with_a_hole_is_filled_first():
    done, _ = play([ONE], budget_s=1e6, samples=2 + 3 * 7)
    hole = next(one for one in done["blog"] if one.slot.block == 3)
    done["blog"].remove(hole)
    assert complete_blocks(ONE, [one.slot for one in done["blog"]]) == 2
    assert next_sample([ONE], done, narrow=NEVER, budget_s=1e6, spent_s=0) == (ONE, hole.slot)


def test_nothing_begins_once_the_budget_is_spent_and_no_block_that_will_not_fit():
    done, _ = play([ONE], budget_s=1e6, samples=2 + 3 * 7)
    ask = {"narrow": NEVER, "budget_s": 500}
    # A block of three takes 30 s.
    assert next_sample([ONE], done, spent_s=470, **ask) == (ONE, slots(ONE, 8)[0])
    assert next_sample([ONE], done, spent_s=471, **ask) is None
    begun = {"blog": [*done["blog"], MeasuredSlot(slot=slots(ONE, 8)[0], seconds=10)]}
    assert next_sample([ONE], begun, spent_s=499, **ask) == (ONE, slots(ONE, 8)[1]), "what has begun goes on"
    assert next_sample([ONE], begun, spent_s=500, **ask) is None
    assert next_sample([ONE], begun, spent_s=501, **ask) is None


def test_what_the_course_does_not_have_is_a_stranger():
    other = slots(replace(ONE, stacks=STACKS), 5)
    assert set(strangers(ONE, [*slots(ONE, 5), *other])) >= {slot for slot in other if slot.stack not in ONE.stacks}
    assert not strangers(ONE, [slot for block in range(9) for slot in slots(ONE, block)])


def test_courses_come_in_order_and_one_that_does_not_fit_is_named_with_what_it_needs():
    slow = SampleSchedule(name="aging", stacks=("btrfs", "ext4"), seed=1, sample_s=100)
    plan = [ONE, slow, replace(ONE, name="random-update")]
    # Each of the short ones takes 20 + 6 × 30 s, the long one ten times that.
    assert [schedule.name for schedule in taken(plan, {}, room_s=450)] == ["blog", "random-update"]
    (sentence,) = left_out(plan, {}, narrow=NEVER, budget_s=450, spent_s=0)
    assert sentence == (
        "aging is left out: 6 blocks of btrfs, ext4 take about 33 min 20 s (7 min 30 s of the budget are left)."
    )
    done, spent_s = play(plan, budget_s=450, truth=lambda schedule, slot: schedule.sample_s)  # noqa: ARG005
    assert {one.name: blocks_of(one, done) for one in plan} == {"blog": 7, "aging": 0, "random-update": 6}
    said = left_out(plan, done, narrow=NEVER, budget_s=450, spent_s=spent_s)
    assert [sentence.split()[0] for sentence in said] == ["blog", "aging", "random-update"]


def test_what_is_left_goes_to_those_that_are_not_narrow():
    plan = [ONE, replace(ONE, name="random-update")]
    done, _ = play(plan, budget_s=1000, narrow=lambda name, blocks: name == "blog" and blocks >= 6)
    assert [blocks_of(schedule, done) for schedule in plan] == [6, 26]


def test_estimates_come_from_what_was_measured():
    first, second = (slot for slot in slots(ONE, 0))
    other = replace(ONE, name="random-update", sample_s=100)
    done = {"blog": [MeasuredSlot(slot=first, seconds=2), MeasuredSlot(slot=slots(ONE, 1)[0], seconds=3)]}
    assert expected_s(ONE, slots(ONE, 1)[0].stack, [ONE, other], done) in {2, 2.5, 3}
    assert expected_s(ONE, second.stack, [ONE, other], done) in {2, 2.5, 3}
    # The plan was 4 times too long for blog; so it may be here.
    assert expected_s(other, "ext4", [ONE, other], done) == pytest.approx(25)


def test_a_plan_that_is_far_too_careful_is_corrected_by_a_pilot():
    done, _ = play([ONE], budget_s=150, truth=lambda schedule, slot: 0.5)  # noqa: ARG005
    assert blocks_of(ONE, done) == ONE.most
    assert next_sample([replace(ONE, sample_s=200)], {}, narrow=NEVER, budget_s=150, spent_s=0) is None
