"""Copies a backup to local scratch: many readers, large files in pieces, holes kept, digests on request."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec import Struct, field

from snapmgr.contract.errors import SnapmgrError, StorageError
from snapmgr.physical.crew import Crew, Piece, pieces
from snapmgr.system.paths import shown
from snapmgr.tree.attributes import Handle, keep
from snapmgr.tree.walk import is_full, open_folder, opened, reach, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COPY_THREADS = 12
BLOCK_BYTES = 128 << 10
"""The unit of comparing and writing back."""
DIGEST_BYTES = 16
_STEP_BYTES = 4 << 20
_FLUSH_BYTES = 8 << 20
_ZEROES = bytes(BLOCK_BYTES)


class Tree(Struct):
    """The entries of a tree, by paths from the root."""

    folders: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Total size of the files."""
    digests: dict[str, bytearray] = field(default_factory=dict)
    """Digests of each file's blocks, in order. Empty unless requested."""

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes.values())


def digest(block: bytes | memoryview) -> bytes:
    """Return the digest of one block."""
    return hashlib.blake2b(block, digest_size=DIGEST_BYTES).digest()


def copy_to_scratch(
    source: str,
    target: str,
    *,
    digests: bool = False,
    threads: int = COPY_THREADS,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Tree:
    """Copy the folder `source` to the new folder `target`, with owners, modes and times; return its entries.

    The copy is not durable yet. `progress` gets the finished and the total bytes. Memory is bounded: a step of 4
    MiB for each thread, and 16 bytes for each 128 KiB where `digests` are wanted. Raises StorageError that names the
    entry and leaves a part in `target`.
    """
    with ExitStack() as stack:
        source_fd = open_folder(stack, source)
        os.mkdir(target, 0o700)
        target_fd = open_folder(stack, target)
        found = _outline(source_fd, target_fd)
        if digests:
            found.digests = {
                path: bytearray(DIGEST_BYTES * -(-size // BLOCK_BYTES)) for path, size in found.sizes.items()
            }
        total, crew = found.size_bytes, Crew(threads)

        def act(piece: Piece) -> None:
            with named(piece.path):
                _copy(source_fd, target_fd, piece, found.digests.get(piece.path), crew)

        crew.work(pieces(found.sizes), act, tick=lambda: progress(min(crew.done_bytes, total - 1), total))
        progress(total, total)
        _finish(source_fd, target_fd, found, threads)
    return found


@contextmanager
def named(path: str) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the entry."""
    try:
        yield
    except OSError as error:
        raise failure(error, path) from error


def failure(error: OSError, path: str) -> SnapmgrError:
    """Return the exception to raise for an error at an entry of the copied tree."""
    if is_full(error):
        return StorageError(f"no space left for {shown(path)}", hint="make room, or name a larger folder (--scratch)")
    if error.errno == errno.ESTALE:
        return StorageError(f"{shown(path)} changed while it was copied", hint="does a program write to the backup?")
    hint = "the storage cannot read the data: see its logs" if error.errno == errno.EIO else None
    return StorageError(f"cannot copy {shown(path)}: {error.strerror}", hint=hint)


def _outline(source_fd: int, target_fd: int) -> Tree:
    """Make the folders and symlinks, and the files with their sizes but without contents."""
    found = Tree()
    path = "."
    try:
        for step in walk(source_fd):
            path = step.path or "."
            if step.kind == "leave" or not step.path:
                continue
            above = reach(target_fd, step.path.rpartition("/")[0])
            try:
                if step.kind == "enter":
                    os.mkdir(step.name, 0o700, dir_fd=above)
                    found.folders.append(step.path)
                elif stat.S_ISLNK(step.info.st_mode):
                    os.symlink(os.readlink(step.name, dir_fd=step.parent_fd), step.name, dir_fd=above)
                    found.links.append(step.path)
                elif stat.S_ISREG(step.info.st_mode):
                    _make_file(above, step.name, step.info.st_size)
                    found.sizes[step.path] = step.info.st_size
                else:
                    raise StorageError(
                        f"{shown(path)} is not a file: backup tools make no such entry", hint="remove it"
                    )
            finally:
                os.close(above)
    except OSError as error:
        raise failure(error, path) from error
    return found


def _make_file(folder_fd: int, name: str, size_bytes: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=folder_fd)
    try:
        os.ftruncate(fd, size_bytes)
    finally:
        os.close(fd)


def read_steps(fd: int, piece: Piece, *, holes: bool = True) -> Iterator[tuple[int, bytes]]:
    """Yield a piece's data in steps that begin at block borders, each with its offset; without `holes` yield all of it.

    Raises OSError (ESTALE) if the file is shorter than it was.
    """
    position, end = piece.offset, piece.offset + piece.length
    while position < end:
        if holes:
            try:
                data_at = os.lseek(fd, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end
                    return
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                data_at = position
            position = max(position, data_at // BLOCK_BYTES * BLOCK_BYTES)
            if position >= end:
                return
        data = os.pread(fd, min(_STEP_BYTES, end - position), position)
        if not data:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        # A short read must not shift the blocks.
        while len(data) < min(_STEP_BYTES, end - position):
            more = os.pread(fd, min(_STEP_BYTES, end - position) - len(data), position + len(data))
            if not more:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            data += more
        yield position, data
        position += len(data)


def write_all(fd: int, data: bytes | memoryview, position: int) -> None:
    """Write all of `data`."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, position)
        rest, position = rest[written:], position + written


def _copy(source_fd: int, target_fd: int, piece: Piece, digests: bytearray | None, crew: Crew) -> None:
    with opened(source_fd, piece.path) as source, opened(target_fd, piece.path, os.O_WRONLY) as copy:
        if digests is not None:
            _zero_digests(digests, piece)
        counted = 0
        for position, data in read_steps(source, piece):
            _write_data(copy, data, position)
            if digests is not None:
                _note(digests, data, position)
            done = position + len(data) - piece.offset
            crew.count(done - counted)
            counted = done
        crew.count(piece.length - counted)
        if piece.length >= _FLUSH_BYTES:
            # Flush while other threads read: gigabytes of dirty pages would delay the end.
            os.fdatasync(copy)
        with suppress(OSError):
            # It is not read again: keep the page cache for the data that the tool reads.
            os.posix_fadvise(source, piece.offset, piece.length, os.POSIX_FADV_DONTNEED)


def _write_data(fd: int, data: bytes, position: int) -> None:
    """Write `data` except whole blocks of zeroes, which stay holes."""
    start = 0
    for offset in range(0, len(data), BLOCK_BYTES):
        block = data[offset : offset + BLOCK_BYTES]
        if block == _ZEROES[: len(block)]:
            if start < offset:
                write_all(fd, memoryview(data)[start:offset], position + start)
            start = offset + len(block)
    if start < len(data):
        write_all(fd, memoryview(data)[start:], position + start)


_ZERO_DIGEST = digest(_ZEROES)


def _zero_digests(digests: bytearray, piece: Piece) -> None:
    """Set the digests of a piece to those of zeroes; holes keep them."""
    for offset in range(piece.offset, piece.offset + piece.length, BLOCK_BYTES):
        length = min(BLOCK_BYTES, piece.offset + piece.length - offset)
        one = _ZERO_DIGEST if length == BLOCK_BYTES else digest(_ZEROES[:length])
        at = offset // BLOCK_BYTES * DIGEST_BYTES
        digests[at : at + DIGEST_BYTES] = one


def _note(digests: bytearray, data: bytes, position: int) -> None:
    view = memoryview(data)
    for offset in range(0, len(data), BLOCK_BYTES):
        at = (position + offset) // BLOCK_BYTES * DIGEST_BYTES
        digests[at : at + DIGEST_BYTES] = digest(view[offset : offset + BLOCK_BYTES])


def _finish(source_fd: int, target_fd: int, found: Tree, threads: int) -> None:
    """Give everything its attributes, the folders last and from the inside out."""

    def act(piece: Piece) -> None:
        with named(piece.path or "."):
            _keep(source_fd, target_fd, piece.path)

    Crew(threads).work([Piece(path, 0, 0) for path in (*found.sizes, *found.links)], act)
    for path in (*reversed(found.folders), ""):
        act(Piece(path, 0, 0))


def _keep(source_fd: int, target_fd: int, path: str) -> None:
    above, _, name = path.rpartition("/")
    if not path:
        keep(Handle(source_fd), Handle(target_fd))
        return
    source, copy = reach(source_fd, above), reach(target_fd, above)
    try:
        keep(Handle(source, name), Handle(copy, name))
    finally:
        os.close(source)
        os.close(copy)
