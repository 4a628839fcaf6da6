"""Percona XtraBackup, for MySQL, by its manual alone: it was never run here (docs/reference/physical-tools.md).

It differs from mariadb-backup where increments are to follow: only `--apply-log-only` leaves a backup open for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from snapmgr.physical.tools.copytool import CopyTool, apply_options, backup_options

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Position, SourcePosition
    from snapmgr.catalog.physical import ToolName
    from snapmgr.physical.tools.request import ApplyRequest, BackupInfo, CopyRequest
    from snapmgr.physical.tools.source import BackupSource


class XtrabackupTool(CopyTool):
    """Percona XtraBackup; see `snapmgr.physical.tools.request.Tool`."""

    name: ToolName = "xtrabackup"
    programs: ClassVar[tuple[str, ...]] = ("xtrabackup",)
    package: ClassVar[str] = "percona-xtrabackup"

    def backup_argv(self, program: str, login: str, request: CopyRequest, *, replica: bool) -> list[str]:
        """Return the command line of a backup; it checks the server's version itself as well."""
        return [
            program,
            f"--defaults-file={login}",
            "--backup",
            f"--target-dir={request.folder}",
            # The tool reads files, not the server's settings.
            f"--datadir={request.identity.datadir}",
            *backup_options(request, replica=replica),
        ]

    def apply_argv(self, program: str, request: ApplyRequest) -> list[str]:
        """Return the command line that applies redo, or an increment."""
        return [
            program,
            "--no-defaults",
            "--prepare",
            *(["--apply-log-only"] if request.redo_only else []),
            *apply_options(request),
        ]

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
        """Return its position: from performance_schema.log_status, of one instant.

        Returns no positions of sources: its records of running appliers were not measured.
        """
        return info.position, ()
