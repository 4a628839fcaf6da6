"""Finds the limits of a tuning on this machine: memory, room for caches, folders for them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.physical.prepare.places import free_bytes, memory_available
from snapmgr.physical.tuning.rungs import TuningLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIB = 1 << 20
_LEAST_MEMORY = 256 * _MIB
_LEAST_CACHE = 128 * _MIB
# Share of the free space for a cache: the client itself keeps a tenth of the disk free.
_CACHE_SHARE = 0.8
# Size of a cache in memory, relative to the data: it holds both the data read and the data written.
_IN_MEMORY_PER_DATA = 1.5


def limits(
    data_bytes: int,
    *,
    private: bool,
    io_threads: bool,
    cache_root: str,
    folders: Sequence[str] = ("/dev/shm",),  # noqa: S108 - caches get folders of their own there, closed to others
) -> TuningLimits:
    """Return the limits for a backup of `data_bytes`.

    Args:
        data_bytes: size of the backup.
        private: whether the storage can be mounted privately.
        io_threads: whether the tool uses I/O threads.
        cache_root: the default folder for caches.
        folders: further folders for caches, used if they are on another disk with room, or in free memory.
    """
    memory = min(memory_available() // 2, max(data_bytes, _LEAST_MEMORY))
    return TuningLimits(
        data_bytes=data_bytes,
        memory_bytes=max(_rounded(memory), _LEAST_MEMORY),
        private=private,
        cache_bytes=_cache_bytes(cache_root) if private else 0,
        cache_dirs=_other_folders(cache_root, folders, data_bytes) if private else (),
        io_threads=io_threads,
    )


def _cache_bytes(root: str) -> int:
    return max(_rounded(int(free_bytes(root) * _CACHE_SHARE)), _LEAST_CACHE)


def _other_folders(root: str, folders: Sequence[str], data_bytes: int) -> tuple[str, ...]:
    devices = {os.stat(root).st_dev}
    found = []
    for folder in folders:
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            continue
        device = os.stat(folder).st_dev
        if device not in devices and free_bytes(folder) > data_bytes * _IN_MEMORY_PER_DATA:
            devices.add(device)
            found.append(folder)
    return tuple(found)


def _rounded(size_bytes: int) -> int:
    """Return whole MiB, which are easier to read."""
    return size_bytes // _MIB * _MIB
