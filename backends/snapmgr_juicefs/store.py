"""The folder of clones: one box for each snapshot, attachment or begun thing, and what makes a box provably ours.

A box is a folder in the store::

    20260102T030405Z-ab12/        attach@0123456789abcdef/      begun@NONCE/  deleting@NONCE/
        complete.json   its mark, named by its state: begun, made (cloned) or complete (uploaded)
        data/           the clone; it appears when it is complete
        note            what the core stored beside it

The mark repeats the box's inode number, which the volume gives to nothing else, ever: a copy of a box has another one
and is not ours. "@" is in no snapshot's id, so no snapshot's box can be taken for anything else. A volume may be
mounted on several machines: what one of them has begun is no debris to the others.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from snapmgr.api import BusyError, InUseError, NotFoundError, Pool, SnapshotRef, StorageError
from snapmgr_juicefs import machine, tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

State = Literal["begun", "made", "complete"]

DATA = "data"
_NOTE = "note"
_CLONING = "cloning"
_STORE_MARK = "snapmgr-juicefs-store.json"
_UNFINISHED_MARK = re.compile(re.escape(_STORE_MARK) + r"\.[0-9a-f]{8}~")
_STATES: tuple[State, ...] = ("begun", "made", "complete")
# As `write` names what it has not renamed yet.
_UNFINISHED_BOX_MARK = re.compile(r"begun\.json\.[0-9a-f]{8}~")
_FORMAT = 1
_MARK_BYTES_AT_MOST = 1 << 20
_READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What is written in a box when it is begun; it never changes."""

    format: int = _FORMAT
    kind: Literal["snapshot", "attachment"]
    nonce: str
    inode: int
    boot_id: str
    snapshot_id: str
    volume_id: str
    origin: str
    """Where the cloned directory was; for people."""
    record_id: str = ""
    """Attachments: `AttachRecord.id`."""
    parent_name: str = ""
    parent_native_id: str = ""
    """Attachments: of what snapshot."""
    staged: bool = False
    """Whether its client uploads later (writeback): what a power cut takes from its cache is lost."""

    @property
    def native_id(self) -> str:
        """What is to be believed: the box's inode and a number that nobody else has."""
        return f"{self.inode}.{self.nonce}"


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box that is open and provably ours; `mark` is None if it is still (or again) an empty folder."""

    store_fd: int
    fd: int
    name: str
    path: str
    mark: Mark | None
    state: State | None


def is_foreign(found: Box) -> bool:
    """Whether another machine made the box: then what looks unfinished may be going on there."""
    nonce = found.mark.nonce if found.mark else found.name.partition("@")[2]
    return not nonce.endswith(machine.tag())


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Open an existing store. Raises StorageError if it is not there, is not a store, or others could write to it."""
    fd = _open_folder(path)
    try:
        _check_private(fd, path)
        try:
            mark = json.loads(read(fd, _STORE_MARK))
        except (FileNotFoundError, ValueError):
            raise StorageError(
                f"{tree.shown(path)} is no store of clones: it has no {_STORE_MARK}",
                hint="is the volume mounted? Otherwise name the right folder in [backend.juicefs] store",
            ) from None
        if mark != {"format": _FORMAT, "inode": os.fstat(fd).st_ino}:
            raise StorageError(
                f"{tree.shown(path)} is a copy of a store, or of another version",
                hint="snapshots are known by their inode numbers, which copies do not have: use an empty folder",
            )
        yield fd
    finally:
        os.close(fd)


def create(path: str) -> None:
    """Make `path` a store: a folder of mode 0700 with a mark. Nothing happens if it is one. Raises StorageError."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise StorageError(
            f"cannot create {tree.shown(path)}: {error.strerror}",
            hint="create the folder's parent, or name another folder in [backend.juicefs] store",
        ) from error
    fd = _open_folder(path)
    try:
        _check_private(fd, path)
        # A store below a folder with a default ACL would hand it on to all boxes.
        with suppress(OSError):
            os.removexattr(fd, "system.posix_acl_default")
        with _locked(fd):
            present = {entry.name for entry in tree.entries(fd)}
            # Whoever began its mark under this lock was killed: there is no store yet.
            for name in [name for name in present if _UNFINISHED_MARK.fullmatch(name)]:
                os.unlink(name, dir_fd=fd)
                present.discard(name)
            if present and _STORE_MARK not in present:
                raise StorageError(
                    f"{tree.shown(path)} holds other things", hint="name an empty folder in [backend.juicefs] store"
                )
            if not present:
                write(fd, _STORE_MARK, json.dumps({"format": _FORMAT, "inode": os.fstat(fd).st_ino}).encode())
    finally:
        os.close(fd)


def _open_folder(path: str) -> int:
    try:
        return os.open(path, _READ_FOLDER)
    except OSError as error:
        raise StorageError(
            f"cannot open the folder of clones {tree.shown(path)}: {error.strerror}",
            hint="is the volume mounted? Is [backend.juicefs] store right?",
        ) from error


def _check_private(fd: int, path: str) -> None:
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise StorageError(
            f"{tree.shown(path)} must belong to user {os.geteuid()} and be closed to others: it belongs to user "
            f"{info.st_uid} and has mode {stat.S_IMODE(info.st_mode):04o}",
            hint=f"chown {os.geteuid()} {tree.shown(path)} && chmod 0700 {tree.shown(path)}, or name another folder "
            "in [backend.juicefs] store",
        )


def begin(store_fd: int, path: str, name: str, mark: Mark) -> Box:
    """Make a box named `name` with `mark` (its nonce and inode are filled in), locked; the caller closes `fd`.

    Raises StorageError if the name is taken or nothing can be written.
    """
    nonce = secrets.token_hex(8) + machine.tag()
    temporary = f"begun@{nonce}"
    fd = -1
    try:
        # Under the store's lock, so that no repair takes the folder away before it bears a lock of its own.
        with _locked(store_fd):
            os.mkdir(temporary, 0o700, dir_fd=store_fd)
            fd = os.open(temporary, _READ_FOLDER, dir_fd=store_fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        own = {"nonce": nonce, "inode": os.fstat(fd).st_ino}
        filled = Mark(**(asdict(mark) | own))
        write(fd, "begun.json", json.dumps(asdict(filled)).encode())
        tree.rename_new(temporary, name, store_fd, store_fd)
        os.fsync(store_fd)
    except (OSError, StorageError) as error:
        if fd >= 0:
            with suppress(OSError, StorageError):
                discard(Box(store_fd=store_fd, fd=fd, name=temporary, path=path, mark=None, state=None))
            os.close(fd)
        if isinstance(error, StorageError):
            raise
        why = "the name is taken" if error.errno == errno.EEXIST else error.strerror
        raise StorageError(f"cannot make {tree.shown(path)}/{name}: {why}") from error
    return Box(store_fd=store_fd, fd=fd, name=name, path=f"{path}/{name}", mark=filled, state="begun")


def trace_cloning(box: Box) -> None:
    """Leave a trace that the clone may have begun. Raises OSError."""
    os.close(os.open(_CLONING, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=box.fd))


def was_interrupted(box: Box) -> bool:
    """Whether a clone had been begun in the box and never appeared."""
    names = {entry.name for entry in tree.entries(box.fd)}
    return _CLONING in names and DATA not in names


def advance(box: Box, old: State, new: State, *, durable: bool) -> None:
    """Give a box its next state; nothing else of it changes. Raises StorageError."""
    try:
        with suppress(FileNotFoundError):  # another process was first
            os.rename(f"{old}.json", f"{new}.json", src_dir_fd=box.fd, dst_dir_fd=box.fd)
        if durable:
            os.fsync(box.fd)
    except OSError as error:
        raise StorageError(f"cannot mark {tree.shown(box.path)} {new}: {error.strerror}") from error


@contextmanager
def box(store_fd: int, path: str, name: str) -> Iterator[Box | None]:
    """Open the box `name` until the context ends; None if there is nothing of that name or it is not provably ours."""
    fd, found = -1, None
    with suppress(OSError):  # nothing there, a file, a symlink; removed meanwhile
        fd = os.open(name, _READ_FOLDER, dir_fd=store_fd)
        found = _recognise(store_fd, fd, path, name)
    try:
        yield found
    finally:
        if fd >= 0:
            os.close(fd)


def _recognise(store_fd: int, fd: int, path: str, name: str) -> Box | None:
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_dev != os.fstat(store_fd).st_dev:
        return None
    for state in _STATES:
        try:
            mark = Mark(**json.loads(read(fd, f"{state}.json")))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError):
            return None
        if (mark.format, mark.inode) != (_FORMAT, info.st_ino):
            return None
        return Box(store_fd=store_fd, fd=fd, name=name, path=f"{path}/{name}", mark=mark, state=state)
    # Killed before its mark was written: nothing is in it but what was to become the mark.
    begun = all(_UNFINISHED_BOX_MARK.fullmatch(entry.name) for entry in tree.entries(fd))
    if name.startswith(("begun@", "deleting@")) and begun:
        return Box(store_fd=store_fd, fd=fd, name=name, path=f"{path}/{name}", mark=None, state=None)
    return None


@contextmanager
def snapshot(store_fd: int, path: str, ref: SnapshotRef) -> Iterator[Box]:
    """Open the snapshot's box, wherever it was renamed to in its store. Raises NotFoundError if it is gone."""
    candidates = [ref.name, *sorted(entry.name for entry in tree.entries(store_fd) if entry.name != ref.name)]
    for name in candidates:
        if "@" in name or "/" in name:
            continue
        with box(store_fd, path, name) as found:
            if found is not None and found.mark is not None and _is(found.mark, ref):
                yield found
                return
    raise NotFoundError(
        f"the clone {ref.name} is not in {tree.shown(path)}, or what bears its name is another",
        hint="`snapmgr doctor` compares what is recorded with what exists",
    )


def _is(mark: Mark, ref: SnapshotRef) -> bool:
    return mark.kind == "snapshot" and mark.native_id == ref.native_id and mark.snapshot_id == ref.snapshot_id


def reference(found: Box, pool: Pool, backend: str) -> SnapshotRef:
    """Given a box with a snapshot, return the snapshot's reference; with an attachment, that of what is attached."""
    mark = found.mark
    if mark is None:
        msg = f"{found.path} has no mark"
        raise ValueError(msg)
    own = mark.kind == "snapshot"
    return SnapshotRef(
        backend=backend,
        snapshot_id=mark.snapshot_id,
        pool=pool,
        volume_id=mark.volume_id,
        name=found.name if own else mark.parent_name,
        native_id=mark.native_id if own else mark.parent_native_id,
    )


@contextmanager
def _locked(fd: int) -> Iterator[None]:
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def try_lock(found: Box, *, shared: bool = False) -> bool:
    """Lock a box as long as it is open; False if another process works on it."""
    try:
        fcntl.flock(found.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(found: Box, *, shared: bool = False) -> None:
    """Like `try_lock`, but raise BusyError."""
    if not try_lock(found, shared=shared):
        raise BusyError(
            f"another process works on {tree.shown(found.path)}",
            hint="wait until it has ended; if it hangs, the storage does",
        )


def read_note(found: Box) -> bytes | None:
    """Return the note beside a snapshot, or None."""
    try:
        return read(found.fd, _NOTE)
    except FileNotFoundError:
        return None


def write_note(found: Box, note: bytes) -> None:
    """Store a note durably: the old or the new one survives a power cut."""
    write(found.fd, _NOTE, note)


def write(dir_fd: int, name: str, content: bytes) -> None:
    """Write a file durably and whole: temporary file, fsync, rename, fsync of the folder. Raises StorageError."""
    temporary = f"{name}.{secrets.token_hex(4)}~"
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


def read(dir_fd: int, name: str) -> bytes:
    """Return what is in a small file. Raises OSError."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    with os.fdopen(fd, "rb") as file:
        return file.read(_MARK_BYTES_AT_MOST)


def _doom(found: Box) -> str:
    """Make sure that a box is durably taken for a whole one no more; return its name from now on."""
    nonce = found.mark.nonce if found.mark else found.name.partition("@")[2]
    doomed = f"deleting@{nonce}"
    if found.name != doomed:
        tree.rename_new(found.name, doomed, found.store_fd, found.store_fd)
        os.fsync(found.store_fd)
    return doomed


def discard(found: Box, remove: Callable[[str], None] = os.rmdir) -> None:
    """Remove a locked box with all that is in it, its mark last: what is left by a crash is still provably ours.

    The box gets another name first, so that the old one is gone durably before the slow part. `remove` removes a folder
    with all that is in it, given its path. Raises InUseError or StorageError; then the rest stays as debris.
    """
    marks = {f"{state}.json" for state in _STATES}
    try:
        doomed = _doom(found)
        for entry in tree.entries(found.fd):
            if entry.is_folder:
                remove(f"{os.path.dirname(found.path)}/{doomed}/{entry.name}")
            elif entry.name not in marks:
                os.unlink(entry.name, dir_fd=found.fd)
        with _locked(found.store_fd):
            for mark in marks:
                with suppress(FileNotFoundError):
                    os.unlink(mark, dir_fd=found.fd)
            os.rmdir(doomed, dir_fd=found.store_fd)
        os.fsync(found.store_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise InUseError(f"{tree.shown(found.path)} is mounted", hint="umount it and try again") from error
        raise StorageError(f"cannot remove {tree.shown(found.path)}: {error.strerror}") from error
