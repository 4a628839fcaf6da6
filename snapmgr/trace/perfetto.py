"""Writes operations as JSON for trace viewers: ui.perfetto.dev, Chrome's about:tracing, speedscope.

The format is the "Trace Event Format" of Chrome's tracing: complete events ("X") with times in microseconds. Events of
one thread must not overlap there, so each lane becomes a thread in the file.
"""

from __future__ import annotations

import json
from array import array
from datetime import UTC, datetime, timedelta
from typing import IO, TYPE_CHECKING

from snapmgr.trace.lanes import Lane, lanes, starts_us

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapmgr.trace.holes import Hole
    from snapmgr.trace.operations import Operations

# All events belong to one process, the mount. Lanes are numbered in the order in which they are to be shown.
_PROCESS = 1
_AT_ONCE = 2000


def write_perfetto(
    operations: Operations, out: IO[bytes], *, holes: Sequence[Hole] = (), title: str = "JuiceFS"
) -> None:
    """Write the operations to a binary file, a few hundred kilobytes at a time.

    Times count from the start of the first operation; its time of day is in "otherData". Holes get a lane of their own.
    """
    starts = starts_us(operations)
    origin_us = min(starts, default=0)
    began = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=origin_us)
    other = {"started": began.replace(tzinfo=None).isoformat(timespec="microseconds"), "operations": len(operations)}
    out.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n'.encode())
    out.write(json.dumps(_named("process_name", 0, {"name": title})).encode())
    waiting: list[str] = [json.dumps(event) for event in _hole_events(holes, origin_us)]
    for number, lane in enumerate(lanes(operations), start=1):
        waiting += (json.dumps(event) for event in _lane_names(lane, number))
        for event in _events(operations, lane, number, starts, origin_us):
            waiting.append(event)
            if len(waiting) >= _AT_ONCE:
                out.write((",\n" + ",\n".join(waiting)).encode())
                waiting.clear()
    out.write("".join(",\n" + event for event in waiting).encode())
    out.write(b"\n]}\n")


def _named(kind: str, number: int, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": number, "args": args}


def _hole_events(holes: Sequence[Hole], origin_us: int) -> Iterator[dict[str, object]]:
    if holes:
        yield _named("thread_name", 0, {"name": "no line in the log: idle, or lines are missing"})
    for hole in holes:
        place = {"ts": hole.from_us - origin_us, "dur": hole.to_us - hole.from_us, "args": {}}
        yield {"ph": "X", "name": "no line", "cat": "hole", "pid": _PROCESS, "tid": 0} | place


def _lane_names(lane: Lane, number: int) -> Iterator[dict[str, object]]:
    beside = f", {lane.number + 1}. at once" if lane.number else ""
    yield _named("thread_name", number, {"name": f"thread {lane.thread}{beside}"})
    yield _named("thread_sort_index", number, {"sort_index": number})


def _events(operations: Operations, lane: Lane, number: int, starts: array[int], origin_us: int) -> Iterator[str]:
    names = [json.dumps(name) for name in operations.names]
    statuses = [json.dumps(status) for status in operations.statuses]
    # Escape names once per file, not once per operation.
    files: dict[int, str] = {}
    column = operations
    for row in lane.rows:
        inode = column.inode[row]
        if inode not in files:
            path = operations.paths.get(inode)
            files[inode] = f'"inode":{inode}' + (f',"file":{json.dumps(path)}' if path is not None else "")
        args = files[inode] if inode else ""
        if column.size[row] or column.got[row]:
            args += f',"offset":{column.offset[row]},"size":{column.size[row]},"got":{column.got[row]}'
        if column.status[row]:
            args += f',"status":{statuses[column.status[row]]}'
        yield (
            f'{{"ph":"X","name":{names[column.name[row]]},"cat":"juicefs","pid":{_PROCESS},"tid":{number},'
            f'"ts":{starts[row] - origin_us},"dur":{column.end_us[row] - starts[row]},"args":{{{args.lstrip(",")}}}}}'
        )
