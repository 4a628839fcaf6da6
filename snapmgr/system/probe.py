"""Checks that a file system answers: on a frozen or hung one every change hangs, unreachable for signals.

Therefore a child tries a change, and the parent waits with a timeout. The child holds no lock, no socket and no folder;
a hanging child ends by itself when the file system recovers.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.contract.errors import StorageError
from snapmgr.contract.units import format_duration
from snapmgr.system.blockdev import read_mounts
from snapmgr.system.host import keep_only, signals_held

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapmgr.contract.records import Mount, Pool

# btrfs blocks all changes while it commits much dirty data: seconds on a slow disk.
ANSWER_S = 15.0
_POLL_S = 0.0005
_hanging: dict[int, int] = {}
"""The hanging child by device number of the file system; one is enough."""


def require_answer(path: str) -> None:
    """Raise StorageError if a small change on the file system of the folder `path` does not return in `ANSWER_S`.

    The child opens an unnamed file there, which leaves nothing. For FUSE, which cannot be frozen, it only asks for the
    size, as JuiceFS would create and remove a named file, which changes the folder's times. Any answer is good, also
    "read-only": the call that needs the storage reports its errors.
    """
    try:
        device = os.stat(path).st_dev
    except OSError:
        return
    pid, deadline = _hanging.pop(device, None), time.monotonic()
    if pid is None:
        pid = _start(path, changing=not _is_fuse(device))
        deadline += ANSWER_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() >= deadline:
            _hanging[device] = pid
            raise StorageError(
                f"the file system at {path} did not answer within {format_duration(ANSWER_S)}: "
                f"a small change there hangs (process {pid})",
                hint=f"if it is frozen: fsfreeze -u {path}; else see /proc/{pid}/stack and the kernel log",
            )
        time.sleep(_POLL_S)


def require_pools_answer(pools: Iterable[Pool], mounts: tuple[Mount, ...]) -> None:
    """Do the same for each pool in `pools` that is mounted, given the mount table; others cannot be frozen."""
    for pool in dict.fromkeys(pools):
        path = _folder_of(pool, mounts)
        if path is not None:
            require_answer(path)


def _folder_of(pool: Pool, mounts: tuple[Mount, ...]) -> str | None:
    """Return a folder in the pool: itself, where it was last seen, or where its device is mounted."""
    for place in (pool.id, pool.hint):
        with suppress(OSError):
            if not place.startswith("/"):
                continue
            found = os.stat(place)
            if stat.S_ISDIR(found.st_mode):
                return place
            if stat.S_ISBLK(found.st_mode):
                device = os.path.realpath(place)
                return next((one.point for one in mounts if os.path.realpath(one.source) == device), None)
    return None


def _is_fuse(device: int) -> bool:
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(one.device == number and one.fs_type.startswith("fuse.") for one in read_mounts())


def _start(path: str, *, changing: bool) -> int:
    with signals_held():
        pid = os.fork()
        if pid == 0:
            try:
                # Keep no mount busy.
                os.chdir("/")
                keep_only(set())
                if changing:
                    os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                else:
                    os.statvfs(path)
            finally:
                os._exit(0)
    return pid
