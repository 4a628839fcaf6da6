"""Runs Percona XtraBackup for MySQL; written from its manual, never run here (docs/reference/physical-tools.md).

It differs from mariadb-backup if increments are to follow: only `--apply-log-only` leaves a backup open for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from snapmgr.physical.tools.copytool import CopyTool

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Position, SourcePosition
    from snapmgr.catalog.physical import ToolName
    from snapmgr.physical.tools.request import ApplyRequest, BackupInfo, CopyRequest
    from snapmgr.physical.tools.source import BackupSource


UNTRIED = "snapmgr was never run with the real xtrabackup: its calls are written from the manual"


class XtrabackupTool(CopyTool):
    """Percona XtraBackup; see `snapmgr.physical.tools.request.Tool`."""

    name: ToolName = "xtrabackup"
    programs: ClassVar[tuple[str, ...]] = ("xtrabackup",)
    package: ClassVar[str] = "percona-xtrabackup"

    def own_backup_options(self, request: CopyRequest) -> list[str]:
        """Return the server's datadir: the tool reads files, not the server's settings."""
        return [f"--datadir={request.identity.datadir}"]

    def own_apply_options(self, request: ApplyRequest) -> list[str]:
        """Return the option that leaves a backup open for increments."""
        return ["--apply-log-only"] if request.redo_only else []

    def why_inexact(self, source: BackupSource) -> str:
        """Return why its position is not exact: performance_schema.log_status does not cover other engines."""
        others = source.needs.other_engines
        return f"there are tables of {', '.join(others)}" if others else ""

    def positions(
        self,
        source: BackupSource,  # noqa: ARG002 - the other tool needs it
        info: BackupInfo,
        folder: str,  # noqa: ARG002 - the same
    ) -> tuple[Position | None, tuple[SourcePosition, ...]]:
        """Return the position from performance_schema.log_status, which is of one instant.

        Omits the positions of sources: the tool's records of running appliers were not measured.
        """
        return info.position, ()
