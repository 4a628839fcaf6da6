"""Mounts an overlay over a backup: the kernel copies each file that a tool changes to scratch, as a whole."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.contract.errors import MissingRequirementError, StorageError
from snapmgr.system import mountapi
from snapmgr.system.mount import unmount
from snapmgr.system.paths import shown
from snapmgr.tree.overlay import UPPER, overlay_options
from snapmgr.tree.walk import FOLDER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator

_MERGED = "merged"


@contextmanager
def overlay(lower: str, work: str) -> Iterator[tuple[str, str]]:
    """Mount an overlay over the folder `lower` while the context lasts; yield its point and its upper folder.

    `work` is an empty folder on scratch that holds everything, including the mount point, so that the cleanup after a
    killed process finds it. `lower` never changes. Raises MissingRequirementError without root, StorageError if
    the kernel cannot overlay the file system of scratch or of `lower`.
    """
    try:
        options = overlay_options(lower, work)
    except StorageError as error:
        raise StorageError(error.message, hint="name another scratch folder (--scratch)") from None
    merged = os.path.join(work, _MERGED)
    os.mkdir(merged, 0o700)
    point_fd = os.open(merged, FOLDER_FLAGS)
    try:
        with mountapi.new_mount("overlay", "overlay", options) as mount_fd:
            try:
                mountapi.put(mount_fd, point_fd)
            except OSError as error:
                raise mountapi.refused(error, f"put an overlay at {merged}") from None
    except StorageError as error:
        raise StorageError(
            f"{shown(lower)} cannot be overlaid: {error.message}", hint="take another strategy: --strategy scratch"
        ) from None
    except MissingRequirementError as error:
        raise MissingRequirementError(
            error.message, hint="run as root, or take another strategy: --strategy scratch"
        ) from None
    finally:
        os.close(point_fd)
    try:
        yield merged, os.path.join(work, UPPER)
    finally:
        unmount(merged)


def copied_up(upper: str) -> set[str]:
    """Return the files that were changed or made, by paths from the root. Raises StorageError."""
    found: set[str] = set()
    try:
        for folder, _folders, files in os.walk(upper, onerror=_raise):
            for name in files:
                path = os.path.join(folder, name)
                if os.path.isfile(path) and not os.path.islink(path):
                    found.add(os.path.relpath(path, upper))
    except OSError as error:
        raise StorageError(f"cannot look through {shown(upper)}: {error.strerror}") from error
    return found


def _raise(error: OSError) -> None:
    if error.errno != errno.ENOENT:
        raise error
