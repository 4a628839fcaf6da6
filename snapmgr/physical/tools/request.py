"""Defines requests to a server's own backup tool, its results and its errors; `choose` has the tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from snapmgr.catalog.manifest import Position, SourcePosition
from snapmgr.catalog.physical import State, ToolName
from snapmgr.contract.errors import StorageError
from snapmgr.contract.records import Reason
from snapmgr.mysql.connect.client import Credentials
from snapmgr.mysql.connect.identity import ServerIdentity
from snapmgr.mysql.datadir.origin import Flavor


class BrokenChainError(StorageError):
    """An increment cannot follow the last backup: a full backup is needed."""


class FullError(StorageError):
    """The file system that the tool writes to, or its quota, is full."""


class Progress(Struct, frozen=True, kw_only=True):
    """Progress of a tool."""

    phase: str
    """The step in words: "copying data files"."""
    done_bytes: int
    """Bytes that the tool has written so far."""
    expected_bytes: int | None
    """The estimated total; None: unknown."""
    lag_bytes: int | None = None
    """Redo log that the server has written and the tool has not copied or applied yet; None: unknown."""


class CopyRequest(Struct, frozen=True, kw_only=True):
    """A request to copy a server into a staging folder."""

    folder: str
    """An existing, empty folder that nobody else uses."""
    log: str
    """Path of the tool's log: a file of mode 0600, replaced by each run and never removed."""
    credentials: Credentials
    identity: ServerIdentity
    """The expected server: `snapmgr.mysql.connect.identity.identify`."""
    from_lsn: int = 0
    """0 for a full backup; otherwise copy only the changes since this LSN."""
    throttle: int = 0
    """Reads and writes a second, in the tool's own units; 0: no limit."""
    parallel: int = 1
    options: tuple[str, ...] = ()
    """Further options of the tool, after ours; never secrets."""
    time_limit_s: float | None = None
    progress: Callable[[Progress], None] = lambda _: None


class ApplyRequest(Struct, frozen=True, kw_only=True):
    """A request to apply redo or an increment to a backup, in place."""

    folder: str
    log: str
    """As in `CopyRequest`."""
    increment: str | None = None
    """Folder of an increment to apply to `folder`. The tool renames and removes its files: it cannot be used again."""
    redo_only: bool = False
    """Whether further increments will follow (xtrabackup --apply-log-only); with mariadb-backup they always can."""
    use_memory_bytes: int = 0
    """0: the tool's default, 96 to 100 MiB."""
    options: tuple[str, ...] = ()
    time_limit_s: float | None = None
    progress: Callable[[Progress], None] = lambda _: None


class BackupInfo(Struct, frozen=True, kw_only=True):
    """A finished backup in a folder, as described by its files."""

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
    """LSN at which the next increment begins; 0: an increment cannot follow (clone)."""
    last_lsn: int
    position: Position | None
    """The position that the tool recorded; only `Tool.back_up` knows whether it is exact."""

    @property
    def is_increment(self) -> bool:
        """Whether it holds only changes, so that it is not a whole backup."""
        return self.from_lsn > 0


class ToolBackup(BackupInfo, frozen=True, kw_only=True):
    """A fresh tool backup. Its `position` is exact, or None: never a guess."""

    sources: tuple[SourcePosition, ...]
    """For a replica: one for each source whose exact position is known."""
    size_bytes: int
    files: int


class Tool(Protocol):
    """A server's own backup tool."""

    name: ToolName
    increments: bool
    """Whether it can back up only the changes."""

    def missing(self) -> tuple[Reason, ...]:
        """Return all missing requirements; empty if the tool can work. Never raises."""

    def back_up(self, request: CopyRequest) -> ToolBackup:
        """Back up the server into the folder. A failure leaves nothing that `read_info` takes for a finished backup.

        Raises StorageError with the important lines of the log (disk full, connection lost, redo log overwritten);
        MissingRequirementError for missing rights, with the statement that grants them, and for a program of another
        version; NotQuiescedError if another server answers; BrokenChainError if no increment is possible.
        """

    def apply(self, request: ApplyRequest) -> None:
        """Apply redo, or an increment, in place. A failure or an interruption leaves an unusable folder.

        Raises BrokenChainError if the increment does not fit the backup, StorageError, MissingRequirementError.
        """
