"""Creates and opens stores, and begins, finds and describes the copy folders in them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from snapmgr.contract.errors import NotFoundError, StorageError
from snapmgr.contract.records import Found, Pool, SnapshotRef
from snapmgr.copystore.copyfolder import BEGUN, DELETING, MARK_FORMAT, STATES, CopyFolder, Mark, Store, read, write
from snapmgr.copystore.removal import discard, locked
from snapmgr.system import kernel
from snapmgr.system.boot import boot_id, machine_id
from snapmgr.system.paths import shown
from snapmgr.tree.entries import entries
from snapmgr.tree.walk import FOLDER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator

# The name that `write` gives to a file before its rename.
_UNFINISHED_MARK = re.compile(r"begun\.json\.[0-9a-f]{8}~")


def mark_name(backend: str) -> str:
    """Return the name of the file that makes a folder a backend's store."""
    return f"snapmgr-{backend}-store.json"


@contextmanager
def opened(path: str, backend: str, *, shared: bool = False) -> Iterator[Store]:
    """Open an existing store; `shared`: several machines may have it mounted.

    Raises StorageError if it is missing, is not a store, or others could write to it.
    """
    fd = _open_folder(path, backend)
    try:
        _check_private(fd, path, backend)
        try:
            mark = json.loads(read(fd, mark_name(backend)))
        except (FileNotFoundError, ValueError):
            raise StorageError(
                f"{shown(path)} is not a store of copies: it has no {mark_name(backend)}",
                hint=f"is its file system mounted? Otherwise set store in [backend.{backend}] to the right folder",
            ) from None
        if mark != {"format": MARK_FORMAT, "inode": os.fstat(fd).st_ino}:
            raise StorageError(
                f"{shown(path)} is a copy of a store, or of another version",
                hint="snapshots are known by their inode numbers, which copies do not have: use an empty folder",
            )
        yield Store(backend=backend, path=path, fd=fd, machine=_machine_tag() if shared else "")
    finally:
        os.close(fd)


def _machine_tag() -> str:
    return hashlib.sha256(machine_id().encode()).hexdigest()[:8]


def create(path: str, backend: str) -> None:
    """Make `path` a store: a folder of mode 0700 with a mark. Leave an existing store as it is. Raises StorageError."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise StorageError(
            f"cannot create {shown(path)}: {error.strerror}",
            hint=f"create the parent folder, or set store in [backend.{backend}] to another folder",
        ) from error
    else:
        parent = _open_folder(os.path.dirname(path), backend)
        os.fsync(parent)
        os.close(parent)
    fd = _open_folder(path, backend)
    try:
        _check_private(fd, path, backend)
        # A store in a folder with a default ACL would pass the ACL on to all copies.
        with suppress(OSError):
            os.removexattr(fd, "system.posix_acl_default")
        with locked(fd):
            _write_mark(fd, path, backend)
    finally:
        os.close(fd)


def _write_mark(fd: int, path: str, backend: str) -> None:
    name = mark_name(backend)
    unfinished = re.compile(re.escape(name) + r"\.[0-9a-f]{8}~")
    present = {entry.name for entry in entries(fd)}
    # A process was killed while it wrote the mark under this lock: this is not a store yet.
    for abandoned in [one for one in present if unfinished.fullmatch(one)]:
        os.unlink(abandoned, dir_fd=fd)
        present.discard(abandoned)
    if present and name not in present:
        raise StorageError(
            f"{shown(path)} holds other things", hint=f"set store in [backend.{backend}] to an empty folder"
        )
    if not present:
        write(fd, name, json.dumps({"format": MARK_FORMAT, "inode": os.fstat(fd).st_ino}).encode())


def _open_folder(path: str, backend: str) -> int:
    try:
        return os.open(path, FOLDER_FLAGS)
    except OSError as error:
        raise StorageError(
            f"cannot open the store of copies {shown(path)}: {error.strerror}",
            hint=f"is its file system mounted? Is store in [backend.{backend}] right?",
        ) from error


def _check_private(fd: int, path: str, backend: str) -> None:
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise StorageError(
            f"{shown(path)} must belong to user {os.geteuid()} and be closed to others: it belongs to user "
            f"{info.st_uid} and has mode {stat.S_IMODE(info.st_mode):04o}",
            hint=f"chown {os.geteuid()} {shown(path)} && chmod 0700 {shown(path)}, or set store in "
            f"[backend.{backend}] to another folder",
        )


def begin(store: Store, name: str, mark: Mark) -> CopyFolder:
    """Make a copy folder named `name`, locked; the caller closes its `fd`.

    Fills in nonce, inode, generation and boot id of `mark`. Raises StorageError if the name is taken or if writing
    fails.
    """
    nonce = os.urandom(8).hex() + store.machine
    made = CopyFolder(store=store, fd=-1, name=f"{BEGUN}{nonce}", mark=None, state=None)
    try:
        # Hold the store's lock, so that a repair cannot remove the folder before it has its own lock.
        with locked(store.fd):
            os.mkdir(made.name, 0o700, dir_fd=store.fd)
            made = replace(made, fd=os.open(made.name, FOLDER_FLAGS, dir_fd=store.fd))
            fcntl.flock(made.fd, fcntl.LOCK_EX)
        inode, generation = os.fstat(made.fd).st_ino, kernel.generation(made.fd)
        filled = replace(mark, nonce=nonce, inode=inode, generation=generation, boot_id=boot_id())
        write(made.fd, "begun.json", json.dumps(asdict(filled)).encode())
        kernel.rename_new(made.name, name, store.fd)
        os.fsync(store.fd)
    except (OSError, StorageError) as error:
        if made.fd >= 0:
            with suppress(OSError, StorageError):
                discard(made)
            os.close(made.fd)
        if isinstance(error, StorageError):
            raise
        why = "the name is taken" if error.errno == errno.EEXIST else error.strerror
        raise StorageError(f"cannot make {shown(store.path)}/{name}: {why}") from error
    return replace(made, name=name, mark=filled, state="begun")


@contextmanager
def copy_folder(store: Store, name: str) -> Iterator[CopyFolder | None]:
    """Open the copy folder `name` until the context ends; None if it is missing or not provably ours."""
    fd, folder = -1, None
    with suppress(OSError):  # nothing there, a file, a symlink; removed meanwhile
        fd = os.open(name, FOLDER_FLAGS, dir_fd=store.fd)
        folder = _recognise(store, fd, name)
    try:
        yield folder
    finally:
        if fd >= 0:
            os.close(fd)


def _recognise(store: Store, fd: int, name: str) -> CopyFolder | None:
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_dev != os.fstat(store.fd).st_dev:
        return None
    for state in STATES:
        try:
            mark = Mark(**json.loads(read(fd, f"{state}.json")))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError):
            return None
        if (mark.format, mark.inode, mark.generation) != (MARK_FORMAT, info.st_ino, kernel.generation(fd)):
            return None
        return CopyFolder(store=store, fd=fd, name=name, mark=mark, state=state)
    # Killed before its mark was written: it holds only the unfinished mark.
    begun = all(_UNFINISHED_MARK.fullmatch(entry.name) for entry in entries(fd))
    if name.startswith((BEGUN, DELETING)) and begun:
        return CopyFolder(store=store, fd=fd, name=name, mark=None, state=None)
    return None


def folders(store: Store, *, snapshots: bool = True) -> Iterator[CopyFolder]:
    """Open all copy folders that are ours, one after another; each closes when the next one is requested.

    Without `snapshots` only attachments and what is begun or half deleted, by their names: of these there are few.
    """
    for name in sorted(_names(store)):
        if snapshots or "@" in name:
            with copy_folder(store, name) as folder:
                if folder is not None:
                    yield folder


def _names(store: Store) -> list[str]:
    # By a descriptor of its own, as `entries` does, but without looking at each of thousands.
    fd = os.open(".", FOLDER_FLAGS, dir_fd=store.fd)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


@contextmanager
def snapshot(store: Store, ref: SnapshotRef) -> Iterator[CopyFolder]:
    """Open the snapshot's copy folder, also if it was renamed in its store. Raises NotFoundError if it is gone."""
    for name in _named_first(store, ref.name):
        if "@" in name or "/" in name:
            continue
        with copy_folder(store, name) as folder:
            mark = folder.mark if folder is not None else None
            if (
                folder is not None
                and mark is not None
                and (mark.kind, mark.native_id, mark.snapshot_id) == ("snapshot", ref.native_id, ref.snapshot_id)
            ):
                yield folder
                return
    raise NotFoundError(
        f"the copy {ref.name} is not in {shown(store.path)}, or another folder has its name",
        hint="`snapmgr doctor` compares what is recorded with what exists",
    )


def _named_first(store: Store, name: str) -> Iterator[str]:
    yield name
    # Only for a renamed one: looking at all takes the longer, the more snapshots there are.
    yield from sorted(one for one in _names(store) if one != name)


def refuse_foreign(store: Store, name: str) -> None:
    """Raise StorageError if a folder that is not ours has this name; ours has just been removed."""
    if "/" in name:
        return
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=store.fd, follow_symlinks=False)
        raise StorageError(
            f"{shown(store.path)}/{shown(name)} was not made by snapmgr: it is left alone",
            hint="look at it and move it away",
        )


def reference(folder: CopyFolder, pool: Pool) -> SnapshotRef:
    """Return the snapshot's reference, given its copy folder or that of an attachment."""
    mark = folder.mark
    if mark is None:
        raise ValueError(f"{folder.path} has no mark")
    own = mark.kind == "snapshot"
    return SnapshotRef(
        backend=folder.store.backend,
        snapshot_id=mark.snapshot_id,
        pool=pool,
        volume_id=mark.volume_id,
        name=folder.name if own else mark.parent_name,
        native_id=mark.native_id if own else mark.parent_native_id,
    )


def describe(folder: CopyFolder, pool: Pool, *, note: bool = True) -> Found | None:
    """Describe a copy folder for `Backend.inventory`; None for another machine's attachment or unfinished copy.

    A volatile copy that is made but not complete counts only until the next boot.
    """
    mark = folder.mark
    if mark is None or folder.name.startswith((BEGUN, DELETING)):
        why = "its deletion was interrupted" if folder.name.startswith(DELETING) else "it was only just begun"
    elif folder.state == "begun":
        why = "it was never finished"
    elif folder.state == "made" and mark.volatile and mark.boot_id != boot_id():
        why = "the machine stopped before it was safe in the storage"
    else:
        why = ""
    if folder.is_foreign and (why or mark is None or (mark.kind, folder.state) != ("snapshot", "complete")):
        return None
    if why or mark is None:
        return Found(
            kind="debris",
            pool=pool,
            name=folder.name,
            snapshot_id=mark.snapshot_id if mark else None,
            record_id=(mark.record_id or None) if mark else None,
            why=why,
        )
    return Found(
        kind=mark.kind,
        pool=pool,
        name=folder.name,
        snapshot_id=mark.snapshot_id,
        ref=reference(folder, pool),
        record_id=mark.record_id or None,
        note=folder.read_note() if note else None,
    )
