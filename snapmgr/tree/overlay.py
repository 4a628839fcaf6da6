"""Lays an overlay over a folder: changes go to another folder, and the kernel copies a file there as it is changed."""

from __future__ import annotations

import errno
import os
import stat

from snapmgr.contract.errors import StorageError
from snapmgr.system.paths import shown
from snapmgr.tree.attributes import Handle, keep
from snapmgr.tree.walk import FOLDER_FLAGS

UPPER = "upper"
_WORK = "work"
# On folders and files of which an overlay was made before.
_MARK_PREFIX = "trusted.overlay."


def overlay_options(lower: str, folder: str) -> tuple[str, ...]:
    """Return the options of an overlay mount that shows `lower` and keeps the changes in ``upper`` in `folder`.

    Makes that folder, with the attributes of `lower`, and the one that the kernel works in. `lower` never changes.
    Raises StorageError for a path that the options cannot hold, OSError.
    """
    if set(folder) & set(",:\\"):
        raise StorageError(f"an overlay cannot be in {shown(folder)}: its path has a comma, a colon or a backslash")
    upper, work = os.path.join(folder, UPPER), os.path.join(folder, _WORK)
    for path in (upper, work):
        os.mkdir(path, 0o700)
    _keep(lower, upper)
    return (f"lowerdir={_escaped(lower)}", f"upperdir={upper}", f"workdir={work}")


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


def has_marks(file: int | str) -> bool:
    """Return whether an overlay may not show this folder or file as it is: it was in an overlay's upper folder.

    True also if that cannot be found out.
    """
    try:
        names = os.listxattr(file) if isinstance(file, int) else os.listxattr(file, follow_symlinks=False)
        return any(name.startswith(_MARK_PREFIX) for name in names)
    except OSError as error:
        return error.errno != errno.EOPNOTSUPP


def is_mark(info: os.stat_result) -> bool:
    """Return whether an overlay would not show this entry: a device that stands for a removed file."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0
