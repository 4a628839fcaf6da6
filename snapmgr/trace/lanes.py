"""Operations in lanes: those of one thread that overlap in time lie side by side.

A thread waits for each of its operations, so that it has one lane; but for reads ahead, which the kernel asks for in
its name, and for what the kernel does on its own (thread 0). Viewers draw each lane as a line of boxes, and refuse
boxes that overlap.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field

from snapmgr.trace.operations import Operations


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Operations of one thread of which none begins before the one before it has ended."""

    thread: int
    number: int
    """0 for the thread's first lane."""
    rows: array[int] = field(default_factory=lambda: array("Q"))
    """Rows of the operations, in the order of their start."""


def starts_us(operations: Operations) -> array[int]:
    """Return when each operation began: microseconds since 1970, in the clock of the log."""
    # A damaged line may tell a latency longer than all time before it.
    both = zip(operations.end_us, operations.duration_us, strict=True)
    return array("Q", [max(end - lasted, 0) for end, lasted in both])


def lanes(operations: Operations) -> list[Lane]:
    """Return all operations in lanes: the thread that was longest in operations first, its lanes one after another."""
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
