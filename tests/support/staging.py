"""Backups by the servers' own tools, called as jobs call them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from snapmgr.contract.errors import MissingRequirementError
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import ServerIdentity, identify
from snapmgr.physical.tools.choose import choose_tool
from snapmgr.physical.tools.request import ApplyRequest, CopyRequest, Tool, ToolBackup
from support.kinds import KINDS

if TYPE_CHECKING:
    from pathlib import Path

    from support.server import PrivateServer


def who(server: PrivateServer) -> ServerIdentity:
    """Return the identity of a server."""
    with connect(Credentials(socket=server.socket, user="root")) as connection:
        return identify(connection)


def tool_of(server: PrivateServer) -> Tool:
    """Return the tool that "auto" takes for a server."""
    identity = who(server)
    return choose_tool(
        "auto", identity.flavor, identity.version, server_program=KINDS[server.kind.name].program("mysqld")
    )


def request(server: PrivateServer, folder: Path, name: str = "full", **changes: Any) -> CopyRequest:
    """Return a request for a backup into the new folder `name` in `folder`, with `changes`; its log lies beside it."""
    (folder / name).mkdir(exist_ok=True)
    given: dict[str, Any] = {
        "folder": str(folder / name),
        "log": str(folder / f"{name}.log"),
        "credentials": Credentials(socket=server.socket, user="root"),
        "identity": who(server),
    }
    return CopyRequest(**given | changes)


def apply_to(server: PrivateServer, folder: Path, increment: Path | None = None) -> None:
    """Apply redo, or an increment, to the backup in `folder`."""
    log = f"{folder}.apply.log"
    tool_of(server).apply(ApplyRequest(folder=str(folder), log=log, increment=str(increment) if increment else None))


def clone(source: Path, target: Path, server: PrivateServer) -> None:
    """Copy a backup as a storage's clone would be: with its owners."""
    shutil.copytree(source, target)
    info = server.datadir.stat()
    for path in (target, *target.rglob("*")):
        os.chown(path, info.st_uid, info.st_gid)


def back_up_with_grants(server: PrivateServer, asked: CopyRequest) -> tuple[ToolBackup, list[str]]:
    """Do what each error says until none comes; return the backup, and the privileges that it took."""
    granted: list[str] = []
    for _ in range(8):
        try:
            return tool_of(server).back_up(asked), sorted(granted)
        except MissingRequirementError as error:
            granted += (error.hint or "").removeprefix("GRANT ").partition(" ON ")[0].split(", ")
            server.query((error.hint or "").rstrip(";"))
            shutil.rmtree(asked.folder)
            os.mkdir(asked.folder)
    raise AssertionError(f"the statements did not help: {granted}")
