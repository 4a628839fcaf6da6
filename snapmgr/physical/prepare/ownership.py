"""Gives the files of a prepared copy the owners and modes of the backup's files, and makes them durable."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.contract.errors import StorageError
from snapmgr.system.paths import shown
from snapmgr.tree.walk import FOLDER_FLAGS, opened, reach, walk

if TYPE_CHECKING:
    from snapmgr.tree.walk import Step


def take_owners(source: str, copy: str, *, sync: bool) -> None:
    """Give each entry of the tree `copy` the owner and mode that it has in `source`; a new entry takes its folder's.

    The users who can read and write the backup's files can do so with a new file. `sync` fsyncs every folder, and each
    file that `source` does not have or has with another time or size. Raises StorageError that names the entry.
    """
    path = "."
    source_fd = os.open(source, FOLDER_FLAGS)
    try:
        copy_fd = os.open(copy, FOLDER_FLAGS)
        try:
            for step in walk(copy_fd):
                path = step.path or "."
                if step.kind == "leave" and sync:
                    os.fsync(step.fd)
                if step.kind == "leave" or not step.path:
                    continue
                _settle(step, source_fd, sync=sync)
        finally:
            os.close(copy_fd)
    except OSError as error:
        raise StorageError(f"cannot give {shown(path)} its owner: {error.strerror}") from error
    finally:
        os.close(source_fd)


def _settle(step: Step, source_fd: int, *, sync: bool) -> None:
    info, wanted = step.info, _same(source_fd, step.path)
    if stat.S_ISLNK(info.st_mode):
        return
    if wanted is not None:
        uid, gid, mode = wanted.st_uid, wanted.st_gid, stat.S_IMODE(wanted.st_mode)
    else:
        above = os.fstat(step.parent_fd)
        uid, gid = above.st_uid, above.st_gid
        # A folder's mode without the right to pass through is a file's mode.
        mode = stat.S_IMODE(above.st_mode) & ~(0o7111 if stat.S_ISREG(info.st_mode) else 0)
    if (info.st_uid, info.st_gid) != (uid, gid):
        # Without the right to change owners, the user prepares a backup of their own.
        with suppress(PermissionError):
            os.chown(step.name, uid, gid, dir_fd=step.parent_fd, follow_symlinks=False)
    if stat.S_IMODE(info.st_mode) != mode:
        os.chmod(step.name, mode, dir_fd=step.parent_fd)
    changed = wanted is None or (wanted.st_mtime_ns, wanted.st_size) != (info.st_mtime_ns, info.st_size)
    if sync and changed and stat.S_ISREG(info.st_mode):
        with opened(step.parent_fd, step.name) as fd:
            os.fsync(fd)


def _same(source_fd: int, path: str) -> os.stat_result | None:
    above, _, name = path.rpartition("/")
    try:
        fd = reach(source_fd, above)
    except OSError:
        return None
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    finally:
        os.close(fd)


def stamps(root: str) -> dict[str, tuple[int, int]]:
    """Return size and modification time of each file of a tree: they show a later change."""
    fd = os.open(root, FOLDER_FLAGS)
    try:
        return {
            step.path: (step.info.st_size, step.info.st_mtime_ns)
            for step in walk(fd)
            if step.kind == "entry" and stat.S_ISREG(step.info.st_mode)
        }
    finally:
        os.close(fd)
