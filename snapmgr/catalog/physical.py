"""Defines a manifest's record of a physical backup, whose files were copied by the server's own tool."""

from typing import Literal

from msgspec import Struct

from snapmgr.contract.recordpath import AbsoluteOrNone, Name

ToolName = Literal["mariadb-backup", "xtrabackup", "clone"]
State = Literal["raw", "redo-applied", "prepared"]
"""As the tool wrote it; redo log applied and ready for increments; ready for a server."""


class BinlogMark(Struct, frozen=True, kw_only=True):
    """A position in a binary log, with a digest of everything before it."""

    file: Name
    offset: int
    digest: str


class PhysicalRecord(Struct, frozen=True, kw_only=True):
    """How the files were made, and the facts that the next increment needs."""

    tool: ToolName
    tool_version: str
    kind: Literal["full", "incremental"]
    """What the tool copied. The snapshot has all data in either case."""
    state: State
    to_lsn: int
    """It includes all changes up to here; the next increment starts here."""
    from_lsn: int = 0
    """Where its increment started; 0: a full copy."""
    base: Name | None = None
    """The snapshot whose clone its increment was applied to. It may no longer exist."""
    full_because: str | None = None
    """Why it is a full copy although the job is incremental."""
    datadir: AbsoluteOrNone = ""
    """Datadir of the live server."""
    identity: str = ""
    """Identity of the live datadir: an increment of another one would apply without an error and be corrupt."""
    run: str = ""
    """Identity of the server's process: as long as it runs, its data cannot have been restored."""
    binlog: BinlogMark | None = None
    """End of the server's binary log when the tool had finished; None without one."""
    fetched_bytes: int = 0
    """Bytes that the tool wrote."""
    size_bytes: int = 0
    """Size of all files of the snapshot."""
    files: int = 0
    copy_s: float = 0.0
    apply_s: float = 0.0
    seal_s: float = 0.0
    fingerprint: str = ""
    """Digest over names, sizes, times and inodes (and contents, if the job asks for checksums) when it was sealed."""
