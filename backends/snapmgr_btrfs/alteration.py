"""Checks that a snapshot was not changed since: somebody may have made it writable, changed it and closed it again.

btrfs itself tells. A subvolume's root notes the transaction that made it (otransid) and the last one that changed an
inode of it (ctransid); in an untouched snapshot the second is the older one. Deduplication (FIDEDUPERANGE, as bees and
duperemove do it) changes inodes of read-only snapshots, too, but neither their contents nor their ctime; so where the
root was touched, the inodes written since are asked for theirs. Balancing rewrites the trees and touches no inode.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr_btrfs import kernel

if TYPE_CHECKING:
    from snapmgr_btrfs.folder import Entry

WHY = "it was made writable by hand, changed, and made read-only again: it no longer holds what was taken"


def is_altered(folder_fd: int, entry: Entry) -> bool:
    """Whether the snapshot `entry` in the folder was changed after it was taken. Raises OSError."""
    if entry.info.ctransid <= entry.info.otransid:
        return False
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(entry.name, flags, dir_fd=folder_fd)
    try:
        made_ns = kernel.made_ns(fd)
        return any(
            changed_ns > made_ns
            for transaction, changed_ns in kernel.inodes_since(fd, entry.info.id, entry.info.otransid + 1)
            if transaction > entry.info.otransid
        )
    finally:
        os.close(fd)
