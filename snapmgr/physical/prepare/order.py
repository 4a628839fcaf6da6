"""What is asked of a prepare, what it would do, and what it has done: the records of `preparing`."""

from __future__ import annotations

from dataclasses import dataclass, field

from snapmgr.errors import ConfigError
from snapmgr.physical.prepare.backupfolder import BackupFolder
from snapmgr.physical.prepare.choice import Choice, Facts, ResultPlace, Strategy, Way
from snapmgr.physical.prepare.inplace import ApplySettings
from snapmgr.physical.prepare.places import PreparePlaces, choose_places
from snapmgr.physical.prepare.writeback import Written
from snapmgr.tree.walk import shown


@dataclass(frozen=True, kw_only=True)
class PrepareOrder:
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
    """None: chosen by `choice`."""
    result: ResultPlace | None = None
    """None: wherever the strategy leaves it, or where `target` is."""
    scratch: str = "/var/tmp"  # noqa: S108 - a folder that is named by the configuration
    """Folder on local scratch."""
    settings: ApplySettings = field(default_factory=ApplySettings)
    """Without `use_memory_bytes` it is chosen by the redo log and the memory that is free."""
    program: str | None = None
    """Path of the tool."""
    time_limit_s: float | None = None

    def places(self, *, make: bool) -> PreparePlaces:
        """Return where to work; with `make` the scratch folder is made.

        Raises ConfigError if the target will not do, also because the strategy leaves its result elsewhere.
        """
        places = choose_places(
            self.source,
            target=self.target,
            beside=self.beside,
            result=self.result,
            scratch=self.scratch,
            make=make,
            name=self.name,
        )
        there = self.strategy in ("storage", "overlay") or self.settings.client is not None
        if self.target is not None and places.result == "scratch" and there:
            raise ConfigError(
                f"{shown(self.target)} is not in the storage of {shown(self.source)}, where the strategy "
                f'"{self.strategy or "storage"}" leaves its result',
                hint="name no folder (the result comes beside the backup) or one in the storage; or --strategy scratch",
            )
        return places


@dataclass(frozen=True, kw_only=True)
class PreparePlan:
    """What would be done, and why."""

    order: PrepareOrder
    backup: BackupFolder
    places: PreparePlaces
    facts: Facts
    choice: Choice
    settings: ApplySettings
    """Completed."""


@dataclass(frozen=True, kw_only=True)
class PreparedBackup:
    """A prepared folder."""

    path: str
    way: Way
    result: ResultPlace
    why: str
    plan: PreparePlan
    steps: tuple[tuple[str, float], ...]
    """What took how many seconds."""
    written: Written | None
    """What was written back to the storage."""

    @property
    def duration_s(self) -> float:
        """All steps together."""
        return sum(seconds for _, seconds in self.steps)
