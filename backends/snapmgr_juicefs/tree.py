"""Walks directory trees by descriptors without following symlinks: flushes trees, and completes their clones."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec import Struct, field

from snapmgr.api import StorageError
from snapmgr.api.copystore import entries, subfolder
from snapmgr.api.kernel import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api.copystore import Entry

_BLOCK_BYTES = 4096
# Each flush of a dirty file waits for the object store; the client makes 20 uploads in parallel.
_FLUSHERS = 16
# The walks recurse with one descriptor per level; Python's limit (1000 calls) and that of open files are close.
_DEEPEST = 400


class Flushed(Struct, kw_only=True):
    """The result of a walk that flushed."""

    files: int = 0
    folders: int = 0
    counted_bytes: int = 0
    """The size of a clone in the volume and its quotas, shared data and holes included: each file in blocks."""
    links: dict[int, list[str]] = field(default_factory=dict)
    """For each file with several names in the tree: these names, relative to the tree."""
    specials: dict[str, os.stat_result] = field(default_factory=dict)
    """FIFOs, sockets and device nodes, by their names relative to the tree."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of entries of each folder."""
    hidden: set[str] = field(default_factory=set)
    """Folders with a mount over them."""


def flush(root_fd: int, path: str) -> Flushed:
    """Write out every file and folder of a tree (fsync), several in parallel; `path` is for messages.

    A clone holds only flushed data, which the metadata engine knows: ``syncfs`` does not reach the client, and only
    the client's memory holds new data of an open file. Omits mounts inside the tree, and entries that vanish
    meanwhile. Raises StorageError if anything cannot be flushed.
    """
    try:
        with ThreadPoolExecutor(_FLUSHERS, thread_name_prefix="flush") as pool:
            walk = _Flush(root_fd, pool)
            walk.run(root_fd, "")
    except OSError as error:
        raise StorageError(
            f"cannot flush {shown(path)}: {error.strerror}",
            hint="is the object store reachable? The client's log says more",
        ) from error
    walk.seen.links = {inode: names for inode, names in walk.seen.links.items() if len(names) > 1}
    return walk.seen


class _Flush:
    def __init__(self, root_fd: int, pool: ThreadPoolExecutor) -> None:
        self.seen = Flushed()
        self._device = os.fstat(root_fd).st_dev
        self._pool = pool

    def run(self, fd: int, path: str) -> None:
        if path.count("/") > _DEEPEST:
            raise StorageError(
                f"folders are nested more than {_DEEPEST} deep, at {shown(path)[:200]}…",
                hint="move them up, or leave them out",
            )
        self.seen.folders += 1
        self.seen.counted_bytes += _counted(0)
        listed = entries(fd)
        self.seen.counts[path] = sum(entry.is_folder for entry in listed)
        for info in self._pool.map(lambda entry: self._file(fd, entry), [one for one in listed if not one.is_folder]):
            if info is None:
                continue
            name, status = info
            self.seen.files += 1
            self.seen.counts[path] += 1
            self.seen.counted_bytes += _counted(status.st_size if stat.S_ISREG(status.st_mode) else 0)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                self.seen.specials[path + name] = status
            if status.st_nlink > 1:
                self.seen.links.setdefault(status.st_ino, []).append(path + name)
        for entry in listed:
            if not entry.is_folder:
                continue
            with suppress(FileNotFoundError, NotADirectoryError):
                self._folder(fd, entry.name, f"{path}{entry.name}/")
        os.fsync(fd)

    def _folder(self, dir_fd: int, name: str, path: str) -> None:
        with ExitStack() as stack:
            try:
                child = stack.enter_context(subfolder(name, dir_fd))
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                self.seen.hidden.add(path)
                return
            self.run(child, path)

    def _file(self, dir_fd: int, entry: Entry) -> tuple[str, os.stat_result] | None:
        with suppress(FileNotFoundError):
            status = os.stat(entry.name, dir_fd=dir_fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and status.st_dev == self._device:
                self._sync(dir_fd, entry.name)
                # Its size is known only now, if somebody was writing.
                status = os.stat(entry.name, dir_fd=dir_fd, follow_symlinks=False)
            return entry.name, status
        return None

    @staticmethod
    def _sync(dir_fd: int, name: str) -> None:
        # The client flushes a file only for a descriptor that may write (JuiceFS 1.4, vfs.Fsync).
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, os.O_WRONLY | flags, dir_fd=dir_fd)
        except PermissionError:
            fd = os.open(name, os.O_RDONLY | flags, dir_fd=dir_fd)  # immutable, or not ours: not being written now
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENXIO}:  # no longer a regular file
                return
            if error.errno not in {errno.EROFS, errno.ETXTBSY}:
                raise
            fd = os.open(name, os.O_RDONLY | flags, dir_fd=dir_fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _counted(size_bytes: int) -> int:
    """Return the space that an entry of this size takes in the volume: blocks of 4 KiB, at least one."""
    return max(-(-size_bytes // _BLOCK_BYTES), 1) * _BLOCK_BYTES


def complete(root_fd: int, seen: Flushed, path: str) -> None:
    """Given the walk over the origin, add the entries that the client omits from its clone, and compare the two.

    Each name of a file becomes a file of its own; with the metadata in Redis special files are missing (1.4.2). Folders
    keep their times. Raises StorageError if anything is missing in the clone, OSError.
    """
    for name, status in seen.specials.items():
        with suppress(FileExistsError), _unchanged(root_fd, os.path.dirname(name)):
            os.mknod(name, status.st_mode, status.st_rdev, dir_fd=root_fd)
            os.chown(name, status.st_uid, status.st_gid, dir_fd=root_fd, follow_symlinks=False)
            os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=root_fd)
            times = (status.st_atime_ns, status.st_mtime_ns)
            os.utime(name, ns=times, dir_fd=root_fd, follow_symlinks=False)
    for names in seen.links.values():
        for name in names[1:]:
            with _unchanged(root_fd, os.path.dirname(name)):
                os.unlink(name, dir_fd=root_fd)
                os.link(names[0], name, src_dir_fd=root_fd, dst_dir_fd=root_fd, follow_symlinks=False)
    _compare(root_fd, seen, path, "")


@contextmanager
def _unchanged(root_fd: int, path: str) -> Iterator[None]:
    """Keep a folder's times unchanged."""
    with subfolder(path or ".", root_fd) as fd:
        times = os.fstat(fd)
        yield
        os.utime(fd, ns=(times.st_atime_ns, times.st_mtime_ns))


def _compare(fd: int, seen: Flushed, path: str, inside: str) -> None:
    if inside in seen.hidden:
        return
    listed = entries(fd)
    if len(listed) != seen.counts.get(inside):
        raise StorageError(
            f"the clone of {shown(path)} has {len(listed)} entries in {shown(inside) or 'its top'}, the original had "
            f"{seen.counts.get(inside, 0)}",
            hint="does somebody write there? Otherwise look at the client's log",
        )
    for entry in listed:
        if entry.is_folder:
            with subfolder(entry.name, fd) as child:
                _compare(child, seen, path, f"{inside}{entry.name}/")
