"""Compares two recordings: what changed between them, and both on one axis of time."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from snapmgr.contract.units import format_duration, format_size
from snapmgr.trace.analysis import described, file_name
from snapmgr.trace.lanes import starts_us
from snapmgr.trace.operations import Operations
from snapmgr.trace.sampling import Series, series

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.trace.accesslog import Trace
    from snapmgr.trace.analysis import Analysis, Total
    from snapmgr.trace.verdict import Verdict

Unit = Literal["s", "bytes", "count"]
NAMES = ("A", "B")
_SAME = 1.1
# A kind of operation is named if its time changed by these shares: of the change as a whole, and of the length.
_OF_CHANGE = 0.1
_OF_LENGTH = 0.01
_OTHER_STATUSES = 255


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two recordings."""

    trace: Trace
    analysis: Analysis
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of both recordings; None if it is not known."""

    name: str
    unit: Unit
    a: float | None
    b: float | None

    def shown(self, value: float | None) -> str:
        """Return one of its values as text."""
        if value is None:
            return "?"
        if self.unit == "s":
            # Many latencies are a few microseconds, which would all be 0.0 ms.
            return f"{value * 1e6:.0f} µs" if 0 < value < 1e-3 else format_duration(value)  # noqa: PLR2004
        return format_size(int(value)) if self.unit == "bytes" else f"{value:,.0f}"

    @property
    def change(self) -> str:
        """Return B relative to A: "÷ 6.6", "× 2.1", "same"; "" if it cannot be told."""
        if self.a is None or self.b is None:
            return ""
        if self.a == self.b or (self.a > 0 and self.b > 0 and 1 / _SAME < self.b / self.a < _SAME):
            return "same"
        if self.a <= 0 or self.b <= 0:
            return "new" if self.a <= 0 else "gone"
        return f"× {self.b / self.a:.1f}" if self.b > self.a else f"÷ {self.a / self.b:.1f}"


def measures(a: Side, b: Side) -> tuple[Measure, ...]:
    """Return the numbers worth comparing: length, operations by the time that they changed by, object store, cache."""
    return (
        _measure("length", "s", a.analysis.wall_s, b.analysis.wall_s),
        *_of_operations(a.analysis, b.analysis),
        *_of_counters(a.analysis, b.analysis),
    )


def _measure(name: str, unit: Unit, a: float | None, b: float | None) -> Measure:
    return Measure(name=name, unit=unit, a=a, b=b)


def _of_operations(a: Analysis, b: Analysis) -> Iterator[Measure]:
    totals = [{total.key: total for total in side.totals["operation"]} for side in (a, b)]
    kinds = {*totals[0], *totals[1]}

    def moved_s(kind: str) -> float:
        return abs(a.busy_s.get(kind, 0.0) - b.busy_s.get(kind, 0.0))

    for kind in sorted(kinds, key=lambda kind: (-moved_s(kind), kind)):
        first, second = (side.get(kind) for side in totals)
        yield _measure(f"{kind}: time", "s", a.busy_s.get(kind, 0.0), b.busy_s.get(kind, 0.0))
        yield _measure(f"{kind}: count", "count", _count(first), _count(second))
        if first is not None and second is not None:
            yield _measure(f"{kind}: p50", "s", first.p50_us / 1e6, second.p50_us / 1e6)
            yield _measure(f"{kind}: p99", "s", first.p99_us / 1e6, second.p99_us / 1e6)


def _count(total: Total | None) -> int:
    return total.count if total is not None else 0


def _of_counters(a: Analysis, b: Analysis) -> Iterator[Measure]:
    if a.counted is None and b.counted is None:
        return
    rows: tuple[tuple[str, Unit, str], ...] = (
        ("GET: count", "count", "gets"),
        ("GET: data", "bytes", "get_bytes"),
        ("PUT: count", "count", "puts"),
        ("PUT: data", "bytes", "put_bytes"),
        ("compacted", "bytes", "compaction_bytes"),
        ("cache misses", "count", "cache_misses"),
        ("not uploaded at the end", "bytes", "staged_bytes"),
        ("processor of the client", "s", "cpu_s"),
    )
    for name, unit, field in rows:
        values = [getattr(side.counted, field) if side.counted is not None else None for side in (a, b)]
        yield _measure(name, unit, *values)


def changed(a: Side, b: Side) -> tuple[str, ...]:
    """Return in sentences what changed, the most important first."""
    found = [_length(a.analysis.wall_s, b.analysis.wall_s)]
    first, second = (described(side.trace) for side in (a, b))
    if first != second:
        found += [f"A: {first or 'unknown program and mount'}", f"B: {second or 'unknown program and mount'}"]
    elif first:
        found.append(f"both: {first}")
    least_s = max(_OF_CHANGE * abs(a.analysis.wall_s - b.analysis.wall_s), _OF_LENGTH * a.analysis.wall_s)
    for measure in measures(a, b):
        kind, _, what = measure.name.partition(": ")
        moved_s = abs((measure.a or 0.0) - (measure.b or 0.0))
        if what == "time" and moved_s > least_s and measure.change != "same":
            found.append(f"{kind}: {measure.shown(measure.a)} in A, {measure.shown(measure.b)} in B ({measure.change})")
    for name, side in zip(NAMES, (a, b), strict=True):
        condition = f" ({side.verdict.condition})" if side.verdict.condition else ""
        found.append(f"verdict on {name}: {side.verdict.bottleneck}: {side.verdict.why}{condition}")
    return tuple(found)


def _length(a_s: float, b_s: float) -> str:
    took = f"A took {format_duration(a_s)}, B {format_duration(b_s)}"
    if a_s <= 0 or b_s <= 0 or 1 / _SAME < b_s / a_s < _SAME:
        return took
    return f"{took}: B is {a_s / b_s:.1f} times as fast" if a_s > b_s else f"{took}: A is {b_s / a_s:.1f} times as fast"


def caveats(a: Side, b: Side) -> tuple[str, ...]:
    """Return what a reader must know about either log."""
    return tuple(
        f"{name}: {caveat}" for name, side in zip(NAMES, (a, b), strict=True) for caveat in side.analysis.caveats
    )


def aligned(a: Side, b: Side) -> tuple[Operations, list[tuple[int, int, str]], list[Series]]:
    """Return the operations of both, each beginning at time 0; their holes: from, to, name of the recording; series.

    Threads and files of one are never those of the other: they get new numbers, and names with the recording's.
    """
    both = Operations()
    holes: list[tuple[int, int, str]] = []
    drawn: list[Series] = []
    threads: dict[tuple[str, int], int] = {}
    files: dict[tuple[str, int], int] = {(name, 0): 0 for name in NAMES}
    for name, side in zip(NAMES, (a, b), strict=True):
        operations = side.trace.recorded
        origin = min(starts_us(operations), default=0)
        kinds = [_number(both.names, kind) for kind in operations.names]
        statuses = [min(_number(both.statuses, status), _OTHER_STATUSES) for status in operations.statuses]
        for thread in set(operations.thread):
            threads[name, thread] = len(threads)
            both.threads[threads[name, thread]] = f"{name} · {'kernel (0)' if thread == 0 else thread}"
        for inode in set(operations.inode) - {0}:
            files[name, inode] = len(files)
            both.paths[files[name, inode]] = f"{name}: {file_name(operations, inode)}"
        both.end_us.extend(max(end - origin, 0) for end in operations.end_us)
        both.thread.extend(threads[name, thread] for thread in operations.thread)
        both.inode.extend(files[name, inode] for inode in operations.inode)
        both.name.extend(kinds[kind] for kind in operations.name)
        both.status.extend(statuses[status] for status in operations.status)
        for column in ("duration_us", "size", "offset", "got"):
            values: array[int] = getattr(both, column)
            values.extend(getattr(operations, column))
        holes += [(hole.from_us - origin, hole.to_us - origin, name) for hole in side.analysis.holes]
        for one in series(side.trace):
            steps = tuple((begin - origin, end - origin, value) for begin, end, value in one.steps)
            drawn.append(replace(one, name=f"{name} · {one.name}", steps=steps))
    return both, holes, drawn


def _number(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)
