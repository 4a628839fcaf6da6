"""What the contract suite must be told about a backend: how to make directories on its storage, how to break things."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from snapmgr.api import AttachRecord, NotMine
from snapmgr.backup.trigger import Trigger
from snapmgr.system.blockdev import find_target
from snapmgr.system.boot import boot_id
from snapmgr.system.command import CommandRunner
from snapmgr.system.mount import KernelMounter, mounted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from snapmgr.api import Attachment, Backend, Found, Mounter, Pool, Runner, Shot, SnapshotRef, Target, Volume

_LONG_S = 60.0


class Lab(ABC):
    """A backend together with storage to try it on. One lab serves one test; storage may be shared between labs."""

    backend_class: type[Backend]
    """The backend under test."""
    config: Any
    """An instance of its `Config`."""
    runner: Runner
    mounter: Mounter

    def __init__(self, backend_class: type[Backend], config: Any) -> None:  # noqa: ANN401
        self.backend_class = backend_class
        self.config = config
        self.runner = CommandRunner()
        self.mounter = KernelMounter()

    def backend(self) -> Backend:
        """Return a fresh instance: nothing may depend on what an earlier one remembered."""
        return self.backend_class(self.config, self.runner, self.mounter)

    @abstractmethod
    def make_origin(self) -> Path:
        """Make a new, empty, writable directory that the backend can snapshot; a volume of its own each time."""

    @abstractmethod
    def remove_origin(self, origin: Path) -> None:
        """Delete an origin with the storage's own means: the subvolume, the logical volume, the folder."""

    @abstractmethod
    def impostor(self, ref: SnapshotRef) -> Callable[[], bool]:
        """Remove a snapshot behind the backend's back and put something else, with content, under its name.

        Return a function that says whether the impostor is untouched.
        """

    @abstractmethod
    def unreachable(self, pool: Pool) -> AbstractContextManager[None]:
        """Make a pool unreachable while the context lasts: unmount it, deactivate it, rename its folder."""

    rounds = 3
    """How often each of several processes takes and deletes a snapshot."""
    files = 300
    """How many files are in what is killed in the middle."""
    looks = 20
    """How often somebody looks on meanwhile."""
    kills = 7
    """At how many moments of each operation it is killed."""
    race_rounds = 8
    """How many snapshots `test_one_instant_if_promised` takes each way: less where one takes seconds."""

    def trim(self, origin: Path) -> None:  # noqa: B027 - most file systems need nothing
        """Give the blocks of deleted files back to the storage, where a file system does not do so by itself."""

    def foreign(self) -> Path | None:
        """Return a directory that the backend cannot snapshot; None if there is no such thing."""
        return Path("/proc/self")

    def nest(self, folder: Path) -> AbstractContextManager[None] | None:
        """Mount something at an empty folder while the context lasts; None where this user may not."""
        return self._tmpfs(folder) if os.geteuid() == 0 else None

    @contextmanager
    def _tmpfs(self, folder: Path) -> Iterator[None]:
        self.runner.run(["mount", "-t", "tmpfs", "-o", "size=64k", "snapmgr-test", str(folder)])
        try:
            yield
        finally:
            self.runner.run(["umount", str(folder)])

    @contextmanager
    def reached(self, attachment: Attachment, *, writable: bool) -> Iterator[Path]:
        """Yield the folder where an attachment's volume can be read (and written).

        As in the core: a device is mounted, a directory is bound to another place if this user may.
        """
        if attachment.directory is not None and os.geteuid() != 0:
            yield Path(attachment.directory)
            return
        point = os.path.join(tempfile.gettempdir(), f"snapmgr-test-mount-{secrets.token_hex(8)}")
        with mounted(attachment, point, writable=writable) as folder:
            yield folder

    # What the tests do all the time. Nothing below needs to be overridden.

    def target(self, origin: Path) -> Target:
        """Return what the core hands to `Backend.locate`."""
        return find_target(str(origin), runner=self.runner)

    def volume(self, origin: Path) -> Volume:
        """Locate an origin, which must succeed."""
        located = self.backend().locate(self.target(origin))
        if isinstance(located, NotMine):
            pytest.fail(f"locate refuses an origin of this lab: {located.reason}")
        return located

    def take(self, *origins: Path, snapshot_id: str | None = None) -> tuple[SnapshotRef, ...]:
        """Take one snapshot of all `origins` as the core does: in a helper process that keeps `Armed.fds` alone."""
        backend = self.backend()
        volumes = tuple(self.volume(origin) for origin in origins)
        with backend.arm(volumes, snapshot_id or new_id()) as armed:
            armed.sync()
            with Trigger(armed, _no_undo) as trigger:
                trigger.fire(time.monotonic() + _LONG_S)
                shots = trigger.shots()
        refs = tuple(shot.ref for shot in shots)
        backend.settle(refs, _LONG_S)
        return refs

    def take_one(self, origin: Path) -> SnapshotRef:
        """Take a snapshot of one origin."""
        return self.take(origin)[0]

    def inside(self, volume_root: Path, origin: Path) -> Path:
        """Return where the origin's content is in a volume that was reached somewhere."""
        return volume_root / self.volume(origin).subpath

    def found(self, pool: Pool) -> tuple[Found, ...]:
        """Return a fresh instance's inventory of a pool."""
        return self.backend().inventory((pool,))

    def repair_all(self, pool: Pool) -> None:
        """Repair all debris of a pool, twice: repairing is idempotent."""
        for found in self.found(pool):
            if found.kind == "debris":
                self.backend().repair(found)
                self.backend().repair(found)

    @contextmanager
    def attached(self, ref: SnapshotRef, *, writable: bool) -> Iterator[Path]:
        """Attach a snapshot and yield where its volume is; detached at the end."""
        record = new_record(ref, writable=writable)
        try:
            with self.reached(self.backend().attach(record), writable=writable) as folder:
                yield folder
        finally:
            self.backend().detach(record)


class FolderLab(Lab):
    """A lab for backends that keep each snapshot as a folder ``POOL.ID/REF.NAME`` of ordinary files."""

    def __init__(self, backend_class: type[Backend], config: Any, folder: Path) -> None:  # noqa: ANN401
        """Take also the folder in which origins are made."""
        super().__init__(backend_class, config)
        self.folder = folder

    def make_origin(self) -> Path:
        """Make a folder."""
        origin = self.folder / f"origin-{secrets.token_hex(4)}"
        origin.mkdir()
        return origin

    def remove_origin(self, origin: Path) -> None:
        """Remove the folder."""
        self._remove(origin)

    def impostor(self, ref: SnapshotRef) -> Callable[[], bool]:
        """Put a copy of the snapshot in its place: the same names and content, but not what snapmgr made."""
        place = Path(ref.pool.id, ref.name)
        aside = self.folder / f"aside-{secrets.token_hex(4)}"
        place.rename(aside)
        self.runner.run(["cp", "-a", str(aside), str(place)])
        self._remove(aside)
        (place / "somebody's").write_bytes(b"precious")
        before = sorted(path.relative_to(place) for path in place.rglob("*"))
        return lambda: place.is_dir() and sorted(path.relative_to(place) for path in place.rglob("*")) == before

    def _remove(self, folder: Path) -> None:
        # A user who is not root can empty only folders that he may write to.
        self.runner.run(["chmod", "-R", "u+rwX", str(folder)])
        shutil.rmtree(folder)

    @contextmanager
    def unreachable(self, pool: Pool) -> Iterator[None]:
        """Rename the pool's folder."""
        hidden = f"{pool.id}.hidden"
        os.rename(pool.id, hidden)
        try:
            yield
        finally:
            os.rename(hidden, pool.id)


def new_id() -> str:
    """Return a snapshot's id as the core makes them."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"


def new_record(ref: SnapshotRef, *, writable: bool) -> AttachRecord:
    """Return a record as the core writes it before it attaches."""
    return AttachRecord(id=secrets.token_hex(8), ref=ref, writable=writable, boot_id=boot_id())


def _no_undo(_shot: Shot) -> None:
    """Leave a shot that came too late to the test: it fails anyway."""


class Contract:
    """What all parts of the suite share: the fixture that a subclass overrides."""

    @pytest.fixture
    def lab(self) -> Lab:
        """The backend under test and its storage."""
        raise NotImplementedError("override the fixture `lab`: it returns a snapmgr.testing.Lab for your backend")
