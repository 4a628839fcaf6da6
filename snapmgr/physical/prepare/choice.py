"""Chooses the way to prepare a backup from sizes and free space (pure).

Storage behind a client program (JuiceFS) asks the network for every page. For such storage the order is: a copy on
local scratch if it fits, else an overlay if the changed files fit, else a clone in the storage. In 16 measured settings
the copy was the fastest way or close to it (docs/explanation/prepare-measurements.md). Local storage is as fast as
scratch and its clones cost nothing, so a clone comes first there.
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from snapmgr.contract.errors import StorageError
from snapmgr.contract.units import format_size

Strategy = Literal["storage", "scratch", "overlay"]
ResultPlace = Literal["scratch", "storage"]
Way = Literal["storage", "writeback", "scratch", "overlay"]
"""A strategy; "writeback" is "storage" through a private mount that uploads later."""

NAMES: dict[Way, str] = {
    "storage": "on a clone in the storage",
    "writeback": "on a clone through a private mount with writeback",
    "scratch": "copied to scratch",
    "overlay": "on an overlay over the backup",
}
"""The ways, in words."""

PAGE_BYTES = 16 << 10
# 128 MB of redo changed 32,000 of 131,000 pages: one page for each 3.6 KB of redo log while most are changed once.
_REDO_BYTES_PER_PAGE = 3657
_SPARE_BYTES = 64 << 20


class Facts(Struct, frozen=True, kw_only=True):
    """Sizes, free space and abilities: the input of the choice."""

    file_bytes: tuple[int, ...]
    """Size of each file of the backup."""
    redo_bytes: int
    remote: bool
    """Whether the storage is behind a client program."""
    scratch_free_bytes: int
    storage_free_bytes: int
    can_clone: bool
    can_remount: bool
    """Whether the storage can be mounted privately with other options."""
    can_overlay: bool

    @property
    def data_bytes(self) -> int:
        """Size of all files together."""
        return sum(self.file_bytes)

    @property
    def changed_bytes(self) -> int:
        """Approximate size of the pages that the redo log changes."""
        return touched_pages(self.data_bytes, self.redo_bytes) * PAGE_BYTES


class Choice(Struct, frozen=True, kw_only=True):
    """The chosen way, and why."""

    way: Way
    result: ResultPlace
    why: str
    scratch_needed_bytes: int
    storage_needed_bytes: int


def touched_pages(data_bytes: int, redo_bytes: int) -> int:
    """Estimate how many pages a redo log changes: pages are random, so a large log changes many of them repeatedly."""
    pages = data_bytes / PAGE_BYTES
    if pages <= 0 or redo_bytes <= 0:
        return 0
    return max(1, round(pages * -math.expm1(-redo_bytes / _REDO_BYTES_PER_PAGE / pages)))


def touched_bytes(file_bytes: tuple[int, ...], pages: int) -> int:
    """Return the size of the files that hold one of `pages` random pages: an overlay copies these files to scratch."""
    total = sum(file_bytes)
    if not total or not pages:
        return 0
    return round(sum(size * -math.expm1(pages * math.log1p(-min(size / total, 1 - 1e-12))) for size in file_bytes))


def choose(
    facts: Facts,
    *,
    source: str,
    strategy: Strategy | None = None,
    result: ResultPlace | None = None,
    way: Way | None = None,
) -> Choice:
    """Return the first possible way.

    Args:
        facts: sizes, free space and abilities.
        source: the backup, for the error.
        strategy: allow only ways of this strategy.
        result: where the result must lie; None: where the way leaves it.
        way: allow only this way.

    Raises StorageError, with the reasons, if no way is possible.
    """
    order: tuple[Way, ...] = ("scratch", "overlay", "writeback", "storage")
    if not facts.remote:
        order = ("storage", "scratch", "overlay", "writeback")
    reasons: dict[Way, str] = {}
    for one in order:
        if strategy not in (None, strategy_of(one)) or way not in (None, one):
            continue
        obstacle = _obstacle(one, facts, result)
        if obstacle is None:
            skipped = "".join(f"; not {NAMES[other]}: {why}" for other, why in reasons.items() if other != "writeback")
            scratch_bytes, storage_bytes = needed_bytes(one, facts, result)
            left: ResultPlace = result or ("scratch" if one == "scratch" else "storage")
            return Choice(
                way=one,
                result=left,
                why=f"{NAMES[one]}{skipped}",
                scratch_needed_bytes=scratch_bytes,
                storage_needed_bytes=storage_bytes,
            )
        reasons[one] = obstacle
    obstacles = "; ".join(f"{NAMES[one]}: {why}" for one, why in reasons.items() if way or one != "writeback")
    raise StorageError(
        f"{source} cannot be prepared here: {obstacles}", hint=_remedy(facts, strategy=strategy, result=result, way=way)
    )


def strategy_of(way: Way) -> Strategy:
    """Return the strategy that a way belongs to."""
    return "storage" if way == "writeback" else way


def needed_bytes(way: Way, facts: Facts, result: ResultPlace | None) -> tuple[int, int]:
    """Return how much scratch space and how much of the storage a way needs."""
    scratch_bytes = {
        "scratch": round(1.02 * facts.data_bytes),
        "overlay": round(1.02 * touched_bytes(facts.file_bytes, touched_pages(facts.data_bytes, facts.redo_bytes))),
        "writeback": 2 * facts.changed_bytes,
        "storage": 0,
    }[way]
    in_storage = way != "scratch" or result == "storage"
    return (
        scratch_bytes + _SPARE_BYTES if way != "storage" else 0,
        facts.changed_bytes + _SPARE_BYTES if in_storage else 0,
    )


def _obstacle(way: Way, facts: Facts, result: ResultPlace | None) -> str | None:
    """Return why a way is not possible here; None if it is."""
    scratch_bytes, storage_bytes = needed_bytes(way, facts, result)
    obstacles = (
        (
            way == "overlay" and result == "scratch",
            "an overlay lasts no longer than its mount: its result goes to the storage",
        ),
        (way == "overlay" and not facts.can_overlay, "mounting needs root"),
        (way != "scratch" and result == "scratch", "its result stays in the storage"),
        (storage_bytes > 0 and not facts.can_clone, "the storage cannot clone folders"),
        (way == "writeback" and not facts.can_remount, "the storage cannot be mounted privately"),
        (
            scratch_bytes > facts.scratch_free_bytes,
            f"{format_size(scratch_bytes)} of scratch space are needed, "
            f"{format_size(facts.scratch_free_bytes)} are free",
        ),
        (
            storage_bytes > facts.storage_free_bytes,
            f"{format_size(storage_bytes)} of space in the storage are needed, "
            f"{format_size(facts.storage_free_bytes)} are free",
        ),
    )
    return next((why for is_so, why in obstacles if is_so), None)


def _remedy(facts: Facts, *, strategy: Strategy | None, result: ResultPlace | None, way: Way | None) -> str:
    if way == "writeback" and not facts.can_remount:
        return "leave --mount-option out: it is for storage behind a client program (JuiceFS)"
    if not facts.can_clone and (strategy in ("storage", "overlay") or result == "storage"):
        return "XFS, btrfs and JuiceFS clone folders; elsewhere a backup is prepared on scratch (--strategy scratch)"
    return "name a folder with more room on a local disk (--scratch), or make room in the storage"
