"""Who else could change a file or folder that snapmgr obeys: what a root process reads there, it does."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def changeable(status: os.stat_result) -> str | None:
    """Return how others than root and this user may change what has this `status`, or None if they may not."""
    if status.st_uid not in {0, os.geteuid()}:
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def exchangeable(path: Path) -> str | None:
    """Return which folder above `path` lets others put something else in its place, or None.

    A sticky folder such as /tmp does not, and neither does one that only a group may write to, as /var/local on Debian:
    that is the administrator's word.
    """
    # Also the folders that a symlink on the way leads through, and those that it stands in.
    for folder in dict.fromkeys((*path.absolute().parents, *Path(os.path.realpath(path)).parents)):
        with suppress(OSError):  # not there yet: whoever makes it is asked then
            status = folder.stat()
            if status.st_uid not in {0, os.geteuid()}:
                return f"{folder} belongs to user {status.st_uid}"
            if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
                return f"everybody may write to {folder} (mode {stat.S_IMODE(status.st_mode):04o})"
    return None
