"""The hidden folder in which a prepare works, beside its result: what a killed one leaves is known by its name.

    PARENT/.snapmgr-prepare-TOKEN/record.json      source and target, and the folder's own inode
    PARENT/.snapmgr-prepare-TOKEN/NAME/            what will be PARENT/NAME

An flock on it tells whether somebody is at work. The next prepare of the same source or to the same target removes it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from snapmgr.blockdev import lies_in, read_mounts
from snapmgr.errors import BusyError, ConfigError, LackingError, SnapmgrError, StorageError
from snapmgr.host import signals_held
from snapmgr.mount import unmount
from snapmgr.system.kernel import rename_new
from snapmgr.tree.walk import FOLDER_FLAGS, deep_trees, remove, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAME = re.compile(r"\.snapmgr-prepare-[0-9a-f]{16}")
_RECORD = "record.json"


class Workplace:
    """A hidden folder that is ours; made by `workplace`."""

    def __init__(self, parent: str, name: str, parent_fd: int, fd: int) -> None:
        self.path = os.path.join(parent, name)
        self._parent = parent
        self._parent_fd = parent_fd
        self._fd = fd

    def land(self, name: str) -> str:
        """Give the inner folder `name` its place beside the hidden one, durably; never over something.

        Return its path. Raises ConfigError if something has that name.
        """
        with signals_held():
            try:
                _rename(self._fd, name, self._parent_fd)
                os.fsync(self._parent_fd)
            except FileExistsError:
                raise ConfigError(
                    f"{os.path.join(self._parent, name)} has appeared meanwhile", hint="name another folder"
                ) from None
            except OSError as error:
                raise StorageError(f"cannot put {shown(name)} in its place: {error.strerror}") from error
        return os.path.join(self._parent, name)


def _rename(fd: int, name: str, parent_fd: int) -> None:
    try:
        rename_new(name, name, fd, parent_fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        # Some FUSE file systems know no RENAME_NOREPLACE.
        if name in os.listdir(parent_fd):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.rename(name, name, src_dir_fd=fd, dst_dir_fd=parent_fd)


@contextmanager
def workplace(
    parent: str, source: str, target: str, *, tell: Callable[[str], None] = lambda _line: None
) -> Iterator[Workplace]:
    """Make a hidden folder in the folder `parent` and remove it, with all that is still in it, when the context ends.

    What a killed prepare of the same source or to the same target left there is removed first. Raises BusyError if such
    a one is at work, LackingError without the right, StorageError.
    """
    try:
        parent_fd = os.open(parent, FOLDER_FLAGS)
    except OSError as error:
        raise StorageError(f"cannot open {shown(parent)}: {error.strerror}") from None
    name = f".snapmgr-prepare-{secrets.token_hex(8)}"
    fd = -1
    try:
        clear_dead(parent, parent_fd, source, target, tell=tell)
        try:
            with signals_held():
                os.mkdir(name, 0o700, dir_fd=parent_fd)
                fd = os.open(name, FOLDER_FLAGS, dir_fd=parent_fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
                _note(fd, source, target)
        except PermissionError:
            raise LackingError(
                f"no right to write to {shown(parent)}", hint="run as root, or name another folder"
            ) from None
        except OSError as error:
            raise StorageError(f"cannot work in {shown(parent)}: {error.strerror}", hint="is it full?") from error
        yield Workplace(parent, name, parent_fd, fd)
    finally:
        try:
            with signals_held(), deep_trees():
                _remove(parent_fd, name, os.path.join(parent, name), tell)
        finally:
            for one in (fd, parent_fd):
                if one >= 0:
                    os.close(one)


def _note(fd: int, source: str, target: str) -> None:
    record = {"source": source, "target": target, "inode": os.fstat(fd).st_ino}
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(_RECORD, flags, 0o600, dir_fd=fd), "w", encoding="utf-8") as file:
        # Surrogates (names that are not UTF-8) are escaped.
        json.dump(record, file, ensure_ascii=True)


def clear_dead(
    parent: str,
    parent_fd: int,
    source: str,
    target: str,
    *,
    tell: Callable[[str], None] = lambda _line: None,
) -> None:
    """Remove what killed prepares of the same source or to the same target left in a folder.

    Raises BusyError if one of them is at work.
    """
    for name in filter(_NAME.fullmatch, os.listdir(parent_fd)):
        try:
            fd = os.open(name, FOLDER_FLAGS, dir_fd=parent_fd)
        except OSError:
            continue
        try:
            if not _is_of(fd, source, target):
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    f"another prepare of {shown(source)} is at work in {shown(parent)}", hint="wait for it to end"
                ) from None
            tell(f"removing what a killed prepare left: {os.path.join(parent, name)}")
            with deep_trees():
                _remove(parent_fd, name, os.path.join(parent, name), None)
        finally:
            os.close(fd)


def _is_of(fd: int, source: str, target: str) -> bool:
    info = os.fstat(fd)
    if info.st_uid not in {0, os.geteuid()}:
        return False
    try:
        with os.fdopen(os.open(_RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd), "rb") as file:
            record = json.loads(file.read(1 << 16))
        mine = record["source"] == source or record["target"] == target
        return bool(mine and record["inode"] == info.st_ino)
    except (OSError, ValueError, KeyError, TypeError):
        # Killed before its record was written, or after all else was removed: nothing is in it.
        return set(os.listdir(fd)) <= {_RECORD}


def _remove(parent_fd: int, name: str, path: str, tell: Callable[[str], None] | None) -> None:
    """Unmount what is mounted in it, and remove it; its record last. With `tell` what fails is only told."""
    try:
        for mount in reversed(read_mounts()):
            if lies_in(mount.point, path):
                unmount(mount.point, mount_id=mount.id)
        with suppress(FileNotFoundError):
            fd = os.open(name, FOLDER_FLAGS, dir_fd=parent_fd)
            try:
                # Its record last: without that nobody would know whose it is.
                for inner in set(os.listdir(fd)) - {_RECORD}:
                    try:
                        remove(fd, inner)
                    except NotADirectoryError:
                        os.unlink(inner, dir_fd=fd)
            finally:
                os.close(fd)
            remove(parent_fd, name)
            os.fsync(parent_fd)
    except (OSError, SnapmgrError) as error:
        if tell is None:
            if isinstance(error, SnapmgrError):
                raise
            raise StorageError(f"cannot remove {shown(path)}: {error}") from error
        tell(f"warning: could not remove {shown(path)} ({error}); the next prepare to the same place tries again")
