"""Fires LVM snapshots: everything is checked before, so that firing is one ``lvcreate`` per volume."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

from msgspec import Struct

from snapmgr.api import CommandError, FireError, Intent, MissingRequirementError, Shot, StorageError
from snapmgr.api.kernel import sync_file_system
from snapmgr_lvm import dm, marks
from snapmgr_lvm.inventory import snapshot_ref
from snapmgr_lvm.report import read_group

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from types import TracebackType

    from snapmgr.api import Held, Pool, Runner, SnapshotRef
    from snapmgr_lvm.report import Group

# lvcreate reads a group as we do, and writes the metadata twice: 2 to 2.5 times as long, measured.
_STALL_FACTOR = 2.5


class Member(Struct, frozen=True, kw_only=True):
    """One volume of the snapshot, with the command that takes it."""

    intent: Intent
    path: str
    """Mount point of the origin's file system."""
    fd: int
    argv: tuple[str, ...]


class LvmArmed:
    """See `snapmgr.api.Armed`; it is `Announcing`, because only another command reports a new volume's UUID.

    Args:
        runner: runs lvcreate.
        snapshot_id: ours.
        members: the volumes, in order.
        read_s: the duration of the last reading of the groups, for the forecast.
        resources: everything open; closed at the end.
    """

    def __init__(
        self, runner: Runner, snapshot_id: str, members: tuple[Member, ...], read_s: float, resources: ExitStack
    ) -> None:
        self._runner = runner
        self._snapshot_id = snapshot_id
        self._members = members
        self._resources = resources
        self.intents = tuple(member.intent for member in members)
        self.stall_s = read_s * _STALL_FACTOR * len(members)
        self.fds = tuple(member.fd for member in members)
        self.launched = False
        self._held: list[Held] = []
        self.fired: Callable[[], None] = _nobody_waits

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Nothing else to undo: arming changes nothing.
        self._resources.close()

    def sync(self) -> None:
        """Flush the origins' file systems: LVM writes the rest under the lock, when it freezes them."""
        for member in self._members:
            try:
                sync_file_system(member.fd)
            except OSError as error:
                raise StorageError(f"cannot sync the file system at {member.path}: {error.strerror}") from None

    def get_ready(self) -> None:
        """Start the processes that will become lvcreate: see `snapmgr.api.Readying`."""
        with suppress(CommandError, MissingRequirementError):  # `fire` tries again, and reports the reason
            # A rehearsal: the first use of memory after a fork copies its pages, which can take longer than everything
            # else that we do under the lock (in User Mode Linux, tens of milliseconds).
            with self._runner.hold(["true"]) as nothing:
                nothing.run()
            self._hold()

    def _hold(self) -> None:
        self._held = [self._resources.enter_context(self._runner.hold(member.argv)) for member in self._members]

    def fire(self, deadline: float) -> tuple[Shot, ...]:
        """Take the snapshots: one ``lvcreate`` each, never ended by us. Their UUIDs are looked up after the last."""
        if not self._held:
            try:
                self._hold()
            except (CommandError, MissingRequirementError) as error:
                raise FireError(f"lvcreate cannot be started: {error.message}", hint=error.hint) from error
        taken: list[tuple[Member, int, int]] = []
        failure: FireError | None = None
        for member, held in zip(self._members, self._held, strict=True):
            if time.monotonic() >= deadline:
                failure = FireError(f"the deadline passed before the snapshot of {member.path} began")
                break
            start_ns = time.monotonic_ns()
            try:
                # No time limit: a killed lvcreate might leave its origin suspended.
                held.run()
            except CommandError as error:
                failure = FireError(f"LVM did not make the snapshot {member.intent.name}: {error.message}")
                break
            taken.append((member, start_ns, time.monotonic_ns()))
        if failure is None:
            self.fired()
        shots: list[Shot] = []
        read = cache(lambda pool: read_group(self._runner, pool))
        for member, start_ns, finish_ns in taken:
            try:
                shots.append(
                    Shot(ref=self._identify(member, read(member.intent.pool)), start_ns=start_ns, finish_ns=finish_ns)
                )
            except StorageError as error:
                failure = FireError(f"the snapshot {member.intent.name} was made but cannot be read: {error.message}")
        if failure is not None:
            raise FireError(failure.message, hint=failure.hint, shots=tuple(shots))
        return tuple(shots)

    def _identify(self, member: Member, group: Group) -> SnapshotRef:
        intent = member.intent
        volume = group.by_name(intent.name)
        if volume is None or marks.value(volume, "id") != self._snapshot_id:
            raise StorageError(f"{group.name}/{intent.name} vanished, or is something else")
        if volume.origin_uuid != intent.volume_id:
            raise StorageError(f"{group.name}/{intent.name} is of another volume: the origin was exchanged just now")
        return snapshot_ref(group, volume)


def _nobody_waits() -> None:
    """Stand in for the core's callback."""


def open_origin(pool: Pool, path: str, number: str | None, name: str) -> int:
    """Return a descriptor of the folder `path`, which must be on the active volume with the device `number`.

    Raises StorageError if something else is there now.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}") from None
    if number is None or not _holds(dm.device_number(os.fstat(fd).st_dev), number):
        os.close(fd)
        raise StorageError(f"{path} is no longer on the logical volume {pool.hint}/{name}", hint="try again")
    return fd


def _holds(number: str, volume_number: str) -> bool:
    """Whether the device `number` ("253:4") is `volume_number`, or lies on it (a LUKS container)."""
    if number == volume_number:
        return True
    slaves = Path("/sys/dev/block") / number / "slaves"
    with suppress(OSError):
        return any((lower / "dev").read_text().strip() == volume_number for lower in slaves.iterdir())
    return False
