"""What may be restored to: a folder that holds nothing yet."""

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
    """Given where to restore to, return it absolute with its parent resolved. Looks only; changes nothing.

    Args:
        path: does not exist, or is an empty folder (or holds what an interrupted restore left). Its parent exists.
        sources: folders of the source: nothing may be restored into them, but *to* them if they are gone or empty.
        barred: other folders that nothing may be restored to or into, and what they are.

    Raises ConfigError that says what is wrong with it, MissingRequirementError without the right to look.
    """
    parent = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    name = os.path.basename(os.path.abspath(path))
    if not os.path.isdir(parent):
        raise ConfigError(f"{shown(parent)} is no folder that exists", hint=f"make it first: mkdir -p {shown(parent)}")
    dest = os.path.join(parent, name) if name else parent
    _refuse_barred(dest, sources, barred)
    try:
        info = os.lstat(dest)
    except FileNotFoundError:
        return dest
    except PermissionError:
        raise MissingRequirementError(
            f"no right to look at {dest}", hint="run as root, or name a folder of yours"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot look at {dest}: {error.strerror}") from None
    if not stat.S_ISDIR(info.st_mode):
        what = "a symlink" if stat.S_ISLNK(info.st_mode) else "no folder"
        raise ConfigError(f"{dest} is {what}", hint="name an empty folder, or one that does not exist yet")
    try:
        fd = os.open(dest, FOLDER_FLAGS)
    except OSError as error:
        raise MissingRequirementError(f"cannot open {dest}: {error.strerror}", hint="run as root") from None
    try:
        # What an earlier restore left may be half moved up: that is judged once the folder is locked.
        if not any(HIDDEN_NAME.fullmatch(name) for name in os.listdir(fd)):
            require_empty(fd, dest)
    finally:
        os.close(fd)
    return dest


def _refuse_barred(dest: str, sources: Collection[str], barred: Mapping[str, str]) -> None:
    try:
        dest.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{shown(dest)} has a name that is not UTF-8", hint="name another folder") from None
    for folder, what in [*((folder, "the source") for folder in sources), *barred.items()]:
        real = os.path.realpath(folder)
        if dest.startswith(real.rstrip("/") + "/") or (dest == real and folder in barred):
            raise ConfigError(f"{dest} lies in {what} {real}", hint="name a folder outside of it")


def require_empty(fd: int, dest: str) -> None:
    """Raise ConfigError if the open folder `fd` holds anything but the lost+found of a new file system."""
    names = sorted(name for name in os.listdir(fd) if not _is_new_lost_and_found(fd, dest, name))
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ConfigError(
            f"{dest} is not empty: it holds {', '.join(map(shown, names[:_SHOWN]))}{more}",
            hint="nothing is ever overwritten: name an empty folder, or one that does not exist yet",
        )


def _is_new_lost_and_found(fd: int, dest: str, name: str) -> bool:
    """Whether this is the empty lost+found that every new ext4 has."""
    if name != LOST_AND_FOUND or not any(mount.point == dest for mount in read_mounts()):
        return False
    lost = os.open(name, FOLDER_FLAGS, dir_fd=fd)
    try:
        return not os.listdir(lost)
    finally:
        os.close(lost)
