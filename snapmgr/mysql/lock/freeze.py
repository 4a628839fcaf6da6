"""Freezes the server process for the milliseconds of a snapshot.

A stopped process does not issue writes, and any subset of the writes in progress is a legal crash state. So
copies made file by file, or of several volumes one after another, form one instant. The price: every client waits.

A separate process, the thawer (`snapmgr.mysql.lock.guard`), resumes the server as soon as we are gone, and at the time
limit in any case. Before the stop we record the frozen process, its thawer and the time limit in a file. If even the
thawer was killed or stopped, `thaw_leftovers` resumes the server at the next command.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import MissingRequirementError, NotFoundError, NotQuiescedError, SnapmgrError
from snapmgr.contract.units import format_duration
from snapmgr.mysql.lock.guard import drop_record, guarded, remove_dead_groups, write_record
from snapmgr.system.files import read_file
from snapmgr.system.host import Process, is_alive

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLL_S = 0.0005
# A thread in an uninterruptible call (such as fsync) stops when the call returns.
_STOP_WAIT_S = 5.0
# A thawer that has not acted this long after its time limit does not run.
_LATE_S = 1.0
_THAWER = "thaw"
_WHY_MOVING = {
    "D": "a thread hangs in the kernel; check the storage and /proc/PID/task/*/stack",
    "t": "a debugger is attached",
}


class _Threads(Struct, frozen=True, kw_only=True):
    """The threads of a process, by thread id: state letters, and counters that grow whenever a thread runs."""

    states: dict[int, str]
    runs: dict[int, bytes]

    @property
    def stopped(self) -> bool:
        return bool(self.states) and set(self.states.values()) == {"T"}


def _threads(pid: int) -> _Threads:
    """Read the states of all threads of a process. Raises NotQuiescedError if it is gone.

    From /proc/PID/task/*/: stat (proc(5): fields 3, 14 and 15), and schedstat, which counts each time that the thread
    was put on a CPU; CPU ticks miss runs shorter than 10 ms.
    """
    states: dict[int, str] = {}
    runs: dict[int, bytes] = {}
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        raise _ended(pid) from None
    for name in names:
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = _read(f"/proc/{pid}/task/{name}/stat").rpartition(b")")[2].split()
            states[int(name)] = fields[0].decode()
            runs[int(name)] = b" ".join(fields[11:13])
            # Absent in kernels without CONFIG_SCHED_INFO.
            runs[int(name)] += b" " + _read(f"/proc/{pid}/task/{name}/schedstat")
    return _Threads(states=states, runs=runs)


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _ended(pid: int) -> NotQuiescedError:
    return NotQuiescedError(f"the server (pid {pid}) ended during the freeze", hint="see its log")


def refuse_unsafe(server: Process, bound_s: float) -> None:
    """Raise NotQuiescedError for a server that we must not stop: debugged, already stopped, or with a short watchdog.

    Raises MissingRequirementError without the right to signal it.
    """
    pid = server.pid
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        os.kill(pid, 0)
    except PermissionError:
        raise MissingRequirementError(f"no right to stop the server (pid {pid})", hint="run snapmgr as root") from None
    except (FileNotFoundError, ProcessLookupError):
        raise NotQuiescedError(f"the server (pid {pid}) is gone", hint="try again") from None
    if facts.get("TracerPid", "0").strip() != "0":
        raise NotQuiescedError(
            f"the server (pid {pid}) is being debugged by process {facts['TracerPid'].strip()}",
            hint="end the debugger: it would see our stop and might undo it",
        )
    if facts.get("State", "")[:1] in {"T", "t"}:
        raise NotQuiescedError(
            f"the server (pid {pid}) is already stopped",
            hint=f"find out who stopped it, and why; to resume: kill -CONT {pid}",
        )
    watchdog = next((entry.partition(b"=")[2] for entry in environment if entry.startswith(b"WATCHDOG_USEC=")), b"")
    # As sd_watchdog_enabled(3): a value that is 0 or not a number means no watchdog.
    if watchdog.isdigit() and int(watchdog) > 0:
        watchdog_s = int(watchdog) / 1e6
        # systemd expects a keep-alive within this time; services send it after half of it.
        if bound_s > watchdog_s / 2:
            raise NotQuiescedError(
                f"systemd kills the server (pid {pid}) after {format_duration(watchdog_s)} without a sign of life, and "
                f"a freeze may last up to {format_duration(bound_s)}",
                hint=f"lower lock_hold below {format_duration(watchdog_s / 2)}",
            )


class FrozenServer:
    """A server whose threads have all stopped."""

    def __init__(self, server: Process, deadline: float, before: _Threads) -> None:
        self._server = server
        self._before = before
        self.deadline = deadline
        """time.monotonic() when the thawer resumes it."""
        self.frozen_s: float | None = None
        """Time that its clients waited, from SIGSTOP to SIGCONT; None before the thaw."""

    def prove(self) -> None:
        """Check that it has not run since it stopped: the same process, the same threads, no CPU tick used.

        Raises NotQuiescedError.
        """
        now = _threads(self._server.pid)
        if not is_alive(self._server):
            raise _ended(self._server.pid)
        if not now.stopped or now != self._before:
            raise NotQuiescedError(
                "the server ran on during the snapshot",
                hint="somebody sent it SIGCONT, or the storage call took longer than lock_hold",
            )
        if time.monotonic() >= self.deadline:
            raise NotQuiescedError("the freeze reached its time limit before the snapshot was proven")


@contextmanager
def frozen(server: Process, bound_s: float, record: Path) -> Iterator[FrozenServer]:
    """Stop `server` while the context lasts, and at most for `bound_s`; the thawer runs before the stop.

    Args:
        server: the process to stop.
        bound_s: after this the thawer resumes it in any case.
        record: file that names the frozen server; written before the stop, removed after the thaw.

    Raises NotQuiescedError if we must not stop it, or if not all its threads stop in time; MissingRequirementError
    without the right to stop it.
    """
    if bound_s <= 0:
        raise NotQuiescedError("no time was left to freeze the server", hint="raise lock_hold")
    refuse_unsafe(server, bound_s)
    handle = os.pidfd_open(server.pid)
    try:
        if not is_alive(server):
            raise NotQuiescedError(f"the server (pid {server.pid}) is gone", hint="try again")
        deadline = time.monotonic() + bound_s
        with guarded(_THAWER, partial(_resume, handle), deadline, keep=frozenset({handle})) as thawer:
            _write_record(record, server, thawer.process, deadline)
            lock, since = None, time.monotonic()
            try:
                signal.pidfd_send_signal(handle, signal.SIGSTOP)
                lock = FrozenServer(server, deadline, _wait_stopped(server, deadline))
                yield lock
            finally:
                _resume(handle)
                if lock is not None:
                    lock.frozen_s = time.monotonic() - since
                thawer.dismiss()
    finally:
        os.close(handle)
        record.unlink(missing_ok=True)


def _resume(handle: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGCONT)


def _wait_stopped(server: Process, deadline: float) -> _Threads:
    until = min(deadline, time.monotonic() + _STOP_WAIT_S)
    last = None
    while True:
        now = _threads(server.pid)
        # Require two equal readings: the state says stopped a moment before the thread leaves its CPU.
        if now.stopped and now == last:
            return now
        if not is_alive(server):
            raise _ended(server.pid)
        if time.monotonic() >= until:
            moving = sorted({state for state in now.states.values() if state != "T"})
            raise NotQuiescedError(
                f"not all threads of the server (pid {server.pid}) stopped in time (states {', '.join(moving)})",
                hint=next(
                    (why for state, why in _WHY_MOVING.items() if state in moving), "is its control group frozen?"
                ),
            )
        last = now
        time.sleep(_POLL_S)


def thaw_leftovers(folder: Path) -> list[str]:
    """Resume servers whose freezer *and* thawer were killed or stopped; return a message for the user for each.

    A server with a live thawer is left to it until the time limit is over. A process that is not the recorded one is
    left alone. Also removes the empty control groups of dead thawers.
    """
    said: list[str] = []
    for path in sorted(folder.glob("*")):
        try:
            server, thawer, deadline = _parse(read_file(path).decode("ascii"))
        except NotFoundError:
            continue
        except SnapmgrError as error:
            said.append(f"a server may be frozen, and its record cannot be read: {error.message}")
            continue
        except ValueError:
            # The record is incomplete, so nothing was stopped yet: the stop comes after the whole record.
            drop_record(path)
            continue
        if is_alive(server) and is_alive(thawer) and time.monotonic() < deadline + _LATE_S:
            continue
        try:
            if _thaw(server):
                said.append(f"an interrupted run had left the server (pid {server.pid}) frozen; it is resumed now")
        except PermissionError:
            said.append(f"an interrupted run left the server (pid {server.pid}) frozen: kill -CONT {server.pid}")
            continue
        drop_record(path)
    remove_dead_groups(_THAWER)
    return said


def _thaw(server: Process) -> bool:
    """Resume a process; return whether it was stopped. Raises PermissionError."""
    try:
        handle = os.pidfd_open(server.pid)
    except (OSError, ValueError, OverflowError):
        return False
    try:
        # The open handle keeps this process; only now does the check hold.
        if not is_alive(server):
            return False
        was_stopped = "T" in _threads(server.pid).states.values()
        # In any case: a stop may be pending until a thread's call returns, and SIGCONT cancels it.
        signal.pidfd_send_signal(handle, signal.SIGCONT)
    except (ProcessLookupError, NotQuiescedError):
        return False
    else:
        return was_stopped
    finally:
        os.close(handle)


def _parse(text: str) -> tuple[Process, Process, float]:
    """Return the frozen process, its thawer, and the time.monotonic() of the thaw. Raises ValueError."""
    server, thawer, deadline = text.splitlines()
    return _process(server), _process(thawer), float(deadline)


def _process(line: str) -> Process:
    pid, ticks, boot = line.split()
    return Process(pid=int(pid), start_ticks=int(ticks), boot_id=boot)


def _write_record(path: Path, server: Process, thawer: Process, deadline: float) -> None:
    lines = [f"{process.pid} {process.start_ticks} {process.boot_id}" for process in (server, thawer)]
    write_record(path, ("\n".join([*lines, f"{deadline}"]) + "\n").encode())
