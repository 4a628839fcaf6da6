"""Percona XtraBackup, for MySQL. By its manual alone: it was never run here (docs/reference/physical-tools.md).

It differs from mariadb-backup where increments are to follow: only `--apply-log-only` leaves a backup open for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from snapmgr.stage.copytool import CopyTool, apply_options, fill_options

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Position, SourcePosition
    from snapmgr.catalog.physical import ToolName
    from snapmgr.stage.request import ApplyRequest, FillRequest, Staged
    from snapmgr.stage.source import Source


class XtrabackupTool(CopyTool):
    """Percona XtraBackup; see `snapmgr.stage.request.Tool`."""

    name: ToolName = "xtrabackup"
    programs: ClassVar[tuple[str, ...]] = ("xtrabackup",)
    package: ClassVar[str] = "percona-xtrabackup"

    def fill_argv(self, program: str, login: str, request: FillRequest, *, replica: bool) -> list[str]:
        """Return the command line of a backup; it checks the server's version itself as well."""
        return [
            program,
            f"--defaults-file={login}",
            "--backup",
            f"--target-dir={request.folder}",
            # It reads files, not the server's settings.
            f"--datadir={request.identity.datadir}",
            *fill_options(request, replica=replica),
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

    def why_inexact(self, source: Source) -> str:
        """Return why its position is not claimed: other engines are not part of performance_schema.log_status."""
        others = source.needs.other_engines
        return f"there are tables of {', '.join(others)}" if others else ""

    def positions(
        self,
        source: Source,  # noqa: ARG002 - the other tool needs it
        staged: Staged,
        folder: str,  # noqa: ARG002 - the same
    ) -> tuple[Position | None, tuple[SourcePosition, ...]]:
        """Return its position: from performance_schema.log_status, of one instant.

        Of sources none is claimed: what it writes down of appliers at work was not measured.
        """
        return staged.position, ()
