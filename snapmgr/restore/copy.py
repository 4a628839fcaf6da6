"""Copies an attached snapshot to the destination, compares the copy, and lists its external paths."""

from __future__ import annotations

import os
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.access.attach import place_of
from snapmgr.contract.errors import StorageError
from snapmgr.contract.units import format_size
from snapmgr.mysql.datadir.relocation import (
    LISTS,
    absolute_folders,
    absolute_names,
    name_own_logs,
    relocated_options,
    seen_from,
)
from snapmgr.system.kernel import sync_file_system
from snapmgr.system.paths import lies_in, shown
from snapmgr.tree.compare import compare
from snapmgr.tree.copy import DIFFERENCES_KEPT, TreeCopy, can_share
from snapmgr.tree.survey import Survey, survey
from snapmgr.tree.walk import FOLDER_FLAGS, reach

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context
    from snapmgr.restore.destination import Destination
    from snapmgr.restore.folder_map import FolderMap, MappedFolder

# Space that an entry needs beside its data: inode, folder entry, extent records.
_ENTRY_BYTES = 1024
_RESERVE_BYTES = 4 << 20
_MIB = 1 << 20
_PROGRESS_EVERY_S = 0.1
_PATHS_KEPT = 1000
DIFFERS_FILE = "SNAPMGR-RESTORE-DIFFERS.txt"


class FolderTarget(Struct, frozen=True, kw_only=True):
    """A folder of the source, and where it is restored to."""

    original: str
    path: str


class ExternalPath(Struct, frozen=True, kw_only=True):
    """A symlink or another name in the restored tree that leads to a path outside it."""

    where: str
    to: str
    live: bool
    """Whether `to` is a path of the source itself."""


class RestoreResult(Struct, frozen=True, kw_only=True):
    """The result of a restore."""

    snapshot_id: str
    dest: str
    data_path: str
    """The datadir, or the directory."""
    places: tuple[FolderTarget, ...]
    """Every folder of the source, its own first."""
    files: int
    links: int
    """Hard links: further names of files."""
    folders: int
    symlinks: int
    special: int
    size_bytes: int
    shared_files: int
    """Files that share their blocks with the snapshot."""
    copied_files: int
    copied_bytes: int
    contents_compared: bool
    differences: tuple[str, ...]
    options: tuple[str, ...]
    """Options that a server on the copy needs; empty for directories and for snapshots without a server record."""
    external_paths: tuple[ExternalPath, ...]
    excluded: tuple[str, ...]
    duration_s: float


def list_targets(folder_map: FolderMap, dest: str) -> tuple[FolderTarget, ...]:
    """Return the target in `dest` of every folder of the source."""
    return tuple(FolderTarget(original=path, path=folder_map.moved(path, dest)) for path in folder_map.copies)


class TreeRestore:
    """The copy of an attached snapshot in its destination; made by `restore`."""

    def __init__(self, ctx: Context, manifest: Manifest, destination: Destination, folder_map: FolderMap) -> None:
        self._ctx = ctx
        self._manifest = manifest
        self._destination = destination
        self._dest = destination.record.dest
        self._folder_map = folder_map
        self._external: list[ExternalPath] = []

    def make(self, *, read_back: bool) -> RestoreResult:
        """Copy, sync and compare. Raises StorageError if that fails; differences are in the result."""
        start = time.monotonic()
        with ExitStack() as stack:
            sources = {
                folder: stack.enter_context(_opened(self._manifest, folder)) for folder in self._folder_map.folders
            }
            share = self._can_share(sources)
            total = self._measure(sources, share=share)
            how = "sharing blocks" if share else "copying"
            self._ctx.tell(f"{how}: {total.entries} entries, {format_size(total.allocated_bytes)}, to {self._dest}")
            progress = _Progress(self._ctx, "restoring", total.allocated_bytes)
            copy = TreeCopy(share=share, progress=progress.add)
            differences: list[str] = []
            for folder, source_fd in sources.items():
                self._copy(copy, folder, source_fd)
                differences += (_prefix(folder) + text for text in copy.differences)
            progress.end()
            self._sync()
            tally = copy.tally
            contents = tally.inodes if read_back and tally.inodes else None
            differences += self._compare(sources, contents, tally.copied_bytes if read_back else 0)
            if len(differences) > DIFFERENCES_KEPT:
                differences[DIFFERENCES_KEPT:] = ["… and more"]
            if differences:
                self._write_differences(differences)
            if self._manifest.source == "mysql":
                # After the comparison: the snapshot's lists name the live logs.
                self._name_own_logs()
                self._add_server_paths()
            self._sync()
        server = self._manifest.server
        places, absent = self._folder_map.copies.keys(), self._manifest.absent
        options = relocated_options(server, self._moved, places=places, absent=absent) if server is not None else ()
        return RestoreResult(
            snapshot_id=self._manifest.id,
            dest=self._dest,
            data_path=self._moved(self._manifest.path),
            places=list_targets(self._folder_map, self._dest),
            files=tally.files,
            links=tally.links,
            folders=tally.folders,
            symlinks=tally.symlinks,
            special=tally.special,
            size_bytes=tally.size_bytes,
            shared_files=tally.shared_files,
            copied_files=tally.copied_files,
            copied_bytes=tally.copied_bytes,
            contents_compared=read_back,
            differences=tuple(differences),
            options=options,
            external_paths=tuple(self._external[:_PATHS_KEPT]),
            excluded=self._manifest.excluded,
            duration_s=time.monotonic() - start,
        )

    def _moved(self, path: str) -> str:
        return self._folder_map.moved(path, self._dest)

    def _can_share(self, sources: Mapping[MappedFolder, int]) -> bool:
        # Some volumes of a set may be on the destination's file system and others not: each file is tried by itself.
        return any(can_share(source_fd, self._destination.hidden_fd) for source_fd in sources.values())

    def _measure(self, sources: Mapping[MappedFolder, int], *, share: bool) -> Survey:
        """Measure the trees. Raises StorageError if the destination has too little space or too few inodes."""
        total = Survey(entries=0, allocated_bytes=0)
        data_bytes = 0
        for folder, source_fd in sources.items():
            one = survey(source_fd, skip=self._folder_map.apart(folder))
            total += one
            if not share or not can_share(source_fd, self._destination.hidden_fd):
                data_bytes += one.allocated_bytes
        space = os.fstatvfs(self._destination.hidden_fd)
        needed = _RESERVE_BYTES + total.entries * _ENTRY_BYTES + data_bytes
        free = (space.f_bfree if os.geteuid() == 0 else space.f_bavail) * space.f_frsize
        # File systems without a limit report 0 blocks.
        if space.f_blocks and free < needed:
            raise StorageError(
                f"{self._dest} has {format_size(free)} free; the copy needs about {format_size(needed)}",
                hint="free space there, or restore to a larger file system",
            )
        # btrfs has no fixed number of inodes and reports 0.
        if space.f_files and space.f_favail < total.entries:
            raise StorageError(
                f"{self._dest} has {space.f_favail} inodes free; the copy needs {total.entries}",
                hint="restore to a file system with more inodes",
            )
        return total

    def _copy(self, copy: TreeCopy, folder: MappedFolder, source_fd: int) -> None:
        tree_fd = self._destination.tree_fd
        if folder.target and not self._is_inner(folder):
            os.mkdir(folder.target, 0o700, dir_fd=tree_fd)
        with _reached(tree_fd, folder.target) as copy_fd:
            copy.run(source_fd, copy_fd, apart=self._folder_map.apart(folder))
        if not folder.target:
            self._destination.keep_root_attributes(source_fd)
        for path, to in copy.tally.leads:
            self._add_external(os.path.join(self._dest, folder.target, path), to)

    def _is_inner(self, folder: MappedFolder) -> bool:
        return "/" in folder.target or any(
            other is not folder and folder.target in self._folder_map.apart(other) for other in self._folder_map.folders
        )

    def _add_external(self, where: str, to: str) -> None:
        to = os.path.normpath(os.path.join(os.path.dirname(where), to))
        live = any(place_of(path, self._folder_map.copies) is not None for path in (to, os.path.realpath(to)))
        inside = lies_in(to, self._dest)
        # A plain directory may hold any symlinks; a server follows all of those in its datadir.
        if not inside and (live or self._manifest.source == "mysql"):
            # Names on disk may not be UTF-8; reports must be.
            self._external.append(ExternalPath(where=shown(where), to=shown(to), live=live))

    def _add_server_paths(self) -> None:
        datadir = self._moved(self._manifest.path)
        with _reached(self._destination.tree_fd, os.path.relpath(datadir, self._dest)) as datadir_fd:
            for name, path in absolute_names(datadir_fd):
                self._add_external(os.path.normpath(os.path.join(datadir, name)), path)
        for path, _ in self._lists():
            with suppress(FileNotFoundError), self._folder_of(path) as fd:
                for to in absolute_folders(os.path.basename(path), fd):
                    self._add_external(path, to)

    def _name_own_logs(self) -> None:
        """Make the restored indexes name the restored logs: a server would purge the live ones."""
        datadir = self._moved(self._manifest.path)
        for path, base in self._lists():
            logs = os.path.dirname(base)
            if not lies_in(logs, self._dest):
                continue  # not in the snapshot
            with suppress(FileNotFoundError), self._folder_of(base) as logs_fd, self._folder_of(path) as fd:
                if name_own_logs(os.path.basename(path), fd, seen_from(datadir, logs), os.listdir(logs_fd)):
                    self._ctx.tell(f"{path}: changed to name the restored logs")

    def _lists(self) -> Iterator[tuple[str, str]]:
        """Yield the path of each restored list of logs, and the path that its logs' names begin with."""
        settings = self._manifest.server.settings if self._manifest.server is not None else {}
        for key, base in LISTS.items():
            if key in settings and base in settings:
                path, logs = (os.path.normpath(os.path.join(self._manifest.path, settings[one])) for one in (key, base))
                if self._moved(path) != path:
                    yield self._moved(path), self._moved(logs)

    @contextmanager
    def _folder_of(self, path: str) -> Iterator[int]:
        with _reached(self._destination.tree_fd, os.path.relpath(os.path.dirname(path), self._dest)) as fd:
            yield fd

    def _sync(self) -> None:
        try:
            sync_file_system(self._destination.dest_fd)
        except OSError as error:
            raise StorageError(
                f"{self._dest} cannot be written to disk: {error.strerror}",
                hint="check the kernel log: a device may be failing",
            ) from error

    def _compare(self, sources: Mapping[MappedFolder, int], contents: set[int] | None, copied_bytes: int) -> list[str]:
        progress = _Progress(self._ctx, "comparing", copied_bytes)
        found: list[str] = []
        for folder, source_fd in sources.items():
            prefix = _prefix(folder)
            with _reached(self._destination.tree_fd, folder.target) as copy_fd:
                try:
                    for text in compare(
                        source_fd,
                        copy_fd,
                        contents=contents,
                        apart=self._folder_map.apart(folder),
                        progress=progress.add,
                    ):
                        found.append(prefix + text)
                        if len(found) > DIFFERENCES_KEPT:
                            return found
                except OSError as error:
                    raise StorageError(
                        f"cannot compare {prefix}{shown(error.filename)}: {error.strerror}",
                        hint="check the kernel log: a device may be failing",
                    ) from error
        progress.end()
        return found

    def _write_differences(self, differences: list[str]) -> None:
        """List the differences in a file of the copy, so that nobody who missed our message takes it for complete."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(DIFFERS_FILE, flags, stat.S_IRUSR | stat.S_IWUSR, dir_fd=self._destination.tree_fd)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"This copy differs from snapshot {self._manifest.id}:\n")
            file.writelines(f"{line}\n" for line in differences)


def _prefix(folder: MappedFolder) -> str:
    return f"{folder.target}/" if folder.target else ""


@contextmanager
def _opened(manifest: Manifest, folder: MappedFolder) -> Iterator[int]:
    try:
        fd = os.open(folder.source, FOLDER_FLAGS)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(
            f"snapshot {manifest.id} has no folder for {folder.original}", hint="restore another snapshot"
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _reached(root_fd: int, path: str) -> Iterator[int]:
    fd = reach(root_fd, path)
    try:
        yield fd
    finally:
        os.close(fd)


class _Progress:
    """Counts bytes and reports them in MiB, at most ten times a second."""

    def __init__(self, ctx: Context, what: str, total_bytes: int) -> None:
        self._ctx = ctx
        self._what = f"{what}, MiB"
        self._done_bytes = 0
        self._total = -(-total_bytes // _MIB)
        self._next_s = 0.0

    def add(self, count_bytes: int) -> None:
        self._done_bytes += count_bytes
        if time.monotonic() >= self._next_s and self._done_bytes // _MIB < self._total:
            self._next_s = time.monotonic() + _PROGRESS_EVERY_S
            self._ctx.progress(self._what, self._done_bytes // _MIB, self._total)

    def end(self) -> None:
        if self._total:
            self._ctx.progress(self._what, self._total, self._total)
