"""The copying part of a restore: room, copy, comparison, and what in the copy leads elsewhere."""

from __future__ import annotations

import os
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.access.attach import place_of
from snapmgr.contract.errors import StorageError
from snapmgr.contract.units import format_size
from snapmgr.mysql.datadir.relocation import LISTS, absolute_folders, absolute_names, relocated_options
from snapmgr.system.kernel import sync_file_system
from snapmgr.system.paths import lies_in, shown
from snapmgr.tree.compare import compare
from snapmgr.tree.copy import TreeCopy, can_share
from snapmgr.tree.walk import FOLDER_FLAGS, Survey, reach, survey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context
    from snapmgr.restore.destination import Destination
    from snapmgr.restore.folder_map import FolderMap, MappedFolder

# What a copy takes beside data: inode, folder entry, extent records.
_ENTRY_BYTES = 1024
_RESERVE_BYTES = 4 << 20
_MIB = 1 << 20
_PROGRESS_EVERY_S = 0.1
_DIFFERENCES_KEPT = 1000
_PATHS_KEPT = 1000
DIFFERS_FILE = "SNAPMGR-RESTORE-DIFFERS.txt"


@dataclass(frozen=True, kw_only=True)
class FolderTarget:
    """A folder of the source, and where it is restored to."""

    original: str
    path: str


@dataclass(frozen=True, kw_only=True)
class ExternalPath:
    """Something in the restored tree that names a path outside of it."""

    where: str
    to: str
    live: bool
    """Whether the source itself is, or was, there."""


@dataclass(frozen=True, kw_only=True)
class RestoreResult:
    """What a restore did."""

    snapshot_id: str
    dest: str
    data_path: str
    """The datadir, or the directory."""
    places: tuple[FolderTarget, ...]
    """Every folder of the source, its own first."""
    files: int
    links: int
    """Further names of files."""
    folders: int
    symlinks: int
    special: int
    size_bytes: int
    shared_files: int
    """They share their blocks with the snapshot."""
    copied_files: int
    copied_bytes: int
    contents_compared: bool
    differences: tuple[str, ...]
    options: tuple[str, ...]
    """What a server on it has to be told; empty for directories and where no server was asked."""
    external_paths: tuple[ExternalPath, ...]
    excluded: tuple[str, ...]
    duration_s: float


def list_targets(folder_map: FolderMap, dest: str) -> tuple[FolderTarget, ...]:
    """Return where every folder of the source goes in `dest`."""
    return tuple(FolderTarget(original=path, path=folder_map.moved(path, dest)) for path in folder_map.copies)


class TreeRestore:
    """The copy of an attached snapshot in a landing; made by `restore`."""

    def __init__(self, ctx: Context, manifest: Manifest, destination: Destination, folder_map: FolderMap) -> None:
        self._ctx = ctx
        self._manifest = manifest
        self._destination = destination
        self._dest = destination.record.dest
        self._folder_map = folder_map
        self._external: list[ExternalPath] = []

    def make(self, *, read_back: bool) -> RestoreResult:
        """Copy, sync and compare; return what was done. Raises StorageError; a difference is in the result."""
        start = time.monotonic()
        with ExitStack() as stack:
            sources = {
                folder: stack.enter_context(_opened(self._manifest, folder)) for folder in self._folder_map.folders
            }
            share = self._can_share(sources)
            seen = self._measure(sources, share=share)
            how = "sharing blocks" if share else "copying"
            self._ctx.tell(f"{how}: {seen.entries} entries, {format_size(seen.allocated_bytes)}, to {self._dest}")
            progress = _Progress(self._ctx, "restoring", seen.allocated_bytes)
            copy = TreeCopy(share=share, progress=progress.add)
            for folder, source_fd in sources.items():
                self._copy(copy, folder, source_fd)
            progress.end()
            if self._manifest.source == "mysql":
                self._note_names()
            self._sync()
            tally = copy.tally
            contents = tally.inodes if read_back else set[int]()
            differences = self._compare(sources, contents, tally.copied_bytes if read_back else 0)
            if differences:
                self._say(differences)
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
        # On a set of volumes some may be on the destination's file system and others not: each file tries for itself.
        return any(can_share(source_fd, self._destination.hidden_fd) for source_fd in sources.values())

    def _measure(self, sources: Mapping[MappedFolder, int], *, share: bool) -> Survey:
        """Measure the trees. Raises StorageError if there is no room for a copy."""
        seen = Survey(entries=0, allocated_bytes=0)
        data_bytes = 0
        for folder, source_fd in sources.items():
            one = survey(source_fd, skip=self._folder_map.apart(folder))
            seen += one
            if not share or not can_share(source_fd, self._destination.hidden_fd):
                data_bytes += one.allocated_bytes
        room = os.fstatvfs(self._destination.hidden_fd)
        needed = _RESERVE_BYTES + seen.entries * _ENTRY_BYTES + data_bytes
        free = (room.f_bfree if os.geteuid() == 0 else room.f_bavail) * room.f_frsize
        # Some know no limits, and say 0.
        if room.f_blocks and free < needed:
            raise StorageError(
                f"{self._dest} has {format_size(free)} free; the copy needs about {format_size(needed)}",
                hint="make room, or name a larger place",
            )
        # btrfs has no fixed number of inodes and says 0.
        if room.f_files and room.f_favail < seen.entries:
            raise StorageError(
                f"{self._dest} has {room.f_favail} inodes free; the copy needs {seen.entries}",
                hint="name a place with more inodes",
            )
        return seen

    def _copy(self, copy: TreeCopy, folder: MappedFolder, source_fd: int) -> None:
        tree_fd = self._destination.tree_fd
        if folder.target and not self._is_inner(folder):
            os.mkdir(folder.target, 0o700, dir_fd=tree_fd)
        with _reached(tree_fd, folder.target) as copy_fd:
            copy.run(source_fd, copy_fd, apart=self._folder_map.apart(folder))
        if not folder.target:
            self._destination.take_root(source_fd)
        for path, aim in copy.tally.leads:
            self._note(os.path.join(self._dest, folder.target, path), aim)

    def _is_inner(self, folder: MappedFolder) -> bool:
        return "/" in folder.target or any(
            other is not folder and folder.target in self._folder_map.apart(other) for other in self._folder_map.folders
        )

    def _note(self, where: str, aim: str) -> None:
        to = os.path.normpath(os.path.join(os.path.dirname(where), aim))
        live = any(place_of(path, self._folder_map.copies) is not None for path in (to, os.path.realpath(to)))
        inside = lies_in(to, self._dest)
        # A directory may hold any links; a datadir's are all followed by its server.
        if not inside and (live or self._manifest.source == "mysql"):
            # Names on disk need not be UTF-8; reports are.
            self._external.append(ExternalPath(where=shown(where), to=shown(to), live=live))

    def _note_names(self) -> None:
        datadir = self._moved(self._manifest.path)
        with _reached(self._destination.tree_fd, os.path.relpath(datadir, self._dest)) as datadir_fd:
            for name, path in absolute_names(datadir_fd):
                self._note(os.path.normpath(os.path.join(datadir, name)), path)
        settings = self._manifest.server.settings if self._manifest.server is not None else {}
        for key in LISTS:
            path = os.path.normpath(os.path.join(self._manifest.path, settings.get(key, "")))
            moved = self._moved(path)
            if key in settings and moved != path:
                self._note_list(moved)

    def _note_list(self, path: str) -> None:
        folder, name = os.path.split(path)
        with (
            suppress(FileNotFoundError),
            _reached(self._destination.tree_fd, os.path.relpath(folder, self._dest)) as fd,
        ):
            for to in absolute_folders(name, fd):
                self._note(path, to)

    def _sync(self) -> None:
        try:
            sync_file_system(self._destination.dest_fd)
        except OSError as error:
            raise StorageError(
                f"{self._dest} cannot be written to disk: {error.strerror}",
                hint="look at the kernel's log: a device may be failing",
            ) from error

    def _compare(self, sources: Mapping[MappedFolder, int], contents: set[int], copied_bytes: int) -> list[str]:
        progress = _Progress(self._ctx, "comparing", copied_bytes)
        found: list[str] = []
        for folder, source_fd in sources.items():
            prefix = f"{folder.target}/" if folder.target else ""
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
                        if len(found) >= _DIFFERENCES_KEPT:
                            return [*found, "… and more"]
                except OSError as error:
                    raise StorageError(
                        f"cannot compare {prefix}{shown(error.filename)}: {error.strerror}",
                        hint="look at the kernel's log: a device may be failing",
                    ) from error
        progress.end()
        return found

    def _say(self, differences: list[str]) -> None:
        """Leave a word in the tree: whoever finds it without our message must not take it for whole."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(DIFFERS_FILE, flags, stat.S_IRUSR | stat.S_IWUSR, dir_fd=self._destination.tree_fd)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"This is not what snapshot {self._manifest.id} holds:\n")
            file.writelines(f"{line}\n" for line in differences)


@contextmanager
def _opened(manifest: Manifest, folder: MappedFolder) -> Iterator[int]:
    try:
        fd = os.open(folder.source, FOLDER_FLAGS)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(
            f"snapshot {manifest.id} has no folder for {folder.original}", hint="restore another one"
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
    """Adds up bytes and tells them in MiB, at most ten times a second."""

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
