"""Packs operations as text for the page: columns with their bytes sorted by significance, deflated, in base64.

Decoded and inflated, the result is the length of a JSON document (4 bytes, little-endian), the document, and the
columns in the order in which the document names them. A column of width w is w runs of bytes, the lowest bytes of all
numbers first: high bytes are nearly always the same and compress to almost nothing. page/unpack.js reads it.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence

from snapmgr.trace.lanes import Lane, lanes, starts_us
from snapmgr.trace.operations import Operations
from snapmgr.trace.sampling import Series

_WIDTHS = ((1 << 8, "B"), (1 << 16, "H"), (1 << 32, "I"), (1 << 64, "Q"))
# Numbers in JavaScript are exact up to this one.
_MOST = (1 << 53) - 1


def pack(
    operations: Operations,
    holes: Sequence[tuple[int, int, str]] = (),
    series: Sequence[Series] = (),
    *,
    compared: bool = False,
) -> str:
    """Return all operations as base64: about 8 bytes each.

    `holes` are the spans in which lines may be missing: microseconds from and to, in the clock of the operations, and
    the beginning of the names of the threads that they concern. `series` are drawn above the threads. `compared`: two
    recordings, each from time 0 on.
    """
    # Threads with names lie together: a comparison has those of the first recording first.
    order = sorted(lanes(operations), key=lambda lane: operations.threads.get(lane.thread, "")[:1])
    starts = starts_us(operations)
    origin_us = min(starts, default=0)
    rows = array("Q", (row for lane in order for row in lane.rows))
    inodes = list(dict.fromkeys(operations.inode))
    place = {inode: number for number, inode in enumerate(inodes)}
    columns = {
        "start": _column(_steps(starts, order, origin_us)),
        "duration": _column(operations.end_us[row] - starts[row] for row in rows),
        "name": _column(map(operations.name.__getitem__, rows)),
        "file": _column(place[operations.inode[row]] for row in rows),
        "offset": _column(map(operations.offset.__getitem__, rows)),
        "size": _column(map(operations.size.__getitem__, rows)),
        "got": _column(map(operations.got.__getitem__, rows)),
        "status": _column(map(operations.status.__getitem__, rows)),
    }
    head = {
        "count": len(rows),
        "origin_us": origin_us,
        "names": operations.names,
        "statuses": operations.statuses,
        "lanes": [[lane.thread, lane.number, len(lane.rows)] for lane in order],
        # As text: an inode may be larger than JavaScript's exact numbers.
        "files": [[str(inode), operations.paths.get(inode, "")] for inode in inodes],
        "threads": operations.threads,
        "compared": compared,
        "series": [
            {"name": one.name, "unit": one.unit, "words": one.words, "steps": _steps_of(one, origin_us)}
            for one in series
        ],
        "holes": [[from_us - origin_us, to_us - origin_us, threads] for from_us, to_us, threads in holes],
        "columns": [[name, width] for name, (width, _) in columns.items()],
    }
    document = json.dumps(head, separators=(",", ":")).encode()
    deflate = zlib.compressobj(level=6)
    parts = [deflate.compress(len(document).to_bytes(4, "little") + document)]
    parts += (deflate.compress(data) for _, data in columns.values())
    parts.append(deflate.flush())
    return base64.b64encode(b"".join(parts)).decode()


def _steps_of(series: Series, origin_us: int) -> list[tuple[int, int, int]]:
    return [(begin - origin_us, end - origin_us, round(value)) for begin, end, value in series.steps]


def _steps(starts: array[int], order: list[Lane], origin_us: int) -> Iterable[int]:
    """Yield each start as the time since the one before it in its lane."""
    for lane in order:
        last = origin_us
        for row in lane.rows:
            yield starts[row] - last
            last = starts[row]


def _column(numbers: Iterable[int]) -> tuple[int, bytes]:
    """Return a column's width in bytes, and its bytes by significance."""
    wide = array("Q", numbers)
    most = max(wide, default=0)
    if most > _MOST:
        wide = array("Q", (min(number, _MOST) for number in wide))
    code = next(code for limit, code in _WIDTHS if most < limit)
    narrow = wide if code == "Q" else array(code, wide)
    if sys.byteorder == "big":
        narrow.byteswap()
    data, width = narrow.tobytes(), narrow.itemsize
    return width, b"".join(data[weight::width] for weight in range(width))
