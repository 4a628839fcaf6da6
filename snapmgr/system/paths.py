"""Prints paths safely, and finds the mounts that hold or cover them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.contract.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.contract.records import Mount


def shown(path: str) -> str:
    """Return a path that can be printed whatever bytes it consists of."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def lies_in(path: str, *folders: str) -> bool:
    """Return whether a path is one of the folders or inside one, by names alone: all absolute and normal."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def holder(path: str, mounts: Sequence[Mount]) -> Mount:
    """Given a real path and the mount table, return the mount that holds it: longest point, latest of equals.

    Raises StorageError if the table is empty.
    """
    held = [mount for mount in mounts if lies_in(path, mount.point)]
    if not held:
        raise StorageError(f"no mount holds {shown(path)}", hint="is /proc mounted?")
    longest = max(len(mount.point) for mount in held)
    return [mount for mount in held if len(mount.point) == longest][-1]


def mounted_inside(path: str, mounts: Sequence[Mount]) -> str | None:
    """Return where something is mounted at or below the real path `path`, or to where a part of it is mounted.

    A bind mount shows in the table as the same device with the folder as its root.
    """
    held = holder(path, mounts)
    inner = os.path.normpath(os.path.join(held.root, os.path.relpath(path, held.point)))
    for mount in mounts:
        if lies_in(mount.point, path):
            return mount.point
        if mount.device == held.device and mount is not held and lies_in(mount.root, inner):
            return mount.point
    return None
