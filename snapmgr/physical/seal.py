"""Seals a finished backup: makes it durable, and takes a fingerprint that shows any later change.

Each file and folder has its own fsync, because `syncfs` does not reach through FUSE. Several threads share the work:
one fsync on a slow object store takes 0.4 s.
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from snapmgr.contract.errors import NotFoundError, StorageError
from snapmgr.physical.crew import Crew, Piece
from snapmgr.system.paths import shown
from snapmgr.tree.facts import facts_of
from snapmgr.tree.walk import open_folder, opened, reach, walk

if TYPE_CHECKING:
    from collections.abc import Callable

_THREADS = 16
_READ_BYTES = 1 << 20
_DIGEST_BYTES = 16


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A file, folder or symlink at the time of sealing; `path` holds the bytes of its name, one character each."""

    path: str
    mode: int
    uid: int
    gid: int
    size_bytes: int
    """0 for a folder."""
    mtime_ns: int
    ctime_ns: int
    inode: int
    content: str = ""
    """A symlink's target, or a file's checksum if one was taken."""


class Fingerprint(Struct, frozen=True, kw_only=True):
    """All entries of a sealed folder."""

    digest: str
    """Digest over all entries."""
    files: int
    size_bytes: int
    """Total size of all files."""
    checksums: bool
    """Whether it has the files' checksums (BLAKE2b, 128 bits)."""
    entries: tuple[Entry, ...]


def seal(
    folder: str,
    *,
    checksums: bool = False,
    threads: int = _THREADS,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Fingerprint:
    """Bring everything in a folder to stable storage, and return its fingerprint.

    Args:
        folder: a finished backup that no program writes to.
        checksums: whether to read every file and record its checksum.
        threads: number of threads.
        progress: gets the number of durable files and folders, and their total.

    Raises StorageError if the storage fails, if a file system is mounted in the folder, or for a FIFO or a
    device, which cannot belong to a backup; NotFoundError if the folder does not exist.
    """
    with ExitStack() as stack:
        root = _open(stack, folder)
        names = [path for path, info in _walk(root, folder) if not stat.S_ISLNK(info.st_mode)]
        _sync_all(root, folder, names, threads, progress)
        # The folder's own entry, in the one above it.
        above = open_folder(stack, os.path.dirname(os.path.abspath(folder)))
        _sync(above, os.path.dirname(os.path.abspath(folder)))
        return _look(root, folder, checksums=checksums, threads=threads)


def compare(
    folder: str, sealed: Fingerprint, *, contents: bool = False, copy: bool = False, threads: int = _THREADS
) -> tuple[str, ...]:
    """Return one phrase for each entry that changed since the folder was sealed; () if nothing changed.

    Args:
        folder: the sealed one, or a copy of it.
        sealed: from `seal`.
        contents: whether to read the files again; only if `sealed` has checksums.
        copy: the folder is a copy: inodes, change times and the top folder's own attributes are its own.
        threads: number of threads.

    Raises as `seal`.
    """
    with ExitStack() as stack:
        now = _look(_open(stack, folder), folder, checksums=contents and sealed.checksums, threads=threads)
    before = {entry.path: entry for entry in sealed.entries}
    after = {entry.path: entry for entry in now.entries}
    return tuple(
        found
        for path in sorted(before.keys() | after.keys())
        if (found := _difference(path, before.get(path), after.get(path), contents=now.checksums, copy=copy))
    )


def _open(stack: ExitStack, folder: str) -> int:
    if not os.path.lexists(folder):
        raise NotFoundError(f"{folder} does not exist")
    return open_folder(stack, folder)


def _walk(root: int, folder: str) -> list[tuple[str, os.stat_result]]:
    """Return path and facts of each entry, "" for the folder itself; folders come before their contents."""
    try:
        found = [(step.path, step.info) for step in walk(root) if step.kind != "leave"]
    except FileNotFoundError:
        raise StorageError(f"files in {folder} appeared or disappeared while it was read") from None
    except OSError as error:
        raise StorageError(f"cannot read {folder}: {error.strerror}") from None
    for path, info in found:
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode) or stat.S_ISLNK(info.st_mode)):
            raise StorageError(f"{shown(os.path.join(folder, path))} is neither file, folder nor symlink")
    return found


def _sync_all(root: int, folder: str, names: list[str], threads: int, progress: Callable[[int, int], None]) -> None:
    crew = Crew(threads)

    def act(piece: Piece) -> None:
        try:
            with opened(root, piece.path) as fd:
                _sync(fd, os.path.join(folder, piece.path))
        except OSError as error:
            raise StorageError(f"cannot open {shown(os.path.join(folder, piece.path))}: {error.strerror}") from None
        crew.count(1)

    # The deepest entries first, so that a failure names a file rather than its folder.
    crew.work([Piece(path, 0, 0) for path in reversed(names)], act, tick=lambda: progress(crew.done_bytes, len(names)))


def _sync(fd: int, path: str) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise StorageError(
            f"the storage failed to write {shown(path)}: {error.strerror}",
            hint="written data may be lost: check the storage and its logs, and back up again",
        ) from None


def _look(root: int, folder: str, *, checksums: bool, threads: int) -> Fingerprint:
    found = _walk(root, folder)
    contents: dict[str, str] = {}
    for path, info in found:
        if stat.S_ISLNK(info.st_mode):
            contents[path] = _aim(root, path)
    if checksums:
        files = [(path, info.st_size) for path, info in found if stat.S_ISREG(info.st_mode)]
        contents |= _checksums(root, folder, files, threads)
    entries = tuple(
        Entry(path=_characters(path), content=contents.get(path, ""), **facts_of(info)._asdict())
        for path, info in found
    )
    sizes = [entry.size_bytes for entry in entries if stat.S_ISREG(entry.mode)]
    return Fingerprint(
        digest=_digest(entries), files=len(sizes), size_bytes=sum(sizes), checksums=checksums, entries=entries
    )


def _digest(entries: tuple[Entry, ...]) -> str:
    return hashlib.blake2b(msgspec.json.encode(entries), digest_size=_DIGEST_BYTES).hexdigest()


def _characters(path: str) -> str:
    """Return a path as text that JSON can hold and that converts back without loss."""
    return os.fsencode(path).decode("latin-1")


def _aim(root: int, path: str) -> str:
    above = reach(root, path.rpartition("/")[0])
    try:
        return _characters(os.readlink(path.rpartition("/")[2], dir_fd=above))
    except OSError as error:
        raise StorageError(f"cannot read the symlink {shown(path)}: {error.strerror}") from None
    finally:
        os.close(above)


def _checksums(root: int, folder: str, files: list[tuple[str, int]], threads: int) -> dict[str, str]:
    found: dict[str, str] = {}

    def act(piece: Piece) -> None:
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        try:
            with opened(root, piece.path) as fd:
                while data := os.read(fd, _READ_BYTES):
                    digest.update(data)
        except OSError as error:
            raise StorageError(f"cannot read {shown(os.path.join(folder, piece.path))}: {error.strerror}") from None
        found[piece.path] = digest.hexdigest()

    # The largest files first, so that the last ones are small.
    Crew(threads).work([Piece(path, 0, size) for path, size in sorted(files, key=lambda file: -file[1])], act)
    return found


def _difference(path: str, before: Entry | None, after: Entry | None, *, contents: bool, copy: bool) -> str | None:
    name = path.encode("latin-1").decode("utf-8", "backslashreplace") or "the folder itself"
    if after is None:
        return f"{name} is gone"
    if before is None:
        return f"{name} is new"
    if copy and not path:
        return None
    facts = [
        ("type or mode", before.mode, after.mode),
        ("owner", (before.uid, before.gid), (after.uid, after.gid)),
        ("size", before.size_bytes, after.size_bytes),
        ("time", before.mtime_ns, after.mtime_ns),
    ]
    if not copy:
        facts += [("inode", before.inode, after.inode), ("time of change", before.ctime_ns, after.ctime_ns)]
    if contents or stat.S_ISLNK(before.mode):
        facts.append(("content", before.content, after.content))
    changed = [what for what, old, new in facts if old != new]
    return f"{name} changed: {', '.join(changed)}" if changed else None
