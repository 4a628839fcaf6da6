"""Checks after the lock that the snapshots are the right ones, and waits until they are on disk."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from snapmgr.api import StorageError
from snapmgr_btrfs import kernel, library

if TYPE_CHECKING:
    from snapmgr.api import SnapshotRef
    from snapmgr_btrfs.filesystem import TopLevel
    from snapmgr_btrfs.folder import Entry


def settle(top: TopLevel, entry: Entry, ref: SnapshotRef, deadline: float) -> None:
    """Check a snapshot and wait until the transaction that made it is on disk.

    Raises StorageError if it is writable or of something else, or at `deadline` (time.monotonic()).
    """
    if not entry.read_only:
        raise StorageError(f"the snapshot {ref.name} is not read-only", hint="somebody changed it: take another one")
    origin = entry.parent_uuid or f"{top.uuid}:{library.TOP_LEVEL_ID}"
    if origin != ref.volume_id:
        raise StorageError(f"the snapshot {ref.name} is one of {origin}, not of {ref.volume_id}")
    _wait_commit(top.fd, entry.info.otransid, deadline - time.monotonic(), ref.name)


def _wait_commit(fd: int, transaction: int, timeout_s: float, name: str) -> None:
    """Wait for a transaction; normally it is on disk already, because the snapshot call commits it itself."""
    failures: list[OSError] = []

    def wait() -> None:
        try:
            kernel.wait_commit(fd, transaction)
        except OSError as error:
            failures.append(error)

    # The wait cannot be interrupted: a thread of its own lets us give up.
    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(max(timeout_s, 0.0))
    if waiter.is_alive():
        message = f"the snapshot {name} was not on disk within the time limit"
        raise StorageError(message, hint="the storage hangs or is very slow; see dmesg")
    if failures:
        raise StorageError(f"cannot make the snapshot {name} durable: {failures[0].strerror}") from failures[0]
