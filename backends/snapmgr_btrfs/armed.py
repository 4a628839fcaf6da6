"""Fires btrfs snapshots, everything being open and checked: one ioctl a volume. Then settles them on disk."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Self

from msgspec import Struct

from snapmgr.api import FireError, Intent, Shot, SnapshotRef, StorageError
from snapmgr.api.kernel import sync_file_system
from snapmgr_btrfs import folder, kernel, library

if TYPE_CHECKING:
    from contextlib import ExitStack
    from types import TracebackType

    from snapmgr_btrfs.filesystem import TopLevel
    from snapmgr_btrfs.folder import Entry
    from snapmgr_btrfs.library import Library

# Measured after a syncfs: 2 ms idle, 3–18 ms with four writers.
_STALL_S = 0.02


class Member(Struct, frozen=True, kw_only=True):
    """One volume of the snapshot, with the descriptors that firing needs."""

    intent: Intent
    origin_fd: int
    folder_fd: int


class ArmedSnapshot:
    """See `snapmgr.api.Armed`. `resources` holds the descriptors and private mounts and is closed at the end."""

    def __init__(self, lib: Library, snapshot_id: str, members: tuple[Member, ...], resources: ExitStack) -> None:
        self._lib = lib
        self._snapshot_id = snapshot_id
        self._members = members
        self._resources = resources
        self.intents = tuple(member.intent for member in members)
        self.stall_s = _STALL_S * len(members)
        self.fds = tuple(dict.fromkeys(fd for member in members for fd in (member.origin_fd, member.folder_fd)))
        self.launched = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Nothing else to undo: the folder that arm made stays, empty, because another run may be about to use it.
        self._resources.close()

    def sync(self) -> None:
        """Flush all dirty data: the snapshot call writes the rest, under the lock."""
        pools = {member.intent.pool.id: member for member in self._members}
        for member in pools.values():
            try:
                sync_file_system(member.folder_fd)
            except OSError as error:
                raise StorageError(
                    f"cannot sync the file system at {member.intent.pool.hint}: {error.strerror}"
                ) from None

    def fire(self, deadline: float) -> tuple[Shot, ...]:
        """Take the snapshots: one ioctl each. Their ids are looked up after the last one."""
        taken: list[tuple[Member, int, int]] = []
        failure: FireError | None = None
        for member in self._members:
            if time.monotonic() >= deadline:
                failure = FireError(f"the deadline passed before the snapshot of {member.intent.pool.hint} began")
                break
            start_ns = time.monotonic_ns()
            try:
                self._lib.create_snapshot(
                    member.origin_fd, f"/proc/self/fd/{member.folder_fd}/{member.intent.name}", read_only=True
                )
            except OSError as error:
                failure = _fire_error(member, error)
                break
            taken.append((member, start_ns, time.monotonic_ns()))
        shots: list[Shot] = []
        for member, start_ns, finish_ns in taken:
            try:
                shots.append(Shot(ref=self._identify(member), start_ns=start_ns, finish_ns=finish_ns))
            except (OSError, StorageError) as error:
                failure = FireError(f"the snapshot {member.intent.name} was made but cannot be read: {error}")
        if failure is not None:
            raise FireError(failure.message, hint=failure.hint, shots=tuple(shots))
        return tuple(shots)

    def _identify(self, member: Member) -> SnapshotRef:
        entry = folder.look(self._lib, member.folder_fd, member.intent.name)
        if entry is None or entry.uuid is None:
            raise StorageError(f"the snapshot {member.intent.name} vanished")
        return SnapshotRef(
            backend="btrfs",
            snapshot_id=self._snapshot_id,
            pool=member.intent.pool,
            volume_id=member.intent.volume_id,
            name=member.intent.name,
            native_id=entry.uuid,
        )


def _fire_error(member: Member, error: OSError) -> FireError:
    hint = None
    if error.errno == errno.ETXTBSY:
        hint = "a swap file is active in this subvolume: move it into a subvolume of its own"
    elif error.errno in {errno.ENOSPC, errno.EDQUOT}:
        hint = "prune snapshots, free space or raise the quota"
    elif error.errno == errno.EROFS:
        hint = "the file system became read-only: see dmesg"
    said = os.strerror(error.errno) if error.errno else str(error)
    return FireError(f"btrfs did not make the snapshot {member.intent.name}: {said}", hint=hint)


def settle(top: TopLevel, entry: Entry, ref: SnapshotRef, deadline: float) -> None:
    """Check a snapshot and wait until the transaction that made it is on disk.

    Raises StorageError if it is writable or of something else, or at `deadline` (time.monotonic()).
    """
    if not entry.read_only:
        raise StorageError(f"the snapshot {ref.name} is not read-only", hint="somebody changed it: take another one")
    origin = entry.parent_uuid or f"{top.uuid}:{library.TOP_LEVEL_ID}"
    if origin != ref.volume_id:
        raise StorageError(f"the snapshot {ref.name} is one of {origin}, not of {ref.volume_id}")
    _wait_commit(top.fd, entry.info.otransid, deadline - time.monotonic(), ref.name)


def _wait_commit(fd: int, transaction: int, timeout_s: float, name: str) -> None:
    """Wait for a transaction; normally it is on disk already, because the snapshot call commits it itself."""
    failures: list[OSError] = []

    def wait() -> None:
        try:
            kernel.wait_commit(fd, transaction)
        except OSError as error:
            failures.append(error)

    # The wait cannot be interrupted: a thread of its own lets us give up.
    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(max(timeout_s, 0.0))
    if waiter.is_alive():
        message = f"the snapshot {name} was not on disk within the time limit"
        raise StorageError(message, hint="the storage hangs or is very slow; see dmesg")
    if failures:
        raise StorageError(f"cannot make the snapshot {name} durable: {failures[0].strerror}") from failures[0]
