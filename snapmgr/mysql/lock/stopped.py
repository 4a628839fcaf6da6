"""Proves for the level "stopped" that no server runs on a datadir, and prevents a start during the snapshot.

Both MariaDB and MySQL take a POSIX write lock (fcntl(2)) on the first system tablespace file, MariaDB also on Aria's
control file; without it they wait or refuse to start. So we take those locks for the milliseconds of the snapshot.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.catalog.manifest import QuiesceRecord
from snapmgr.contract.errors import MissingRequirementError, NotQuiescedError
from snapmgr.mysql.connect.identity import server_processes

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOCK_FILES = ("ibdata1", "aria_log_control")
_REDO_LOGS = ("ib_logfile0", "#innodb_redo")


class StoppedServer:
    """A datadir that no server uses while the context lasts."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._since = time.monotonic()

    def record(self) -> QuiesceRecord:
        """Return the record for the manifest."""
        return QuiesceRecord(
            level="stopped",
            why="asked for by the job",
            proof=f"no server had it open, and we held the lock on {' and '.join(self._names)} throughout",
            attempts=1,
            waited_s=0.0,
            held_s=time.monotonic() - self._since,
        )


@contextmanager
def stopped(datadir: str) -> Iterator[StoppedServer]:
    """Prevent servers from using `datadir` while the context lasts.

    Raises NotQuiescedError if a server runs there, or if it is not a datadir; MissingRequirementError without the right
    to look.
    """
    pid = server_process(datadir)
    if pid is not None:
        raise NotQuiescedError(
            f'a server (pid {pid}) runs on {datadir}, but the job says quiesce = "stopped"',
            hint='stop it, or give the job its socket and quiesce = "auto"',
        )
    with ExitStack() as stack:
        names = []
        for name in _LOCK_FILES:
            path = Path(datadir, name)
            try:
                # Closing any descriptor of the file drops the lock: this process must not open it again.
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise MissingRequirementError(
                    f"cannot open {path} to lock it: {error.strerror}", hint="run as root"
                ) from None
            stack.callback(os.close, fd)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise NotQuiescedError(f"a server holds the lock on {path}", hint="stop the server first") from None
            names.append(name)
        if not names:
            raise NotQuiescedError(
                f"{datadir} has neither ibdata1 nor aria_log_control: it does not look like a datadir",
                hint="correct the job's datadir",
            )
        _refuse_scattered(datadir)
        yield StoppedServer(tuple(names))


def _refuse_scattered(datadir: str) -> None:
    """Raise NotQuiescedError if only one of system tablespace and redo log is in the datadir."""
    tablespace = Path(datadir, "ibdata1").exists()
    if tablespace != any(Path(datadir, name).exists() for name in _REDO_LOGS):
        what = "redo log" if tablespace else "system tablespace"
        raise NotQuiescedError(
            f"InnoDB's {what} is not in {datadir}, and only a running server knows where it is",
            hint='start the server and give the job its socket and quiesce = "auto"',
        )


def server_process(datadir: str) -> int | None:
    """Return the pid of a database server whose working directory is `datadir`, as both flavors' is, or None."""
    try:
        wanted = Path(datadir).stat()
    except OSError as error:
        raise NotQuiescedError(f"cannot read {datadir}: {error.strerror}") from None
    for process in server_processes():
        with suppress(OSError):  # ended meanwhile, or not ours to look at
            folder = (process / "cwd").stat()
            if (folder.st_dev, folder.st_ino) == (wanted.st_dev, wanted.st_ino):
                return int(process.name)
    return None
