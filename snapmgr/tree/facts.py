"""The facts of a file or folder by which a change of it shows."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import os


class Facts(NamedTuple):
    """Of one file or folder, as it was when it was looked at."""

    inode: int
    mode: int
    """Type and mode."""
    uid: int
    gid: int
    size_bytes: int
    """0 for a folder, whose size is the file system's own matter."""
    mtime_ns: int
    ctime_ns: int


def facts_of(info: os.stat_result) -> Facts:
    """Return the facts of what has this status."""
    return Facts(
        inode=info.st_ino,
        mode=info.st_mode,
        uid=info.st_uid,
        gid=info.st_gid,
        size_bytes=0 if stat.S_ISDIR(info.st_mode) else info.st_size,
        mtime_ns=info.st_mtime_ns,
        ctime_ns=info.st_ctime_ns,
    )
