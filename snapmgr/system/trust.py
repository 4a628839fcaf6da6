"""Checks that no other user can modify files that snapmgr acts on as root."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def changeable(status: os.stat_result) -> str | None:
    """Return how users other than root and this one can modify a file with this `status`; None if they cannot."""
    if status.st_uid not in {0, os.geteuid()}:
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def exchangeable(path: Path) -> str | None:
    """Return which folder above `path` lets others replace it, or None.

    A sticky folder such as /tmp does not. A folder that only a group may write to is trusted too, as the administrator
    decides about the group (/var/local on Debian).
    """
    # Check both the folders of the path as given and those of its resolved form.
    for folder in dict.fromkeys((*path.absolute().parents, *Path(os.path.realpath(path)).parents)):
        with suppress(OSError):  # missing: checked when it is created
            status = folder.stat()
            if status.st_uid not in {0, os.geteuid()}:
                return f"{folder} belongs to user {status.st_uid}"
            if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
                return f"everybody may write to {folder} (mode {stat.S_IMODE(status.st_mode):04o})"
    return None
