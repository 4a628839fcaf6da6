"""Locks a job, and keeps what its last run knew at its end, so that the next one need not look at every snapshot.

The lock's file holds the pid of its holder. A run that ends in order, with none of its job's snapshots unfinished, adds
a mark; whoever takes the lock removes it first. So a run that was killed leaves none, and the next one looks at all
manifests. Everybody who makes a snapshot unfinished (PENDING, DELETING) holds the lock.

A mark is not believed after a boot, as it is not synced; if its file or the folder of the snapshots was replaced, as by
a restored state directory; and for longer than an hour, because somebody may change manifests by hand. Nor is one left
where a look is quick. Its removal is synced before a snapshot becomes unfinished.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from snapmgr.contract.errors import BusyError, CatalogError
from snapmgr.contract.records import Pool
from snapmgr.system.boot import boot_id
from snapmgr.system.files import space_hint
from snapmgr.system.trust import changeable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

WORTH = 500
"""With fewer snapshots a look takes 3 ms."""
_BELIEVED_S = 3600.0
# Between reading the clock and the change time, which is of the last tick; where ticks are longer (1 s on ext4 with
# small inodes) no mark is believed.
_TICK_NS = 2 * 10**8
_PATIENCE_S = 2.0
_MAX_BYTES = 1 << 16


class Mark(Struct, frozen=True, kw_only=True):
    """What somebody knew who had looked at all snapshots, or had believed a mark."""

    pid: int
    """Who wrote it; the same as in the file's first line, or else a later holder could not remove it."""
    boot_id: str
    written_ns: int
    """By the system's clock, like the file's change time."""
    looked_s: float
    """When somebody looked; on the clock of this boot."""
    folder: tuple[int, int]
    """Inode of the folder of the snapshots, and that inode's generation: ext4 gives the next folder the same inode."""
    pools: tuple[Pool, ...]
    number: int


class Held:
    """A lock that is held. `before` is the mark that the last holder left, None if there is none to believe."""

    def __init__(self, fd: int, snapshots: Path) -> None:
        self._fd = fd
        self._snapshots = snapshots
        self.before = _read(fd, snapshots)
        self.unfinished: set[str] = set()
        """The snapshots that the holder made unfinished."""
        self.pools: dict[Pool, None] = {}
        self._looked_s: float | None = None
        self._withdrawn = self.before is None

    def begin(self) -> None:
        """Leave nothing but our pid: it names us in error messages. On a full disk a lock works without it."""
        with suppress(OSError):
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        with suppress(OSError):
            os.ftruncate(self._fd, len(f"{os.getpid()}\n"))

    def will_be_unfinished(self, snapshot_id: str) -> None:
        """Note a snapshot that is about to become unfinished.

        Before the first one the removal of `before` becomes durable: btrfs flushes a file alone, so that a disk that
        was lost and is mounted again without a boot could hold the new manifest beside the old mark.
        """
        self.unfinished.add(snapshot_id)
        if not self._withdrawn:
            with suppress(OSError):  # what cannot be flushed takes no manifest either
                os.fsync(self._fd)
                self._withdrawn = True

    def swept(self, pools: Iterable[Pool], count: int | None) -> None:
        """Note that no snapshot is unfinished and that they are in `pools`, to be left at the end.

        `count` is the number of snapshots if we have looked, None if we believe `before`.
        """
        self.pools |= dict.fromkeys(pools)
        if count is None:
            self._looked_s = self.before.looked_s if self.before is not None else None
        elif count >= WORTH:
            self._looked_s = _boot_s()

    def end(self) -> None:
        """Leave the mark if the holder swept and has finished everything."""
        if self._looked_s is not None and not self.unfinished:
            leave_mark(self._fd, self._snapshots, self._looked_s, pools=tuple(self.pools))


@contextmanager
def held_lock(path: Path, job: str, snapshots: Path) -> Iterator[Held]:
    """Hold the lock `path` of `job`. Raises BusyError if another run has it, CatalogError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CatalogError(f"cannot open {path}: {error.strerror}", hint=space_hint(error)) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).partition(b"\n")[0].decode("ascii", "replace").strip() or "?"
            raise BusyError(f"another run of job {job} is active (pid {holder})", hint="wait for it to end") from None
        held = Held(fd, snapshots)
        held.begin()
        try:
            yield held
        finally:
            held.end()
    finally:
        os.close(fd)


def next_number(path: Path, snapshots: Path, least: int, highest: Callable[[], tuple[int, int]]) -> int:
    """Return a number above those of all snapshots, at least `least`; keep it in the file `path`, for the next one.

    `highest` returns the highest number of any snapshot and their count, by a look at all of them. Raises its errors.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = -1
    try:
        with suppress(OSError):
            fd = os.open(path, flags)
            _wait_for(fd)
        before = _read(fd, snapshots) if fd >= 0 else None
        if before is not None:
            known, count, looked_s = before.number, WORTH, before.looked_s
        else:
            (known, count), looked_s = highest(), _boot_s()
        number = max(least, 1 + known)
        if count >= WORTH:
            with suppress(OSError):
                fd = fd if fd >= 0 else os.open(path, flags | os.O_CREAT, 0o600)
                leave_mark(fd, snapshots, looked_s, number=number)
        return number
    finally:
        if fd >= 0:
            os.close(fd)


def _wait_for(fd: int) -> None:
    """Wait until no other job takes a number, but not for a process that was stopped: at worst two get the same one."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PATIENCE_S / 100)
        else:
            return


def leave_mark(fd: int, snapshots: Path, looked_s: float, *, pools: tuple[Pool, ...] = (), number: int = 0) -> None:
    """Write a mark; without room for it leave none."""
    try:
        mark = Mark(
            pid=os.getpid(),
            boot_id=boot_id(),
            written_ns=time.time_ns(),
            looked_s=looked_s,
            folder=_identity(snapshots),
            pools=pools,
            number=number,
        )
        data = f"{mark.pid}\n".encode() + msgspec.json.encode(mark)
        if len(data) <= _MAX_BYTES and os.pwrite(fd, data, 0) == len(data):
            os.ftruncate(fd, len(data))
            return
    except OSError:
        pass
    with suppress(OSError):
        os.ftruncate(fd, 0)


def _read(fd: int, snapshots: Path) -> Mark | None:
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or changeable(status) or not status.st_size:
            return None
        pid, _, data = os.pread(fd, _MAX_BYTES + 1, 0).partition(b"\n")
        if not data:
            return None
        mark = msgspec.json.decode(data, type=Mark)
        if (
            pid == str(mark.pid).encode()
            and mark.boot_id == boot_id()
            and abs(status.st_ctime_ns - mark.written_ns) < _TICK_NS
            and 0 <= _boot_s() - mark.looked_s < _BELIEVED_S
            and mark.folder == _identity(snapshots)
        ):
            return mark
    return None


def _identity(folder: Path) -> tuple[int, int]:
    from snapmgr.system.kernel import generation  # noqa: PLC0415 - most commands read no mark

    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return os.fstat(fd).st_ino, generation(fd)
    finally:
        os.close(fd)


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
