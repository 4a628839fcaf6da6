"""Remembers interrupted clones, whose detached parts can be removed only a day later.

A clone grows out of sight and appears when it is complete. If its client dies earlier, its parts stay in the metadata
engine ("detached nodes"), and ``juicefs gc --delete`` removes them only when they are 24 hours old (cmd/gc.go). So a
file of the store keeps the times until then.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.api import StorageError, format_duration
from snapmgr.api.copystore import read as read_file
from snapmgr.api.copystore import write as write_file

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "interrupted.json"
_DAY_S = 24 * 3600.0
# The clone may have continued for a while after its copy folder was found unfinished.
_DUE_S = _DAY_S + 600.0
_KEPT_AT_MOST = 100


def note(store_fd: int, now: float) -> None:
    """Record that a clone may have been interrupted before `now`. Raises StorageError."""
    times = read(store_fd)
    _write(store_fd, [*times, now][-_KEPT_AT_MOST:])


def read(store_fd: int) -> list[float]:
    """Return the times at which interrupted clones were found that still need cleanup."""
    with suppress(OSError, ValueError, TypeError):
        return sorted(float(time) for time in json.loads(read_file(store_fd, NAME)))
    return []


def is_due(times: Sequence[float], now: float) -> bool:
    """Return whether the oldest of them can be cleaned up."""
    return any(now - time >= _DUE_S for time in times)


def forget_due(store_fd: int, now: float) -> None:
    """Forget the clones that were cleaned up at `now`. Raises StorageError."""
    _write(store_fd, [time for time in read(store_fd) if now - time < _DUE_S])


def warning(times: Sequence[float], now: float) -> str | None:
    """Return a warning about clones that must wait for cleanup; None without any."""
    if not times:
        return None
    left_s = max(times[0] + _DUE_S - now, 0.0)
    when = f"in {format_duration(left_s)}" if left_s else "now"
    what = "an interrupted clone may have left metadata that nothing refers to"
    return f"{what}; `juicefs gc --delete` can remove it {when}"


def _write(store_fd: int, times: list[float]) -> None:
    try:
        write_file(store_fd, NAME, json.dumps(times).encode())
    except StorageError as error:
        raise StorageError(f"cannot note an interrupted clone: {error.message}", hint=error.hint) from error
