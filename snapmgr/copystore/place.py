"""Decides whether a folder can be the store for the copies of a directory, and measures its file system."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.contract.errors import StorageError
from snapmgr.contract.records import Gauge
from snapmgr.system.paths import holder, lies_in, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.contract.records import Mount, Pool


def unsuitable(store: str, path: str) -> str | None:
    """Return why the folder `store` cannot hold the copies of the directory `path`; None if it can. Real paths."""
    try:
        store.encode()
    except UnicodeEncodeError:
        # Manifests hold this path, and they are UTF-8.
        return f"the store {shown(store)} has a name that is not UTF-8"
    if lies_in(path, store):
        return f"{shown(path)} lies inside the store {shown(store)}"
    if lies_in(store, path):
        return f"the store {shown(store)} lies inside {shown(path)}"
    return None


def unwritable(store: str) -> str | None:
    """Return why the folder `store` cannot be used or created by this user; None if it can."""
    if os.path.isdir(store):
        return f"the store {shown(store)} belongs to another user" if os.stat(store).st_uid != os.geteuid() else None
    if os.path.lexists(store):
        return f"the store {shown(store)} is not a folder"
    if not os.access(os.path.dirname(store), os.W_OK | os.X_OK):
        return f"the store {shown(store)} does not exist and cannot be created"
    return None


def gauge(pool: Pool, path: str, mounts: Sequence[Mount]) -> Gauge:
    """Return how full the file system is that holds the folder `path` of a pool. Raises StorageError."""
    try:
        room = os.statvfs(path)
    except OSError as error:
        raise StorageError(f"cannot look at {shown(path)}: {error.strerror}") from error
    # By the mount table: each btrfs subvolume has a device number of its own.
    held, origin = (holder(one, mounts) for one in (os.path.realpath(path), pool.hint))
    size_bytes = room.f_blocks * room.f_frsize
    return Gauge(
        name=f"the file system at {shown(held.point)}",
        size_bytes=size_bytes,
        # Only root may use the last blocks, which servers do not run as.
        used_bytes=size_bytes - room.f_bavail * room.f_frsize,
        when_full="origin_errors" if held.device == origin.device else "no_snapshots",
        pool=pool,
    )
