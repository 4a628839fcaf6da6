"""Reads the counters of a JuiceFS mount (its file ``.stats``), and computes their growth between two readings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_OPERATIONS = "juicefs_fuse_ops_total_"
_SECONDS = "juicefs_fuse_ops_durations_seconds_"
_ALL_OPERATIONS = "juicefs_fuse_ops_durations_histogram_seconds_total"
_REQUESTS = "juicefs_object_request_durations_histogram_seconds_"
_REQUEST_BYTES = "juicefs_object_request_data_bytes_"


def read_counters(text: str) -> dict[str, float]:
    """Given the text of ``.stats``, return its values by name; other lines are ignored."""
    counters = {}
    for line in text.splitlines():
        name, _, number = line.rpartition(" ")
        try:
            value = float(number)
        except ValueError:
            continue
        if name and " " not in name and math.isfinite(value):
            counters[name] = value
    return counters


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Growth of a mount's counters between two readings. A counter that the mount does not have is 0."""

    operations: dict[str, int]
    """Number of each kind, named as in the log; empty if the mount counts only their sum."""
    operations_sum: int
    operation_s: dict[str, float]
    """Seconds that each kind took; concurrent operations are added up."""
    read_bytes: int
    written_bytes: int
    gets: int
    get_bytes: int
    get_s: float
    puts: int
    put_bytes: int
    put_s: float
    cache_hits: int
    cache_misses: int
    evictions: int
    compactions: int
    compaction_bytes: int
    cpu_s: float
    staged_bytes: int
    """Written to the cache folder and not uploaded yet, at the end."""


def growth(start: Mapping[str, float], end: Mapping[str, float]) -> Counted:
    """Return the growth between two readings.

    Raises ValueError if the mount was remounted, which resets its counters.
    """
    if end.get("juicefs_uptime", 0.0) < start.get("juicefs_uptime", 0.0):
        raise ValueError("the volume was remounted between the two readings of its counters")

    def grown(name: str) -> float:
        return max(end.get(name, 0.0) - start.get(name, 0.0), 0.0)

    def by_kind(prefix: str) -> dict[str, float]:
        return {name.removeprefix(prefix): grown(name) for name in end if name.startswith(prefix)}

    return Counted(
        operations={kind: round(count) for kind, count in by_kind(_OPERATIONS).items()},
        operations_sum=round(grown(_ALL_OPERATIONS)),
        operation_s=by_kind(_SECONDS),
        read_bytes=round(grown("juicefs_fuse_read_size_bytes_sum")),
        written_bytes=round(grown("juicefs_fuse_written_size_bytes_sum")),
        gets=round(grown(f"{_REQUESTS}GET_total")),
        get_bytes=round(grown(f"{_REQUEST_BYTES}GET")),
        get_s=grown(f"{_REQUESTS}GET_sum"),
        puts=round(grown(f"{_REQUESTS}PUT_total")),
        put_bytes=round(grown(f"{_REQUEST_BYTES}PUT")),
        put_s=grown(f"{_REQUESTS}PUT_sum"),
        cache_hits=round(grown("juicefs_blockcache_hits")),
        cache_misses=round(grown("juicefs_blockcache_miss")),
        evictions=round(grown("juicefs_blockcache_evicts")),
        compactions=round(grown("juicefs_compact_size_histogram_bytes_total")),
        compaction_bytes=round(grown("juicefs_compact_size_histogram_bytes_sum")),
        cpu_s=grown("juicefs_process_cpu_seconds_total"),
        staged_bytes=round(end.get("juicefs_staging_block_bytes", 0.0)),
    )
