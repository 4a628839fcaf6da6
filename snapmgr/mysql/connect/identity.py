"""Proves that the server behind a socket has the datadir open; otherwise we could lock one server and snapshot another.

The chain: socket → listening process (SO_PEERCRED) → its open files → the datadir that the server names, as we see it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from snapmgr.contract.errors import MissingRequirementError, NotQuiescedError
from snapmgr.mysql.connect.openfiles import write_flags
from snapmgr.system.host import start_ticks
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from snapmgr.mysql.connect.client import Connection

_PROXIES = ("socat", "mysqlrouter", "maxscale", "proxysql", "haproxy", "ssh", "sshd", "nginx", "systemd-socket-")
_MARIADB_ONLY = "aria_block_size"
IDENTITY = ("datadir", "version", "server_id", "server_uuid", "socket", _MARIADB_ONLY)
"""Variables that tell who a server is."""
_SERVERS = frozenset({"mariadbd", "mysqld"})
_PROC = Path("/proc")


class ServerIdentity(Struct, frozen=True, kw_only=True):
    """A running server, and its datadir, which it provably has open."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat; with the pid it identifies a process until the next boot."""
    uid: int
    gid: int
    flavor: Literal["mariadb", "mysql"]
    version: str
    server_id: int
    server_uuid: str | None
    """MySQL's server UUID; MariaDB does not keep one with the data."""
    datadir: str
    """Symlinks resolved, as this process sees it."""
    socket: str
    """The socket that we connected to."""


def identify(connection: Connection, variables: Mapping[str, str] | None = None) -> ServerIdentity:
    """Return which server answers on `connection`, after proof that its process has the datadir open for writing.

    `variables` holds at least IDENTITY, just read on this connection; without it, this reads them.

    Raises NotQuiescedError for a proxy, socket activation, a container's server or any other process that does not own
    the datadir; MissingRequirementError without the right to inspect the process.
    """
    found = connection.variables(*IDENTITY) if variables is None else variables
    pid = connection.peer_pid()
    if pid == 0:
        raise NotQuiescedError(
            f"the process that listens at {connection.socket} is not visible from here: it is in another PID namespace",
            hint="run snapmgr on the host that runs the server's container, or in the same container",
        )
    process = f"process {pid} ({process_name(pid)})"
    try:
        started = _started(pid)
        uid, gid = _effective_ids(pid)
        # A server with a relative datadir has it as its working directory.
        named = found["datadir"] if found["datadir"].startswith("/") else os.readlink(f"/proc/{pid}/cwd")
        datadir = os.path.realpath(named)
        _check_same_view(pid, process, named, datadir)
        proven = any(_is_written_below(pid, number, datadir) for number in os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        raise MissingRequirementError(
            f"no right to see the open files of {process}, which listens at {connection.socket}",
            hint="run snapmgr as root or as the server's user",
        ) from None
    except (FileNotFoundError, ProcessLookupError):
        raise NotQuiescedError(
            f"{process}, which listened at {connection.socket}, is gone", hint="was the server restarted? Try again"
        ) from None
    if not proven:
        raise NotQuiescedError(
            f"{process} listens at {connection.socket}, but does not have the datadir {datadir} open",
            hint=_why_not(pid, found.get("socket", ""), connection.socket),
        )
    identity = ServerIdentity(
        pid=pid,
        start_ticks=started,
        uid=uid,
        gid=gid,
        # --version=… can set any version text; this variable exists only on MariaDB.
        flavor="mariadb" if _MARIADB_ONLY in found else "mysql",
        version=found["version"],
        server_id=int(found.get("server_id", "0")),
        server_uuid=found.get("server_uuid"),
        datadir=datadir,
        socket=connection.socket,
    )
    if not still_same(identity):
        raise NotQuiescedError(f"{process} ended while snapmgr inspected it", hint="try again")
    return identity


def still_same(identity: ServerIdentity) -> bool:
    """Return whether the process of `identity` still runs: not ended, not a zombie, and its pid not reused."""
    return start_ticks(identity.pid) == identity.start_ticks


def process_name(pid: int) -> str:
    """Return the command name of a process (proc_pid_comm(5)), "?" if it is gone."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return "?"


def server_processes(proc: Path = _PROC) -> Iterator[Path]:
    """Yield the folders in /proc of processes with a database server's name, by pid."""
    for process in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        with suppress(OSError):
            if (process / "comm").read_text(errors="replace").strip() in _SERVERS:
                yield process


def program_of(pid: int, proc: Path = _PROC) -> str | None:
    """Return the path of the program that a process runs; None if it is gone, replaced, or not visible to us.

    Also returns None for a server in a container: its path names another file here, or one without its libraries.
    """
    link = proc / str(pid) / "exe"
    try:
        path = os.readlink(link)
        # After an upgrade the file is a different one, and the link ends with "(deleted)".
        return path if os.path.samefile(path, link) else None
    except OSError:
        return None


def _started(pid: int) -> int:
    """Return when the process started, in clock ticks. Raises ProcessLookupError if it is gone or a zombie."""
    ticks = start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(pid)
    return ticks


def _effective_ids(pid: int) -> tuple[int, int]:
    """Return the effective uid and gid of the process now; SO_PEERCRED has those at the time of listen()."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        facts = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return int(facts["Uid"].split()[1]), int(facts["Gid"].split()[1])


def _check_same_view(pid: int, process: str, named: str, datadir: str) -> None:
    """Raise NotQuiescedError unless the process and we see the same directory at the datadir's path."""
    # Use stat for both: on btrfs its device differs from the one in mountinfo.
    theirs = os.stat(f"/proc/{pid}/root{named}")
    try:
        ours = os.stat(datadir)
    except FileNotFoundError:
        ours = None
    if ours is None or (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino):
        seen = "that folder does not exist here" if ours is None else "that is a different folder here"
        raise NotQuiescedError(
            f"{process} has its datadir at {named} in a mount namespace of its own (a container?): {seen}",
            hint="mount the folder at the same path on both sides, or run snapmgr in the server's namespace: "
            f"nsenter --target {pid} --mount",
        )


def _is_written_below(pid: int, number: str, datadir: str) -> bool:
    """Return whether descriptor `number` is a file below `datadir`, open for writing, and the same file as we see."""
    try:
        path = os.readlink(f"/proc/{pid}/fd/{number}")
        return lies_in(path, datadir) and write_flags(pid, number, path) != 0
    except FileNotFoundError:
        # Closed meanwhile, or a deleted file.
        return False


def _why_not(pid: int, own_socket: str, ours: str) -> str:
    own = f" (the server names {own_socket})" if own_socket and own_socket != ours else ""
    if pid == 1:
        return (
            "systemd opened this socket (socket activation), so it does not show which server uses it: "
            f"let the server open its own socket and set that{own}"
        )
    if process_name(pid).startswith(_PROXIES):
        return f"it is a proxy: set the server's own socket{own}"
    return f"is it a proxy, or a server whose datadir was replaced? Set the server's own socket{own}"
