"""Identifies this host and its processes across reboots and reused pids."""

import os
import re
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from msgspec import Struct

from snapmgr.system.boot import boot_id


class Process(Struct, frozen=True, kw_only=True):
    """A process, identified so that a reused pid is not mistaken for it."""

    pid: int
    start_ticks: int
    boot_id: str


_POLL_S = 0.0005
_REGRESSED, _FIXED = (4, 9), (5, 6)
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def regression_side(kernel: str) -> Literal["before", "within", "after"]:
    """Given a kernel's release ("5.4.0-150-generic"), return on which side of ext4's O_DIRECT regression it is.

    "within": Linux 4.9 to 5.5, where in-place writes block synchronous reads of the same file (since "ext4: Allow
    parallel DIO reads", until they share the lock again). A distribution may have backported the fix, which the number
    does not show. Raises ValueError if `kernel` does not begin with a version.
    """
    version = re.match(r"(\d+)\.(\d+)", kernel)
    if version is None:
        raise ValueError(f"{kernel!r} is not a kernel release")
    number = int(version[1]), int(version[2])
    if number < _REGRESSED:
        return "before"
    return "within" if number < _FIXED else "after"


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot (field 22 of proc(5) stat), or None if it is gone.

    A zombie counts as gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may contain spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])


def this_process(pid: int | None = None) -> Process:
    """Return the identity of a running process, by default ours."""
    pid = os.getpid() if pid is None else pid
    return Process(pid=pid, start_ticks=start_ticks(pid) or 0, boot_id=boot_id())


def is_alive(process: Process) -> bool:
    """Whether that very process still runs."""
    return process.boot_id == boot_id() and start_ticks(process.pid) == process.start_ticks


@contextmanager
def signals_held() -> Iterator[None]:
    """Block the signals that end a run until the context ends. For short steps that must not be interrupted."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def ends_by(pid: int, deadline: float) -> bool:
    """Wait until a child ends, at most until `deadline` (time.monotonic()), and reap it. Return whether it ended.

    Raises ChildProcessError if there is no such child.
    """
    await_end(pid, deadline)
    # Where that is not possible, we ask again and again.
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def await_end(pid: int, deadline: float) -> None:
    """Wait until a process ends, at most until `deadline` (time.monotonic()); reap nothing, and raise nothing.

    Linux 5.3 tells when it ends. Where that is missing, or a container forbids it, return at once.
    """
    with suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            ended = select.poll()
            ended.register(fd, select.POLLIN)
            ended.poll(max(deadline - time.monotonic(), 0.0) * 1000)
        finally:
            os.close(fd)


def keep_only(fds: set[int]) -> None:
    """Close every descriptor but `fds`; stdin, stdout and stderr become /dev/null.

    For a forked helper, which may hang for hours and must not hold a lock, a socket, or the pipe that cron reads.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    kept = sorted(fds | {0, 1, 2})
    for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
