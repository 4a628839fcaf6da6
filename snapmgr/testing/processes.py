"""Runs actions in other processes, so that they share no memory or can be killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.system.host import is_alive, this_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.system.host import Process

_ORPHANS_S = 2.0


def spawn(action: Callable[[], object]) -> int:
    """Run `action` in a forked child and return its pid; its exit code is 0 only if nothing was raised."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        action()
        code = 0
    except BaseException as error:  # noqa: BLE001
        os.write(2, f"in the child: {type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"))
    finally:
        os._exit(code)


def succeeds(pid: int) -> bool:
    """Wait for a child; return whether it ended without an exception."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def kill_after(action: Callable[[], object], delay_s: float) -> None:
    """Run `action` in a child, with everything that it starts, and kill the child after `delay_s`, if it still runs.

    Programs that it had started are given a moment to notice: one that is to die with us dies a little later.
    """
    pid = spawn(action)
    time.sleep(delay_s)
    started = _descendants(pid)
    os.kill(pid, signal.SIGKILL)  # at worst a zombie, so the pid is not reused
    os.waitpid(pid, 0)
    deadline = time.monotonic() + _ORPHANS_S
    while any(is_alive(process) for process in started) and time.monotonic() < deadline:
        time.sleep(0.001)


def _descendants(pid: int) -> list[Process]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except OSError:
        return []
    return [found for child in children for found in (this_process(child), *_descendants(child))]


def moments(duration_s: float, count: int) -> tuple[float, ...]:
    """Given the duration of an action, return moments, in seconds, at which to kill it."""
    return tuple(duration_s * (number + 0.5) / count for number in range(count))


def duration_s(action: Callable[[], object]) -> float:
    """Return how long `action` takes in a child, forking included."""
    start = time.monotonic()
    if not succeeds(spawn(action)):
        raise AssertionError("it failed without being killed; what it said is on stderr")
    return time.monotonic() - start
