"""Keeps the folder of scratch files: for each attachment ``RECORD.json``, its snapshot, and ``RECORD.cow``, its writes.

The note is created first and removed last, so that every leftover of a crash has a name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict

from snapmgr.api import MissingRequirementError, StorageError, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

_FORMAT = 1
_FILE = re.compile(r"(?P<record>[0-9a-f]{16})\.(?:cow|json~?)")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_NOTE_MAX_BYTES = 64 << 10
_HINT = "set scratch_dir in [backend.lvm] to a folder of root's own"


class Note(Struct, frozen=True, kw_only=True):
    """The note of an attachment's snapshot, on disk before anything else of the attachment."""

    format: int = _FORMAT
    record_id: str
    snapshot_id: str
    native_id: str
    """LV UUID of the snapshot."""
    pool_id: str
    """UUID of its volume group."""
    boot_id: str
    """Boot id of the attachment: after another boot its devices are gone."""


@contextmanager
def opened(path: str, *, make: bool) -> Iterator[int | None]:
    """Yield a descriptor of the folder with a shared lock, or with `make` an exclusive one; None if it is missing.

    The lock keeps unfinished files from looking abandoned. `make` creates the folder (0700; its parents 0755). Raises
    StorageError if other users could replace or read it, or if it cannot be opened.
    """
    if make:
        _make(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        what = "it is a symlink or no folder" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
        raise StorageError(f"cannot use the scratch folder {path}: {what}", hint=_HINT) from None
    try:
        _require_private(path, fd)
        fcntl.flock(fd, fcntl.LOCK_EX if make else fcntl.LOCK_SH)
        yield fd
    finally:
        os.close(fd)


def records(folder_fd: int) -> tuple[str, ...]:
    """Return the record ids of all files in the folder."""
    found = (_FILE.fullmatch(name) for name in os.listdir(folder_fd))
    return tuple(sorted({match["record"] for match in found if match}))


def write_note(folder_fd: int, note: Note) -> None:
    """Write a note durably. Raises StorageError if the record has files already, or it cannot be written."""
    if note.record_id in records(folder_fd):
        raise StorageError(f"attachment {note.record_id} has scratch files already", hint="snapmgr doctor")
    name = f"{note.record_id}.json"
    try:
        fd = os.open(f"{name}~", os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=folder_fd)
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(asdict(note)).encode())
            file.flush()
            os.fsync(file.fileno())
        os.rename(f"{name}~", name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        os.fsync(folder_fd)
    except OSError as error:
        raise StorageError(f"cannot write in the scratch folder: {error.strerror}", hint=_HINT) from None


def read_note(folder_fd: int, record_id: str) -> Note | None:
    """Return a record's note; None if it is missing or unreadable."""
    try:
        fd = os.open(f"{record_id}.json", os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=folder_fd)
        with os.fdopen(fd, "rb") as file:
            note = Note(**json.loads(file.read(_NOTE_MAX_BYTES)))
    except (OSError, ValueError, TypeError):
        return None
    return note if note.record_id == record_id and note.format == _FORMAT else None


def make_file(folder_fd: int, record_id: str, size_bytes: int) -> int:
    """Make a record's sparse file and return its descriptor. Raises StorageError."""
    try:
        fd = os.open(f"{record_id}.cow", os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=folder_fd)
    except OSError as error:
        raise StorageError(f"cannot make a scratch file: {error.strerror}", hint=_HINT) from None
    try:
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        os.close(fd)
        raise StorageError(
            f"a scratch file of {format_size(size_bytes)} cannot be made there: {error.strerror}",
            hint="set scratch_size smaller, or scratch_dir to another folder, in [backend.lvm]",
        ) from None
    return fd


def file_size(folder_fd: int, record_id: str) -> int | None:
    """Return the maximum size of a record's file in bytes; None if it is gone."""
    try:
        return os.stat(f"{record_id}.cow", dir_fd=folder_fd, follow_symlinks=False).st_size
    except OSError:
        return None


def remove(folder_fd: int, record_id: str) -> None:
    """Remove a record's files, the note last; idempotent. Raises StorageError."""
    try:
        gone = [_unlink(f"{record_id}.{end}", folder_fd) for end in ("cow", "json~", "json")]
        if any(gone):
            os.fsync(folder_fd)
    except OSError as error:
        raise StorageError(f"cannot remove the scratch files of {record_id}: {error.strerror}") from None


def free_bytes(folder_fd: int) -> int:
    """Return the free space on the folder's file system, minus the further growth of its files."""
    room = os.fstatvfs(folder_fd)
    promised = 0
    for record_id in records(folder_fd):
        with suppress(OSError):
            status = os.stat(f"{record_id}.cow", dir_fd=folder_fd, follow_symlinks=False)
            promised += max(0, status.st_size - status.st_blocks * 512)
    return room.f_bavail * room.f_frsize - promised


def _unlink(name: str, folder_fd: int) -> bool:
    try:
        os.unlink(name, dir_fd=folder_fd)
    except FileNotFoundError:
        return False
    return True


def _make(path: str) -> None:
    try:
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except PermissionError as error:
        raise MissingRequirementError(
            f"cannot make the scratch folder {path}: {error.strerror}", hint="run as root"
        ) from None
    except OSError as error:
        raise StorageError(f"cannot make the scratch folder {path}: {error.strerror}", hint=_HINT) from None


def _require_private(path: str, fd: int) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise StorageError(
            f"the scratch folder {path} must belong to user {os.geteuid()} and be closed to others: it belongs to "
            f"user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}",
            hint=f"is it yours? chown {os.geteuid()} {path} && chmod 0700 {path}; else {_HINT}",
        )
    # Also check the folders that hold a symlink on the way: a user who can write there could redirect us.
    for folder in dict.fromkeys((*Path(path).parents, *Path(os.path.realpath(path)).parents)):
        above = folder.stat()
        loose = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
        if loose or above.st_uid not in {0, os.geteuid()}:
            raise StorageError(
                f"others could exchange the scratch folder {path}: {folder} belongs to user {above.st_uid} and has "
                f"mode {stat.S_IMODE(above.st_mode):04o}",
                hint=_HINT,
            )
