"""How long each way to prepare a backup would take, and which one to go: pure, from what was measured.

Calibrated by a backup of 2.1 GB with 128 MB of redo on JuiceFS, cold cache, 15 ms a GET and 25 ms a PUT: 103-111 s on a
clone, 29-37 s on one with writeback, 4-5.5 s for twelve copies at once and 2 s for the prepare on a local disk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from snapmgr.units import format_duration, format_size

Strategy = Literal["storage", "scratch", "overlay"]
Result = Literal["scratch", "storage"]
Way = Literal["storage", "writeback", "scratch", "overlay"]
"""A strategy as it is forecast: "writeback" is "storage" through a private mount that uploads later."""

PAGE_BYTES = 16 << 10
BLOCK_BYTES = 128 << 10
"""What is compared and written back at once."""
COPY_THREADS = 12

# 128 MB of redo touched 32,000 of 131,000 pages: one for each 3.6 KB of redo as long as most are touched once.
_REDO_BYTES_PER_PAGE = 3657
_FIXED_S = 0.3
# A page applied on a local disk, its share of reading the redo log included.
_PAGE_S = 60e-6
# The same behind a client program: its processor time, and how much of a request's latency one page waits for.
_CLIENT_PAGE_S, _GETS_WAITED = 0.5e-3, 0.033
_PUT_PAGE_S, _PUTS_WAITED = 0.5e-3, 0.072
# Compaction reads and writes 12 times the pages; with writeback and a delay all pages are uploaded at the end.
_COMPACTED, _UPLOADS = 12, 20
# What one random read makes the client fetch.
_FETCH_BYTES = 256 << 10
_MOUNT_S = 2.0
_HASH_BYTES_S = 800e6
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What was measured of a storage and of the scratch space."""

    read_latency_s: float
    """A small read that no cache has."""
    write_latency_s: float
    """A small write until it is durable."""
    stream_bytes_s: float
    """One reader."""
    total_bytes_s: float
    """Many readers together."""
    scratch_bytes_s: float
    """Writing to the scratch space until it is durable."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the forecast stands on."""

    file_bytes: tuple[int, ...]
    """Size of each file of the backup."""
    redo_bytes: int
    speeds: Speeds
    remote: bool
    """Whether the storage is behind a client program, where each page is a request of its own."""
    scratch_free_bytes: int
    storage_free_bytes: int
    can_clone: bool
    can_remount: bool
    """Whether it can be mounted privately with other options."""
    can_overlay: bool

    @property
    def data_bytes(self) -> int:
        """Of all files together."""
        return sum(self.file_bytes)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one way would take."""

    way: Way
    seconds: float
    parts: tuple[tuple[str, float], ...]
    """Steps in words, and the seconds of each."""
    obstacle: str | None = None
    """Why it cannot be gone here; None if it can."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The way to go, and why."""

    way: Way
    result: Result
    why: str
    forecasts: tuple[Forecast, ...]
    """Of every way, the shortest first."""


def touched_pages(data_bytes: int, redo_bytes: int) -> int:
    """Return about how many pages a redo log changes: random ones, so that with much redo many are hit again."""
    pages = data_bytes / PAGE_BYTES
    if pages <= 0 or redo_bytes <= 0:
        return 0
    return max(1, round(pages * -math.expm1(-redo_bytes / _REDO_BYTES_PER_PAGE / pages)))


def touched_bytes(file_bytes: tuple[int, ...], pages: int) -> int:
    """Return the size of the files that hold one of `pages` random pages: what an overlay copies up."""
    total = sum(file_bytes)
    if not total or not pages:
        return 0
    return round(sum(size * -math.expm1(pages * _log_of_rest(size / total)) for size in file_bytes))


def _log_of_rest(share: float) -> float:
    return math.log1p(-min(share, 1 - 1e-12))


def changed_block_bytes(data_bytes: int, pages: int) -> int:
    """Return the size of the blocks that hold one of `pages` random pages: what is written back."""
    blocks = max(data_bytes / BLOCK_BYTES, 1.0)
    return round(min(blocks * -math.expm1(-pages / blocks) * BLOCK_BYTES, data_bytes))


def forecast(facts: Facts, result: Result | None = None) -> tuple[Forecast, ...]:
    """Return what each way would take, the shortest possible one first; `result` as in `choose`."""
    pages = touched_pages(facts.data_bytes, facts.redo_bytes)
    every = (
        _storage(facts, pages, result),
        _writeback(facts, pages, result),
        _scratch(facts, pages, result),
        _overlay(facts, pages, result),
    )
    return tuple(sorted(every, key=lambda one: (one.obstacle is not None, one.seconds)))


def _made(way: Way, parts: dict[str, float], obstacle: str | None) -> Forecast:
    return Forecast(way=way, seconds=sum(parts.values()), parts=tuple(parts.items()), obstacle=obstacle)


def _clone_s(facts: Facts) -> float:
    return 0.1 + len(facts.file_bytes) * 50e-6


def _not_there(facts: Facts, pages: int, result: Result | None) -> str | None:
    if result == "scratch":
        return "its result stays in the storage"
    if not facts.can_clone:
        return "the storage cannot clone folders"
    if facts.storage_free_bytes < pages * PAGE_BYTES + _SPARE_BYTES:
        return f"the storage has {format_size(facts.storage_free_bytes)} free"
    return None


def _storage(facts: Facts, pages: int, result: Result | None) -> Forecast:
    speeds = facts.speeds
    changed = pages * PAGE_BYTES
    if not facts.remote:
        # Recovery asks for many pages at once; a disk answers eight or more.
        reading = pages * speeds.read_latency_s / 8
        applied = max(pages * _PAGE_S, reading, 2 * changed / speeds.total_bytes_s)
    else:
        waited = pages * (
            _CLIENT_PAGE_S + _PUT_PAGE_S + _GETS_WAITED * speeds.read_latency_s + _PUTS_WAITED * speeds.write_latency_s
        )
        # Either direction has the bandwidth for itself; what is compacted is read and written.
        moved = _fetched(facts, pages) + _COMPACTED * changed
        applied = max(waited, moved / speeds.total_bytes_s)
    parts = {"clone": _clone_s(facts), "prepare there": applied + _FIXED_S}
    return _made("storage", parts, _not_there(facts, pages, result))


def _fetched(facts: Facts, pages: int) -> int:
    return min(facts.data_bytes, pages * _FETCH_BYTES)


def _writeback(facts: Facts, pages: int, result: Result | None) -> Forecast:
    speeds = facts.speeds
    changed = pages * PAGE_BYTES
    waited = pages * (_CLIENT_PAGE_S + _GETS_WAITED * speeds.read_latency_s)
    applied = max(waited, _fetched(facts, pages) / speeds.total_bytes_s, changed / speeds.scratch_bytes_s)
    # The client is mounted once more, without the delay.
    left = _MOUNT_S + max(pages * speeds.write_latency_s / _UPLOADS, changed / speeds.total_bytes_s)
    parts = {"clone": _clone_s(facts), "mount": _MOUNT_S, "prepare there": applied + _FIXED_S, "upload": left}
    obstacle = _not_there(facts, pages, result)
    if obstacle is None and not facts.can_remount:
        obstacle = "the storage cannot be mounted privately"
    if obstacle is None and facts.scratch_free_bytes < 2 * changed + _SPARE_BYTES:
        obstacle = f"{format_size(facts.scratch_free_bytes)} are free for what is not yet uploaded"
    return _made("writeback", parts, obstacle)


def _scratch(facts: Facts, pages: int, result: Result | None) -> Forecast:
    speeds = facts.speeds
    rate = min(speeds.total_bytes_s, COPY_THREADS * speeds.stream_bytes_s, speeds.scratch_bytes_s)
    opening = len(facts.file_bytes) * (speeds.read_latency_s + 0.5e-3) / COPY_THREADS
    parts = {"copy": max(facts.data_bytes / rate, opening), "prepare locally": _local_s(facts, pages)}
    obstacle = None
    needed = round(1.02 * facts.data_bytes) + _SPARE_BYTES
    if facts.scratch_free_bytes < needed:
        obstacle = (
            f"{format_size(needed)} of scratch space are wanted, {format_size(facts.scratch_free_bytes)} are free"
        )
    if result == "storage":
        parts |= _back(facts, changed_block_bytes(facts.data_bytes, pages), compared=True)
        obstacle = obstacle or _not_there(facts, pages, result)
    return _made("scratch", parts, obstacle)


def _overlay(facts: Facts, pages: int, result: Result | None) -> Forecast:
    speeds = facts.speeds
    copied = touched_bytes(facts.file_bytes, pages)
    rate = min(speeds.stream_bytes_s, speeds.total_bytes_s, speeds.scratch_bytes_s)
    parts = {"copy up": copied / rate, "prepare locally": _local_s(facts, pages)}
    obstacle = None if facts.can_overlay else "mounting needs root"
    if result == "scratch":
        obstacle = "an overlay lasts no longer than its mount: its result goes to the storage"
    needed = round(1.02 * copied) + _SPARE_BYTES
    if obstacle is None and facts.scratch_free_bytes < needed:
        obstacle = (
            f"{format_size(needed)} of scratch space are wanted, {format_size(facts.scratch_free_bytes)} are free"
        )
    if result != "scratch":
        parts |= _back(facts, copied, compared=False)
        obstacle = obstacle or _not_there(facts, pages, result)
    return _made("overlay", parts, obstacle)


def _local_s(facts: Facts, pages: int) -> float:
    return max(pages * _PAGE_S, pages * PAGE_BYTES / facts.speeds.scratch_bytes_s) + _FIXED_S


def _back(facts: Facts, changed_bytes: int, *, compared: bool) -> dict[str, float]:
    looked = facts.data_bytes / _HASH_BYTES_S if compared else 0.0
    # Written, and read back once.
    moved = 2 * changed_bytes / facts.speeds.total_bytes_s
    return {"clone": _clone_s(facts), "write back": looked + moved + facts.speeds.write_latency_s}


def choose(
    facts: Facts, *, strategy: Strategy | None = None, result: Result | None = None, way: Way | None = None
) -> Choice | None:
    """Return the shortest possible way and why, or None if there is none.

    Args:
        facts: what was measured.
        strategy: only ways of this one.
        way: only this one.
        result: where the result is to lie; None: wherever the way leaves it.
    """
    found = forecast(facts, result)
    possible = [
        one
        for one in found
        if one.obstacle is None and strategy in (None, strategy_of(one.way)) and way in (None, one.way)
    ]
    if not possible:
        return None
    best = possible[0]
    left: Result = result or ("scratch" if best.way == "scratch" else "storage")
    return Choice(way=best.way, result=left, why=_why(facts, best, found), forecasts=found)


def remedy(facts: Facts, *, strategy: Strategy | None, result: Result | None, way: Way | None) -> str:
    """Return what helps where `choose` finds nothing."""
    if way == "writeback" and not facts.can_remount:
        return "leave --mount-option out: it is for storage behind a client program (JuiceFS)"
    if not facts.can_clone and (strategy in ("storage", "overlay") or result == "storage"):
        return "XFS, btrfs and JuiceFS clone folders; elsewhere a backup is prepared on scratch (--strategy scratch)"
    return "name a folder with more room on a local disk (--scratch), or make room in the storage"


def strategy_of(way: Way) -> Strategy:
    """Return the strategy that a way belongs to."""
    return "storage" if way == "writeback" else way


NAMES: dict[Way, str] = {
    "storage": "on a clone in the storage",
    "writeback": "on a clone through a private mount with writeback",
    "scratch": "copied to scratch",
    "overlay": "on an overlay over the backup",
}
"""The ways, in words."""


def _why(facts: Facts, best: Forecast, found: tuple[Forecast, ...]) -> str:
    pages = touched_pages(facts.data_bytes, facts.redo_bytes)
    steps = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in best.parts)
    others = ", ".join(
        f"{NAMES[one.way]} {'is not possible: ' + one.obstacle if one.obstacle else format_duration(one.seconds)}"
        for one in found
        if one.way != best.way and (one.obstacle is None or one.way == "scratch")
    )
    speeds = facts.speeds
    return (
        f"{NAMES[best.way]}: about {format_duration(best.seconds)} ({steps}) for {format_size(facts.data_bytes)} with "
        f"{format_size(facts.redo_bytes)} of redo, about {pages} pages; the storage reads "
        f"{format_size(round(speeds.total_bytes_s))}/s, with {format_duration(speeds.read_latency_s)} latency"
        + (f"; {others}" if others else "")
    )
