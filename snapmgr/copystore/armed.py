"""Fires prepared copies: `snapmgr.api.Armed` for backends of the kit."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Self

from snapmgr.contract.errors import SnapmgrError, StorageError
from snapmgr.contract.records import FireError, Intent, Shot
from snapmgr.copystore.copying import explain
from snapmgr.copystore.store import reference
from snapmgr.system.paths import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from snapmgr.contract.records import Volume
    from snapmgr.copystore.copyfolder import CopyFolder
    from snapmgr.copystore.copying import FolderCopy


class ArmedCopies:
    """`snapmgr.api.Armed` and `snapmgr.api.Readying` for copies of volumes."""

    def __init__(
        self, members: Sequence[tuple[Volume, CopyFolder, FolderCopy]], discard: Callable[[CopyFolder], None]
    ) -> None:
        """Take over the members' descriptors and folders; `discard` removes one that was not fired."""
        self._members = tuple(members)
        self._discard = discard
        self.intents = tuple(
            Intent(pool=volume.pool, volume_id=volume.id, name=folder.name) for volume, folder, _ in members
        )
        self.stall_s = sum(copy.stall_s for _, _, copy in members)
        self.fds = tuple(fd for _, folder, copy in members for fd in (copy.source.fd, folder.store.fd, folder.fd))
        self.launched = False

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the begun copies unless they were launched, and close the descriptors."""
        members, self._members = self._members, ()
        with ExitStack() as stack:
            for fd in self.fds:
                stack.callback(os.close, fd)
            self.fds = ()
            if not self.launched:
                for _, folder, _ in members:
                    stack.callback(self._discard, folder)

    def get_ready(self) -> None:
        """Let each copy do its last preparations; `fire` reports a failure."""
        for _, _, copy in self._members:
            with suppress(SnapmgrError):
                copy.get_ready()

    def sync(self) -> None:
        """Flush the origins."""
        for _, _, copy in self._members:
            copy.flush()

    def fire(self, deadline: float) -> tuple[Shot, ...]:
        """Copy one directory after another."""
        shots: list[Shot] = []
        for volume, folder, copy in self._members:
            try:
                shots.append(_shoot(volume, folder, copy, deadline))
            except (SnapmgrError, OSError) as error:
                why, hint = explain(error)
                raise FireError(f"cannot copy {shown(volume.path)}: {why}", hint=hint, shots=tuple(shots)) from error
            finally:
                # From here on we do not write to it: a failed copy may be repaired, a made one attached or deleted.
                fcntl.flock(folder.fd, fcntl.LOCK_UN)
        return tuple(shots)


def _shoot(volume: Volume, folder: CopyFolder, copy: FolderCopy, deadline: float) -> Shot:
    start_ns = time.monotonic_ns()
    if start_ns / 1e9 > deadline:
        raise StorageError("the deadline passed before the copy was begun")
    copy.run(deadline)
    folder.advance("begun", "made", durable=False)
    return Shot(ref=reference(folder, volume.pool), start_ns=start_ns, finish_ns=time.monotonic_ns())
