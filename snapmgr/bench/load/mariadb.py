"""Installs and runs a private MariaDB on the measured storage, without network, and blocks its writers on request."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.contract.errors import CommandError, MissingRequirementError
from snapmgr.mysql.connect.abilities import probe_abilities
from snapmgr.mysql.connect.client import Credentials, MysqlError, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.lock.freeze import frozen
from snapmgr.mysql.lock.levels import LockNeeds, choose
from snapmgr.mysql.lock.quiesce import LockBounds, locked
from snapmgr.system.boot import boot_id
from snapmgr.system.command import dying_with_us, find_program, running
from snapmgr.system.host import Process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from snapmgr.contract.backend import Runner
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.system.command import Process as Child

PROGRAMS = ("mariadbd", "mariadb-install-db")
_START_S = 120.0
_STOP_S = 120.0
_BOUNDS = LockBounds(max_stall_s=10.0, lock_attempts=5, lock_hold_s=30.0)
_LOG_TAIL = 20


@dataclass
class Hold:
    """Time that a server's clients were blocked."""

    seconds: float = 0.0


class PrivateMariadb:
    """A running server, made by `private_mariadb`."""

    def __init__(self, child: Child, folder: Path) -> None:
        self._child = child
        self.socket = str(folder / "s")
        self._log = folder / "server.log"
        self._folder = folder

    @property
    def credentials(self) -> Credentials:
        """Credentials of an account with all privileges."""
        return Credentials(socket=self.socket, user="root")

    def connect(self) -> Connection:
        """Return a connection with all privileges."""
        return connect(self.credentials)

    def wait(self) -> None:
        """Wait until it answers. Raises CommandError with the end of its log."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self.connect().close()
            except MysqlError as error:
                ended = self._child.poll()
                if ended is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                how = "does not answer" if ended is None else f"ended with {ended}"
                raise CommandError(f"the server {how}: {error.message}; its log: {self._tail()}") from None
            return

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL:])

    @contextmanager
    def held(self, hold: Hold, *, at_once: bool) -> Iterator[None]:
        """Block it as a backup does while the context lasts: lock it, and freeze it if files are copied singly.

        `hold` receives the time that its writers were blocked.
        """
        with self.connect() as connection:
            identity = identify(connection)
            abilities = probe_abilities(connection, identity)
        choice = choose(
            "auto" if at_once else "freeze-process", abilities, LockNeeds(engines={"InnoDB": 1}, atomic=at_once)
        )
        with ExitStack() as stack:
            # Everything was flushed just before.
            lock = stack.enter_context(
                locked(self.credentials, abilities, choice, _BOUNDS, check=lambda _connection: None, sync=lambda: None)
            )
            start = time.monotonic()
            if choice.freeze:
                lock.expect_freeze()
                process = Process(pid=identity.pid, start_ticks=identity.start_ticks, boot_id=boot_id())
                with frozen(process, lock.deadline - start, self._folder / "frozen") as still:
                    yield
                    still.prove()
            else:
                yield
            lock.prove()
            lock.release()
            hold.seconds = time.monotonic() - start

    def stop(self) -> None:
        """Shut it down cleanly, with all data written."""
        self._child.terminate()
        self._child.wait(_STOP_S)

    def kill(self) -> None:
        """Kill it, so that it writes nothing more."""
        self._child.kill()
        self._child.wait(_STOP_S)


def install(datadir: Path, runner: Runner) -> None:
    """Make an empty datadir; the folder must not exist yet."""
    datadir.mkdir()
    runner.run(
        [
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={datadir}",
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
            *_as_root(),
        ],
        timeout_s=_START_S,
    )


def _as_root() -> list[str]:
    # Another user is unnecessary: the folder is closed to other users, and the server has no network. It is also
    # impossible: another user could not reach the private mounts of the benchmark.
    return ["--user=root"] if os.geteuid() == 0 else []


@contextmanager
def private_mariadb(datadir: Path, folder: Path, options: Sequence[str]) -> Iterator[PrivateMariadb]:
    """Run a server on `datadir` while the context lasts; socket and log are in `folder`, closed to other users.

    Raises MissingRequirementError if MariaDB is missing, CommandError if it does not start.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if len(os.fsencode(folder)) > 90:  # noqa: PLR2004 - sun_path has 108 bytes
        raise MissingRequirementError(
            f"{folder} is too long for a socket", hint="choose a shorter folder for the results"
        )
    argv = [
        *(*dying_with_us(), find_program("mariadbd")),
        "--no-defaults",
        f"--datadir={datadir}",
        f"--socket={folder}/s",
        f"--pid-file={folder}/pid",
        f"--tmpdir={folder}",
        "--skip-networking",
        "--performance-schema=OFF",
        "--log-bin=binlog",
        "--server-id=1",
        "--sync-binlog=1",
        "--innodb-flush-log-at-trx-commit=1",
        # A buffer pool warmed by an earlier start would distort the comparison.
        "--innodb-buffer-pool-dump-at-shutdown=OFF",
        "--innodb-buffer-pool-load-at-startup=OFF",
        *_as_root(),
        *options,
    ]
    with (folder / "server.log").open("ab") as log, running(argv, output=log) as child:
        server = PrivateMariadb(child, folder)
        server.wait()
        yield server
