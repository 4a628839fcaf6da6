"""Defines what the contract suite needs of a backend: ways to create directories on its storage, and to break it."""

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
    """A backend together with storage for tests. Each test has its own lab; labs may share storage."""

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
        """Return a new instance, as nothing may depend on the memory of an earlier one."""
        return self.backend_class(self.config, self.runner, self.mounter)

    @abstractmethod
    def make_origin(self) -> Path:
        """Create an empty, writable directory that the backend can snapshot; a separate volume each time."""

    @abstractmethod
    def remove_origin(self, origin: Path) -> None:
        """Delete an origin with the storage's own tools: the subvolume, the logical volume, the folder."""

    @abstractmethod
    def impostor(self, ref: SnapshotRef) -> Callable[[], bool]:
        """Remove a snapshot without the backend, and put something else, with content, under its name.

        Return a function that says whether the impostor is untouched.
        """

    @abstractmethod
    def unreachable(self, pool: Pool) -> AbstractContextManager[None]:
        """Make a pool unreachable while the context lasts: unmount it, deactivate it, rename its folder."""

    rounds = 3
    """How often each of several processes takes and deletes a snapshot."""
    files = 300
    """Number of files in the origin of operations that are killed."""
    looks = 20
    """How often another process reads the inventory meanwhile."""
    kills = 7
    """At how many moments each operation is killed."""
    race_rounds = 8
    """Number of snapshots that `test_one_instant_if_promised` takes in each direction; fewer if one takes seconds."""

    def trim(self, origin: Path) -> None:  # noqa: B027 - most file systems need nothing
        """Return the blocks of deleted files to the storage, if the file system does not do so by itself."""

    def foreign(self) -> Path | None:
        """Return a directory that the backend cannot snapshot; None if there is none."""
        return Path("/proc/self")

    def nest(self, folder: Path) -> AbstractContextManager[None] | None:
        """Mount a file system at an empty folder while the context lasts; None without the privilege."""
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

    # Steps that many tests share. Nothing below needs to be overridden.

    def target(self, origin: Path) -> Target:
        """Return the target that the core passes to `Backend.locate`."""
        return find_target(str(origin), runner=self.runner)

    def volume(self, origin: Path) -> Volume:
        """Locate an origin, which must succeed."""
        located = self.backend().locate(self.target(origin))
        if isinstance(located, NotMine):
            pytest.fail(f"locate refuses an origin of this lab: {located.reason}")
        return located

    def take(self, *origins: Path, snapshot_id: str | None = None) -> tuple[SnapshotRef, ...]:
        """Take one snapshot of all `origins` as the core does: in a helper process that keeps only `Armed.fds`."""
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
        """Return where the origin's content is in an attached volume."""
        return volume_root / self.volume(origin).subpath

    def found(self, pool: Pool) -> tuple[Found, ...]:
        """Return the inventory of a pool, from a new instance."""
        return self.backend().inventory((pool,))

    def repair_all(self, pool: Pool) -> None:
        """Repair all debris of a pool, twice, as repairing is idempotent."""
        for found in self.found(pool):
            if found.kind == "debris":
                self.backend().repair(found)
                self.backend().repair(found)

    @contextmanager
    def attached(self, ref: SnapshotRef, *, writable: bool) -> Iterator[Path]:
        """Attach a snapshot, yield the folder of its volume, and detach it at the end."""
        record = new_record(ref, writable=writable)
        try:
            with self.reached(self.backend().attach(record), writable=writable) as folder:
                yield folder
        finally:
            self.backend().detach(record)


class FolderLab(Lab):
    """A lab for backends that keep each snapshot as a folder ``POOL.ID/REF.NAME`` of ordinary files."""

    def __init__(self, backend_class: type[Backend], config: Any, folder: Path) -> None:  # noqa: ANN401
        """Also takes the folder in which origins are created."""
        super().__init__(backend_class, config)
        self.folder = folder

    def make_origin(self) -> Path:
        """Create a folder."""
        origin = self.folder / f"origin-{secrets.token_hex(4)}"
        origin.mkdir()
        return origin

    def remove_origin(self, origin: Path) -> None:
        """Remove the folder."""
        self._remove(origin)

    def impostor(self, ref: SnapshotRef) -> Callable[[], bool]:
        """Replace the snapshot by a copy with the same names and content, which snapmgr did not create."""
        place = Path(ref.pool.id, ref.name)
        aside = self.folder / f"aside-{secrets.token_hex(4)}"
        place.rename(aside)
        self.runner.run(["cp", "-a", str(aside), str(place)])
        self._remove(aside)
        (place / "somebody's").write_bytes(b"precious")
        before = sorted(path.relative_to(place) for path in place.rglob("*"))
        return lambda: place.is_dir() and sorted(path.relative_to(place) for path in place.rglob("*")) == before

    def _remove(self, folder: Path) -> None:
        # Without root only writable folders can be emptied.
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
    """Return a snapshot id in the form of the core's."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"


def new_record(ref: SnapshotRef, *, writable: bool) -> AttachRecord:
    """Return a record as the core writes it before attaching."""
    return AttachRecord(id=secrets.token_hex(8), ref=ref, writable=writable, boot_id=boot_id())


def _no_undo(_shot: Shot) -> None:
    """Ignore a late snapshot: the test fails anyway."""


class Contract:
    """The fixture that all parts of the suite share and a subclass overrides."""

    @pytest.fixture
    def lab(self) -> Lab:
        """The backend under test and its storage."""
        raise NotImplementedError("override the fixture `lab`: it returns a snapmgr.testing.Lab for your backend")
