"""The manifest's record of a physical backup: files copied by a server's own tool, then snapshotted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ToolName = Literal["mariadb-backup", "xtrabackup", "clone"]
State = Literal["raw", "redo-applied", "prepared"]
"""As the tool wrote it; redo log applied and ready for increments; ready for a server."""


@dataclass(frozen=True, kw_only=True)
class BinlogMark:
    """A place in a binary log, and a digest of the log before it."""

    file: str
    offset: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class PhysicalRecord:
    """The origin of the files, and all that the next increment depends on."""

    tool: ToolName
    tool_version: str
    kind: Literal["full", "incremental"]
    """The tool's last backup. The snapshot holds all data in either case."""
    state: State
    to_lsn: int
    """End of the backup; the next increment begins here."""
    from_lsn: int = 0
    """Begin of its increment; 0: a full backup."""
    base: str | None = None
    """The snapshot to whose clone the increment was applied. It may be gone by now."""
    full_because: str | None = None
    """Why an incremental job made a full backup."""
    datadir: str = ""
    """Datadir of the live server."""
    identity: str = ""
    """Identity of the live datadir: an increment of another one would apply without an error and be corrupt."""
    run: str = ""
    """Identity of the server's process: as long as it runs, its data cannot have been restored."""
    binlog: BinlogMark | None = None
    """End of the server's binary log when the tool had finished; None without one."""
    fetched_bytes: int = 0
    """Size of the tool's output."""
    size_bytes: int = 0
    """Size of the snapshot's files."""
    files: int = 0
    copy_s: float = 0.0
    apply_s: float = 0.0
    seal_s: float = 0.0
    fingerprint: str = ""
    """Digest over names, sizes, times and inodes (and contents, if the job asks for checksums) when it was sealed."""
