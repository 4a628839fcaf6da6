"""Mounts a volume privately: a further mount in a folder of our own, with its own cache, until a context ends.

Each such mount has a folder ROOT/ID with the mount point and a record, on which the owner holds a lock. A
killed process leaves a record without an owner: see `abandoned` and `clear`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict, replace

from snapmgr.api import ClientOptions, CommandError, StorageError, format_size
from snapmgr.api.kernel import lies_in, shown
from snapmgr_juicefs import client as clients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.api import Mounter, Runner
    from snapmgr_juicefs.client import Client
    from snapmgr_juicefs.program import Address, Juicefs

_RECORD = "record.json"
_POINT = "mnt"
_UNMOUNT_S = 30.0
_END_S = 120.0
# All its files are closed. A client that was asked to end but does not leave its mount ends after 30 s.
_END_BY_ITSELF_S = 5.0
_POLL_S = 0.05
_MOUNT_S = 90.0
# A client queues a hundred staged blocks for each parallel upload, 2,000 by default. If the queue is full, blocks
# wait for the next scan, once a minute or after an upload delay if that is shorter (cached_store.go).
_QUEUED = 2000
# Blocks that once found the queue full wait for that scan, also when it has become short since. So what is not
# uploaded by then is left to another mount, which scans each second and has more uploads at once.
_SOON_S = 2.0
_LOOK_S = 1.0
# Number of parallel uploads: each takes a block of memory.
_UPLOADS = "100"
_MAX_UPLOADS = "--max-uploads"


class Record(Struct, frozen=True, kw_only=True):
    """The record of a private mount, on disk before the mount is made."""

    id: str
    uuid: str
    subdir: str
    cache_dir: str
    own_cache: bool
    """Whether the cache folder was made for this mount and is removed with it."""


def root() -> str:
    """Return the folder of this user's private mounts."""
    if os.geteuid() == 0:
        return "/run/snapmgr-juicefs"
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return os.path.join(base, f"snapmgr-juicefs-{os.geteuid()}")


def _checked_root() -> str:
    folder = root()
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StorageError(f"{shown(folder)} is not a folder of our own", hint="remove it and try again")
    return folder


class PrivateClient:
    """`snapmgr.api.ClientMount`."""

    def __init__(self, place: _Place, inside: str, options: ClientOptions) -> None:
        """Take the mount, and the requested folder's path relative to its top."""
        self._place = place
        self._inside = inside
        self._options = options
        self._delayed = options.writeback and options.upload_delay_s > 0

    @property
    def path(self) -> str:
        """The requested folder, seen through this mount."""
        return os.path.normpath(os.path.join(self.point, self._inside))

    @property
    def point(self) -> str:
        """Its mount point."""
        return self._place.point

    @property
    def options(self) -> ClientOptions:
        """Its mount options."""
        return self._options

    def counters(self) -> dict[str, float]:
        """Return the client's current counters."""
        return self._place.client().counters()

    def settle(self, timeout_s: float, tell: Callable[[int], None] | None = None) -> None:
        """Wait for the uploads. If they are not done soon, mount the volume again, so that none waits for its time."""
        if not self._is_soon_uploaded():
            self._place.unmount()
            self._place.mount_to_upload(self._options)
            self._delayed = False
        clients.wait_uploaded(self._place.client(), timeout_s, tell)

    def _is_soon_uploaded(self) -> bool:
        """Wait shortly for the uploads, unless they are delayed or more than the client queues."""
        client, until_s = self._place.client(), time.monotonic() + _SOON_S
        while staged := client.staged():
            if self._delayed or len(staged) > _QUEUED or time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def warm_up(self, path: str) -> None:
        """Read a folder into the cache."""
        self._place.program.run("warmup", path)


class _Place:
    """One private mount's folder, and the means to mount and unmount there."""

    def __init__(
        self, record: Record, program: Juicefs, runner: Runner, mounter: Mounter, address: Address | None
    ) -> None:
        self.record = record
        self.program = program
        self.folder = os.path.join(root(), record.id)
        self.point = os.path.join(self.folder, _POINT)
        self._runner = runner
        self._mounter = mounter
        self._address = address

    def client(self) -> Client:
        mount = next((one for one in self._mounter.mounts() if one.point == self.point), None)
        if mount is None:
            raise StorageError(f"nothing is mounted at {self.point}", hint="did its client crash? See client.log there")
        return clients.recognise(mount)

    def is_mounted(self) -> bool:
        return any(one.point == self.point for one in self._mounter.mounts())

    def mount(self, options: ClientOptions) -> None:
        if self._address is None:
            raise StorageError(
                "the address of the volume's metadata is not known", hint="set meta_url in [backend.juicefs]"
            )
        log = os.path.join(self.folder, "client.log")
        arguments = ["-d", "--no-usage-report", "--no-syslog", "--log", log, "--backup-meta", "0", "--enable-xattr"]
        arguments += ["--cache-dir", self.record.cache_dir]
        arguments += ["--subdir", self.record.subdir] if self.record.subdir else []
        arguments += ["--writeback"] if options.writeback else []
        if options.writeback and options.upload_delay_s > 0:
            arguments += ["--upload-delay", f"{options.upload_delay_s:.3f}s"]
        if options.cache_bytes is not None:
            arguments += ["--cache-size", str(options.cache_bytes >> 20)]
        words = [self.program.path, "--no-agent", "mount", self._address.url, self.point, *arguments, *options.extra]
        try:
            self._runner.run(
                words, timeout_s=_MOUNT_S, env=dict(self._address.environment), secrets=self._address.secrets
            )
        except CommandError as error:
            raise StorageError(
                f"cannot mount the volume a second time: {error.message}",
                hint="if it needs a password: META_PASSWORD, password_file; docs/reference/backends/juicefs.md",
            ) from error

    def mount_to_upload(self, options: ClientOptions) -> None:
        """Mount it so that the client uploads all blocks staged in the cache folder now."""
        given = any(word.partition("=")[0] == _MAX_UPLOADS for word in options.extra)
        extra = options.extra if given else (*options.extra, _MAX_UPLOADS, _UPLOADS)
        self.mount(replace(options, writeback=True, upload_delay_s=_LOOK_S, extra=extra))

    def unmount(self) -> None:
        """Unmount it and wait for its client to end; do nothing without a mount."""
        if not self.is_mounted():
            return
        pids = self._pids()
        command = ["umount", self.point] if os.geteuid() == 0 else ["fusermount3", "-u", self.point]
        deadline = time.monotonic() + _UNMOUNT_S
        while self.is_mounted():
            try:
                self._runner.run(command, timeout_s=_UNMOUNT_S)
            except CommandError as error:
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"cannot unmount {self.point}: {error.message}", hint="end what uses it; doctor tries again"
                    ) from error
                time.sleep(_POLL_S)
        now = time.monotonic()
        deadline, politely_until = now + _END_S, now + _END_BY_ITSELF_S
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            if time.monotonic() > politely_until:
                politely_until = deadline
                self._ask_to_end(pids)
            if time.monotonic() > deadline:
                raise StorageError(
                    f"the client of {self.point} does not end (process {', '.join(map(str, sorted(pids)))})",
                    hint="is the object store reachable? See client.log beside it",
                )
            time.sleep(_POLL_S)

    def _ask_to_end(self, pids: set[int]) -> None:
        """Ask a client to flush and end: a mount namespace created meanwhile may hold a copy of its mount."""
        for pid in pids:
            with suppress(OSError):
                if os.fsencode(self.point) in Path("/proc", str(pid), "cmdline").read_bytes():
                    os.kill(pid, signal.SIGTERM)

    def _pids(self) -> set[int]:
        with suppress(StorageError):
            pid = self.client().pid
            return {pid} if pid else set()
        return set()

    def upload(self, tell: Callable[[int], None] | None = None) -> None:
        """Wait until everything in the cache folder is uploaded; mount the volume for that if necessary."""
        if not self.is_mounted():
            if not clients.staged(_caches(self.record)):
                return
            self.mount_to_upload(ClientOptions())
        clients.wait_uploaded(self.client(), None, tell)

    def remove(self) -> None:
        """Remove the folder after the unmount, and the cache folder if it was made for this mount."""
        if self.record.own_cache:
            left = clients.staged(_caches(self.record))
            if left:
                raise StorageError(
                    f"{format_size(sum(left.values()))} in {self.record.cache_dir} never got to the object store",
                    hint="keep that folder: a client with --writeback and this --cache-dir uploads it",
                )
            shutil.rmtree(self.record.cache_dir, ignore_errors=True)
        # Never remove it as a tree: a late client may have mounted the volume there.
        try:
            with suppress(FileNotFoundError):
                os.rmdir(self.point)
            for name in sorted(os.listdir(self.folder), key=lambda name: name == _RECORD):
                os.unlink(os.path.join(self.folder, name))
            os.rmdir(self.folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"cannot remove {self.folder}: {error.strerror}", hint="doctor tries again") from error


def _caches(record: Record) -> list[str]:
    return [os.path.join(part, record.uuid) for part in record.cache_dir.split(":")]


@contextmanager
def mounted(
    seen: Client,
    inside: str,
    options: ClientOptions,
    *,
    program: Juicefs,
    runner: Runner,
    mounter: Mounter,
    address: Address,
    cache_root: str,
) -> Iterator[PrivateClient]:
    """Mount the volume of `seen` privately; `inside` is the requested folder's path relative to the mount's top."""
    identity = os.urandom(8).hex()
    cache = options.cache_dir or os.path.join(cache_root, f"snapmgr-juicefs-{identity}")
    record = Record(
        id=identity, uuid=seen.uuid, subdir=seen.subdir, cache_dir=cache, own_cache=options.cache_dir is None
    )
    place = _Place(record, program, runner, mounter, address)
    with ExitStack() as stack:
        try:
            _checked_root()
            os.mkdir(place.folder, 0o700)
            stack.callback(os.close, _write(place.folder, record))
            os.mkdir(place.point, 0o700)
            os.makedirs(cache, mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot prepare {place.folder} and {cache}: {error.strerror}") from error
        try:
            place.mount(options)
            found = place.client()
            if found.uuid != seen.uuid:
                raise StorageError(
                    f"at {address.url} is the volume {found.name}, not {seen.name}",
                    hint="correct meta_url in [backend.juicefs]; with several volumes use meta_urls",
                )
            yield PrivateClient(place, inside, options)
        finally:
            _leave(place, options)


def _leave(place: _Place, options: ClientOptions) -> None:
    try:
        if place.is_mounted():
            if options.writeback and options.upload_delay_s > 0 and place.client().staged():
                place.unmount()
            place.upload()
            place.unmount()
            # Blocks that were still in memory are now staged or uploaded.
            place.upload()
            place.unmount()
    except StorageError as error:
        raise StorageError(
            error.message, hint=f"{error.hint or ''}; its cache folder {place.record.cache_dir} is kept".lstrip("; ")
        ) from error
    place.remove()


def _write(folder: str, record: Record) -> int:
    """Write a record, and return a descriptor that holds its lock."""
    path = os.path.join(folder, _RECORD)
    fd = os.open(f"{path}~", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, json.dumps(asdict(record)).encode())
    os.fsync(fd)
    os.rename(f"{path}~", path)
    return fd


def abandoned(uuid: str) -> list[Record]:
    """Return the private mounts of a volume, or their leftovers, whose owners are gone."""
    found = []
    with suppress(OSError):
        for name in sorted(os.listdir(root())):
            with _taken(name) as record:
                if record is not None and record.uuid == uuid:
                    found.append(record)
    return found


@contextmanager
def _taken(name: str) -> Iterator[Record | None]:
    """Lock a record while the context lasts; None if its owner lives, or if it is missing."""
    record: Record | None = None
    fd = -1
    with suppress(OSError, ValueError, TypeError):
        fd = os.open(os.path.join(root(), name, _RECORD), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        record = Record(**json.loads(os.read(fd, 1 << 16)))
    try:
        yield record
    finally:
        if fd >= 0:
            os.close(fd)


def clear(identity: str, program: Juicefs, runner: Runner, mounter: Mounter, address: Address | None) -> None:
    """Upload the rest of an abandoned private mount's cache, unmount and remove it; ignore a mount with an owner."""
    with _taken(identity) as record:
        if record is None or record.id != identity:
            return
        place = _Place(record, program, runner, mounter, address)
        # Unmount first: it may have been mounted with an upload delay, which only another mount ends.
        place.unmount()
        place.upload()
        place.unmount()
        place.remove()


def forget(folder: str, program: Juicefs, runner: Runner, mounter: Mounter) -> None:
    """Remove the leftovers of private mounts with caches in `folder` and without a living owner.

    Does not upload anything, because `folder` will be removed together with the volume.
    """
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(root())):
            with _taken(name) as record:
                if record is not None and lies_in(record.cache_dir, folder):
                    place = _Place(replace(record, own_cache=False), program, runner, mounter, None)
                    place.unmount()
                    place.remove()
