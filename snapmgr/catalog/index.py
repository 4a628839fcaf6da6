"""Keeps summaries of the manifests in one file, so that a command need not read each of them.

The index (STATE/index) is never the truth. A summary counts only as long as its manifest and verification have the
inode, change time and size that they had when it was made: `stat` tells that for every file and at every use. What
does not fit is read again. So an index that is lost, damaged, old, of another version or cannot be written costs time
and nothing else; hence writers of manifests do not touch it, it is not fsynced, and it is replaced in place, as its
checksum tells a half-written one.

Nothing writes it while a state directory holds few snapshots. What a command had to read, it keeps for its next look.
"""

from __future__ import annotations

import binascii
import fcntl
import os
import stat
import time
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from snapmgr.catalog.manifest import SCHEMA
from snapmgr.catalog.recordfolder import Damaged, folders_in
from snapmgr.catalog.summary import Summary, summarize
from snapmgr.contract.errors import CatalogError, NotFoundError
from snapmgr.system.trust import changeable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from snapmgr.catalog.entry import Entry

_FORMAT = 1
_MAGIC = b"snapmgr index %d.%d\n" % (_FORMAT, SCHEMA)
_SUM_BYTES = 4
_MAX_BYTES = 256 << 20
# So many differences are worth writing it anew.
WORTH = 64
# A file may change again without a new change time while the clock of its file system has not ticked: for up to 2 s
# (FAT; 1 s on ext4 with small inodes). A change time of the future comes from a clock that was set back.
_SETTLED_NS = 3 * 10**9

_Stamp = tuple[int, int, int]
"""Inode, change time in ns and size of a file. No program can set the change time."""
_Stamps = tuple[_Stamp | None, _Stamp | None]
"""Of a snapshot's manifest and verification; None where there is no file."""


class _Known(msgspec.Struct, frozen=True, array_like=True, gc=False):
    stamps: _Stamps
    summary: Summary


class Index:
    """The index of the snapshots in `folder`, in the file `path`; `load` reads a snapshot's files."""

    def __init__(self, path: Path, folder: Path, load: Callable[[str], tuple[Entry, str | None]]) -> None:
        self._path = path
        self._folder = folder
        self._load = load
        self._known: dict[str, _Known] | None = None
        self._fresh: dict[str, _Known] = {}
        """What was read since, for the next look of this command: it counts as long as what the index says."""

    def look(
        self, job: str | None, until: Callable[[Summary], bool] | None = None
    ) -> tuple[list[Summary], list[Damaged]]:
        """Return the summaries of all snapshots (or those of `job`), oldest first, and the files that cannot be read.

        With `until` only those from the newest down to the first for which it returns True are sure to be among them:
        the order of snapshots in the index does not change, so that older ones need no look. Raises as `names_in`.
        """
        known = self._read() if self._known is None else self._known
        settled_ns = time.time_ns() - _SETTLED_NS
        folders, others = folders_in(self._folder)
        gone = known.keys() - folders
        start = f"{job}." if job is not None else ""
        names = {name for name in folders if name.startswith(start)} if job is not None else set(folders)
        found, stamps = self._fitting(known, names, until)
        in_order = len(found)
        found += self._fitting_since(stamps)
        # Their stamps come first: if one changes while it is read, they do not fit the next time.
        stamps |= {name: (None, None) for name in others if name.startswith(start)}
        damaged: list[Damaged] = []
        for name, seen in sorted(stamps.items()):
            one = self._summarized(name)
            if isinstance(one, Damaged):
                damaged.append(one)
            elif one is not None:
                found.append(one)
                if all(stamp is None or stamp[1] < settled_ns for stamp in seen):
                    self._fresh[name] = _Known(stamps=seen, summary=one)
        if len(found) > in_order:
            found.sort(key=_ORDER)
        if len(self._fresh) + len(gone) >= WORTH:
            there = frozenset(folders)
            kept = [one for name, one in (known | self._fresh).items() if name in there]
            known = {one.summary.id: one for one in sorted(kept, key=lambda one: _ORDER(one.summary))}
            self._fresh = {}
            self._write(known)
        self._known = known
        return found, damaged

    def _fitting(
        self, known: dict[str, _Known], names: set[str], until: Callable[[Summary], bool] | None
    ) -> tuple[list[Summary], dict[str, _Stamps]]:
        """Return the summaries that still fit, and the stamps of all others; `until` as in `look`."""
        found: list[Summary] = []
        stamps: dict[str, _Stamps] = {}
        if not names:
            return found, stamps
        with _opened(self._folder) as fd:
            for name, one in reversed(known.items()):
                if name not in names:
                    continue
                seen = _stamps(name, fd)
                if one.stamps != seen:
                    stamps[name] = seen
                    continue
                found.append(one.summary)
                if until is not None and until(one.summary):
                    break
            stamps |= {name: _stamps(name, fd) for name in names - known.keys()}
        found.reverse()
        return found, stamps

    def _fitting_since(self, stamps: dict[str, _Stamps]) -> list[Summary]:
        """Take those out of `stamps` that an earlier look of this command read, and return their summaries."""
        fitting = [name for name in self._fresh.keys() & stamps.keys() if self._fresh[name].stamps == stamps[name]]
        for name in fitting:
            del stamps[name]
        return [self._fresh[name].summary for name in fitting]

    def _summarized(self, name: str) -> Summary | Damaged | None:
        """Read a snapshot's files; return None if it is being deleted, or its first manifest was not written."""
        try:
            entry, problem = self._load(name)
        except NotFoundError:
            return None
        except CatalogError as error:
            return Damaged(path=self._folder / name, problem=error.message)
        # If a verification is damaged, it is unknown what it said, so retention must not see the snapshot.
        return summarize(entry) if problem is None else Damaged(path=self._folder / name, problem=problem)

    def _read(self) -> dict[str, _Known]:
        """Return what the index says by the snapshots' ids, oldest first; nothing if it cannot be used."""
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, OverflowError):
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
            with open(fd, "rb") as file:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or changeable(status) or status.st_size > _MAX_BYTES:
                    return {}
                data = memoryview(file.read())
            head = len(_MAGIC) + _SUM_BYTES
            if data[: len(_MAGIC)] == _MAGIC and data[len(_MAGIC) : head] == _sum(data[head:]):
                return {one.summary.id: one for one in msgspec.msgpack.decode(data[head:], type=list[_Known])}
        return {}

    def _write(self, known: dict[str, _Known]) -> None:
        """Replace the index in place, unless another process is writing it or it is not ours to write."""
        rows = msgspec.msgpack.encode(list(known.values()))
        data = memoryview(_MAGIC + _sum(rows) + rows)
        if len(data) > _MAX_BYTES:
            return
        with suppress(OSError):
            # Root's file in a state directory of somebody else would be in the way of its owner.
            if self._folder.stat().st_uid != os.geteuid():
                return
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
            with open(os.open(self._path, flags, 0o600), "rb+", buffering=0) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or changeable(status) or status.st_nlink > 1:
                    return
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                while data:
                    data = data[file.write(data) :]
                file.truncate()


_ORDER = attrgetter("number", "at", "id")


def _sum(data: bytes | memoryview) -> bytes:
    return binascii.crc32(data).to_bytes(_SUM_BYTES, "big")


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _stamps(name: str, folder_fd: int) -> _Stamps:
    # Written out, as a look calls it for each snapshot; asking whether there is one takes half the time of an error.
    verified: _Stamp | None = None
    if os.access(name + "/verified.json", os.F_OK, dir_fd=folder_fd, follow_symlinks=False):
        verified = _stamp(name + "/verified.json", folder_fd)
    try:
        status = os.stat(name + "/manifest.json", dir_fd=folder_fd, follow_symlinks=False)
    except OSError:
        return None, verified
    return (status.st_ino, status.st_ctime_ns, status.st_size), verified


def _stamp(path: str, folder_fd: int) -> _Stamp | None:
    try:
        status = os.stat(path, dir_fd=folder_fd, follow_symlinks=False)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size
