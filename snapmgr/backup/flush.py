"""Flushes a storage until little is dirty: dirty data that remain are written while the lock is held."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapmgr.contract.backend import Armed

_TRIES = 8
_GAIN = 0.9


def flush_until_short(armed: Armed, target_s: float) -> None:
    """Flush until a flush takes no longer than `target_s`.

    Give up when a flush is not clearly shorter than the one before: then somebody dirties data as fast as the storage
    writes them, and further flushes only delay the snapshot.
    """
    last_s = float("inf")
    for _ in range(_TRIES):
        start = time.monotonic()
        armed.sync()
        took_s = time.monotonic() - start
        if took_s <= target_s or took_s > last_s * _GAIN:
            return
        last_s = took_s
