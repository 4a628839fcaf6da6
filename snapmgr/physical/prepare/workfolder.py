"""Makes and removes the hidden folder in which a prepare works, beside its result.

    PARENT/.snapmgr-prepare-TOKEN/record.json      source and target, and the inode number of the folder itself
    PARENT/.snapmgr-prepare-TOKEN/NAME/            becomes PARENT/NAME

The process of the prepare holds an flock on it. The next prepare of the same source or to the same target removes the
leftovers of a killed one.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.contract.errors import (
    BusyError,
    CatalogError,
    ConfigError,
    MissingRequirementError,
    SnapmgrError,
    StorageError,
)
from snapmgr.system.blockdev import read_mounts
from snapmgr.system.host import signals_held
from snapmgr.system.mount import unmount
from snapmgr.system.paths import lies_in, shown
from snapmgr.tree.hiddenfolder import lock, make_hidden, move_up, read_record, remove_hidden, write_record
from snapmgr.tree.walk import FOLDER_FLAGS, deep_trees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAME = re.compile(r"\.snapmgr-prepare-[0-9a-f]{16}")


class WorkFolder:
    """A hidden folder that is ours; made by `work_folder`."""

    def __init__(self, parent: str, name: str, parent_fd: int, fd: int) -> None:
        self.path = os.path.join(parent, name)
        self._parent = parent
        self._parent_fd = parent_fd
        self._fd = fd

    def move_up(self, name: str) -> str:
        """Move the inner folder `name` up beside the hidden one, durably; return its path.

        Raises ConfigError if something has that name, StorageError.
        """
        with signals_held():
            try:
                move_up(self._fd, name, self._parent_fd)
                os.fsync(self._parent_fd)
            except FileExistsError:
                raise ConfigError(
                    f"{os.path.join(self._parent, name)} has appeared meanwhile", hint="name another folder"
                ) from None
            except OSError as error:
                raise StorageError(f"cannot move {shown(name)} to {shown(self._parent)}: {error.strerror}") from error
        return os.path.join(self._parent, name)


@contextmanager
def work_folder(
    parent: str, source: str, target: str, *, tell: Callable[[str], None] = lambda _line: None
) -> Iterator[WorkFolder]:
    """Make a hidden folder in the folder `parent`; remove it and its contents when the context ends.

    First removes the leftovers of a killed prepare of the same source or to the same target. Raises BusyError if such a
    prepare is running, MissingRequirementError without the right to write there, StorageError.
    """
    try:
        parent_fd = os.open(parent, FOLDER_FLAGS)
    except OSError as error:
        raise StorageError(f"cannot open {shown(parent)}: {error.strerror}") from None
    name = f".snapmgr-prepare-{secrets.token_hex(8)}"
    fd = -1
    try:
        _remove_dead(parent, parent_fd, source, target, tell=tell)
        try:
            with signals_held():
                fd = make_hidden(parent_fd, name)
                lock(fd)
                record = {"source": source, "target": target, "inode": os.fstat(fd).st_ino}
                # ASCII: names that are not UTF-8 hold surrogates.
                write_record(fd, json.dumps(record, ensure_ascii=True).encode())
        except PermissionError:
            raise MissingRequirementError(
                f"no right to write to {shown(parent)}", hint="run as root, or name another folder"
            ) from None
        except OSError as error:
            raise StorageError(f"cannot work in {shown(parent)}: {error.strerror}", hint="is it full?") from error
        except CatalogError as error:
            raise StorageError(f"cannot work in {shown(parent)}: {error.message}", hint=error.hint) from error
        yield WorkFolder(parent, name, parent_fd, fd)
    finally:
        try:
            with signals_held():
                try:
                    _remove(parent_fd, name, os.path.join(parent, name))
                except (OSError, SnapmgrError) as error:
                    tell(
                        f"warning: could not remove {shown(os.path.join(parent, name))} ({error}); the next prepare to "
                        "the same folder tries again"
                    )
        finally:
            for one in (fd, parent_fd):
                if one >= 0:
                    os.close(one)


def _remove_dead(parent: str, parent_fd: int, source: str, target: str, *, tell: Callable[[str], None]) -> None:
    """Remove the leftovers of killed prepares of the same source or to the same target from a folder.

    Raises BusyError if one of them is running.
    """
    for name in filter(_NAME.fullmatch, os.listdir(parent_fd)):
        try:
            fd = os.open(name, FOLDER_FLAGS, dir_fd=parent_fd)
        except OSError:
            continue
        try:
            if not _is_of(fd, source, target):
                continue
            if not lock(fd):
                raise BusyError(
                    f"another prepare of {shown(source)} is running in {shown(parent)}", hint="wait for it to end"
                )
            path = os.path.join(parent, name)
            tell(f"removing what a killed prepare left: {path}")
            try:
                _remove(parent_fd, name, path)
            except OSError as error:
                raise StorageError(f"cannot remove {shown(path)}: {error}") from error
        finally:
            os.close(fd)


def _is_of(fd: int, source: str, target: str) -> bool:
    record = read_record(fd)
    if not record:
        return record is not None
    try:
        found = json.loads(record)
        same = found["source"] == source or found["target"] == target
        return bool(same and found["inode"] == os.fstat(fd).st_ino)
    except (ValueError, KeyError, TypeError):
        return False


def _remove(parent_fd: int, name: str, path: str) -> None:
    """Unmount everything in a hidden folder, and remove the folder. Raises OSError, SnapmgrError."""
    for mount in reversed(read_mounts()):
        if lies_in(mount.point, path):
            unmount(mount.point, mount_id=mount.id)
    with deep_trees():
        remove_hidden(parent_fd, name)
