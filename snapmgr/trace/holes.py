"""Finds spans of time in which a log has no operation although nothing shows that the mount was idle.

A reader of the log gets a line "#" for each second in which no operation ended. The client drops lines only while the
10,240 before them are still unread, so a quiet span with these marks was idle. Without marks the program may have been
idle too (marks can be filtered out), or lines are missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.trace.accesslog import Trace
    from snapmgr.trace.operations import Operations

_US = 1_000_000
# Shorter pauses belong to the rhythm of a program, or do not matter.
_LEAST_SHARE = 0.01
_LEAST_US = _US // 10
_LONG_US = 1 * _US
# A mark is due after each second, but the seconds around the quiet span have a mark only by chance.
_UNMARKED_US = 2 * _US
_MARK_US = int(1.1 * _US)


@dataclass(frozen=True, kw_only=True)
class Hole:
    """A span without operations: microseconds since 1970, in the clock of the log."""

    from_us: int
    to_us: int


def holes(trace: Trace) -> tuple[Hole, ...]:
    """Return the spans of a log in which lines may be missing, in order of time.

    Only spans of a second, or of 1 % of the whole log (but 0.1 s): shorter losses do not show by time.
    """
    quiet = list(_quiet(trace.operations))
    explained = sorted(_explained(trace))
    found, at = [], 0
    for hole in quiet:
        middle = (hole.from_us + hole.to_us) // 2
        while at < len(explained) and explained[at][1] < middle:
            at += 1
        if at == len(explained) or middle < explained[at][0]:
            found.append(hole)
    return tuple(found)


def _quiet(operations: Operations) -> Iterator[Hole]:
    """Yield the longer spans in which no operation was running."""
    spans = sorted(
        (max(end - took, 0), end) for end, took in zip(operations.end_us, operations.duration_us, strict=True)
    )
    if not spans:
        return
    reached = spans[0][0]
    whole_us = max(operations.end_us) - reached
    least_us = min(max(int(_LEAST_SHARE * whole_us), _LEAST_US), _LONG_US)
    for start, end in spans:
        if start - reached >= least_us:
            yield Hole(from_us=reached, to_us=start)
        reached = max(reached, end)


def _explained(trace: Trace) -> Iterator[tuple[int, int]]:
    """Yield the spans between two lines in which the log has all marks of an idle mount."""
    ends = trace.operations.end_us
    for row, marks in trace.idle.items():
        if 0 < row < len(ends) and marks * _MARK_US + _UNMARKED_US >= ends[row] - ends[row - 1] >= 0:
            yield ends[row - 1], ends[row]
