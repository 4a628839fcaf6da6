"""Starts a development server on a clone. It keeps running after us, with the accounts of the source.

It does not run until its pid is on record, so that every running server is known. Where the data hold absolute paths,
or parts are outside the datadir, it sees the clone at the original paths, in its own mount namespace. We unmount other
file systems there, so that it keeps none busy.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket as sockets
import struct
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from msgspec import Struct

from snapmgr.contract.errors import ConfigError, MissingRequirementError, VerificationError
from snapmgr.contract.units import format_duration
from snapmgr.mysql.connect.optionfile import options_in
from snapmgr.mysql.datadir.copy import isolate_copy
from snapmgr.mysql.datadir.plainfile import open_plain
from snapmgr.mysql.server.keyring import provide_keys
from snapmgr.mysql.server.log import describe_end, lacks_keys
from snapmgr.mysql.server.options import throwaway_options
from snapmgr.mysql.server.plugins import table_plugins
from snapmgr.mysql.server.rundir import COVER_FAILED, as_user, check_reachable, covered, make_run_dir, owner_of
from snapmgr.system.command import end_process, let_go, start_held
from snapmgr.system.host import is_alive, this_process
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from snapmgr.contract.records import Mount
    from snapmgr.mysql.datadir.copy import IsolatedCopy, Originals
    from snapmgr.mysql.server.program import ServerBinary
    from snapmgr.system.command import Process as ChildProcess
    from snapmgr.system.host import Process

ADDRESS = "127.0.0.1"
_ANSWER_S = 2.0
_GREETING_BYTES = 5
_KILL_S = 10.0
_LOG_SHOWN = 1 << 20
_UUID = re.compile("[0-9a-fA-F-]{36}")
_SERVER_ID = re.compile(r"--(?:loose[-_])?server[-_]id=(\d+)")
# Options that the record states, or that keep other users out. The server accepts any unambiguous prefix of a name.
_OURS = {
    "datadir": "the clone's own folder",
    "socket": "a path in the server's own folder",
    "port": "--port N of this command",
    "pid-file": "a path in the server's own folder",
    "log-error": "a file in the server's own folder",
    "user": "the owner of the datadir",
    "daemonize": "off: the server would change its pid",
    "skip-grant-tables": "off: any user of this machine could log in",
}
_PREFIXES = ("loose-", "enable-", "maximum-")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/dev", "/proc", "/sys")


def check_options(options: Iterable[str]) -> None:
    """Raise ConfigError for a server option that would contradict the record of the server."""
    for option in options:
        name = option.removeprefix("--").partition("=")[0].replace("_", "-")
        while name.startswith(_PREFIXES):
            name = name.partition("-")[2]
        for ours, what in _OURS.items():
            if name and ours.startswith(name):
                raise ConfigError(f"the server option {option} is not allowed: it is {what}", hint="remove it")


def development_options(
    binary: ServerBinary,
    copy: IsolatedCopy,
    *,
    memory_bytes: int,
    run_dir: str,
    socket: str,
    uid: int,
    port: int | None,
    options: Sequence[str] = (),
) -> list[str]:
    """Return the options of a development server: those of a throwaway one, except that it serves clients and writes.

    Pure except for the random server id. Its accounts are those in the data. The last option wins.
    """
    check_options(options)
    base = throwaway_options(binary, copy, memory_bytes=memory_bytes, run_dir=run_dir, socket=socket, uid=uid)
    kept = [one for one in base if not one.startswith(("--skip-grant", "--skip-networking"))]
    network = ["--skip-networking"] if port is None else [f"--port={port}", f"--bind-address={ADDRESS}"]
    own = [
        # Off, not disabled: a developer of events can turn it on.
        "--event-scheduler=OFF",
        "--read-only=OFF",
        "--max-connections=50",
        # Commits survive a kill of the server; a power cut ends the clone anyway.
        "--innodb-flush-log-at-trx-commit=2",
        "--myisam-recover-options=BACKUP,QUICK",
    ]
    if binary.flavor == "mariadb":
        own.append("--aria-recover-options=BACKUP,QUICK")
    else:
        own += [
            "--loose-super-read-only=OFF",
            "--loose-group-replication-start-on-boot=OFF",
            # Without them no account with a password can log in by TCP.
            "--loose-auto-generate-certs=ON",
            "--loose-sha256-password-auto-generate-rsa-keys=ON",
            "--loose-caching-sha2-password-auto-generate-rsa-keys=ON",
        ]
    return [*kept, *network, *own, *options]


class DevelopmentServer(Struct, kw_only=True):
    """A server that waits for `run`, or runs; made by `held_server`."""

    record: Process
    socket: str
    server_id: int
    _child: ChildProcess
    _log: BinaryIO
    _datadir: str
    _no_keys: str | None

    def run(self, time_limit_s: float) -> None:
        """Let it start, and return once it sends a greeting: we have no account there to log in with.

        Raises VerificationError if it does not start on the data in time; MissingRequirementError if this machine is
        the cause.
        """
        let_go(self._child)
        deadline = time.monotonic() + time_limit_s
        while time.monotonic() < deadline:
            if self._child.poll() is not None:
                self._fail("the server ended instead of starting on the clone", self._child.returncode)
            if _greets(self.socket, self.record.pid):
                return
            time.sleep(0.05)
        self._fail(f"the server on the clone did not answer within {format_duration(time_limit_s)}", None)

    def _fail(self, what: str, returncode: int | None) -> NoReturn:
        # Not by its path: the server's user owns the folder.
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), _LOG_SHOWN, max(size - _LOG_SHOWN, 0))
        told = text.decode("utf-8", "replace")
        end = describe_end(told, returncode)
        if returncode == COVER_FAILED:
            raise MissingRequirementError(f"cannot mount the clone over the original paths: {end.text}")
        if self._no_keys is not None and lacks_keys(told, given=False):
            raise MissingRequirementError(
                f"{what}: the data are encrypted, and it does not have their keys; {self._no_keys}",
                hint=f"its log says: {end.text}; requirements: docs/explanation/verification.md",
            )
        kind = MissingRequirementError if end.machine else VerificationError
        raise kind(f"{what}: {end.text}", hint=end.hint)

    def uuid(self) -> str | None:
        """Return MySQL's server UUID, which the server wrote at its start; None for MariaDB."""
        with suppress(FileNotFoundError, ValueError), open_plain(os.path.join(self._datadir, "auto.cnf")) as file:
            told = options_in(file.read(4096), "auto").get("server_uuid", "")
            return told if _UUID.fullmatch(told) else None
        return None


@contextmanager
def held_server(
    binary: ServerBinary,
    datadir: str | os.PathLike[str],
    *,
    settings: Mapping[str, str],
    memory_bytes: int,
    run_dir: str,
    port: int | None,
    options: Sequence[str],
    originals: Originals,
    mounts: Sequence[Mount] = (),
) -> Iterator[DevelopmentServer]:
    """Isolate the clone at `datadir` and start a server on it that waits for `DevelopmentServer.run`.

    An exception in the context kills the server, whether it runs or not; otherwise it keeps running after us.

    Args:
        binary: the server program.
        datadir: the clone; the server changes it.
        settings: `Layout.settings` of the source.
        memory_bytes: limit of its buffers together; it uses at least about 80 MiB.
        run_dir: the server's own folder, made if missing; other users can traverse it to the socket.
        port: at 127.0.0.1; None: the socket only.
        options: further options; the last one wins.
        originals: see `snapmgr.mysql.server.throwaway`.
        mounts: this machine's mounts.

    Raises MissingRequirementError if it cannot start because of this machine, VerificationError if because of the data.
    """
    datadir, run_dir = os.path.realpath(datadir), os.path.abspath(run_dir)
    uid, gid = owner_of(datadir)
    copy = isolate_copy(datadir, settings, originals)
    socket, log = make_run_dir(run_dir, uid, gid, mode=0o711)
    with log:
        check_reachable(datadir, run_dir, uid, gid)
        keys = provide_keys(binary, copy, originals, run_dir=run_dir, owner=(uid, gid), options=options)
        serving = development_options(
            binary,
            copy,
            memory_bytes=memory_bytes,
            run_dir=run_dir,
            socket=socket,
            uid=uid,
            port=port,
            options=(*table_plugins(binary, settings, options), *keys.among(options)),
        )
        needed = {binary.path, run_dir, *(part.partition("=")[2] for part in serving if "=/" in part)}
        needed |= {value for value in copy.settings.values() if value.startswith("/")}
        child = start_held([*_covered(copy, mounts, needed), *as_user(uid, gid), binary.path, *serving], output=log)
        try:
            yield DevelopmentServer(
                record=this_process(child.pid),
                socket=socket,
                server_id=int([match[1] for one in serving if (match := _SERVER_ID.fullmatch(one))][-1]),
                _child=child,
                _log=log,
                _datadir=datadir,
                _no_keys=keys.missing,
            )
        except BaseException:
            # Not by SIGTERM: MariaDB loses one that comes 30 to 80 ms after its start.
            child.kill()
            end_process(child)
            raise


def _covered(copy: IsolatedCopy, mounts: Sequence[Mount], needed: Collection[str]) -> list[str]:
    targets = [path for _, path in copy.covers]
    # A covered path may itself be a mount of live data: unmount that one. The folder that it is mounted on must stay.
    kept = {path for path in needed if not lies_in(path, *targets)}
    kept |= {source for source, _ in copy.covers} | {os.path.dirname(target) for target in targets}
    return covered(copy.covers, unneeded(mounts, kept))


def unneeded(mounts: Sequence[Mount], needed: Collection[str]) -> list[str]:
    """Return the mount points of disks that do not hold any of the `needed` paths, innermost first. Pure.

    A mount namespace keeps all its file systems busy: nobody could remove a volume while the server runs.
    """
    paths = {os.path.realpath(path) for path in needed}
    return [
        mount.point
        for mount in reversed(mounts)
        if mount.source.startswith("/dev/")
        and not any(lies_in(path, mount.point) for path in paths)
        and not lies_in(mount.point, *_SYSTEM)
    ]


def _greets(socket: str, pid: int) -> bool:
    """Return whether process `pid` itself answers at the socket, with the first bytes of a handshake or a refusal."""
    with sockets.socket(sockets.AF_UNIX) as client:
        client.settimeout(_ANSWER_S)
        try:
            client.connect(socket)
            peer, _, _ = struct.unpack("3i", client.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12))
            return peer == pid and len(client.recv(_GREETING_BYTES)) == _GREETING_BYTES
        except OSError:
            return False


def port_problem(port: int) -> str | None:
    """Return why a server of another user than root cannot listen at this port of 127.0.0.1; None if it can."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text(encoding="ascii"))
    if port < lowest:
        return f"only root's servers may listen at a port below {lowest}"
    with sockets.socket(sockets.AF_INET) as trial:
        # As the server does: a connection that has just ended does not block the port.
        trial.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        try:
            trial.bind((ADDRESS, port))
            trial.listen()
        except OSError as error:
            return f"port {port} of {ADDRESS} is not free: {error.strerror}"
    return None


def end_server(process: Process, *, kill: bool, time_limit_s: float = _KILL_S) -> bool:
    """End a server, which may be any process's child, by SIGTERM or `kill`; return whether it is gone. Idempotent."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        # Check after opening: the descriptor stays with the process, the pid does not.
        if not is_alive(process):
            return True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL if kill else signal.SIGTERM)
            # A stopped process reacts only when it resumes.
            signal.pidfd_send_signal(fd, signal.SIGCONT)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(time_limit_s * 1000))
    finally:
        os.close(fd)
