"""What is asked of a prepare, what it would do, and what it has done: the records of `snapmgr.stage.preparing`."""

from __future__ import annotations

from dataclasses import dataclass, field

from snapmgr.stage.backupfolder import Backup
from snapmgr.stage.forecast import Choice, Facts, Result, Strategy, Way
from snapmgr.stage.inplace import Settings
from snapmgr.stage.place import Place
from snapmgr.stage.writeback import Written


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is wanted."""

    source: str
    """Folder of a finished backup; only read. Absolute."""
    target: str | None = None
    """Where the result is to be: a path that does not exist, in a folder that does. None: a fresh one is chosen."""
    beside: str | None = None
    """Folder of the storage that takes a result there; None: the one that holds `source`."""
    name: str | None = None
    """What a fresh result is called, before ".prepared"; None: as `source`."""
    strategy: Strategy | None = None
    """None: the shortest."""
    result: Result | None = None
    """None: wherever the strategy leaves it, or where `target` is."""
    scratch: str = "/var/tmp"  # noqa: S108 - a folder that is named by the configuration
    """Folder on local scratch."""
    settings: Settings = field(default_factory=Settings)
    """Without `use_memory_bytes` it is chosen by the redo log and the memory that is free."""
    program: str | None = None
    """Path of the tool."""
    time_limit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What would be done, and why."""

    order: Order
    backup: Backup
    place: Place
    facts: Facts
    choice: Choice
    settings: Settings
    """Completed."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A prepared folder."""

    path: str
    way: Way
    result: Result
    why: str
    plan: Plan
    steps: tuple[tuple[str, float], ...]
    """What took how many seconds."""
    written: Written | None
    """What was written back to the storage."""

    @property
    def duration_s(self) -> float:
        """All steps together."""
        return sum(seconds for _, seconds in self.steps)
