"""Whether a copy still holds what was taken: it is a plain folder, and root can write anywhere."""

from __future__ import annotations

import os
import time

from snapmgr.api import AlteredError
from snapmgr_reflink import store, tree


def refuse_altered(box: store.Box) -> None:
    """Raise AlteredError if anything in a finished snapshot was written to, made, renamed or removed since."""
    shown = tree.shown(box.path)
    try:
        altered = _altered(box)
    except OSError as error:
        raise AlteredError(
            f"the copy {shown} is not what was taken any more: {error.strerror}",
            hint="somebody changed what is in it, or something is mounted there",
        ) from error
    if altered is not None:
        raise AlteredError(
            f"the copy {shown} is not what was taken any more: {tree.shown(altered)} in it was changed by hand",
            hint="look at it there; delete the snapshot if it is not needed",
        )


def _altered(box: store.Box) -> str | None:
    """Return the first path that was changed, or None.

    The mark got its name when the copy was safe on disk, so its ctime is that moment. Later times of both kinds show a
    change of contents: an mtime alone (or one that lies in the future) was copied from the origin, a ctime alone is a
    new label or link.
    """
    done_ns = os.stat(f"{box.state}.json", dir_fd=box.fd).st_ctime_ns
    with tree.folder(store.DATA, box.fd) as data:
        return "." if _is_later(os.fstat(data), done_ns) else _find(data, "", done_ns)


def _find(fd: int, path: str, done_ns: int) -> str | None:
    for entry in tree.entries(fd):
        if _is_later(os.stat(entry.name, dir_fd=fd, follow_symlinks=False), done_ns):
            return path + entry.name
        if entry.is_folder:
            with tree.folder(entry.name, fd) as child:
                found = _find(child, f"{path}{entry.name}/", done_ns)
            if found is not None:
                return found
    return None


def _is_later(status: os.stat_result, done_ns: int) -> bool:
    return status.st_ctime_ns > done_ns and done_ns < status.st_mtime_ns <= time.time_ns()
