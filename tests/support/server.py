"""A private server for a test: its own datadir, socket and log, no network, always ended by its process id."""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymysql

from snapmgr.system.command import CommandRunner, clean_environment, find_program
from support.kinds import KINDS, SYSTEM
from support.storage import shielded, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 60.0
# sun_path has 108 bytes; clients cut or refuse at different lengths before that.
_SOCKET_LIMIT = 100


def server_user() -> pwd.struct_passwd:
    """Return the user that servers run as: "mysql" if there is one, else "nobody"; ourselves if not root."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    try:
        return pwd.getpwnam("mysql")
    except KeyError:
        return pwd.getpwnam("nobody")


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PrivateServer:
    """A running (or stopped, or killed) private server. Made by `private_server`."""

    def __init__(self, datadir: Path, folder: Path, options: Sequence[str], kind: str = SYSTEM) -> None:
        self.datadir = datadir
        self.kind = KINDS[kind]
        self.socket = str(folder / "s")
        self.log = folder / "error.log"
        self._folder = folder
        self._options = (*self.kind.options, *options)
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = False
        if len(self.socket) >= _SOCKET_LIMIT:
            raise ValueError(f"the socket's path is too long for clients: {self.socket}")

    @property
    def pid(self) -> int:
        """The server's process id. Raises RuntimeError while it does not run."""
        if self._process is None:
            raise RuntimeError(f"the server of {self.datadir} does not run")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def log_text(self) -> str:
        """Return the error log so far, of all starts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def start(self, options: Sequence[str] = (), *, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Start the server, with further `options` for this start only, and return when it answers.

        Raises RuntimeError with the end of the log if it does not come up.
        """
        user = server_user()
        argv = [find_program("setpriv"), "--pdeathsig", "KILL"]
        if os.geteuid() == 0:
            # The user changes before the server starts: it would itself clear the death signal by changing it.
            argv += [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        argv += [
            *self.kind.server_command(),
            f"--datadir={self.datadir}",
            f"--socket={self.socket}",
            f"--pid-file={self._folder}/pid",
            f"--log-error={self.log}",
            f"--tmpdir={self._folder}",
            *self._options,
            *options,
        ]
        with shielded(), (self._folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=clean_environment(),
                cwd="/",
                # Ctrl-C must reach us, not the server.
                start_new_session=True,
            )
        self._answered = False
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.connect(connect_timeout=20).close()
            except (OSError, pymysql.err.OperationalError) as error:
                code = self._process.poll()
                if code is not None or time.monotonic() > deadline:
                    how = "did not answer" if code is None else f"ended with {code}"
                    raise RuntimeError(f"{self.kind.name} {how} ({error}); log:\n{self._tail()}") from None
                time.sleep(0.05)
            else:
                self._answered = True
                return

    def _tail(self) -> str:
        output = (self._folder / "output").read_text(errors="replace")
        return "\n".join((output + self.log_text()).splitlines()[-30:])

    def connect(self, **options: Any) -> pymysql.connections.Connection[Any]:
        """Return a connection as root by the socket, with autocommit; the caller closes it."""
        # ssl_disabled: or PyMySQL reads all of the system's certificates each time, which takes 25 ms of a processor.
        given: dict[str, Any] = {"unix_socket": self.socket, "user": "root", "autocommit": True, "ssl_disabled": True}
        given |= options
        connection = pymysql.connections.Connection(**given, defer_connect=True)
        # PyMySQL leaks a socket that is refused.
        made = socket.socket(socket.AF_UNIX)
        try:
            made.settimeout(connection.connect_timeout)
            made.connect(self.socket)
        except OSError as error:
            made.close()
            raise pymysql.err.OperationalError(2002, f"cannot connect to {self.socket}: {error}") from None
        # By a socket that lies on this machine passwords may go in clear.
        connection._secure = True  # type: ignore[attr-defined]
        connection.connect(made)
        return connection

    def query(self, sql: str, *arguments: object) -> tuple[tuple[Any, ...], ...]:
        """Run one statement on a connection of its own and return its rows."""
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(sql, arguments or None)
            return tuple(cursor.fetchall())

    def stop(self) -> None:
        """Shut the server down cleanly; killed after a minute. No error if it does not run.

        One that has not answered yet (an interrupted `start`) is killed at once: MariaDB may lose a SIGTERM
        while it starts.
        """
        self._end(signal.SIGTERM if self._answered else signal.SIGKILL)

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self, options: Sequence[str] = ()) -> None:
        """Stop and start."""
        self.stop()
        self.start(options)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        # A test may have frozen it: a stopped process does not act on SIGTERM.
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_TIMEOUT_S)


def install(datadir: Path, options: Sequence[str] = (), kind: str = SYSTEM) -> None:
    """Make an initialised datadir at `datadir` (created, owned by the server's user).

    Without `options` it is copied from one that was made once in this process: 0.1 s instead of 4 s. Options that move
    files (``--innodb-undo-directory=…``) must be given here *and* to the server. `kind` is one of `KINDS`.
    """
    user = server_user()
    if not options:
        shutil.copytree(_template(kind), datadir, dirs_exist_ok=True)
    else:
        datadir.mkdir(parents=True, exist_ok=True)
        _initialise(datadir, kind, options)
    # MySQL's server UUID: two servers must not have the same, and one without makes its own.
    (datadir / "auto.cnf").unlink(missing_ok=True)
    if os.geteuid() == 0:
        for path in [datadir, *datadir.rglob("*")]:
            os.chown(path, user.pw_uid, user.pw_gid)


def _initialise(datadir: Path, kind: str, options: Sequence[str] = ()) -> None:
    user = server_user()
    as_root = os.geteuid() == 0
    if as_root:
        os.chown(datadir, user.pw_uid, user.pw_gid)
    CommandRunner().run(
        [*KINDS[kind].install_command(datadir, user.pw_name if as_root else None), *options],
        timeout_s=120,
        # A server that starts removes all temporary tables in its temporary folder, be they another one's.
        env={"TMPDIR": str(datadir)},
    )


_templates = ExitStack()


@cache
def _template(kind: str) -> Path:
    """Initialise a datadir once for this process and return it; `close_template` removes it."""
    folder = _templates.enter_context(work_folder())
    datadir = folder / "template"
    datadir.mkdir()
    _initialise(datadir, kind)
    return datadir


def close_template() -> None:
    """Remove the datadirs that `install` copies from; they are made again where one is needed."""
    _templates.close()
    _template.cache_clear()


atexit.register(close_template)


@contextmanager
def private_server(
    datadir: Path,
    options: Sequence[str] = (),
    *,
    install_options: Sequence[str] | None = (),
    start: bool = True,
    kind: str = SYSTEM,
) -> Iterator[PrivateServer]:
    """Run a private server on `datadir` while the context lasts.

    Args:
        datadir: made and initialised, unless `install_options` is None: then it is used as it is.
        options: further options; the last one given wins.
        install_options: further options for the initialisation.
        start: False leaves the first `start` to the caller.
        kind: one of `support.kinds.KINDS`; by default the system's MariaDB.

    The server runs as `server_user`, without network, its socket and log in a folder of its own outside the datadir.
    """
    # Not below TMPDIR, which may be too long for a socket.
    with work_folder(Path("/tmp")) as folder:
        if os.geteuid() == 0:
            os.chown(folder, server_user().pw_uid, server_user().pw_gid)
        if install_options is not None:
            install(datadir, install_options, kind)
        server = PrivateServer(datadir, folder, options, kind)
        try:
            if start:
                server.start()
            yield server
        finally:
            with shielded():
                server.stop()
