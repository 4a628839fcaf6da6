"""Chooses the next sample, and decides when a run has enough: blocks, mirrored order, A/A twins, budget. Pure.

A *block* has each stack once, in random order, and one of them twice (its *twin*, for the A/A pair). The next block is
its mirror image (A B B A). Over both blocks each stack runs before each other one once, and none has the better place.
Block 0 is the *pilot*: its samples show how long one takes, and are not used otherwise.

`done` includes failed samples, unless they are to be repeated: a block without them would never be complete.

Intervals are examined after `least` blocks and then after each further third, not after each sample: see
`snapmgr.bench.statistics.ratio.PEEKING`. The next step depends on the samples alone, never on an interruption: a
resumed run continues as if it had not been interrupted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Literal, TypeAlias

from snapmgr.bench.statistics.ratio import LEAST_PAIRS
from snapmgr.contract.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


Kind = Literal["pilot", "measured", "a/a"]
# The finished samples, by the schedule's name.
Done: TypeAlias = "Mapping[str, Sequence[MeasuredSlot]]"
# Whether all intervals of a schedule, made of its first N blocks, are narrow enough.
Narrow: TypeAlias = "Callable[[str, int], bool]"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One sample's place."""

    block: int
    position: int
    """In its block, from 0."""
    stack: str
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class MeasuredSlot:
    """A sample that was made, and how long it took, provisioning and cleaning included."""

    slot: Slot
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SampleSchedule:
    """One experiment's share of a run."""

    name: str
    """Unique in the run."""
    stacks: tuple[str, ...]
    seed: int
    sample_s: float
    """About how long one sample takes; corrected by measurements."""
    least: int = LEAST_PAIRS
    """Blocks before anything is looked at."""
    most: int = 64
    twins: bool = True
    """Whether each block has an A/A pair."""


@lru_cache(maxsize=1024)
def slots(schedule: SampleSchedule, block: int) -> tuple[Slot, ...]:
    """Return the samples of one block, in order; block 0 is the pilot."""
    random = Random(f"{schedule.seed} {schedule.name} {(block + 1) // 2}")  # noqa: S311 - repeatable on purpose
    entries: list[tuple[str, Kind]] = [(stack, "measured" if block else "pilot") for stack in schedule.stacks]
    random.shuffle(entries)
    if block and schedule.twins:
        # Each stack in turn, so that all have as many twins.
        turns = Random(f"{schedule.seed} {schedule.name}").sample(schedule.stacks, len(schedule.stacks))  # noqa: S311 - the same
        twin = turns[(block - 1) // 2 % len(turns)]
        entries.insert(random.randint(0, len(entries)), (twin, "a/a"))
    if block and block % 2 == 0:
        entries.reverse()
    return tuple(
        Slot(block=block, position=position, stack=stack, kind=kind) for position, (stack, kind) in enumerate(entries)
    )


def strangers(schedule: SampleSchedule, done: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return the samples that are not part of the schedule: of other stacks, another seed, or made by hand."""
    return tuple(slot for slot in done if slot.block < 0 or slot not in slots(schedule, slot.block))


def missing(schedule: SampleSchedule, done: Iterable[Slot], block: int) -> tuple[Slot, ...]:
    """Return the missing samples of a block, in order."""
    made = {slot for slot in done if slot.block == block}
    return tuple(slot for slot in slots(schedule, block) if slot not in made)


def complete_blocks(schedule: SampleSchedule, done: Iterable[Slot]) -> int:
    """Return how many blocks, from the first on, are complete, without the pilot."""
    made = set(done)
    return next(block for block in count() if not made.issuperset(slots(schedule, block + 1)))


def looks(schedule: SampleSchedule) -> Iterator[int]:
    """Yield after how many blocks the intervals are looked at: whole mirrored pairs, each time a third more."""
    blocks = schedule.least
    while blocks < schedule.most:
        yield blocks
        more = blocks * 4 // 3 + 1
        blocks = more + more % 2
    yield schedule.most


def goal(schedule: SampleSchedule, done: Iterable[Slot], narrow: Narrow) -> int:
    """Return how many blocks the schedule needs, as far as known now: its current number if that is enough."""
    have = complete_blocks(schedule, done)
    if have >= schedule.most:
        return have
    for look in looks(schedule):
        if look > have:
            return look
        if narrow(schedule.name, look):
            return have
    return have


def expected_s(schedule: SampleSchedule, stack: str, schedules: Iterable[SampleSchedule], done: Done) -> float:
    """Return how long the next sample of a stack will take: as long as the stack's median, else as the schedule's
    other stacks, else as planned, corrected by how wrong the plan was elsewhere."""
    own = [one.seconds for one in done.get(schedule.name, ()) if one.slot.stack == stack]
    mates = [one.seconds for one in done.get(schedule.name, ())]
    wrong = [one.seconds / other.sample_s for other in schedules if other.sample_s for one in done.get(other.name, ())]
    return median(own or mates) if mates else schedule.sample_s * (median(wrong) if wrong else 1)


def rest_s(schedule: SampleSchedule, blocks: int, schedules: Sequence[SampleSchedule], done: Done) -> float:
    """Return how long it will take to bring a schedule, with its pilot, to `blocks` blocks."""
    made = {one.slot for one in done.get(schedule.name, ())}
    absent = Counter(slot.stack for block in range(blocks + 1) for slot in slots(schedule, block) if slot not in made)
    return sum(number * expected_s(schedule, stack, schedules, done) for stack, number in absent.items())


def taken(schedules: Sequence[SampleSchedule], done: Done, *, room_s: float) -> tuple[SampleSchedule, ...]:
    """Return which schedules are measured: those that have begun, then in the given order each whose least number of
    blocks fits into the room that the others leave."""
    begun = [schedule for schedule in schedules if any(one.slot.block for one in done.get(schedule.name, ()))]
    room_s -= sum(rest_s(schedule, schedule.least, schedules, done) for schedule in begun)
    chosen = {schedule.name for schedule in begun}
    for schedule in schedules:
        if schedule.name not in chosen and (need_s := rest_s(schedule, schedule.least, schedules, done)) <= room_s:
            room_s -= need_s
            chosen.add(schedule.name)
    return tuple(schedule for schedule in schedules if schedule.name in chosen)


def next_sample(
    schedules: Sequence[SampleSchedule], done: Done, *, narrow: Narrow, budget_s: float, spent_s: float
) -> tuple[SampleSchedule, Slot] | None:
    """Return what to measure next; None if there is enough of all, or if nothing more fits into the budget.

    No block begins that is expected not to fit, and no sample once the budget is spent: a run is longer than its
    budget by less than one sample. Schedules come in the given order until each has its least number of blocks; the
    rest goes to those that are not narrow, the one with the fewest blocks first.
    """
    room_s = budget_s - spent_s
    if room_s <= 0:
        return None
    made = {schedule.name: [one.slot for one in done.get(schedule.name, ())] for schedule in schedules}
    for schedule in schedules:
        for block in sorted({slot.block for slot in made[schedule.name]}):
            if absent := missing(schedule, made[schedule.name], block):
                return schedule, absent[0]
    chosen = taken(schedules, done, room_s=room_s)
    if not chosen:
        # The estimate may be far too careful, before a pilot and even after one: go on with what can be resumed.
        chosen = tuple(schedule for schedule in schedules if made[schedule.name] or schedule.sample_s <= room_s)[:1]
    for schedule in chosen:
        if not made[schedule.name]:
            return schedule, slots(schedule, 0)[0]
    wanted = [(schedule, complete_blocks(schedule, made[schedule.name])) for schedule in chosen]
    first = [(schedule, have) for schedule, have in wanted if have < schedule.least]
    more = [
        (schedule, have)
        for schedule, have in wanted
        if schedule.least <= have < goal(schedule, made[schedule.name], narrow)
    ]
    for schedule, have in first + sorted(more, key=lambda one: one[1]):
        following = slots(schedule, have + 1)
        if sum(expected_s(schedule, slot.stack, schedules, done) for slot in following) <= room_s:
            return schedule, following[0]
    return None


def left_out(
    schedules: Sequence[SampleSchedule], done: Done, *, narrow: Narrow, budget_s: float, spent_s: float
) -> tuple[str, ...]:
    """Return in sentences the parts that a run leaves out, or, before the first sample, that do not fit."""
    room_s = max(0.0, budget_s - spent_s)
    chosen = {schedule.name for schedule in taken(schedules, done, room_s=room_s)}
    sentences = []
    for schedule in schedules:
        made = [one.slot for one in done.get(schedule.name, ())]
        have = complete_blocks(schedule, made)
        needs = format_duration(rest_s(schedule, schedule.least, schedules, done))
        if schedule.name not in chosen:
            sentences.append(
                f"{schedule.name} is left out: {schedule.least} blocks of {', '.join(schedule.stacks)} take about "
                f"{needs} ({_left(room_s)})."
            )
        elif have < schedule.least:
            if rest_s(schedule, schedule.least, schedules, done) > room_s:
                sentences.append(
                    f"{schedule.name} has {have} of {schedule.least} blocks, too few to say anything: the rest takes "
                    f"about {needs} ({_left(room_s)})."
                )
        elif have < goal(schedule, made, narrow):
            sentences.append(
                f"{schedule.name} has {have} blocks: its intervals are wider than asked ({_left(room_s)})."
            )
        elif have >= schedule.most and not narrow(schedule.name, schedule.most):
            sentences.append(
                f"{schedule.name} has {have} blocks, the most allowed: its intervals are wider than asked."
            )
    return tuple(sentences)


def _left(room_s: float) -> str:
    return f"{format_duration(room_s)} of the budget are left" if room_s > 0 else "the budget is spent"
