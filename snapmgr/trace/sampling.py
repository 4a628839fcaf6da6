"""Samples a mount's counters during a recording, and turns the samples into series for the page."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Self

from snapmgr.contract.errors import SnapmgrError

if TYPE_CHECKING:
    from snapmgr.trace.accesslog import Trace
    from snapmgr.trace.mounted import Mounted

_EVERY_S = 1.0
# A longer recording is sampled less often.
_MOST = 600
_JOIN_WITHIN_S = 5.0
_US = 1_000_000
_LARGEST = 1 << 63
_FIELDS = {
    "gets": "juicefs_object_request_durations_histogram_seconds_GET_total",
    "get_bytes": "juicefs_object_request_data_bytes_GET",
    "puts": "juicefs_object_request_durations_histogram_seconds_PUT_total",
    "put_bytes": "juicefs_object_request_data_bytes_PUT",
    "staged_blocks": "juicefs_staging_blocks",
    "staged_bytes": "juicefs_staging_block_bytes",
}
_Unit = Literal["bytes/s", "bytes"]


class Sampler(threading.Thread):
    """Reads the counters once a second, in a thread of its own, from `start` until `end`."""

    def __init__(self, mount: Mounted) -> None:
        """Take the mount; without counters nothing is sampled."""
        super().__init__(name="sampler", daemon=True)
        self.samples: list[dict[str, float]] = []
        self._mount = mount
        self._done = threading.Event()

    def __enter__(self) -> Self:
        """Start it."""
        if self._mount.stats_inode is not None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it. A client that hangs is not waited for."""
        self._done.set()
        if self.is_alive():
            self.join(_JOIN_WITHIN_S)

    def run(self) -> None:
        """Sample until the end."""
        pause_s = _EVERY_S
        while True:
            last = self._done.is_set()
            with suppress(SnapmgrError):
                counters = self._mount.counters()
                found = {field: counters.get(name, 0.0) for field, name in _FIELDS.items()}
                self.samples.append({"at_us": now_us()} | found)
            if last:
                return
            if len(self.samples) >= _MOST:
                del self.samples[1::2]
                pause_s *= 2
            self._done.wait(pause_s)


def now_us() -> int:
    """Return the time as the log has it: microseconds since 1970 in local time."""
    offset = datetime.now().astimezone().utcoffset()
    return time.time_ns() // 1000 + (int(offset.total_seconds()) * _US if offset else 0)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity over time, in steps."""

    name: str
    unit: _Unit
    words: str
    """Its sum, or its largest value, for people."""
    steps: tuple[tuple[int, int, float], ...]
    """From and to, microseconds as in the log, and the value."""


def series(trace: Trace) -> tuple[Series, ...]:
    """Return downloads, uploads and staged data of a recording; none without samples."""
    samples = _checked((trace.trailer or {}).get("samples"))
    found = []
    for name, count, size in (("GET", "gets", "get_bytes"), ("PUT", "puts", "put_bytes")):
        steps = tuple(
            (a["at_us"], b["at_us"], max(b[size] - a[size], 0.0) / (b["at_us"] - a["at_us"]) * _US)
            for a, b in pairwise(samples)
        )
        requests = round(max(samples[-1][count] - samples[0][count], 0)) if samples else 0
        found.append(Series(name=name, unit="bytes/s", words=f"{requests:,} requests", steps=_typed(steps)))
    staged = tuple((a["at_us"], b["at_us"], b["staged_bytes"]) for a, b in pairwise(samples))
    blocks = round(max((sample["staged_blocks"] for sample in samples), default=0))
    found.append(Series(name="staged", unit="bytes", words=f"at most {blocks:,} blocks", steps=_typed(staged)))
    return tuple(one for one in found if any(value for _, _, value in one.steps))


def _typed(steps: tuple[tuple[float, float, float], ...]) -> tuple[tuple[int, int, float], ...]:
    return tuple((int(begin), int(end), value) for begin, end, value in steps)


def _checked(samples: Any) -> list[dict[str, float]]:  # noqa: ANN401 - the file is not trusted
    """Return the samples that are whole, in order of time."""
    found: list[dict[str, float]] = []
    for sample in samples if isinstance(samples, list) else ():
        names = ("at_us", *_FIELDS)
        whole = isinstance(sample, dict) and all(_is_number(sample.get(name)) for name in names)
        if whole and (not found or sample["at_us"] > found[-1]["at_us"]):
            found.append(sample)
    return found


def _is_number(value: object) -> bool:
    # Not a NaN, for which this is false, either.
    return isinstance(value, int | float) and 0 <= value < _LARGEST
