"""What a manifest says of a physical backup: files that a server's own tool had copied, not the storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ToolName = Literal["mariadb-backup", "xtrabackup", "clone"]
State = Literal["raw", "redo-applied", "prepared"]
"""As the tool left it; its redo log applied, and still open for increments; ready for a server."""


@dataclass(frozen=True, kw_only=True)
class BinlogMark:
    """A place in a binary log, and a digest of what is before it."""

    file: str
    offset: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class PhysicalRecord:
    """How the files came about, and what the next increment has to know."""

    tool: ToolName
    tool_version: str
    kind: Literal["full", "incremental"]
    """What was fetched. The snapshot holds all data in either case."""
    state: State
    to_lsn: int
    """All up to here is in it; the next increment begins here."""
    from_lsn: int = 0
    """Where its increment began; 0: all was fetched."""
    base: str | None = None
    """The snapshot that its increment was applied to a clone of. It need not exist any more."""
    full_because: str | None = None
    """Why all was fetched though the job is incremental."""
    datadir: str = ""
    """Of the live server."""
    identity: str = ""
    """Of the live datadir: an increment of another one would be applied without an error, and be garbage."""
    run: str = ""
    """Of the server's process: while it runs, its data cannot have been put back."""
    binlog: BinlogMark | None = None
    """Where the server's binary log ended when the tool was done; None without one."""
    fetched_bytes: int = 0
    """What the tool wrote."""
    size_bytes: int = 0
    """What the snapshot holds."""
    files: int = 0
    copy_s: float = 0.0
    apply_s: float = 0.0
    seal_s: float = 0.0
    fingerprint: str = ""
    """Digest over names, sizes, times and inodes (and contents, if the job asks for checksums) when it was sealed."""
