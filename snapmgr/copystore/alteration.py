"""Checks that a copy is unchanged since it was taken: it is a plain folder, and root can write anywhere."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from snapmgr.contract.errors import AlteredError
from snapmgr.copystore.copyfolder import DATA
from snapmgr.system.paths import shown
from snapmgr.tree.entries import entries, subfolder

if TYPE_CHECKING:
    from snapmgr.copystore.copyfolder import CopyFolder


def refuse_altered(folder: CopyFolder) -> None:
    """Raise AlteredError if anything in a finished snapshot was later written to, created, renamed or removed.

    The mark got its name when the copy was complete, so its ctime is that moment. Only a later mtime together with a
    later ctime shows changed contents: an mtime alone (or one in the future) was copied from the origin, and a ctime
    alone comes from a new label or link.
    """
    path = shown(folder.path)
    try:
        done_ns = os.stat(f"{folder.state}.json", dir_fd=folder.fd).st_ctime_ns
        with subfolder(DATA, folder.fd) as data:
            altered = "." if _is_later(os.fstat(data), done_ns) else _find(data, "", done_ns)
    except OSError as error:
        raise AlteredError(
            f"the copy {path} no longer holds what was taken: {error.strerror}",
            hint="somebody changed it, or something is mounted there",
        ) from error
    if altered is not None:
        raise AlteredError(
            f"the copy {path} no longer holds what was taken: {shown(altered)} in it was changed by hand",
            hint="look at it there; delete the snapshot if it is not needed",
        )


def _find(fd: int, path: str, done_ns: int) -> str | None:
    """Return the first path that was changed, or None."""
    for entry in entries(fd):
        if _is_later(os.stat(entry.name, dir_fd=fd, follow_symlinks=False), done_ns):
            return path + entry.name
        if entry.is_folder:
            with subfolder(entry.name, fd) as child:
                found = _find(child, f"{path}{entry.name}/", done_ns)
            if found is not None:
                return found
    return None


def _is_later(status: os.stat_result, done_ns: int) -> bool:
    return status.st_ctime_ns > done_ns and done_ns < status.st_mtime_ns <= time.time_ns()
