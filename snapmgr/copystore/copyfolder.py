"""Defines a copy folder: a folder of a store that holds one copy, with a mark that proves that snapmgr made it.

::

    20260102T030405Z-ab12/        attach@0123456789abcdef/      begun@NONCE/  deleting@NONCE/
        complete.json   its mark, named by its state: begun, made (copied) or complete (safe in the storage)
        data/           the copy
        note            what the core stored beside it

The mark repeats the folder's inode number and generation: a copy of the folder (cp -a, a restored backup) has others
and is not ours. The number alone is not enough: XFS reuses the number of a removed folder. A snapshot's id never
contains "@", so a snapshot cannot be mistaken for anything else.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import Literal, Protocol

from msgspec import Struct

from snapmgr.contract.errors import BusyError, StorageError
from snapmgr.system.paths import shown

State = Literal["begun", "made", "complete"]

STATES: tuple[State, ...] = ("begun", "made", "complete")
DATA = "data"
MARK_FORMAT = 1
BEGUN, DELETING = "begun@", "deleting@"
_NOTE = "note"
_BYTES_AT_MOST = 1 << 20


class Folder(Protocol):
    """Any open folder."""

    @property
    def path(self) -> str:
        """Its path."""

    @property
    def fd(self) -> int:
        """Its descriptor."""


class Store(Struct, frozen=True, kw_only=True):
    """An open store: a folder of ours that others cannot access and that holds copy folders."""

    backend: str
    """Name of the backend."""
    path: str
    fd: int
    machine: str = ""
    """If several machines may mount the store: eight hex digits that identify this machine; otherwise ""."""


class Mark(Struct, frozen=True, kw_only=True):
    """The proof in a copy folder, written when it is begun; it never changes."""

    kind: Literal["snapshot", "attachment"]
    snapshot_id: str
    volume_id: str
    origin: str
    """Path of the copied directory; for the user."""
    volatile: bool = True
    """Whether a power cut may destroy parts of the copy before it is complete."""
    record_id: str = ""
    """Attachments: `AttachRecord.id`."""
    parent_name: str = ""
    parent_native_id: str = ""
    """Attachments: the snapshot's id."""
    format: int = MARK_FORMAT
    nonce: str = ""
    inode: int = 0
    generation: int = 0
    """The inode's generation, which tells apart the uses of its number. 0 if the file system has none."""
    boot_id: str = ""

    @property
    def native_id(self) -> str:
        """The storage's own id: the folder's inode and its unique number."""
        return f"{self.inode}.{self.nonce}"


class CopyFolder(Struct, frozen=True, kw_only=True):
    """An open copy folder that is provably ours; `mark` is None while the folder is still (or again) empty."""

    store: Store
    fd: int
    name: str
    mark: Mark | None
    state: State | None

    @property
    def path(self) -> str:
        """Its path."""
        return f"{self.store.path}/{self.name}"

    @property
    def data(self) -> str:
        """Path of the copy in it."""
        return f"{self.path}/{DATA}"

    @property
    def nonce(self) -> str:
        """The unique number of this copy folder."""
        return self.mark.nonce if self.mark else self.name.partition("@")[2]

    @property
    def is_foreign(self) -> bool:
        """Whether another machine made it: if it looks unfinished here, it may be in progress there."""
        return not self.nonce.endswith(self.store.machine)

    def lock(self, *, shared: bool = False) -> None:
        """Lock it while it is open. Raises BusyError if another process works on it."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"another process works on {shown(self.path)}",
                hint="wait until it has ended; if it hangs, so does the storage",
            ) from None

    def advance(self, old: State, new: State, *, durable: bool) -> None:
        """Give it its next state, and change nothing else. Raises StorageError."""
        try:
            with suppress(FileNotFoundError):  # another process was first
                os.rename(f"{old}.json", f"{new}.json", src_dir_fd=self.fd, dst_dir_fd=self.fd)
            if durable:
                os.fsync(self.fd)
        except OSError as error:
            raise StorageError(f"cannot mark {shown(self.path)} {new}: {error.strerror}") from error

    def read_note(self) -> bytes | None:
        """Return the note beside the copy, or None."""
        try:
            return read(self.fd, _NOTE)
        except FileNotFoundError:
            return None

    def write_note(self, note: bytes) -> None:
        """Store a note durably: either the old or the new one survives a power cut. Raises StorageError."""
        write(self.fd, _NOTE, note)


def read(dir_fd: int, name: str) -> bytes:
    """Return the contents of a small file. Raises OSError."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    with os.fdopen(fd, "rb") as file:
        return file.read(_BYTES_AT_MOST)


def write(dir_fd: int, name: str, content: bytes) -> None:
    """Write a file durably and atomically: temporary file, fsync, rename, fsync of the folder. Raises StorageError."""
    temporary = f"{name}.{os.urandom(4).hex()}~"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=dir_fd)
            raise
        os.fsync(dir_fd)
    except OSError as error:
        raise StorageError(f"cannot write {name}: {error.strerror}", hint="is the file system full?") from error
