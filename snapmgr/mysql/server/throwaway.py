"""Runs a throwaway server on a copy of a datadir: the proof that a snapshot starts and is readable.

It has a private socket and no network, runs as the datadir's owner, does not replicate, and dies with us even if we are
killed. It sees only the copy: a path that leads outside it, to the live data, is refused or covered by the copy.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from snapmgr.contract.errors import MissingRequirementError, VerificationError
from snapmgr.contract.units import format_duration
from snapmgr.mysql.connect.client import Connection, Credentials, MysqlError, connect
from snapmgr.mysql.datadir.copy import IsolatedCopy, isolate_copy
from snapmgr.mysql.datadir.tablespace import name_spaces
from snapmgr.mysql.server.keyring import provide_keys
from snapmgr.mysql.server.log import damage, describe_end, lacks_keys, unreadable_logs
from snapmgr.mysql.server.options import throwaway_options
from snapmgr.mysql.server.plugins import table_plugins
from snapmgr.mysql.server.program import server_for
from snapmgr.mysql.server.rundir import (
    COVER_FAILED,
    as_user,
    check_reachable,
    covered,
    make_run_dir,
    owner_of,
    remove_folder,
)
from snapmgr.system.command import Process, dying_with_us, running
from snapmgr.system.host import await_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from snapmgr.catalog.manifest import ServerRecord
    from snapmgr.mysql.datadir.copy import Originals
    from snapmgr.mysql.server.program import ServerBinary

_GRACE_S = 10.0
_MIB = 1024 * 1024


class ThrowawayServer:
    """A running throwaway server; made by `throwaway`."""

    def __init__(self, binary: ServerBinary, process: Process, socket: str, log_fd: int, *, home: str) -> None:
        self.binary = binary
        self._process = process
        self._home = home
        self.socket = socket
        # Never open the log again by its path: the server's user owns the folder.
        self._log_fd = log_fd
        self._complaints_read = 0
        self.no_keys: str | None = None
        """Why the keys of encrypted data are missing, as text; None if it has keys."""
        self.encrypted_logs = False
        """Whether its binary logs are encrypted: if they cannot be read, MariaDB does not say why."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is still there."""
        return self._process.poll() is None

    def connect(self, *, timeout_s: float = 5.0) -> Connection:
        """Return a connection with all rights. Raises MysqlError."""
        return connect(Credentials(socket=self.socket, user="root"), timeout_s=timeout_s)

    def excerpt(self) -> str:
        """Return the relevant lines of the log so far, bounded: for a failure's message."""
        return describe_end(self.log_text(), self._process.poll()).text

    def complaints(self) -> tuple[str, ...]:
        """Return new log lines about damaged data since the last call: a server may log damage and still answer."""
        # Up to the last whole line: the server may be writing the next one.
        new = _read_from(self._log_fd, self._complaints_read).rpartition(b"\n")[0]
        self._complaints_read += len(new)
        return damage(new.decode("utf-8", "replace"))

    def shutdown(self, *, time_limit_s: float = 60.0) -> bool:
        """Shut the server down by SIGTERM; return whether it ended in time and without an error."""
        deadline = time.monotonic() + time_limit_s
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            await_end(self.pid, deadline)
        while self.running and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._process.poll() == 0

    def failure(self, what: str) -> VerificationError | MissingRequirementError:
        """Return the error for a server that ended by itself: MissingRequirementError if the machine is the cause."""
        end = describe_end(self.log_text(), self._process.poll())
        kind = MissingRequirementError if end.machine else VerificationError
        return self.missing_keys(what) or kind(f"{what}: {name_spaces(end.text, self._home)}", hint=end.hint)

    def missing_keys(self, what: str) -> MissingRequirementError | None:
        """Return the error for a server without the keys of encrypted data; None if that is not the cause."""
        log = self.log_text()
        unread = self.no_keys is not None and self.encrypted_logs and unreadable_logs(log)
        if not unread and not lacks_keys(log, given=self.no_keys is None):
            return None
        why = f"; {self.no_keys}" if self.no_keys else ""
        return MissingRequirementError(
            f"{what}: the data are encrypted, and the server on the copy does not have their keys{why}",
            hint=f"its log says: {self.excerpt()}; requirements: docs/explanation/verification.md",
        )

    def log_text(self) -> str:
        """Return all of the log so far."""
        return _read_from(self._log_fd, 0).decode("utf-8", "replace")


@contextmanager
def throwaway(
    binary: ServerBinary,
    datadir: str | os.PathLike[str],
    *,
    settings: Mapping[str, str],
    memory_bytes: int,
    run_dir: str | os.PathLike[str],
    options: Sequence[str] = (),
    originals: Originals | None = None,
    time_limit_s: float = 600.0,
    encrypted_logs: bool = False,
) -> Iterator[ThrowawayServer]:
    """Run a server on a writable copy of a datadir while the context lasts; then always end and reap it.

    Args:
        binary: from `snapmgr.mysql.server.program.find_server`.
        datadir: the copy; the server changes it: recovery, a new UUID, the binary log's index.
        settings: `Layout.settings` of the source.
        memory_bytes: limit of its buffers together; it uses at least about 80 MiB (MySQL: 190).
        run_dir: for socket, log and temporary files; made if missing, given to the datadir's owner, mode 0700.
        options: further options; the last one wins.
        originals: folders by their path on the source's server, and the copy of each: the datadir and every place
            outside it. Needed (and used) only if the copy holds absolute paths; requires root.
        time_limit_s: from start to the first answer, crash recovery included.
        encrypted_logs: whether its binary logs are encrypted.

    The server dies with the *thread* that entered the context (prctl(2), PR_SET_PDEATHSIG).

    Raises VerificationError if the copy does not start in time; MissingRequirementError if this machine is the cause
    (rights, memory, space, an absolute path that is not covered).
    """
    datadir, run_dir = os.path.realpath(datadir), os.path.abspath(run_dir)
    uid, gid = owner_of(datadir)
    copy = isolate_copy(datadir, settings, originals or {}, fresh_logs=run_dir)
    socket, log = make_run_dir(run_dir, uid, gid)
    with log:
        check_reachable(datadir, run_dir, uid, gid)
        keys = provide_keys(binary, copy, originals or {}, run_dir=run_dir, owner=(uid, gid), options=options)
        argv = [
            *_prefix(copy, uid, gid),
            binary.path,
            *throwaway_options(binary, copy, memory_bytes=memory_bytes, run_dir=run_dir, socket=socket, uid=uid),
            *table_plugins(binary, settings, options),
            *keys.among(options),
        ]
        with running(argv, output=log, grace_s=_GRACE_S) as process:
            # Assume that any plugin has keys: then an unreadable page is damaged.
            given = keys.plugin_dir is not None or any(one.startswith("--plugin-load") for one in keys.among(options))
            server = ThrowawayServer(binary, process, socket, log.fileno(), home=copy.home)
            server.no_keys = None if given else keys.missing
            server.encrypted_logs = encrypted_logs
            try:
                _wait_until_it_answers(server, time_limit_s)
            except BaseException:
                # MariaDB loses a SIGTERM that comes 30 to 80 ms after its start; and it has no data to save yet.
                process.kill()
                raise
            yield server


@contextmanager
def copy_server(
    data: str | os.PathLike[str],
    recorded: ServerRecord | None = None,
    *,
    program: str | None = None,
    binary: ServerBinary | None = None,
    memory_bytes: int,
    options: Sequence[str] = (),
    originals: Originals | None = None,
    scratch_dir: str | os.PathLike[str],
    time_limit_s: float,
    tell: Callable[[str], None] = lambda _line: None,
    purpose: str = "",
    encrypted_logs: bool = False,
) -> Iterator[ThrowawayServer]:
    """Choose the program for a writable copy of a datadir, and run `throwaway` with it in a temporary folder.

    Args:
        data: the copy.
        recorded: the server that wrote the data; None if we could not ask it.
        program: path of the only allowed program.
        binary: the program, if already chosen.
        memory_bytes: as for `throwaway`, like `options`, `originals` and `time_limit_s`.
        scratch_dir: gets the folder for socket, log and temporary files, which is removed afterwards.
        tell: receives a message for the user, which ends with `purpose`.
        purpose: the reason for the start.
        encrypted_logs: as for `throwaway`.

    Raises the errors of `server_for`, `run_folder` and `throwaway`.
    """
    binary = binary or server_for(recorded, data, program)
    tell(f"starting {binary.flavor} {binary.version} on a clone{purpose}")
    with (
        run_folder(scratch_dir) as run_dir,
        throwaway(
            binary,
            data,
            settings=recorded.settings if recorded is not None else {},
            memory_bytes=memory_bytes,
            run_dir=run_dir,
            options=options,
            originals=originals,
            time_limit_s=time_limit_s,
            encrypted_logs=encrypted_logs,
        ) as server,
    ):
        yield server


@contextmanager
def run_folder(scratch: str | os.PathLike[str]) -> Iterator[str]:
    """Make a folder for `throwaway` in `scratch`, and remove it with its content.

    Not tempfile.TemporaryDirectory: the folder belongs to the server's user by then, and its cleanup may follow a
    symlink (CVE-2023-6597); shutil.rmtree works by descriptors. Raises StorageError if the removal fails.
    """
    folder = mkdtemp(prefix=f"v{os.getpid()}-", dir=scratch)
    try:
        yield folder
    finally:
        remove_folder(folder)


def _read_from(fd: int, offset: int) -> bytes:
    """Return a file's content from `offset` on; keeps its position, which the server shares."""
    pieces = []
    while piece := os.pread(fd, _MIB, offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _as_owner(uid: int, gid: int) -> list[str]:
    # Change the user before setting the death signal: a later change would clear the signal.
    return [*as_user(uid, gid), *dying_with_us()]


def _prefix(copy: IsolatedCopy, uid: int, gid: int) -> list[str]:
    if not copy.covers:
        return _as_owner(uid, gid)
    if os.geteuid() != 0:
        raise MissingRequirementError(
            "the copy holds absolute paths, and only root can mount the copy over them for a server", hint="run as root"
        )
    return [*covered(copy.covers), *_as_owner(uid, gid)]


def _wait_until_it_answers(server: ThrowawayServer, time_limit_s: float) -> None:
    began = time.monotonic()
    deadline = began + time_limit_s
    last = ""
    while (left := deadline - time.monotonic()) > 0:
        if not server.running:
            if server._process.returncode == COVER_FAILED:  # noqa: SLF001 - one module
                raise MissingRequirementError(f"cannot mount the copy over the original paths: {server.excerpt()}")
            raise server.failure("the server ended instead of starting on the copy")
        try:
            server.connect(timeout_s=min(left, 2.0)).close()
        except MysqlError as error:
            last = error.message
        else:
            return
        # A twentieth of the time so far: little of a short start is waste, and a long recovery is not asked often.
        time.sleep(min(max((time.monotonic() - began) / 20, 0.005), 0.05))
    end = describe_end(server.log_text(), None)
    # A server on a full file system waits for space instead of ending.
    kind = MissingRequirementError if end.machine else VerificationError
    raise kind(
        f"the server on the copy did not answer within {format_duration(time_limit_s)}: {end.text or last}",
        hint=end.hint or "raise the time limit if it was still recovering",
    )
