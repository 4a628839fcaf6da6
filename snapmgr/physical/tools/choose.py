"""Chooses the backup tool for a server, or for the backup in a folder."""

from __future__ import annotations

from typing import Literal

from snapmgr.catalog.physical import ToolName
from snapmgr.contract.errors import ConfigError, MissingRequirementError
from snapmgr.mysql.datadir.origin import Flavor
from snapmgr.physical.tools.cloneplugin import CloneTool
from snapmgr.physical.tools.mariabackup import MariabackupTool
from snapmgr.physical.tools.request import BackupInfo, Tool
from snapmgr.physical.tools.xtrabackup import XtrabackupTool


def choose_tool(
    name: Literal["auto"] | ToolName,
    flavor: Flavor,
    version: str,
    *,
    program: str | None = None,
    server_program: str | None = None,
) -> Tool:
    """Return the tool that backs up a server.

    Args:
        name: "auto": mariadb-backup for MariaDB; for MySQL xtrabackup if it is installed in the server's version,
            else the server's CLONE.
        flavor: of the server.
        version: of the server, as it prints it.
        program: path of the tool; excludes any other program.
        server_program: path of the server's program: its tool may lie beside it.

    Raises ConfigError for a tool of the other flavor. Its `missing` and `back_up` check that it is installed and fits.
    """
    if flavor == "mariadb":
        if name not in ("auto", "mariadb-backup"):
            raise ConfigError(f"{name} backs up MySQL, and the server is MariaDB {version}", hint="use mariadb-backup")
        return MariabackupTool(program=program, server_version=version, server_program=server_program)
    if name == "mariadb-backup":
        raise ConfigError(
            f"mariadb-backup backs up MariaDB, and the server is MySQL {version}", hint="use clone or xtrabackup"
        )
    percona = XtrabackupTool(program=program, server_version=version, server_program=server_program)
    if name == "xtrabackup" or (name == "auto" and not percona.missing()):
        return percona
    return CloneTool(server_version=version)


def require_tool(tool: Tool) -> None:
    """Raise MissingRequirementError that names every missing requirement of a tool."""
    if missing := tool.missing():
        raise MissingRequirementError(
            "; ".join(one.what for one in missing), hint="; ".join(one.hint for one in missing)
        )


def tool_for(info: BackupInfo, *, program: str | None = None) -> Tool:
    """Return the tool that applies redo and increments to a backup. Raises MissingRequirementError for a clone."""
    if info.tool == "clone":
        raise MissingRequirementError("a clone needs no prepare: a server can start on it", hint="verify it instead")
    return choose_tool(info.tool, info.flavor, info.server_version, program=program)
