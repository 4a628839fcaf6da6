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
from snapmgr.tree.attributes import Handle, keep
from snapmgr.tree.walk import FOLDER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator

_UPPER, _WORK, _MERGED = "upper", "work", "merged"


@contextmanager
def overlay(lower: str, work: str) -> Iterator[tuple[str, str]]:
    """Mount an overlay over the folder `lower` while the context lasts; yield its point and its upper folder.

    `work` is an empty folder on scratch that holds everything, including the mount point, so that the cleanup after a
    killed process finds it. `lower` never changes. Raises MissingRequirementError without root, StorageError if
    the kernel cannot overlay the file system of scratch or of `lower`.
    """
    upper, merged = os.path.join(work, _UPPER), os.path.join(work, _MERGED)
    for name in (_UPPER, _WORK, _MERGED):
        os.mkdir(os.path.join(work, name), 0o700)
    _keep(lower, upper)
    options = (f"lowerdir={_escaped(lower)}", f"upperdir={upper}", f"workdir={os.path.join(work, _WORK)}")
    if set(work) & set(",:\\"):
        raise StorageError(f"an overlay cannot be in {shown(work)}", hint="name another scratch folder (--scratch)")
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
        yield merged, upper
    finally:
        unmount(merged)


def _keep(source: str, copy: str) -> None:
    source_fd = os.open(source, FOLDER_FLAGS)
    try:
        copy_fd = os.open(copy, FOLDER_FLAGS)
        try:
            keep(Handle(source_fd), Handle(copy_fd))
        finally:
            os.close(copy_fd)
    finally:
        os.close(source_fd)


def _escaped(path: str) -> str:
    """Return a path as lowerdir takes it, where ":" separates folders (Documentation/filesystems/overlayfs.rst)."""
    return path.replace("\\", "\\\\").replace(":", "\\:")


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
