"""Freezing the server process: for the milliseconds of a snapshot it does not run at all.

A stopped process issues no new write, and any subset of the writes that were under way is a legal crash state; so
copies made file by file, or of several volumes one after another, are of one instant. The price is that every client
waits.

Hence the thawer: a process of its own (own session, own control group where there is one) that lets the server go on as
soon as we are gone, and at the bound whatever happens to us. What is frozen, and who thaws it, is on disk before the
stop; if even the thawer was killed, `thaw_leftovers` lets the server go on at the next command.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.errors import LackingError, NotQuiescedError
from snapmgr.host import is_alive, keep_only, signals_held, this_process
from snapmgr.manifest import Process
from snapmgr.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLL_S = 0.0005
# A thread in an uninterruptible call (an fsync under way) stops when the call returns.
_STOP_WAIT_S = 5.0
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class _Threads:
    """What a process's threads are doing, by thread id: state letter and CPU ticks used."""

    states: dict[int, str]
    ticks: dict[int, int]

    @property
    def stopped(self) -> bool:
        return bool(self.states) and set(self.states.values()) == {"T"}


def _threads(pid: int) -> _Threads:
    """Read /proc/PID/task/*/stat (proc(5): fields 3, 14 and 15). Raises NotQuiescedError if the process is gone."""
    states: dict[int, str] = {}
    ticks: dict[int, int] = {}
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        raise NotQuiescedError(f"the server (pid {pid}) ended while it was to be frozen") from None
    for name in names:
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/task/{name}/stat").read_bytes().rpartition(b")")[2].split()
            states[int(name)] = fields[0].decode()
            ticks[int(name)] = int(fields[11]) + int(fields[12])
    return _Threads(states=states, ticks=ticks)


def refuse_unsafe(server: Process, bound_s: float) -> None:
    """Raise NotQuiescedError for a server that must not be stopped: debugged, stopped already, or watched too closely.

    Raises LackingError without the right to signal it.
    """
    pid = server.pid
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        os.kill(pid, 0)
    except PermissionError:
        raise LackingError(f"no right to stop the server (pid {pid})", hint="run snapmgr as root") from None
    except (FileNotFoundError, ProcessLookupError):
        raise NotQuiescedError(f"the server (pid {pid}) is gone", hint="try again") from None
    if facts.get("TracerPid", "0").strip() != "0":
        raise NotQuiescedError(
            f"the server (pid {pid}) is being debugged by process {facts['TracerPid'].strip()}",
            hint="end the debugger: it would see our stop, and might undo it",
        )
    if facts.get("State", "")[:1] in {"T", "t"}:
        raise NotQuiescedError(
            f"the server (pid {pid}) is stopped already", hint=f"somebody stopped it on purpose; or: kill -CONT {pid}"
        )
    watchdog = next((entry for entry in environment if entry.startswith(b"WATCHDOG_USEC=")), None)
    if watchdog is not None:
        watchdog_s = int(watchdog.partition(b"=")[2]) / 1e6
        # systemd expects a sign of life within this time; half of it is what services aim at.
        if bound_s > watchdog_s / 2:
            raise NotQuiescedError(
                f"systemd kills the server (pid {pid}) after {format_duration(watchdog_s)} without a sign of life, and "
                f"it may be frozen up to {format_duration(bound_s)}",
                hint=f"lower lock_hold below {format_duration(watchdog_s / 2)}",
            )


class FrozenServer:
    """A server whose threads have all stopped."""

    def __init__(self, server: Process, deadline: float, before: _Threads) -> None:
        self._server = server
        self._before = before
        self._since = time.monotonic()
        self.deadline = deadline
        """time.monotonic() at which the thawer lets it go on."""
        self.frozen_s: float | None = None
        """How long it stood still; set when it goes on."""

    def prove(self) -> None:
        """Show that it has not run since it stopped: the same process, the same threads, no CPU tick used.

        Raises NotQuiescedError.
        """
        now = _threads(self._server.pid)
        if not is_alive(self._server):
            raise NotQuiescedError("the server was replaced while it was to be frozen")
        if not now.stopped or now != self._before:
            raise NotQuiescedError(
                "the server went on during the snapshot",
                hint="somebody sent it SIGCONT, or the storage call took longer than lock_hold",
            )
        if time.monotonic() >= self.deadline:
            raise NotQuiescedError("the server's time to stand still was over before the snapshot was proven")


@contextmanager
def frozen(server: Process, bound_s: float, record: Path) -> Iterator[FrozenServer]:
    """Stop `server` while the context lasts, and at most `bound_s`; the thawer is armed before it is stopped.

    Args:
        server: the process to stop.
        bound_s: after this the thawer lets it go on, whatever we do.
        record: file that says what is frozen; written before the stop, removed after the thaw.

    Raises NotQuiescedError if it must not be stopped, or if not all its threads stop in time.
    """
    refuse_unsafe(server, bound_s)
    handle = os.pidfd_open(server.pid)
    try:
        if not is_alive(server):
            raise NotQuiescedError(f"the server (pid {server.pid}) is gone", hint="try again")
        with _thawer(handle, bound_s, lambda thawer: _write_record(record, server, thawer)) as deadline:
            lock = None
            try:
                signal.pidfd_send_signal(handle, signal.SIGSTOP)
                lock = FrozenServer(server, deadline, _wait_stopped(server.pid, deadline))
                yield lock
            finally:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGCONT)
                if lock is not None:
                    lock.frozen_s = time.monotonic() - lock._since  # noqa: SLF001 - the two are one thing
    finally:
        os.close(handle)
        record.unlink(missing_ok=True)


def _wait_stopped(pid: int, deadline: float) -> _Threads:
    until = min(deadline, time.monotonic() + _STOP_WAIT_S)
    while True:
        now = _threads(pid)
        if now.stopped:
            return now
        if time.monotonic() >= until:
            moving = sorted({state for state in now.states.values() if state != "T"})
            raise NotQuiescedError(
                f"not all threads of the server (pid {pid}) stopped in time (states {', '.join(moving)})",
                hint="D: a thread hangs in the kernel; look at the storage and at /proc/PID/task/*/stack",
            )
        time.sleep(_POLL_S)


@contextmanager
def _thawer(handle: int, bound_s: float, announce: Callable[[Process], None]) -> Iterator[float]:
    """Run the thawer while the context lasts; yields the deadline at which it thaws.

    `announce` puts its identity on disk; only then the context begins.
    """
    alive_out, alive_in = os.pipe()
    with signals_held():
        deadline = time.monotonic() + bound_s
        pid = os.fork()
        if pid == 0:
            _run_thawer(handle, deadline, alive_out)
    os.close(alive_out)
    try:
        _own_control_group(pid)
        announce(this_process(pid))
        yield deadline
    finally:
        # Its end of the pipe closes: it thaws (once more, harmless) and ends.
        os.close(alive_in)
        os.waitpid(pid, 0)
        _drop_control_group(pid)


def _run_thawer(handle: int, deadline: float, alive: int) -> None:
    """Wait until our parent is gone or done, or the deadline has come; thaw; exit. Runs in the child, never returns."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
            signal.signal(number, signal.SIG_IGN)
        keep_only({handle, alive})
        select.select([alive], [], [], max(deadline - time.monotonic(), 0.0))
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGCONT)
        os._exit(0)


def _own_control_group(pid: int) -> None:
    """Move the thawer out of our control group, so that ``systemctl kill`` of our unit does not end it with us."""
    folder = _control_group(pid)
    with suppress(OSError):
        folder.mkdir()
        (folder / "cgroup.procs").write_text(f"{pid}\n", encoding="ascii")


def _drop_control_group(pid: int) -> None:
    with suppress(OSError):
        _control_group(pid).rmdir()


def _control_group(pid: int) -> Path:
    root = _CGROUP / "unified" if (_CGROUP / "unified" / "cgroup.procs").exists() else _CGROUP
    return root / f"snapmgr-thaw-{pid}"


def thaw_leftovers(folder: Path) -> list[str]:
    """Let servers go on whose freezer *and* thawer were killed; return a line for people for each.

    A server that its own thawer still watches is left to it. Nothing is done to a process that is not the recorded one.
    """
    said: list[str] = []
    for path in sorted(folder.glob("*")):
        try:
            server, thawer = (_parse(line) for line in path.read_text(encoding="ascii").splitlines())
        except (ValueError, OSError):
            # Cut short: it is on disk, whole, before anything is stopped.
            path.unlink(missing_ok=True)
            continue
        if is_alive(server) and is_alive(thawer):
            continue
        if is_alive(server) and _threads(server.pid).stopped:
            os.kill(server.pid, signal.SIGCONT)
            said.append(f"a killed run had left the server (pid {server.pid}) frozen; it goes on now")
        path.unlink(missing_ok=True)
    return said


def _parse(line: str) -> Process:
    pid, ticks, boot = line.split()
    return Process(pid=int(pid), start_ticks=int(ticks), boot_id=boot)


def _write_record(path: Path, server: Process, thawer: Process) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    text = "\n".join(f"{process.pid} {process.start_ticks} {process.boot_id}" for process in (server, thawer))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
