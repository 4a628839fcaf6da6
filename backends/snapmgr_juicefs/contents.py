"""Reads what is in a store."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from snapmgr.api import AlteredError, Found, InUseError, Pool, StorageError
from snapmgr_juicefs import client as clients
from snapmgr_juicefs import store, tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapmgr.api import Mount


def boxes(store_fd: int, path: str) -> Iterator[store.Box]:
    """Open one after another all boxes that are ours; each is closed when the next one is asked for."""
    for name in sorted(entry.name for entry in tree.entries(store_fd) if entry.is_folder):
        with store.box(store_fd, path, name) as box:
            if box is not None:
                yield box


def refuse_foreign(store_fd: int, path: str, name: str) -> None:
    """Raise StorageError if something that is not ours has this name; ours has just been removed."""
    try:
        if "/" not in name:
            os.stat(name, dir_fd=store_fd, follow_symlinks=False)
            raise StorageError(
                f"{tree.shown(path)}/{tree.shown(name)} is not what snapmgr made: it is left alone",
                hint="look at it and move it away",
            )
    except FileNotFoundError:
        return


def describe(box: store.Box, pool: Pool, boot_id: str, backend: str) -> Found | None:
    """Say what a box is; None for another machine's that is no finished snapshot: it is that machine's matter."""
    mark = box.mark
    if mark is None or box.name.startswith(("begun@", "deleting@")):
        why = "its deletion was interrupted" if box.name.startswith("deleting@") else "it was only just begun"
    elif box.state == "begun":
        why = "it was never finished"
    elif box.state == "made" and mark.staged and mark.boot_id != boot_id:
        why = "the machine stopped before all of it was uploaded from its cache"
    else:
        if store.is_foreign(box) and (mark.kind, box.state) != ("snapshot", "complete"):
            return None
        return Found(
            kind=mark.kind,
            pool=pool,
            name=box.name,
            snapshot_id=mark.snapshot_id,
            ref=store.reference(box, pool, backend),
            record_id=mark.record_id or None,
            note=store.read_note(box),
        )
    if store.is_foreign(box):
        return None
    return Found(
        kind="debris",
        pool=pool,
        name=box.name,
        snapshot_id=mark.snapshot_id if mark else None,
        record_id=(mark.record_id or None) if mark else None,
        why=why,
    )


def refuse_mounted(path: str, mounts: Sequence[Mount]) -> None:
    """Raise InUseError if something is mounted at or below `path`, or a part of it elsewhere (a bind mount)."""
    held = clients.holder(path, mounts)
    if held is None:
        return
    inner = os.path.normpath(os.path.join(held.root, os.path.relpath(path, held.point)))
    for mount in mounts:
        inside = clients.lies_in(mount.point, path)
        if inside or (mount.device == held.device and mount is not held and clients.lies_in(mount.root, inner)):
            raise InUseError(
                f"{tree.shown(path)} is mounted at, or has a mount in it at, {tree.shown(mount.point)}",
                hint=f"umount {tree.shown(mount.point)} and try again",
            )


def refuse_altered(box: store.Box) -> None:
    """Raise AlteredError if anything in a finished snapshot was written to, made, renamed or removed since."""
    shown = tree.shown(box.path)
    try:
        # The mark got its name when the clone was finished, so its ctime is that moment.
        done_ns = os.stat(f"{box.state}.json", dir_fd=box.fd).st_ctime_ns
        with tree.folder(store.DATA, box.fd) as data:
            altered = "." if _is_later(os.fstat(data), done_ns) else _find(data, "", done_ns)
    except OSError as error:
        raise AlteredError(
            f"the clone {shown} is not what was taken any more: {error.strerror}",
            hint="somebody changed what is in it, or something is mounted there",
        ) from error
    if altered is not None:
        raise AlteredError(
            f"the clone {shown} is not what was taken any more: {tree.shown(altered)} in it was changed by hand",
            hint="look at it there; delete the snapshot if it is not needed",
        )


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
    # Both: an mtime alone (or one that lies in the future) was copied from the origin, a ctime alone is a new label.
    return status.st_ctime_ns > done_ns and done_ns < status.st_mtime_ns <= time.time_ns()
