"""Works in a hidden folder inside a user's folder, and moves the result up into it without replacing anything.

    PARENT/.NAME-TOKEN/record.json      who made it, with the inode number of the hidden folder itself
    PARENT/.NAME-TOKEN/…                the work

The record is written before the work begins and is removed last, so what a killed process leaves is recognised by it.
The callers hold an flock while they work: who gets the lock knows that nobody else is at work.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from snapmgr.contract.errors import CatalogError, NotFoundError
from snapmgr.system.files import read_file, write_file
from snapmgr.system.kernel import rename_new
from snapmgr.tree.walk import FOLDER_FLAGS, remove

_RECORD = "record.json"
# NFS and FUSE do not support RENAME_NOREPLACE.
_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS})


def make_folder(parent_fd: int, name: str) -> int:
    """Make a folder of mode 0700 unless it exists; return its descriptor. Raises OSError."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent_fd)
    return os.open(name, FOLDER_FLAGS, dir_fd=parent_fd)


def make_hidden(parent_fd: int, name: str) -> int:
    """Make a folder that only its owner can enter; return its descriptor. Raises OSError."""
    fd = make_folder(parent_fd, name)
    # Every file in it would inherit a default ACL of the parent.
    with suppress(OSError):
        os.removexattr(fd, "system.posix_acl_default")
    os.fchmod(fd, 0o700)
    return fd


def lock(fd: int) -> bool:
    """Lock an open folder until it is closed; return False if another process has the lock. Raises OSError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_record(fd: int, record: bytes) -> None:
    """Write or replace the record of the hidden folder `fd`, durably. Raises CatalogError."""
    write_file(_record_path(fd), record)


def read_record(fd: int) -> bytes | None:
    """Return the record of a hidden folder; None if the folder is not ours.

    Returns b"" for an empty folder of ours: its process was killed before it wrote the record, or after it removed
    everything else. Raises MissingRequirementError without the right to read it.
    """
    if os.fstat(fd).st_uid not in {0, os.geteuid()}:
        return None
    try:
        return read_file(_record_path(fd))
    except NotFoundError:
        return b"" if all(name.startswith(f".{_RECORD}.") for name in os.listdir(fd)) else None
    except CatalogError:
        return None


def _record_path(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}", _RECORD)


def move_up(fd: int, name: str, parent_fd: int) -> None:
    """Move an entry of the folder `fd` to `parent_fd`. Raises FileExistsError if the name is taken, OSError."""
    try:
        _rename(fd, name, parent_fd)
    except PermissionError:
        # The move changes the ".." of a folder: everybody but root needs the right to write to it.
        mode = stat.S_IMODE(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
        os.chmod(name, mode | 0o700, dir_fd=fd)
        _rename(fd, name, parent_fd)
        os.chmod(name, mode, dir_fd=parent_fd)


def _rename(fd: int, name: str, parent_fd: int) -> None:
    try:
        rename_new(name, name, fd, parent_fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if name in os.listdir(parent_fd):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.rename(name, name, src_dir_fd=fd, dst_dir_fd=parent_fd)


def remove_hidden(parent_fd: int, name: str) -> None:
    """Remove a hidden folder with everything in it, its record last, durably; idempotent.

    Raises OSError, and StorageError if something is mounted in it.
    """
    try:
        fd = os.open(name, FOLDER_FLAGS, dir_fd=parent_fd)
    except FileNotFoundError:
        return
    try:
        for inner in set(os.listdir(fd)) - {_RECORD}:
            try:
                remove(fd, inner)
            except NotADirectoryError:
                os.unlink(inner, dir_fd=fd)
    finally:
        os.close(fd)
    remove(parent_fd, name)
    os.fsync(parent_fd)
