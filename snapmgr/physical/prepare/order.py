"""Defines the records of a prepare: the order, the plan and the result."""

from __future__ import annotations

from msgspec import Struct, field

from snapmgr.contract.errors import ConfigError
from snapmgr.physical.prepare.backupfolder import BackupFolder
from snapmgr.physical.prepare.choice import Choice, Facts, ResultPlace, Strategy, Way
from snapmgr.physical.prepare.inplace import ApplySettings
from snapmgr.physical.prepare.places import PreparePlaces, choose_places
from snapmgr.physical.prepare.writeback import Written
from snapmgr.system.paths import shown


class PrepareOrder(Struct, frozen=True, kw_only=True):
    """The source, the wanted result and the options of a prepare."""

    source: str
    """Folder of a finished backup, which is only read; an absolute path."""
    target: str | None = None
    """Path of the result: it must not exist, and its folder must. None: a fresh path is chosen."""
    beside: str | None = None
    """Folder for a result in the storage; None: the folder that holds `source`."""
    name: str | None = None
    """Name of a fresh result, without ".prepared"; None: the name of `source`."""
    strategy: Strategy | None = None
    """None: `choice` decides."""
    result: ResultPlace | None = None
    """None: where the strategy leaves it, or where `target` is."""
    scratch: str = "/var/tmp"  # noqa: S108 - a folder that is named by the configuration
    """Folder on local scratch."""
    settings: ApplySettings = field(default_factory=ApplySettings)
    """Without `use_memory_bytes` the buffer pool is chosen by the size of the redo log and the free memory."""
    program: str | None = None
    """Path of the tool."""
    time_limit_s: float | None = None

    def places(self, *, make: bool) -> PreparePlaces:
        """Return where to work; with `make` make the scratch folder.

        Raises ConfigError if the target does not fit, for example because the strategy leaves its result elsewhere.
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


class PreparePlan(Struct, frozen=True, kw_only=True):
    """The chosen way and the facts that decided it."""

    order: PrepareOrder
    backup: BackupFolder
    places: PreparePlaces
    facts: Facts
    choice: Choice
    settings: ApplySettings
    """With the buffer pool filled in."""


class PreparedBackup(Struct, frozen=True, kw_only=True):
    """A prepared folder, and how it was made."""

    path: str
    way: Way
    result: ResultPlace
    why: str
    plan: PreparePlan
    steps: tuple[tuple[str, float], ...]
    """Names and seconds."""
    written: Written | None
    """Changes written back to the storage; None if the way writes nothing back."""

    @property
    def duration_s(self) -> float:
        """All steps together."""
        return sum(seconds for _, seconds in self.steps)
