"""Summarises a recorded log: operations, files, threads, latencies, concurrency, and missing operations."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeGuard

from snapmgr.contract.units import format_duration, format_size
from snapmgr.trace.counters import Counted, growth
from snapmgr.trace.holes import Hole, holes
from snapmgr.trace.verdict import TraceFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from snapmgr.trace.accesslog import Trace
    from snapmgr.trace.operations import Operations

By = Literal["operation", "file", "thread"]
_US = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Total:
    """Sums over the operations of one kind, file or thread; latencies by nearest rank."""

    key: str
    count: int
    failed: int
    """Number of operations that did not end with OK, such as a lookup of a missing name."""
    size_bytes: int
    """Bytes that reads returned and writes wrote."""
    total_us: int
    p50_us: int
    p95_us: int
    p99_us: int
    max_us: int


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The results that `trace show` prints for a log."""

    operations: int
    skipped: int
    wall_s: float
    """Of the recording; without a trailer from the first operation's start to the last one's end."""
    first_us: int
    last_us: int
    busy_s: dict[str, float]
    """For each kind of operation: seconds in which at least one was running."""
    mean_under_way: float
    max_under_way: int
    totals: dict[By, tuple[Total, ...]]
    """The longest total time first."""
    missing: dict[str, int] | None
    """Operations that the mount counted but the log does not have, by kind; None without counters to compare."""
    holes: tuple[Hole, ...]
    """Spans of time in which lines may be missing; none if the counters show that the log is complete."""
    caveats: tuple[str, ...]
    """What a reader of the results must know about the log."""
    counted: Counted | None


def analyse(trace: Trace) -> Analysis:
    """Return the analysis of a log, without the recorder's own operations."""
    operations = trace.recorded
    counted = _counted(trace)
    span_us = _counted_span_us(trace)
    first_us, last_us = _span_us(operations)
    recorded_s = (trace.trailer or {}).get("wall_s")
    wall_s = float(recorded_s) if isinstance(recorded_s, int | float) else (last_us - first_us) / _US
    mean, most = _under_way(operations, wall_s)
    missing = _missing(trace.operations, counted, *span_us) if counted is not None else None
    # Times that are assumed show nothing.
    found = () if missing == {} or operations.untimed else holes(trace)
    return Analysis(
        operations=len(operations),
        skipped=operations.skipped,
        wall_s=wall_s,
        first_us=first_us,
        last_us=last_us,
        busy_s=_busy_s(operations, *span_us),
        mean_under_way=mean,
        max_under_way=most,
        totals={
            "operation": totals(operations, operations.name, lambda name: operations.names[name]),
            "file": totals(operations, operations.inode, lambda inode: file_name(operations, inode)),
            "thread": totals(operations, operations.thread, str),
        },
        missing=missing,
        holes=found,
        caveats=tuple(_caveats(trace, missing, found, first_us)),
        counted=counted,
    )


def facts_of(trace: Trace, analysis: Analysis) -> TraceFacts:
    """Return the facts for the verdict."""
    operations, header = trace.operations, trace.header or {}
    fsyncs = sum(total.count for total in analysis.totals["operation"] if total.key == "fsync")
    return TraceFacts(
        wall_s=analysis.wall_s,
        read_s=analysis.busy_s.get("read", 0.0),
        write_s=analysis.busy_s.get("write", 0.0),
        fsync_s=analysis.busy_s.get("fsync", 0.0),
        fsyncs=fsyncs,
        counted=analysis.counted,
        writeback=header.get("writeback"),
        prepares=header.get("prepares") is True,
        folder=header.get("folder"),
        missing=analysis.missing or {},
        unchecked=analysis.missing is None,
        silent_s=_silent_s(analysis.holes),
        unread_share=operations.skipped / max(len(operations), 1) if analysis.missing is None else 0.0,
        untimed=operations.untimed,
    )


def _caveats(trace: Trace, missing: Mapping[str, int] | None, found: tuple[Hole, ...], first_us: int) -> Iterator[str]:
    """Yield what a reader of the results must know about the log, each as a sentence without a full stop."""
    operations = trace.operations
    if trace.truncated:
        yield f"the file is {trace.truncated}: only part of it could be read"
    if operations.skipped:
        yield f"{operations.skipped} lines are not from a JuiceFS log and were skipped"
    if operations.untimed:
        yield f"{operations.untimed} lines have no time and are assumed to follow one another"
    if missing is None and operations:
        yield "the file has no counters of the mount, so missing operations cannot be detected"
    if found:
        longest = max(found, key=lambda hole: hole.to_us - hole.from_us)
        yield (
            f"for {format_duration(_silent_s(found))} the log has no operation, and no mark of an idle mount: the "
            f"program was idle, or lines are missing; the longest such time is "
            f"{format_duration((longest.to_us - longest.from_us) / _US)}, from "
            f"{format_duration((longest.from_us - first_us) / _US)} on"
        )


def _silent_s(found: tuple[Hole, ...]) -> float:
    return sum(hole.to_us - hole.from_us for hole in found) / _US


def described(trace: Trace) -> str:
    """Return what was recorded, in one line: command, volume, client, mount options; "" for a log of another origin."""
    header = trace.header or {}
    if not header.get("volume"):
        return ""
    what = [f"{header['command']} on {header.get('folder') or header.get('point')}"] if header.get("command") else []
    what += [f"volume {header['volume']}", f"JuiceFS {header.get('version')}"]
    options = ["writeback"] if header.get("writeback") else []
    # The file is not trusted.
    delay_s, cache, uploads = (
        value if isinstance(value := header.get(name), int | float) and value > 0 else 0
        for name in ("upload_delay_s", "cache_bytes", "max_uploads")
    )
    options += [f"upload-delay {format_duration(delay_s)}"] if delay_s else []
    options += [f"cache-size {format_size(int(cache))}"] if cache else []
    options += [f"max-uploads {int(uploads)}"] if uploads else []
    return ", ".join(what) + (f"; mounted with {', '.join(options)}" if options else "")


def file_name(operations: Operations, inode: int) -> str:
    """Return a file's path as far as the log has it, otherwise its inode."""
    if inode == 0:
        return "(none)"
    return operations.paths.get(inode, f"inode {inode}")


def totals(operations: Operations, column: Iterable[int], name: Callable[[int], str]) -> tuple[Total, ...]:
    """Group by the values of a column, which `name` turns into keys; the longest total time first."""
    durations: defaultdict[int, list[int]] = defaultdict(list)
    size_bytes: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    rows = zip(column, operations.duration_us, operations.got, operations.status, strict=True)
    for key, duration_us, got, status in rows:
        durations[key].append(duration_us)
        if got:
            size_bytes[key] += got
        if status:
            failed[key] += 1
    found = [_total(name(key), taken, failed[key], size_bytes[key]) for key, taken in durations.items()]
    return tuple(sorted(found, key=lambda total: (-total.total_us, total.key)))


def _total(key: str, taken: list[int], failed: int, size_bytes: int) -> Total:
    taken.sort()

    def rank(share: float) -> int:
        return taken[max(math.ceil(share * len(taken)) - 1, 0)]

    return Total(
        key=key,
        count=len(taken),
        failed=failed,
        size_bytes=size_bytes,
        total_us=sum(taken),
        p50_us=rank(0.5),
        p95_us=rank(0.95),
        p99_us=rank(0.99),
        max_us=taken[-1],
    )


def _span_us(operations: Operations) -> tuple[int, int]:
    if not operations:
        return 0, 0
    # A damaged duration may reach back before 1970.
    first_us = min(end - took for end, took in zip(operations.end_us, operations.duration_us, strict=True))
    return first_us, max(operations.end_us)


def _under_way(operations: Operations, wall_s: float) -> tuple[float, int]:
    """Return how many operations ran at the same time, on average and at most."""
    starts = sorted(end - took for end, took in zip(operations.end_us, operations.duration_us, strict=True))
    ends = sorted(operations.end_us)
    most = ended = 0
    for begun, start in enumerate(starts, start=1):
        # An operation that ends when another starts does not overlap it.
        while ends[ended] <= start and ended < begun - 1:
            ended += 1
        most = max(most, begun - ended)
    mean = sum(operations.duration_us) / _US / wall_s if wall_s > 0 else 0.0
    return mean, most


def _busy_s(operations: Operations, from_us: int, to_us: int) -> dict[str, float]:
    """Return for each kind the seconds of the span in which at least one was running."""
    spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for name, end, took in zip(operations.name, operations.end_us, operations.duration_us, strict=True):
        start, end_inside = max(end - took, from_us), min(end, to_us)
        # An operation outside the span counts as 0 seconds.
        spans[name].append((start, max(start, end_inside)))
    return {operations.names[name]: _union_us(found) / _US for name, found in spans.items()}


def _union_us(spans: list[tuple[int, int]]) -> int:
    spans.sort()
    total = 0
    reached = spans[0][0]
    for start, end in spans:
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def _counted(trace: Trace) -> Counted | None:
    start, end = (trace.header or {}).get("counters"), (trace.trailer or {}).get("counters")
    if not (_are_numbers(start) and _are_numbers(end) and start and end):
        return None
    try:
        return growth(start, end)
    except ValueError:
        return None


def _are_numbers(counters: object) -> TypeGuard[dict[str, float]]:
    # The file is not trusted.
    return isinstance(counters, dict) and all(isinstance(value, int | float) for value in counters.values())


def _missing(operations: Operations, counted: Counted, from_us: int, to_us: int) -> dict[str, int] | None:
    """Compare the log with the counters, over the span between their two readings.

    An operation is counted shortly before its line is written, so the first line of each thread after the span counts
    too. This can hide up to one missing line per thread, but never reports a missing line that is there.
    """
    if not counted.operations and not counted.operations_sum:
        # Reading the counters is itself counted, so that no recording has a count of 0.
        return None
    names: Counter[int] = Counter()
    late: dict[int, int] = {}
    for name, end, thread in zip(operations.name, operations.end_us, operations.thread, strict=True):
        if from_us <= end <= to_us:
            names[name] += 1
        elif end > to_us:
            late.setdefault(thread, name)
    names.update(late.values())
    logged: Mapping[str, int] = {operations.names[name]: count for name, count in names.items()}
    if not counted.operations:
        # An older client counts only the sum.
        lost = counted.operations_sum - sum(logged.values())
        return {"any": lost} if lost > 0 else {}
    lost_by_kind = {kind: count - logged.get(kind, 0) for kind, count in counted.operations.items()}
    return {kind: lost for kind, lost in lost_by_kind.items() if lost > 0}


def _counted_span_us(trace: Trace) -> tuple[int, int]:
    """Return the span over which operations were counted: between our two openings of the counters' file."""
    operations, header = trace.operations, trace.header or {}
    inode, thread = header.get("stats_inode"), header.get("thread")
    opening = operations.names.index("open") if "open" in operations.names else -1
    # Fall back to any thread: in a container ours has another number.
    found = [at for at, name in enumerate(operations.name) if name == opening and operations.inode[at] == inode]
    marks = [at for at in found if operations.thread[at] == thread] or found
    from_us, to_us = 0, 1 << 64
    if marks:
        from_us = operations.end_us[marks[0]] - operations.duration_us[marks[0]]
    if len(marks) > 1:
        to_us = operations.end_us[marks[-1]]
    return from_us, to_us
