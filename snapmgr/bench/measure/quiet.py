"""Waits until a storage has finished its background work, so that the next measurement does not include it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from snapmgr.system.blockdev import find_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from snapmgr.contract.backend import Runner

# A device is idle after this time without any request.
_IDLE_S = 0.3
_LOOK_S = 0.05
# A device that others use is never idle.
_AT_MOST_S = 120.0
_CLEANER_S = 1800.0


def wait_until_idle(
    path: Path, devices: Sequence[str], runner: Runner, tell: Callable[[str], None], *, at_most_s: float = _AT_MOST_S
) -> float:
    """Flush the file system of `path`, wait for btrfs's cleaner, then until its devices are idle; return the seconds.

    The wait for a device that others use ends after `at_most_s`, and a message says so. Raises CommandError.
    """
    start = time.monotonic()
    flush(path, runner)
    now = requests(devices)
    since = begun = time.monotonic()
    while time.monotonic() - since < _IDLE_S:
        if time.monotonic() - begun > at_most_s:
            tell(
                f"{', '.join(devices)} not idle after {at_most_s:g} s: somebody else uses it, or it works on by itself"
            )
            break
        time.sleep(_LOOK_S)
        before, now = now, requests(devices)
        if now != before or now[1]:
            since = time.monotonic()
    return time.monotonic() - start


def flush(path: Path, runner: Runner) -> None:
    """Flush the file system of `path`, and wait until btrfs has cleaned up after deleted subvolumes."""
    mount = find_target(str(path)).mount
    if mount.fs_type == "btrfs":
        # This ioctl (BTRFS_IOC_SYNC) wakes the cleaner, which otherwise begins up to 30 s later; syncfs does not.
        runner.run(["btrfs", "filesystem", "sync", mount.point], timeout_s=_CLEANER_S)
        # Includes deletions that a backend has not waited for.
        runner.run(["btrfs", "subvolume", "sync", mount.point], timeout_s=_CLEANER_S)
    runner.run(["sync", "--file-system", str(path)], timeout_s=_CLEANER_S)
    if mount.fs_type == "fuse.juicefs":
        deadline = time.monotonic() + _CLEANER_S
        while _staged_bytes(mount.point) > 0 and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        # Objects that are files are on another file system, which the client does not flush.
        runner.run(["sync", "--file-system", os.path.dirname(mount.point)], timeout_s=_CLEANER_S)


def _staged_bytes(point: str) -> float:
    """Return the number of bytes that a JuiceFS client has not uploaded yet."""
    with open(f"{point}/.stats", encoding="utf-8") as file:
        values = [line.split()[-1] for line in file if line.startswith("juicefs_staging_block_bytes")]
    return sum(map(float, values))


def requests(devices: Sequence[str]) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """Return the reads, writes and discards that each device has completed, and the number of requests in flight."""
    done, under_way = [], 0
    for device in devices:
        number = os.stat(device).st_rdev
        # Documentation/admin-guide/iostats.rst: discards exist since 4.18.
        with open(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat", encoding="ascii") as file:
            fields = [int(word) for word in file.read().split()]
        done.append((fields[0], fields[4], fields[11] if len(fields) > 11 else 0))  # noqa: PLR2004
        under_way += fields[8]
    return tuple(done), under_way
