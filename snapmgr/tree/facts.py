"""Records the facts of a file or folder that reveal a change."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import os


class Facts(NamedTuple):
    """Facts of one file or folder at one time."""

    inode: int
    mode: int
    """Type and mode."""
    uid: int
    gid: int
    size_bytes: int
    """0 for a folder, whose size depends on the file system."""
    mtime_ns: int
    ctime_ns: int


def facts_of(info: os.stat_result) -> Facts:
    """Return the facts in a status."""
    size_bytes = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
    return Facts(info.st_ino, info.st_mode, info.st_uid, info.st_gid, size_bytes, info.st_mtime_ns, info.st_ctime_ns)
