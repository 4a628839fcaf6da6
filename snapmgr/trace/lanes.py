"""Assigns operations to lanes, so that no two in a lane overlap in time.

A thread waits for each of its operations, so one lane is enough, except for the kernel's read-ahead in its name and
for the kernel's own operations (thread 0). Viewers draw each lane as a row of boxes and reject overlapping boxes.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field

from snapmgr.trace.operations import Operations


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Operations of one thread that do not overlap."""

    thread: int
    number: int
    """0 for the thread's first lane."""
    rows: array[int] = field(default_factory=lambda: array("Q"))
    """Rows of the operations, in the order of their start."""


def starts_us(operations: Operations) -> array[int]:
    """Return when each operation began: microseconds since 1970, in the clock of the log."""
    # A damaged line may have a latency that reaches back before 1970.
    both = zip(operations.end_us, operations.duration_us, strict=True)
    return array("Q", [max(end - lasted, 0) for end, lasted in both])


def lanes(operations: Operations) -> list[Lane]:
    """Return all operations in lanes: the busiest thread first, its lanes one after another."""
    starts, ends, threads = starts_us(operations), operations.end_us, operations.thread
    found: dict[int, list[Lane]] = defaultdict(list)
    free_us: dict[int, list[int]] = defaultdict(list)
    busy_us: dict[int, int] = defaultdict(int)
    for row in sorted(range(len(operations)), key=starts.__getitem__):
        thread, start, end = threads[row], starts[row], ends[row]
        free, busy_us[thread] = free_us[thread], busy_us[thread] + end - start
        number = next((beside for beside, free_from in enumerate(free) if free_from <= start), len(free))
        if number == len(free):
            free.append(0)
            found[thread].append(Lane(thread=thread, number=number))
        free[number] = end
        found[thread][number].rows.append(row)
    order = sorted(found, key=lambda thread: (-busy_us[thread], thread))
    return [lane for thread in order for lane in found[thread]]
