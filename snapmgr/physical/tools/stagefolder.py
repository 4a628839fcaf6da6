"""Checks that a staging folder is empty before a copy; then measures it and gives it to the server's user."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from snapmgr.contract.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def require_empty(folder: str) -> None:
    """Raise StorageError unless `folder` is an empty folder, not a symlink to one."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise StorageError(f"{folder} is not a folder")
        left = os.listdir(folder)
    except OSError as error:
        raise StorageError(f"cannot use the staging folder {folder}: {error.strerror}") from None
    if left:
        raise StorageError(f"the staging folder {folder} is not empty: it holds {left[0]!r}", hint="remove it")


def entries(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and facts of each entry of `folder`; folders come before their contents.

    Symlinks are not followed. Raises OSError.
    """
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        with os.scandir(os.path.join(folder, inside)) as found:
            names = sorted(found, key=lambda entry: entry.name)
        for entry in names:
            path = os.path.join(inside, entry.name)
            info = entry.stat(follow_symlinks=False)
            yield path, info
            if stat.S_ISDIR(info.st_mode):
                waiting.append(path)


def measure(folder: str) -> tuple[int, int]:
    """Return the size of all files in bytes and their number. Raises StorageError."""
    try:
        sizes = [info.st_size for _, info in entries(folder) if stat.S_ISREG(info.st_mode)]
    except OSError as error:
        raise StorageError(f"cannot read {folder}: {error.strerror}") from None
    return sum(sizes), len(sizes)


def give_to(folder: str, uid: int, gid: int) -> None:
    """Give our own files in a folder, and the folder, to a user whose server will start on it.

    Files of other users stay theirs. Raises StorageError.
    """
    try:
        for path, info in [("", os.lstat(folder)), *entries(folder)]:
            if info.st_uid == os.geteuid() and (info.st_uid, info.st_gid) != (uid, gid):
                os.chown(os.path.join(folder, path), uid, gid, follow_symlinks=False)
    except OSError as error:
        raise StorageError(f"cannot give {folder} to user {uid}: {error.strerror}") from None


def give_owner(folder: Path, uid: int, gid: int) -> None:
    """Give a folder and everything in it to a server's user, who owns a datadir.

    Does nothing without root. Symlinks are not followed.
    """
    if os.geteuid() != 0:
        return
    for path, _ in [("", None), *entries(str(folder))]:
        os.chown(folder / path, uid, gid, follow_symlinks=False)
