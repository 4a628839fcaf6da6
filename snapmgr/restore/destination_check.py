"""Checks that a folder can be restored to: it is missing or empty, and outside the source."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from snapmgr.catalog.manifest import HIDDEN_NAME
from snapmgr.contract.errors import ConfigError, MissingRequirementError
from snapmgr.system.blockdev import read_mounts
from snapmgr.system.paths import shown
from snapmgr.tree.walk import FOLDER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

LOST_AND_FOUND = "lost+found"
_SHOWN = 4


def choose_destination(path: str, *, sources: Collection[str], barred: Mapping[str, str]) -> str:
    """Check a destination and return it as an absolute path with its parent resolved. Changes nothing.

    Args:
        path: an empty folder, or one that does not exist; its parent exists. It may hold an unfinished restore.
        sources: folders of the source. They are allowed as destination if they are missing or empty, but not as its
            parent.
        barred: other folders that are allowed neither as destination nor as its parent, each with its description.

    Raises ConfigError if `path` is not suitable, MissingRequirementError if it cannot be read.
    """
    parent = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    name = os.path.basename(os.path.abspath(path))
    if not os.path.isdir(parent):
        raise ConfigError(
            f"{shown(parent)} is not an existing folder", hint=f"create it first: mkdir -p {shown(parent)}"
        )
    dest = os.path.join(parent, name) if name else parent
    _refuse_barred(dest, sources, barred)
    try:
        info = os.lstat(dest)
    except FileNotFoundError:
        return dest
    except PermissionError:
        raise MissingRequirementError(
            f"no permission to read {dest}", hint="run as root, or name a folder that you own"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {dest}: {error.strerror}") from None
    if not stat.S_ISDIR(info.st_mode):
        what = "a symlink" if stat.S_ISLNK(info.st_mode) else "not a folder"
        raise ConfigError(f"{dest} is {what}", hint="name an empty folder, or one that does not exist yet")
    try:
        fd = os.open(dest, FOLDER_FLAGS)
    except OSError as error:
        raise MissingRequirementError(f"cannot open {dest}: {error.strerror}", hint="run as root") from None
    try:
        # An unfinished restore may have moved up part of its tree: `claim_destination` checks it under the lock.
        if not any(HIDDEN_NAME.fullmatch(name) for name in os.listdir(fd)):
            require_empty(fd, dest)
    finally:
        os.close(fd)
    return dest


def _refuse_barred(dest: str, sources: Collection[str], barred: Mapping[str, str]) -> None:
    try:
        dest.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the name {shown(dest)} is not UTF-8", hint="name another folder") from None
    for folder, what in [*((folder, "the source") for folder in sources), *barred.items()]:
        real = os.path.realpath(folder)
        if dest.startswith(real.rstrip("/") + "/") or (dest == real and folder in barred):
            raise ConfigError(f"{dest} is in {what} {real}", hint="name a folder outside it")


def require_empty(fd: int, dest: str) -> None:
    """Raise ConfigError if the open folder `fd` holds anything but the lost+found of a new file system."""
    names = sorted(name for name in os.listdir(fd) if not _is_new_lost_and_found(fd, dest, name))
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ConfigError(
            f"{dest} is not empty: it holds {', '.join(map(shown, names[:_SHOWN]))}{more}",
            hint="a restore overwrites nothing: name an empty folder, or one that does not exist yet",
        )


def _is_new_lost_and_found(fd: int, dest: str, name: str) -> bool:
    """Whether this is the empty lost+found folder of a new ext4 file system."""
    if name != LOST_AND_FOUND or not any(mount.point == dest for mount in read_mounts()):
        return False
    lost = os.open(name, FOLDER_FLAGS, dir_fd=fd)
    try:
        return not os.listdir(lost)
    finally:
        os.close(lost)
