"""Describes the source of a job as located on its storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.source.volumes import is_held

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import ServerRecord
    from snapmgr.contract.backend import Backend
    from snapmgr.contract.records import Volume
    from snapmgr.mysql.datadir.layout import ServerLayout
    from snapmgr.mysql.lock.levels import LockChoice
    from snapmgr.source.server import LiveServer
    from snapmgr.source.toolbackup import ToolBackup
    from snapmgr.source.volumes import VolumeShare


class SnapshotSource(Struct, frozen=True, kw_only=True):
    """The source of a job, located on its storage."""

    path: str
    backend: Backend
    shares: tuple[VolumeShare, ...]
    """One for each volume; the first holds `path`."""
    live: LiveServer | None
    """None for directories, tool backups and stopped servers."""
    choice: LockChoice | None
    """The lock for the live server; None without one."""
    server: ServerRecord | None
    """The manifest's record of the server; None if we could not ask it."""
    layout: ServerLayout | None = None
    """For a server, running or not: all files that the snapshot must hold."""
    absent: tuple[str, ...] = ()
    """Folders of logs that the backend cannot snapshot, and that the snapshot does not need."""
    tool_backup: ToolBackup | None = None
    """The finished backup at `path`."""

    @property
    def volumes(self) -> tuple[Volume, ...]:
        """The volumes of `shares`."""
        return tuple(share.volume for share in self.shares)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of all volumes and of replication, and about open files of unknown kind outside the snapshot."""
        unknown_files = () if self.layout is None else self.layout.unknown_files
        return (
            *(self.live.problems if self.live is not None else ()),
            *(warning for volume in self.volumes for warning in volume.warnings),
            *(
                f"the server has {path} open for writing, which is not in a snapshot"
                for path in unknown_files
                if not is_held(self.shares, path)
            ),
        )
