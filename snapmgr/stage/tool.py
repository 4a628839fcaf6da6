"""Which of the servers' own backup tools is taken, and what lies in a folder that one of them has filled."""

from __future__ import annotations

from typing import Literal

from snapmgr.catalog.physical import State, ToolName
from snapmgr.contract.errors import ConfigError, MissingRequirementError
from snapmgr.mysql.datadir.origin import Flavor
from snapmgr.stage.cloneplugin import CloneTool
from snapmgr.stage.infofile import read_state
from snapmgr.stage.mariabackup import MariabackupTool
from snapmgr.stage.request import ApplyRequest, BrokenChainError, Filled, FillRequest, Progress, Staged, Tool
from snapmgr.stage.xtrabackup import XtrabackupTool

__all__ = [
    "ApplyRequest",
    "BrokenChainError",
    "FillRequest",
    "Filled",
    "Progress",
    "Staged",
    "State",
    "Tool",
    "ToolName",
    "choose_tool",
    "read_state",
    "require_tool",
    "tool_for",
]


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
        name: "auto": mariadb-backup for MariaDB; for MySQL xtrabackup where it is installed in the server's version,
            else the server's CLONE.
        flavor: of the server.
        version: of the server, as it prints it.
        program: path of the tool, the only one that may be taken.
        server_program: path of the server's program: its tool may lie beside it.

    Raises ConfigError for a tool of the other flavor. Whether it is there and fits, its `missing` and `fill` say.
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
    """Raise MissingRequirementError that names all that this machine lacks for a tool."""
    if lacking := tool.missing():
        raise MissingRequirementError(
            "; ".join(one.what for one in lacking), hint="; ".join(one.hint for one in lacking)
        )


def tool_for(staged: Staged, *, program: str | None = None) -> Tool:
    """Return the tool that applies redo and increments to a backup that lies there.

    Raises MissingRequirementError for a clone.
    """
    if staged.tool == "clone":
        raise MissingRequirementError("a clone needs no prepare: a server may start on it", hint="verify it instead")
    return choose_tool(staged.tool, staged.flavor, staged.server_version, program=program)
