"""Which sample comes next, and when a run has enough: blocks, mirrored order, A/A twins, looks, and the budget. Pure.

A *block* has each stack once, in random order, and one of them twice (its *twin*, for the A/A pair). The next block is
its mirror image, so that over both each stack runs before each other one once, and none has the better place: A B B A.
Block 0 is the *pilot*: its samples tell how long one takes, and count for nothing else.

`done` holds failed samples too, unless they are to be tried again: a block without them never is complete.

Intervals are looked at after `least` blocks and then after each third more, not after each sample: see `stats.PEEKING`.
What a run does next depends on what was measured, never on how it was interrupted: a resumed run goes on as if nothing
had happened.
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
# What was made, by the course's name.
Done: TypeAlias = "Mapping[str, Sequence[Measured]]"
# Whether all intervals of a course, made of its first N blocks, are narrow enough.
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
class Measured:
    """A sample that was made, and how long it took, provisioning and cleaning included."""

    slot: Slot
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Course:
    """One experiment's share of a run."""

    name: str
    """Unique in the run."""
    stacks: tuple[str, ...]
    seed: int
    sample_s: float
    """About how long one sample takes; corrected by what is measured."""
    least: int = LEAST_PAIRS
    """Blocks before anything is looked at."""
    most: int = 64
    twins: bool = True
    """Whether each block has an A/A pair."""


@lru_cache(maxsize=1024)
def slots(course: Course, block: int) -> tuple[Slot, ...]:
    """Return the samples of one block, in order; block 0 is the pilot."""
    random = Random(f"{course.seed} {course.name} {(block + 1) // 2}")  # noqa: S311 - repeatable on purpose
    entries: list[tuple[str, Kind]] = [(stack, "measured" if block else "pilot") for stack in course.stacks]
    random.shuffle(entries)
    if block and course.twins:
        # Each stack in turn, so that all have as many twins.
        turns = Random(f"{course.seed} {course.name}").sample(course.stacks, len(course.stacks))  # noqa: S311 - the same
        twin = turns[(block - 1) // 2 % len(turns)]
        entries.insert(random.randint(0, len(entries)), (twin, "a/a"))
    if block and block % 2 == 0:
        entries.reverse()
    return tuple(
        Slot(block=block, position=position, stack=stack, kind=kind) for position, (stack, kind) in enumerate(entries)
    )


def strangers(course: Course, done: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return what was measured that is none of the course's: made with other stacks, another seed, or by hand."""
    return tuple(slot for slot in done if slot.block < 0 or slot not in slots(course, slot.block))


def missing(course: Course, done: Iterable[Slot], block: int) -> tuple[Slot, ...]:
    """Return what is still to be measured of a block, in order."""
    made = {slot for slot in done if slot.block == block}
    return tuple(slot for slot in slots(course, block) if slot not in made)


def complete_blocks(course: Course, done: Iterable[Slot]) -> int:
    """Return how many blocks, from the first on, are complete; the pilot is none of them."""
    made = set(done)
    return next(block for block in count() if not made.issuperset(slots(course, block + 1)))


def looks(course: Course) -> Iterator[int]:
    """Yield after how many blocks the intervals are looked at: whole mirrored pairs, each time a third more."""
    blocks = course.least
    while blocks < course.most:
        yield blocks
        more = blocks * 4 // 3 + 1
        blocks = more + more % 2
    yield course.most


def goal(course: Course, done: Iterable[Slot], narrow: Narrow) -> int:
    """Return how many blocks the course is to have, by what is known now: as many as it has if it has enough."""
    have = complete_blocks(course, done)
    if have >= course.most:
        return have
    for look in looks(course):
        if look > have:
            return look
        if narrow(course.name, look):
            return have
    return have


def expected_s(course: Course, stack: str, courses: Iterable[Course], done: Done) -> float:
    """Return how long the next sample of a stack will take: as long as the stack's median, else as the course's
    other stacks, else as planned, corrected by how wrong the plan was elsewhere."""
    own = [one.seconds for one in done.get(course.name, ()) if one.slot.stack == stack]
    mates = [one.seconds for one in done.get(course.name, ())]
    wrong = [one.seconds / other.sample_s for other in courses if other.sample_s for one in done.get(other.name, ())]
    return median(own or mates) if mates else course.sample_s * (median(wrong) if wrong else 1)


def rest_s(course: Course, blocks: int, courses: Sequence[Course], done: Done) -> float:
    """Return how long it will take to bring a course, with its pilot, to `blocks` blocks."""
    made = {one.slot for one in done.get(course.name, ())}
    lacking = Counter(slot.stack for block in range(blocks + 1) for slot in slots(course, block) if slot not in made)
    return sum(number * expected_s(course, stack, courses, done) for stack, number in lacking.items())


def taken(courses: Sequence[Course], done: Done, *, room_s: float) -> tuple[Course, ...]:
    """Return which courses are measured: those that have begun, then in the given order each whose least number of
    blocks fits into the room that the others leave."""
    begun = [course for course in courses if any(one.slot.block for one in done.get(course.name, ()))]
    room_s -= sum(rest_s(course, course.least, courses, done) for course in begun)
    chosen = {course.name for course in begun}
    for course in courses:
        if course.name not in chosen and (need_s := rest_s(course, course.least, courses, done)) <= room_s:
            room_s -= need_s
            chosen.add(course.name)
    return tuple(course for course in courses if course.name in chosen)


def next_sample(
    courses: Sequence[Course], done: Done, *, narrow: Narrow, budget_s: float, spent_s: float
) -> tuple[Course, Slot] | None:
    """Return what to measure next; None if there is enough of all, or if nothing more fits into the budget.

    No block begins that is expected not to fit, and no sample once the budget is spent: a run is longer than its
    budget by less than one sample. Courses come in the given order until each has its least number of blocks; what then
    is left goes to those that are not narrow, the one with the fewest blocks first.
    """
    room_s = budget_s - spent_s
    if room_s <= 0:
        return None
    made = {course.name: [one.slot for one in done.get(course.name, ())] for course in courses}
    for course in courses:
        for block in sorted({slot.block for slot in made[course.name]}):
            if lacking := missing(course, made[course.name], block):
                return course, lacking[0]
    chosen = taken(courses, done, room_s=room_s)
    if not chosen:
        # The estimate may be far too careful, before a pilot and even after one: go on with what can be resumed.
        chosen = tuple(course for course in courses if made[course.name] or course.sample_s <= room_s)[:1]
    for course in chosen:
        if not made[course.name]:
            return course, slots(course, 0)[0]
    wanted = [(course, complete_blocks(course, made[course.name])) for course in chosen]
    first = [(course, have) for course, have in wanted if have < course.least]
    more = [(course, have) for course, have in wanted if course.least <= have < goal(course, made[course.name], narrow)]
    for course, have in first + sorted(more, key=lambda one: one[1]):
        following = slots(course, have + 1)
        if sum(expected_s(course, slot.stack, courses, done) for slot in following) <= room_s:
            return course, following[0]
    return None


def left_out(
    courses: Sequence[Course], done: Done, *, narrow: Narrow, budget_s: float, spent_s: float
) -> tuple[str, ...]:
    """Return in sentences what a run leaves out, or, with nothing done, what of a plan does not fit."""
    room_s = max(0.0, budget_s - spent_s)
    chosen = {course.name for course in taken(courses, done, room_s=room_s)}
    sentences = []
    for course in courses:
        made = [one.slot for one in done.get(course.name, ())]
        have = complete_blocks(course, made)
        needs = format_duration(rest_s(course, course.least, courses, done))
        if course.name not in chosen:
            sentences.append(
                f"{course.name} is left out: {course.least} blocks of {', '.join(course.stacks)} take about {needs} "
                f"({_left(room_s)})."
            )
        elif have < course.least:
            if rest_s(course, course.least, courses, done) > room_s:
                sentences.append(
                    f"{course.name} has {have} of {course.least} blocks, too few to say anything: the rest takes about "
                    f"{needs} ({_left(room_s)})."
                )
        elif have < goal(course, made, narrow):
            sentences.append(f"{course.name} has {have} blocks: its intervals are wider than asked ({_left(room_s)}).")
        elif have >= course.most and not narrow(course.name, course.most):
            sentences.append(f"{course.name} has {have} blocks, the most allowed: its intervals are wider than asked.")
    return tuple(sentences)


def _left(room_s: float) -> str:
    return f"{format_duration(room_s)} of the budget are left" if room_s > 0 else "the budget is spent"
