"""Kills a forked child just before its n-th step: what it opens, makes, removes, starts or asks of the kernel."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.testing.processes import spawn
from support.processes import children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# sys.audit events (docs.python.org/3/library/audit_events.html).
_STEPS = frozenset(
    {"fcntl.flock", "fcntl.ioctl", "os.mkdir", "os.remove", "os.rename", "os.truncate", "subprocess.Popen"}
)
_PR_SET_CHILD_SUBREAPER = 36
# A program that was started a moment ago dies with its parent as soon as it has asked for it, or ends by itself.
_ORPHANS_S = 60.0


def kill_at(action: Callable[[], object], step: int, *, marks: tuple[str, ...]) -> bool:
    """Run `action` in a child that dies at its step number `step`, from 0; return whether it came that far.

    Opening a file is a step if one of `marks` is in its name. Raises AssertionError if it ends early otherwise.
    """
    others = children()
    with _adopting():
        pid = spawn(lambda: _act(action, step, marks))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        deadline = time.monotonic() + _ORPHANS_S
        while orphans := children() - others:
            assert time.monotonic() < deadline, f"they do not end: {orphans}"
            for orphan in orphans:
                os.waitpid(orphan, os.WNOHANG)
            time.sleep(0.005)
    assert code in (0, -signal.SIGKILL), f"it failed before step {step}"
    return code != 0


@contextmanager
def _adopting() -> Iterator[None]:
    """Be the parent of those whose parent ends, instead of the init process (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


def _act(action: Callable[[], object], step: int, marks: tuple[str, ...]) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in _STEPS and not (event == "open" and any(mark in str(arguments[0]) for mark in marks)):
            return
        if seen == step:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    sys.addaudithook(hook)
    action()
