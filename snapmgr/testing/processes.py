"""Does things in other processes: to have no memory of them, or to be killed in the middle."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_FRACTIONS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)


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
    """Run `action` in a child, with everything that it starts, and kill the child after `delay_s`, if it still runs."""
    pid = spawn(action)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)  # a zombie at worst: nobody else has its pid
    os.waitpid(pid, 0)


def moments(duration_s: float) -> tuple[float, ...]:
    """Given how long something takes, return moments in it, in seconds, at which to kill it."""
    return tuple(duration_s * fraction for fraction in _FRACTIONS)


def duration_s(action: Callable[[], object]) -> float:
    """Return how long `action` takes in a child, forking included."""
    start = time.monotonic()
    if not succeeds(spawn(action)):
        raise AssertionError("it failed without being killed; what it said is on stderr")
    return time.monotonic() - start
