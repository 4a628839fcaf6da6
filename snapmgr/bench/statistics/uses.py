"""Defines what a storage is wanted for, and says in words what its snapshots promise. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapmgr.contract.records import Capabilities

UseName = Literal["oltp", "staging", "files"]


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a storage is wanted for."""

    title: str
    """As the object of "for": "a database with snapshots"."""
    without: str = ""
    """The same without snapshots: "a database without snapshots"; "" if snapshots are what it is about."""
    scenarios: tuple[str, ...]
    """The scenarios that say something about it."""
    server: bool = False
    """Whether a running server writes to it, so that it matters how a snapshot is kept consistent."""


USES: Mapping[UseName, Use] = {
    "oltp": Use(
        title="a database with snapshots",
        without="a database without snapshots",
        scenarios=("random-update", "snapshot-ops", "oltp", "oltp-threads", "aging", "innodb-io"),
        server=True,
    ),
    "staging": Use(title="preparing physical backups", scenarios=("prepare",)),
    "files": Use(title="a server with many small files", scenarios=("blog",)),
}


def use_of(scenario: str) -> UseName:
    """Return what a scenario says something about; a database if it is unknown."""
    return next((name for name, use in USES.items() if scenario in use.scenarios), "oltp")


def guarantee_words(known: Capabilities, *, server: bool) -> str:
    """Return a backend's guarantee as the end of a sentence."""
    words = (
        "a snapshot is atomic for the whole volume"
        if known.atomicity == "volume"
        else "a snapshot is atomic for each file only"
    )
    if server:
        words += f"; a running server needs {LOCKS[lock_of(known)]}"
    survives = "survives" if known.survives_origin else "does not survive"
    return f"{words}; it {survives} the deletion of its origin"


LockName = Literal["short", "frozen"]
LOCKS: Mapping[LockName, str] = {
    "short": "a short lock, or none if all its tables are InnoDB",
    "frozen": 'its process frozen during the copy (quiesce = "freeze-process"), or must be stopped',
}


def lock_of(known: Capabilities) -> LockName:
    """Return what keeps a snapshot of a running server consistent: see `snapmgr.source.volumes.choose_backend`."""
    return "short" if known.atomicity == "volume" else "frozen"
