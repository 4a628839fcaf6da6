"""Clones any folder to another one of its file system: every file shares its blocks."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from snapmgr.api import BusyError, FireError, NotFoundError, StorageError
from snapmgr_reflink import kernel, removal, tree
from snapmgr_reflink.place import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.api import Mount

_OPEN = tree.FOLDER_FLAGS | os.O_NOFOLLOW | os.O_CLOEXEC


def clone_folder(source: str, target: str, mounts: Sequence[Mount]) -> None:
    """Clone `source` to `target`, as `snapmgr.api.FolderCloning.clone_folder`.

    It is made under a hidden name that `target` alone decides, and renamed: what a killed call left is removed by the
    next one. Nested subvolumes and mounts are refused.
    """
    parent, name = os.path.split(os.path.abspath(target))
    with ExitStack() as stack:
        try:
            source_fd = os.open(source, _OPEN)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"there is no folder {tree.shown(source)}") from None
        except OSError as error:
            raise StorageError(f"cannot open {tree.shown(source)}: {error.strerror}") from error
        stack.callback(os.close, source_fd)
        try:
            parent_fd = os.open(parent, _OPEN)
        except OSError as error:
            raise StorageError(f"cannot open {tree.shown(parent)}: {error.strerror}") from error
        stack.callback(os.close, parent_fd)
        if os.path.lexists(target):
            raise StorageError(f"{tree.shown(target)} exists already", hint="a clone gets a new name")
        _make(source_fd, source, parent_fd, parent, name, nocow=_is_btrfs(parent, mounts))


def _is_btrfs(parent: str, mounts: Sequence[Mount]) -> bool:
    return Place.holder(os.path.realpath(parent), mounts).fs_type == "btrfs"


def _make(source_fd: int, source: str, parent_fd: int, parent: str, name: str, *, nocow: bool) -> None:
    hidden = f".{name}.snapmgr-cloning"
    shown = f"{tree.shown(parent)}/{tree.shown(hidden)}"
    with ExitStack() as stack:
        try:
            with suppress(FileExistsError):
                os.mkdir(hidden, 0o700, dir_fd=parent_fd)
            fd = os.open(hidden, _OPEN, dir_fd=parent_fd)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_uid != os.geteuid():
                raise StorageError(f"{shown} belongs to another user", hint="remove it")
            removal.remove_contents(fd, shown)
        except BlockingIOError:
            raise BusyError(f"{tree.shown(parent)}/{tree.shown(name)} is being cloned already") from None
        except OSError as error:
            raise StorageError(f"cannot make {shown}: {error.strerror}", hint="is the file system full?") from error
        copy = tree.TreeCopy(method="reflink", deadline=float("inf"), excluded=frozenset(), nocow=nocow)
        try:
            copy.run(source_fd, fd)
            kernel.rename_new(hidden, name, parent_fd)
        except BaseException as error:
            with suppress(OSError, StorageError):
                os.fchmod(fd, 0o700)
                removal.remove_contents(fd, shown)
                os.rmdir(hidden, dir_fd=parent_fd)
            if isinstance(error, FireError | OSError):
                why = error.message if isinstance(error, FireError) else error.strerror
                hint = error.hint if isinstance(error, FireError) else None
                raise StorageError(f"cannot clone {tree.shown(source)}: {why}", hint=hint) from error
            raise
