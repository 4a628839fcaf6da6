"""Frozen file systems, thawed again whatever the test does: what hangs on one cannot be killed. Traced processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def frozen_file_system(point: str, *, at_most_s: float = 90.0) -> Iterator[None]:
    """Freeze the file system mounted at `point` (fsfreeze(8)) while the context lasts, and `at_most_s`.

    The guard is a process of its own: the test itself may come to hang there.
    """
    guard = subprocess.Popen(
        ["/bin/sh", "-c", f"sleep {at_most_s}; fsfreeze --unfreeze '{point}'"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        subprocess.run(["fsfreeze", "--freeze", point], check=True, timeout=60)
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", point], check=False, stderr=subprocess.DEVNULL)
        guard.kill()
        guard.wait()


_PTRACE_SEIZE = 0x4206


@contextmanager
def traced(pid: int) -> Iterator[int]:
    """Let a child of ours trace the process `pid`, as strace(1) and gdb(1) do; yields the child's pid."""
    ready_out, ready_in = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(ready_in, b"\0" if ctypes.CDLL(None).ptrace(_PTRACE_SEIZE, pid, None, None) == 0 else b"\1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(ready_in)
    try:
        assert os.read(ready_out, 1) == b"\0"
        yield child
    finally:
        os.close(ready_out)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
