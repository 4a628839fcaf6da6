"""The bare snapshot call, which the time of a lock is compared with."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import btrfsutil

from snapmgr.system.kernel import sync_file_system

if TYPE_CHECKING:
    from pathlib import Path


def bare_snapshot(origin: Path, target: Path) -> tuple[int, int]:
    """Snapshot a btrfs subvolume after a sync, with no lock, and delete it.

    Return begin and end of the snapshot call alone (CLOCK_MONOTONIC, ns).
    """
    fd = os.open(origin, os.O_RDONLY)
    try:
        sync_file_system(fd)
        start = time.monotonic_ns()
        btrfsutil.create_snapshot(fd, str(target), read_only=True)
        end = time.monotonic_ns()
    finally:
        os.close(fd)
    btrfsutil.delete_subvolume(str(target))
    return start, end
