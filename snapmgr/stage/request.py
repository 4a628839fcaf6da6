"""What is asked of a server's own backup tool, and what it answers; `snapmgr.stage.tool` has the tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from snapmgr.catalog.manifest import Position, SourcePosition
from snapmgr.catalog.physical import State, ToolName
from snapmgr.contract.errors import StorageError
from snapmgr.contract.records import Reason
from snapmgr.mysql.connect.client import Credentials
from snapmgr.mysql.connect.identity import ServerIdentity
from snapmgr.mysql.datadir.origin import Flavor


class BrokenChainError(StorageError):
    """No increment can follow on what is there: only a full backup helps."""


class FullError(StorageError):
    """The file system that the tool writes to is full, or a quota of it is used up."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a tool is."""

    phase: str
    """In words: "copying data files"."""
    done_bytes: int
    """Written by the tool so far."""
    expected_bytes: int | None
    """About how much it will be; None: not known."""
    lag_bytes: int | None = None
    """Redo log that the server has written and the tool not copied, or not applied yet; None: it does not tell."""


@dataclass(frozen=True, kw_only=True)
class FillRequest:
    """A backup into a staging folder."""

    folder: str
    """Exists and is empty; nobody else uses it."""
    log: str
    """Where the tool's log goes: a file of mode 0600, replaced. It stays, whatever comes."""
    credentials: Credentials
    identity: ServerIdentity
    """The server that is meant: `snapmgr.mysql.connect.identity.identify`."""
    from_lsn: int = 0
    """0 for a full backup; else what has changed since."""
    throttle: int = 0
    """Reads and writes a second, in the tool's own counting; 0: as fast as it can."""
    parallel: int = 1
    options: tuple[str, ...] = ()
    """Further options of the tool, behind ours: no secrets."""
    time_limit_s: float | None = None
    progress: Callable[[Progress], None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class ApplyRequest:
    """Applying redo or an increment to a backup, in place."""

    folder: str
    log: str
    """As in `FillRequest`."""
    increment: str | None = None
    """Folder of an increment that goes into `folder`. The tool renames and removes files in it: it is used up."""
    redo_only: bool = False
    """Whether further increments are to follow (xtrabackup --apply-log-only); mariadb-backup's always may."""
    use_memory_bytes: int = 0
    """0: the tool's default, 96 to 100 MiB."""
    options: tuple[str, ...] = ()
    time_limit_s: float | None = None
    progress: Callable[[Progress], None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A finished backup, from the tool's own files and its log."""

    tool: ToolName
    tool_version: str
    state: State
    """"raw", or "prepared" (clone)."""
    from_lsn: int
    """0 for a full backup."""
    to_lsn: int
    """Where the next increment begins; 0: none can follow (clone)."""
    last_lsn: int
    position: Position | None
    """Exact, or None: never a guess."""
    sources: tuple[SourcePosition, ...]
    """Of a replica: one for each source of which the exact position is known."""
    size_bytes: int
    files: int


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What lies in the folder of a finished backup, as its files tell."""

    tool: ToolName
    tool_version: str
    """"" if they do not tell."""
    flavor: Flavor
    server_version: str
    """"" if they do not tell."""
    state: State
    from_lsn: int
    """0 for a full backup; more for an increment that was not applied to anything."""
    to_lsn: int
    last_lsn: int
    position: Position | None
    """As the tool wrote it down; whether it is exact, `Tool.fill` alone knows."""

    @property
    def is_increment(self) -> bool:
        """Whether it is only what had changed, and no backup by itself."""
        return self.from_lsn > 0


class Tool(Protocol):
    """A server's own backup tool."""

    name: ToolName
    increments: bool
    """Whether it can back up only what has changed."""
    applies: bool
    """Whether there is anything to apply: a clone is "prepared" as it comes."""

    def missing(self) -> tuple[Reason, ...]:
        """Return all that this machine lacks for it, at once; empty when it can work. Never raises."""

    def fill(self, request: FillRequest) -> Filled:
        """Back up the server into the folder. What fails leaves nothing there that `read_state` takes for finished.

        Raises StorageError with the log's telling lines (disk full, connection lost, redo log overwritten);
        MissingRequirementError for missing rights, with the statement that grants them, and for a program of another
        version; NotQuiescedError if another server answers than is meant; BrokenChainError if no increment is possible.
        """

    def apply(self, request: ApplyRequest) -> None:
        """Apply redo, or an increment, in place. What fails or is interrupted leaves a folder of no further use.

        Raises BrokenChainError if the increment does not follow on what is there, StorageError,
        MissingRequirementError.
        """
