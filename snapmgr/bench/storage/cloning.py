"""Finds the backend that clones a folder of a stack's storage: the stack's own, or another one that fits."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.api import FolderCloning, NotMine, SnapmgrError
from snapmgr.blockdev import find_target
from snapmgr.plugins import list_plugins, make_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import Backend, Mounter, Runner


def cloning_of(own: Backend, path: str, runner: Runner, mounter: Mounter) -> FolderCloning | None:
    """Return what clones a folder at `path`; None if nothing that is installed can.

    Args:
        own: the backend of the stack's snapshots. btrfs and XFS on LVM take theirs of whole volumes, and their folders
            are cloned by another backend, as for ``snapmgr prepare``.
        path: a folder in the storage.
        runner: for programs.
        mounter: for private mounts.
    """
    target = find_target(path, runner=runner)
    for backend in (own, *_others(own, runner, mounter)):
        if not isinstance(backend, FolderCloning):
            continue
        # What lacks its program says so when it is to look.
        with suppress(SnapmgrError):
            if not isinstance(backend.locate(target), NotMine) and not backend.missing():
                return backend
    return None


def _others(own: Backend, runner: Runner, mounter: Mounter) -> Iterator[Backend]:
    for plugin in list_plugins():
        if plugin.backend is not None and plugin.name != own.name:
            with suppress(SnapmgrError):
                yield make_backend(plugin.name, {}, runner, mounter)
