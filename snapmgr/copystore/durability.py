"""Waits until data are on disk, and until the space of removed files is free."""

from __future__ import annotations

import os
import threading
import time

from snapmgr.contract.errors import StorageError
from snapmgr.system import kernel
from snapmgr.system.paths import shown

_SPACE_STEADY_S = 0.05
_SPACE_AT_MOST_S = 10.0


def flush(fd: int, path: str, deadline: float | None = None) -> None:
    """Write all dirty data of a file system, given one descriptor in it and a path for messages.

    Raises StorageError if the device refuses, or at the deadline (time.monotonic()), and then abandons the call.
    """
    # A sync on a hung device cannot be interrupted, but its thread can be abandoned: the call runs without the GIL.
    outcome: list[OSError | None] = []

    def run(own_fd: int) -> None:
        try:
            kernel.sync_file_system(own_fd)
        except OSError as error:
            outcome.append(error)
        else:
            outcome.append(None)
        finally:
            os.close(own_fd)

    if deadline is None:
        run(os.dup(fd))
    else:
        thread = threading.Thread(target=run, args=(os.dup(fd),), daemon=True)
        thread.start()
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            raise StorageError(
                f"{shown(path)} was not safe on disk in time",
                hint="the storage is slow or hangs; the copy is kept and can be settled later",
            )
    if outcome[0] is not None:
        raise StorageError(
            f"cannot flush the file system of {shown(path)}: {outcome[0].strerror}",
            hint="look at the kernel's log: the device may be failing",
        ) from outcome[0]


def await_space(fd: int, path: str) -> None:
    """Wait until the file system that holds `fd` has reclaimed the blocks of removed files."""
    flush(fd, path)
    if kernel.free_removed_files(fd):
        return
    # Only root can ask XFS. Each statvfs triggers its background work: wait until the figure no longer changes.
    deadline = time.monotonic() + _SPACE_AT_MOST_S
    free, steady_since = os.fstatvfs(fd).f_bfree, time.monotonic()
    while steady_since + _SPACE_STEADY_S > time.monotonic() and time.monotonic() < deadline:
        time.sleep(_SPACE_STEADY_S / 10)
        now = os.fstatvfs(fd).f_bfree
        if now != free:
            free, steady_since = now, time.monotonic()
