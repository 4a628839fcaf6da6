"""Writes the changes of a prepare on scratch back to a clone in the storage: blocks, new files, removed files."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import StorageError
from snapmgr.physical.crew import Crew, Piece, pieces
from snapmgr.physical.prepare.scratchcopy import (
    BLOCK_BYTES,
    COPY_THREADS,
    DIGEST_BYTES,
    Tree,
    digest,
    failure,
    named,
    read_steps,
    write_all,
)
from snapmgr.system.paths import shown
from snapmgr.tree.walk import open_folder, opened, reach, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator


class Written(Struct, frozen=True, kw_only=True):
    """Numbers and sizes of the changes that were written back."""

    changed_bytes: int
    changed_files: int
    new_files: int
    removed_files: int


def write_back(
    scratch: str,
    clone: str,
    before: Tree,
    *,
    only: Collection[str] | None = None,
    threads: int = COPY_THREADS,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Written:
    """Make the folder `clone` equal to `scratch`, and check it.

    Args:
        scratch: the tree as it is now.
        clone: a tree equal to `scratch` at the time of `before`.
        before: the earlier tree, with its digests; a file without digests counts as changed.
        only: the files that may have changed, if known; None: all.
        threads: number of threads that read and write.
        progress: gets the compared and the total bytes.

    Writes only the changed blocks, fsyncs each file, then reads the written blocks again and compares their digests and
    all sizes. Raises StorageError; the clone is then unusable.
    """
    with ExitStack() as stack:
        scratch_fd, clone_fd = open_folder(stack, scratch), open_folder(stack, clone)
        now = outline(scratch_fd)
        removed = _remove_gone(clone_fd, before, now)
        new = [path for path in now.sizes if path not in before.sizes]
        _make_new(scratch_fd, clone_fd, before, now, new)
        work = _Work(scratch_fd, clone_fd, before, Crew(threads))
        looked_at = {path: size for path, size in now.sizes.items() if only is None or path in only}
        total = sum(looked_at.values())
        work.crew.work(
            pieces(looked_at), work.write, tick=lambda: progress(min(work.crew.done_bytes, total - 1), total)
        )
        progress(total, total)
        _compare_sizes(clone_fd, now)
        Crew(threads).work(list(work.written), work.check)
    return Written(
        changed_bytes=sum(piece.length for piece in work.written),
        changed_files=len({piece.path for piece in work.written}),
        new_files=len(new),
        removed_files=removed,
    )


def outline(root_fd: int) -> Tree:
    """Return the entries of a tree, without digests. Raises StorageError."""
    found = Tree()
    try:
        for step in walk(root_fd):
            if step.kind == "enter" and step.path:
                found.folders.append(step.path)
            elif step.kind == "entry" and stat.S_ISREG(step.info.st_mode):
                found.sizes[step.path] = step.info.st_size
            elif step.kind == "entry":
                found.links.append(step.path)
    except OSError as error:
        raise failure(error, str(error.filename or ".")) from error
    return found


def outline_of(folder: str) -> Tree:
    """Return the entries of a folder, without digests. Raises StorageError."""
    with ExitStack() as stack:
        return outline(open_folder(stack, folder))


def _remove_gone(clone_fd: int, before: Tree, now: Tree) -> int:
    gone = [path for path in before.sizes if path not in now.sizes]
    gone += sorted(set(before.links) - set(now.links))
    for path in gone:
        with named(path), _above(clone_fd, path) as (fd, name):
            os.unlink(name, dir_fd=fd)
    for path in sorted(set(before.folders) - set(now.folders), reverse=True):
        with named(path), _above(clone_fd, path) as (fd, name):
            os.rmdir(name, dir_fd=fd)
    return len(gone)


def _make_new(scratch_fd: int, clone_fd: int, before: Tree, now: Tree, new: list[str]) -> None:
    for path in now.folders:
        if path not in before.folders:
            with named(path), _above(clone_fd, path) as (fd, name):
                os.mkdir(name, 0o700, dir_fd=fd)
    for path in sorted(set(now.links) - set(before.links)):
        with named(path), _above(scratch_fd, path) as (source, name), _above(clone_fd, path) as (fd, _):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=fd)
    for path in new:
        with named(path), _above(clone_fd, path) as (fd, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(name, flags, 0o600, dir_fd=fd))
    # Once for each file, before many threads write: the size can change without any change of a block.
    for path, size in now.sizes.items():
        if before.sizes.get(path) != size:
            with named(path), opened(clone_fd, path, os.O_WRONLY) as fd:
                os.ftruncate(fd, size)
                os.fsync(fd)


@contextmanager
def _above(root_fd: int, path: str) -> Iterator[tuple[int, str]]:
    """Yield the open folder that holds an entry, and the entry's name in it."""
    above, _, name = path.rpartition("/")
    fd = reach(root_fd, above)
    try:
        yield fd, name
    finally:
        os.close(fd)


class _Work:
    """Compares pieces of files with their earlier digests, and writes the changed blocks."""

    def __init__(self, scratch_fd: int, clone_fd: int, before: Tree, crew: Crew) -> None:
        self._scratch_fd = scratch_fd
        self._clone_fd = clone_fd
        self._before = before
        self.crew = crew
        self.written: list[Piece] = []
        """Runs of changed blocks; appending is atomic."""

    def write(self, piece: Piece) -> None:
        """Write the changed blocks of a piece to the clone."""
        with named(piece.path), opened(self._scratch_fd, piece.path) as source, ExitStack() as stack:
            copy = -1
            for position, data in read_steps(source, piece, holes=False):
                for start, end in self._changed(piece.path, position, data):
                    if copy < 0:
                        copy = stack.enter_context(opened(self._clone_fd, piece.path, os.O_WRONLY))
                    write_all(copy, memoryview(data)[start:end], position + start)
                    self.written.append(Piece(piece.path, position + start, end - start))
                self.crew.count(len(data))
            if copy >= 0:
                os.fsync(copy)

    def _changed(self, path: str, position: int, data: bytes) -> Iterator[tuple[int, int]]:
        """Yield runs of changed blocks in `data`."""
        old, old_size = self._before.digests.get(path, b""), self._before.sizes.get(path, 0)
        view = memoryview(data)
        start: int | None = None
        for offset in range(0, len(data), BLOCK_BYTES):
            block = view[offset : offset + BLOCK_BYTES]
            at = (position + offset) // BLOCK_BYTES * DIGEST_BYTES
            # A last block that grew or shrank has another length, whatever its digest.
            there = min(BLOCK_BYTES, max(old_size - position - offset, 0))
            same = there == len(block) and old[at : at + DIGEST_BYTES] == digest(block)
            if same and start is not None:
                yield start, offset
                start = None
            elif not same and start is None:
                start = offset
        if start is not None:
            yield start, len(data)

    def check(self, piece: Piece) -> None:
        """Read a run again from the clone, past the page cache, and compare it."""
        with named(piece.path):
            there = self._read(self._clone_fd, piece, fresh=True)
            if there != self._read(self._scratch_fd, piece, fresh=False):
                raise StorageError(
                    f"{shown(piece.path)} in the storage differs from the data written to it (at byte {piece.offset})",
                    hint="the storage loses writes: see its logs",
                )

    @staticmethod
    def _read(root_fd: int, piece: Piece, *, fresh: bool) -> bytes:
        with opened(root_fd, piece.path) as fd:
            if fresh:
                with suppress(OSError):
                    os.posix_fadvise(fd, piece.offset, piece.length, os.POSIX_FADV_DONTNEED)
            return b"".join(digest(data) for _, data in read_steps(fd, piece, holes=False))


def _compare_sizes(clone_fd: int, now: Tree) -> None:
    there = outline(clone_fd)
    if there.sizes != now.sizes or sorted(there.links) != sorted(now.links):
        odd = sorted(
            path for path in {*there.sizes, *now.sizes} if there.sizes.get(path, -1) != now.sizes.get(path, -1)
        )
        raise StorageError(
            f"the clone in the storage differs from the prepared data: {', '.join(map(shown, odd[:4]))}",
            hint="does another program write to it?",
        )
