"""What the btrfs tests share: a backend on real mounts, snapshots in one call, the btrfs program."""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.api import AttachRecord, NotMine
from snapmgr.system.blockdev import find_target
from snapmgr.system.command import CommandRunner
from snapmgr.system.mount import KernelMounter, mount_device, unmount
from snapmgr_btrfs import BtrfsBackend, BtrfsConfig
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapmgr.api import SnapshotRef, Volume
    from support.storage import LoopFileSystem

RUNNER = CommandRunner()
_IMAGES = Path("/dev/shm")


def run(*argv: str | Path) -> str:
    """Run a program and return its stdout."""
    return RUNNER.run([str(word) for word in argv]).stdout


def make_backend(*, folder: str = ".snapmgr", space_wait_s: float = 60.0) -> BtrfsBackend:
    """Return a backend that really mounts and really runs programs."""
    return BtrfsBackend(BtrfsConfig(folder=folder, space_wait_s=space_wait_s), RUNNER, KernelMounter())


@contextmanager
def btrfs_disk(
    size_mib: int = 300, mkfs_options: Sequence[str] = (), mount_options: Sequence[str] = ()
) -> Iterator[LoopFileSystem]:
    """Make a mounted btrfs of `size_mib`, in memory where /dev/shm is there."""
    base = _IMAGES if _IMAGES.is_dir() else None
    with loop_filesystem("btrfs", size_mib << 20, mkfs_options, mount_options, base=base) as disk:
        yield disk


def make_subvolume(path: Path, **files: str) -> Path:
    """Make a subvolume with text files in it."""
    run("btrfs", "--quiet", "subvolume", "create", path)
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def locate(backend: BtrfsBackend, path: Path) -> Volume:
    """Return the volume of `path`, which must have one."""
    volume = backend.locate(find_target(str(path)))
    assert not isinstance(volume, NotMine), volume.reason
    return volume


def take(backend: BtrfsBackend, path: Path, snapshot_id: str) -> SnapshotRef:
    """Take a settled snapshot of the subvolume that holds `path`."""
    with backend.arm((locate(backend, path),), snapshot_id) as armed:
        armed.launched = True
        shots = armed.fire(time.monotonic() + 10)
    refs = tuple(shot.ref for shot in shots)
    backend.settle(refs, 10)
    return refs[0]


def new_record(ref: SnapshotRef, *, writable: bool = True) -> AttachRecord:
    """Return a fresh record for an attachment of `ref`."""
    return AttachRecord(id=secrets.token_hex(8), ref=ref, writable=writable, boot_id="this-boot")


@contextmanager
def attached(backend: BtrfsBackend, record: AttachRecord) -> Iterator[Path]:
    """Attach, mount, yield the mount point; unmount and detach."""
    attachment = backend.attach(record)
    assert attachment.device is not None
    assert attachment.fs_type is not None
    with work_folder() as folder:
        point = folder / "scratch"
        mount_device(attachment.device, str(point), fs_type=attachment.fs_type, options=attachment.options)
        try:
            yield point
        finally:
            unmount(str(point))
    backend.detach(record)
