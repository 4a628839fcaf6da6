"""Looks at processes, and waits for what they do."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_until(true: Callable[[], object], limit_s: float = 60.0) -> None:
    """Return once `true` says so; AssertionError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def state(pid: int) -> str:
    """Return a process's state letter (proc_pid_stat(5)), "X" for one that is gone."""
    try:
        return _letter(Path(f"/proc/{pid}/stat"))
    except OSError:
        return "X"


def halt(pid: int) -> None:
    """Stop a process, and return when all its threads stand still: until then one may write, or answer, once more."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(_letter(stat) == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")))


def _letter(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def ended(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    return state(pid) in "ZX"


def children(pid: int | str = "self") -> set[int]:
    """Return the ids of a process's children, by default of our own, zombies included."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def servers_on(datadir: Path) -> list[int]:
    """Return the ids of the processes that were given `datadir`, or something in it, as their datadir."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(b"--datadir=" + os.fsencode(datadir)) for word in words):
                found.append(int(process.name))
    return found
