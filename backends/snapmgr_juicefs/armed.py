"""A clone that is ready to be made: flushed, checked, its box begun."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from snapmgr.api import CommandError, FireError, Held, Intent, Shot, SnapmgrError, StorageError, Volume
from snapmgr_juicefs import store, tree
from snapmgr_juicefs.program import clone_arguments, complaint

if TYPE_CHECKING:
    from types import TracebackType

    from snapmgr.api import Runner
    from snapmgr_juicefs.program import Juicefs

# Measured with Redis and SQLite on 2 cores: 35 to 220 µs an entry in the clone, about as much to flush a clean one.
# Other metadata engines are slower (218 entries/s were reported): a forecast can only be wrong about those.
_ENTRY_S = 400e-6
_FIXED_S = 0.15


@dataclass(frozen=True, kw_only=True)
class Member:
    """One volume of a snapshot: an open origin, and the box that will hold its clone."""

    volume: Volume
    source: str
    """The origin's path in the client's own mount."""
    origin_fd: int
    store_fd: int
    box: store.Box


def forecast_s(seen: tree.Flushed) -> float:
    """Given what the origin holds, return how many seconds flushing and cloning it will take."""
    return _FIXED_S + (seen.files + seen.folders) * _ENTRY_S


class JuicefsArmed:
    """`snapmgr.api.Armed` for clones of folders, with `Readying`: the program is started beforehand."""

    def __init__(
        self, backend: str, members: tuple[Member, ...], stall_s: float, program: Juicefs, runner: Runner
    ) -> None:
        """Take over the members' descriptors and boxes; `stall_s` is the forecast for all of them."""
        self._backend = backend
        self._members = members
        self._program = program
        self._runner = runner
        self._held: list[Held] = []
        self.intents = tuple(
            Intent(pool=member.volume.pool, volume_id=member.volume.id, name=member.box.name) for member in members
        )
        self.stall_s = stall_s
        self.fds = tuple(fd for member in members for fd in (member.origin_fd, member.store_fd, member.box.fd))
        self.launched = False

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was begun unless it was launched, and close the descriptors."""
        members, self._members = self._members, ()
        with ExitStack() as stack:
            for fd in self.fds:
                stack.callback(os.close, fd)
            self.fds = ()
            if not self.launched:
                for member in members:
                    stack.callback(store.discard, member.box)

    def get_ready(self) -> None:
        """Start a held process for each member; what fails, `fire` says."""
        try:
            for member in self._members:
                self._held.append(self._runner.hold(self._command(member)))
        except SnapmgrError:
            self._held.clear()

    def _command(self, member: Member) -> list[str]:
        return self._program.command(*clone_arguments(member.source, f"{member.box.path}/{store.DATA}"))

    def sync(self) -> None:
        """Flush every file of the origins: a clone holds only what was flushed."""
        for member in self._members:
            tree.flush(member.origin_fd, member.volume.path)

    def fire(self, deadline: float) -> tuple[Shot, ...]:
        """Flush once more (nobody writes now, if anybody did) and clone one directory after another."""
        shots: list[Shot] = []
        for index, member in enumerate(self._members):
            held = self._held[index] if index < len(self._held) else None
            try:
                shots.append(self._shoot(member, held, deadline))
            except FireError as error:
                raise FireError(error.message, hint=error.hint, shots=tuple(shots)) from error
            except (StorageError, CommandError) as error:
                raise FireError(
                    f"cannot clone {tree.shown(member.volume.path)}: {complaint(error.message)}",
                    hint=error.hint,
                    shots=tuple(shots),
                ) from error
            except OSError as error:
                raise FireError(
                    f"cannot clone {tree.shown(member.volume.path)}: {error.strerror}", shots=tuple(shots)
                ) from error
            finally:
                # From here on nobody writes to it: a failed clone may be repaired, a made one attached or deleted.
                fcntl.flock(member.box.fd, fcntl.LOCK_UN)
        return tuple(shots)

    def _shoot(self, member: Member, held: Held | None, deadline: float) -> Shot:
        start_ns = time.monotonic_ns()
        if start_ns / 1e9 > deadline:
            raise FireError(f"the deadline passed before the clone of {tree.shown(member.volume.path)} was begun")
        seen = tree.flush(member.origin_fd, member.volume.path)
        store.trace_cloning(member.box)
        if held is not None:
            with held:
                held.run()
        else:
            self._runner.run(self._command(member), timeout_s=None)
        with tree.folder(store.DATA, member.box.fd) as data:
            tree.complete(data, seen, member.volume.path)
        store.advance(member.box, "begun", "made", durable=False)
        ref = store.reference(member.box, member.volume.pool, self._backend)
        return Shot(ref=ref, start_ns=start_ns, finish_ns=time.monotonic_ns())
