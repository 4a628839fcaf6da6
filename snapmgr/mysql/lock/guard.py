"""Runs a guard: a separate process that undoes our change to a server as soon as we are gone, or at a deadline.

It has its own session (a closed terminal does not end it) and, with cgroup version 2, its own control group, so that
``systemctl kill`` of our unit does not end it with us. The out-of-memory killer spares it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.system.host import ends_by, keep_only, signals_held, start_ticks, this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.system.host import Process

# How long a dismissed guard may take to end.
_END_S = 1.0
_CGROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
_DONE = b"d"


def write_record(path: Path, data: bytes) -> None:
    """Write the record of a change to a server, before the guard starts and before the change.

    Not flushed to disk: a crash of the machine ends the server too.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def drop_record(path: Path) -> None:
    """Remove a record; never raises."""
    with suppress(OSError):
        path.unlink()


class Guard:
    """A guard that waits for our end, or for its deadline."""

    def __init__(self, name: str, pid: int, alive: int) -> None:
        self._name = name
        self._alive = alive
        self.process: Process = this_process(pid)

    def dismiss(self) -> None:
        """Dismiss the guard because the change is undone, and wait for its end; kill it if it hangs."""
        with suppress(BrokenPipeError):
            os.write(self._alive, _DONE)
        pid = self.process.pid
        if not ends_by(pid, time.monotonic() + _END_S):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with suppress(OSError):
            _control_group(self._name, pid).rmdir()


@contextmanager
def guarded(
    name: str, undo: Callable[[], object], deadline: float, *, keep: frozenset[int] = frozenset()
) -> Iterator[Guard]:
    """Run a guard while the context lasts.

    Args:
        name: names its control group.
        undo: called in the guard's process when we are gone or have left the context without `Guard.dismiss`, or at
            the deadline. It may run after our own undo, so it must be idempotent.
        deadline: time.monotonic() when it acts in any case.
        keep: descriptors that `undo` needs; the guard closes all others of ours.
    """
    alive_out, alive_in = os.pipe()
    with signals_held():
        pid = os.fork()
        if pid == 0:
            _run(name, undo, deadline, alive_out, keep)
    os.close(alive_out)
    try:
        yield Guard(name, pid, alive_in)
    finally:
        # A guard that was not dismissed takes this for our end.
        os.close(alive_in)


def _run(name: str, undo: Callable[[], object], deadline: float, alive: int, keep: frozenset[int]) -> None:
    """Wait until our parent is gone or done, or the deadline is over; undo; exit. Runs in the child, never returns."""
    said: bytes | None = None
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        keep_only({alive, *keep})
        _own_control_group(name)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("-1000", encoding="ascii")
        said = _listen(alive, max(deadline - time.monotonic(), 0.0))
    finally:
        if said != _DONE:
            with suppress(Exception):
                undo()
        with suppress(OSError):
            if (said if said is not None else _listen(alive, 0)) == b"":
                _leave_control_group(name)
        os._exit(0)


def _listen(alive: int, timeout_s: float) -> bytes | None:
    """Return our parent's message: None before it arrives, empty bytes if the parent is gone."""
    return os.read(alive, 1) if select.select([alive], [], [], timeout_s)[0] else None


def _own_control_group(name: str) -> None:
    """Move the guard out of our control group.

    The guard does this itself: the kernel takes 20 ms, during which the parent would keep the server locked.
    """
    folder = _control_group(name, os.getpid())
    with suppress(OSError):
        # With cgroup version 1 the root is not a group but a plain tmpfs.
        if (folder.parent / "cgroup.procs").exists():
            folder.mkdir()
            (folder / "cgroup.procs").write_text(f"{os.getpid()}\n", encoding="ascii")


def _leave_control_group(name: str) -> None:
    """Remove our own control group: our parent is gone and cannot do it."""
    folder = _control_group(name, os.getpid())
    with suppress(OSError):
        (folder.parent / "cgroup.procs").write_text("0\n", encoding="ascii")
        folder.rmdir()


def remove_dead_groups(name: str) -> None:
    """Remove the control groups of dead guards called `name`."""
    for group in _control_group(name, 0).parent.glob(f"snapmgr-{name}-*"):
        pid = group.name.rpartition("-")[2]
        if pid.isdigit() and start_ticks(int(pid)) is None:
            with suppress(OSError):
                group.rmdir()


def _control_group(name: str, pid: int) -> Path:
    root = next((path for path in _CGROUPS if (path / "cgroup.procs").exists()), _CGROUPS[-1])
    return root / f"snapmgr-{name}-{pid}"
