"""Finds the running database servers in /proc, for the example configuration; it proves nothing."""

from __future__ import annotations

import os
import re
import socket as sockets
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import ConfigError
from snapmgr.mysql.connect.identity import server_processes

if TYPE_CHECKING:
    from collections.abc import Iterator

_USUAL_SOCKETS = ("/run/mysqld/mysqld.sock", "/var/lib/mysql/mysql.sock", "/tmp/mysql.sock")  # noqa: S108 - MySQL's own default
_ANSWER_S = 2.0
# __SO_ACCEPTCON in proc_net(5): the socket is listening.
_LISTENING = 0x10000
# MySQL's X protocol has a socket of its own, which we cannot use.
_OTHER_PROTOCOL = re.compile(r"mysqlx[^/]*$")
_SOCKET_LINK = re.compile(r"socket:\[(\d+)\]")


class RunningServer(Struct, frozen=True, kw_only=True):
    """A server that listens on a unix socket."""

    socket: str
    datadir: str | None
    """None if it is not readable or not clear."""


def running_servers(proc: Path = Path("/proc")) -> list[RunningServer]:
    """Return the running servers, those with a usual socket path first.

    They are found by the sockets of server processes; without permission to read those, by the usual socket paths.
    """
    listening = _listening(proc)
    found: dict[str, RunningServer] = {}
    for process in server_processes(proc):
        for path in _sockets(process, listening):
            found.setdefault(path, RunningServer(socket=path, datadir=_datadir(process)))
    for path in listening.values():
        if path in _USUAL_SOCKETS:
            found.setdefault(path, RunningServer(socket=path, datadir=None))
    return sorted(found.values(), key=lambda server: (server.socket not in _USUAL_SOCKETS, server.socket))


def server_at(socket: str) -> RunningServer:
    """Return the server that listens on the socket. Raises ConfigError if nothing does, or we may not connect."""
    with sockets.socket(sockets.AF_UNIX) as client:
        client.settimeout(_ANSWER_S)
        try:
            client.connect(socket)
            pid, _, _ = struct.unpack("3i", client.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12))
        except OSError as error:
            raise ConfigError(
                f"no server answers at {socket}: {error.strerror or error}",
                hint="start the server, or name its socket: SELECT @@socket on it shows the path",
            ) from None
    return RunningServer(socket=socket, datadir=_datadir(Path(f"/proc/{pid}")))


def _listening(proc: Path) -> dict[str, str]:
    """Return the paths of listening unix sockets by inode."""
    sockets: dict[str, str] = {}
    with suppress(OSError):
        for line in (proc / "net/unix").read_text(errors="surrogateescape").splitlines()[1:]:
            # Num RefCount Protocol Flags Type St Inode Path
            fields = line.split(maxsplit=7)
            if len(fields) == 8 and int(fields[3], 16) & _LISTENING and fields[7].startswith("/"):  # noqa: PLR2004
                sockets[fields[6]] = fields[7]
    return {inode: path for inode, path in sockets.items() if not _OTHER_PROTOCOL.search(path)}


def _sockets(process: Path, listening: dict[str, str]) -> Iterator[str]:
    with suppress(OSError):
        for number in os.listdir(process / "fd"):
            with suppress(OSError):
                match = _SOCKET_LINK.fullmatch(os.readlink(process / "fd" / number))
                if match and match[1] in listening:
                    yield listening[match[1]]


def _datadir(process: Path) -> str | None:
    """Return the working directory if it looks like a datadir: MySQL and MariaDB change into theirs."""
    with suppress(OSError):
        folder = os.readlink(process / "cwd")
        # A container's server has another folder at that path.
        if os.path.isdir(os.path.join(folder, "mysql")) and os.path.samefile(folder, process / "cwd"):
            return folder
    return None
