"""Kills a forked child just before its n-th step: what it opens, makes, removes, starts or asks of the kernel."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from snapmgr.testing.processes import spawn

if TYPE_CHECKING:
    from collections.abc import Callable

# sys.audit events (docs.python.org/3/library/audit_events.html).
_STEPS = frozenset(
    {"fcntl.flock", "fcntl.ioctl", "os.mkdir", "os.remove", "os.rename", "os.truncate", "subprocess.Popen"}
)
# A program that was started a moment ago dies with us as soon as it has asked for it.
_ORPHANS_S = 0.1


def kill_at(action: Callable[[], object], step: int, *, marks: tuple[str, ...]) -> bool:
    """Run `action` in a child that dies at its step number `step`, from 0; return whether it came that far.

    Opening a file is a step if one of `marks` is in its name. Raises AssertionError if it ends early otherwise.
    """
    pid = spawn(lambda: _act(action, step, marks))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"it failed before step {step}"
    if code:
        time.sleep(_ORPHANS_S)
    return code != 0


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
