"""Checks that a copy is unchanged since it was taken: it is a plain folder, and root can write anywhere."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from snapmgr.contract.errors import AlteredError
from snapmgr.copystore.copyfolder import DATA
from snapmgr.system.paths import shown
from snapmgr.tree.entries import subfolder
from snapmgr.tree.overlay import has_marks, is_mark

if TYPE_CHECKING:
    from snapmgr.copystore.copyfolder import CopyFolder


def refuse_altered(folder: CopyFolder, *, overlay: bool = False) -> bool:
    """Raise AlteredError if anything in a finished snapshot was later written to, created, renamed or removed.

    Return whether an overlay over the copy would show the same, as far as `overlay` asks for that.

    The mark got its name when the copy was complete, so its ctime is that moment. Only a later mtime together with a
    later ctime shows changed contents: an mtime alone (or one in the future) was copied from the origin, and a ctime
    alone comes from a new label or link.
    """
    path = shown(folder.path)
    try:
        look = _Look(os.stat(f"{folder.state}.json", dir_fd=folder.fd).st_ctime_ns, overlay=overlay)
        with subfolder(DATA, folder.fd) as data:
            altered = "." if look.is_later(os.fstat(data)) else look.find(data, "")
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
    return look.overlay


class _Look:
    def __init__(self, done_ns: int, *, overlay: bool) -> None:
        self.overlay = overlay
        self._done_ns = done_ns

    def find(self, fd: int, path: str) -> str | None:
        """Return the first path that was changed, or None."""
        if self.overlay and has_marks(fd):
            self.overlay = False
        folders = []
        # Without `entries` and its records: this is done for each of many files.
        with os.scandir(fd) as listed:
            for one in listed:
                status = one.stat(follow_symlinks=False)
                if status.st_ctime_ns > self._done_ns and self.is_later(status):
                    return path + one.name
                if one.is_dir(follow_symlinks=False):
                    folders.append(one.name)
                elif self.overlay:
                    # Python has no listxattrat(2); this path is short, however long the folder's own is.
                    regular = one.is_file(follow_symlinks=False)
                    self.overlay = not (has_marks(f"/proc/self/fd/{fd}/{one.name}") if regular else is_mark(status))
        for name in folders:
            with subfolder(name, fd) as child:
                found = self.find(child, f"{path}{name}/")
            if found is not None:
                return found
        return None

    def is_later(self, status: os.stat_result) -> bool:
        """Return whether an entry was changed after the copy was complete."""
        return status.st_ctime_ns > self._done_ns and self._done_ns < status.st_mtime_ns <= time.time_ns()
