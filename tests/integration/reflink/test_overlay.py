"""A check command gets an overlay over a copy, which shows what a clone would and costs only what it changes."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.access import attach
from snapmgr.access.attach import attached, release
from snapmgr.api import InUseError, MissingRequirementError, StorageError
from snapmgr.backup.run import backup
from snapmgr.catalog.store import Catalog
from snapmgr.config.model import Verify
from snapmgr.doctor.collect import collect_facts
from snapmgr.doctor.diagnose import diagnose
from snapmgr.system.mount import KernelMounter, mounted, read_mounts
from snapmgr.testing import FolderLab, plant
from snapmgr.testing.lab import new_record
from snapmgr.testing.trees import fingerprint, same
from snapmgr.verify.run import verify
from snapmgr_reflink import ReflinkBackend, ReflinkConfig
from support.reflink import store_of
from support.scene import Scene
from support.storage import loop_filesystem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import AttachRecord, SnapshotRef
    from support.storage import LoopFileSystem

pytestmark = pytest.mark.needs("root", "loop", "xfs", "btrfs")


def _record(ref: SnapshotRef) -> AttachRecord:
    return replace(new_record(ref, writable=True), overlay=True)


@contextmanager
def _overlaid(lab: FolderLab, ref: SnapshotRef, point: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the overlay, mounted, and the folder of its changes."""
    record = _record(ref)
    try:
        with mounted(lab.backend().attach(record), str(point), writable=True) as folder:
            yield folder, store_of(lab) / f"attach@{record.id}" / "upper"
    finally:
        lab.backend().detach(record)


def test_an_overlay_shows_the_copy_and_takes_changes(lab: FolderLab, tmp_path: Path) -> None:
    origin = lab.make_origin()
    plant(origin)
    (origin / "big").write_bytes(os.urandom(8 << 20))
    (origin / "again").hardlink_to(origin / "big")
    os.setxattr(origin, "user.mark", b"1")
    origin.chmod(0o751)
    ref = lab.take_one(origin)
    data = store_of(lab) / ref.name / "data"
    before = fingerprint(data)
    with _overlaid(lab, ref, tmp_path / "point") as (folder, changes):
        same(fingerprint(folder), before)
        assert os.getxattr(folder, "user.mark") == b"1"
        assert list(changes.iterdir()) == []
        free = os.statvfs(folder).f_bavail
        with (folder / "big").open("r+b") as file:
            file.write(b"changed")
        os.sync()
        assert (free - os.statvfs(folder).f_bavail) * os.statvfs(folder).f_frsize < 4 << 20, "it was copied whole"
        assert (folder / "again").read_bytes()[:7] == b"changed"
        (folder / "new").mkdir()
        (folder / "again").rename(folder / "new" / "name")
        (folder / "big").unlink()
        inside = next(one for one in folder.iterdir() if one.is_dir() and any(one.iterdir()))
        names = sorted(os.listdir(inside))
        inside.rename(folder / "renamed")
        assert sorted(os.listdir(folder / "renamed")) == names
    same(fingerprint(data), before)
    assert list(store_of(lab).glob("attach@*")) == []
    lab.backend().refuse_altered(ref)


@pytest.mark.parametrize("mark", ["folder", "whiteout", "metacopy", "redirect"])
def test_what_an_overlay_would_hide_is_cloned(lab: FolderLab, mark: str) -> None:
    origin = lab.make_origin()
    (origin / "folder").mkdir()
    (origin / "folder" / "file").write_bytes(b"x")
    if mark == "folder":
        os.setxattr(origin / "folder", "trusted.overlay.opaque", b"y")
    elif mark != "whiteout":
        os.setxattr(origin / "folder" / "file", f"trusted.overlay.{mark}", b"/other")
    else:
        os.mknod(origin / "folder" / "gone", 0o020000, 0)
    ref = lab.take_one(origin)
    record = _record(ref)
    attachment = lab.backend().attach(record)
    assert attachment.directory == str(store_of(lab) / f"attach@{record.id}" / "data")
    same(fingerprint(Path(attachment.directory)), fingerprint(store_of(lab) / ref.name / "data"))
    lab.backend().detach(record)


def test_without_overlays_there_is_a_clone(lab: FolderLab, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = lab.take_one(lab.make_origin())

    def refuse(*_arguments: object) -> None:
        raise StorageError("the kernel has none")

    monkeypatch.setattr(KernelMounter, "private", refuse)
    record = _record(ref)
    assert str(lab.backend().attach(record).directory).endswith(f"attach@{record.id}/data")
    lab.backend().detach(record)


def test_where_blocks_cannot_be_shared_there_is_a_clone(tmp_path: Path) -> None:
    """A command that changed a large file of an overlay would find no space, and the snapshot would count as bad."""
    with loop_filesystem("ext4", 64 << 20) as made:
        lab = FolderLab(ReflinkBackend, ReflinkConfig(allow_plain_copy=True), made.point)
        ref = lab.take_one(lab.make_origin())
        with _overlaid(lab, ref, tmp_path / "point") as (_, changes):
            assert not changes.exists()


def test_an_overlay_in_use_is_not_detached(lab: FolderLab, tmp_path: Path) -> None:
    origin = lab.make_origin()
    (origin / "file").write_bytes(b"x")
    ref = lab.take_one(origin)
    record = _record(ref)
    with mounted(lab.backend().attach(record), str(tmp_path / "point"), writable=True) as folder:
        for forbidden in (lambda: lab.backend().detach(record), lambda: lab.backend().delete(ref)):
            with pytest.raises(InUseError):
                forbidden()
        assert (folder / "file").read_bytes() == b"x"
    lab.backend().detach(record)
    lab.backend().delete(ref)


@pytest.fixture
def files(file_system: LoopFileSystem, tmp_path: Path) -> Iterator[Scene]:
    """A job of a directory, by reflink."""
    scene = Scene(file_system, tmp_path, None)
    source = Path(file_system.point) / "files"
    source.mkdir(exist_ok=True)
    (source / "file").write_text("content")
    scene.configure(text=f'[job.demo]\nsource = "directory"\nbackend = "reflink"\npath = "{source}"\n')
    yield scene
    assert Catalog(scene.state).leases()[0] == []
    assert list(Path(file_system.point, ".snapmgr-reflink").glob("attach@*")) == []
    assert not any(mount.point.startswith(str(scene.scratch)) for mount in read_mounts())


def test_a_check_that_writes_passes_and_changes_nothing(files: Scene) -> None:
    ctx = files.context()
    entry = ctx.catalog.load(backup(ctx, ctx.config.job("demo")).id)
    check = 'cd "$0" && test "$(stat -f -c %T .)" = overlayfs && grep content file && echo more > file && rm file'
    for _ in range(2):
        assert verify(ctx, entry, Verify(command=("sh", "-c", check, "{}"))).result == "passed"


def test_a_check_that_finds_no_space_says_nothing_about_the_snapshot(files: Scene) -> None:
    ctx = files.context()
    entry = ctx.catalog.load(backup(ctx, ctx.config.job("demo")).id)
    with pytest.raises(MissingRequirementError, match="No space left on device"):
        verify(ctx, entry, Verify(command=("fallocate", "-l", "1T", "{}/large")))
    assert ctx.catalog.load(entry.manifest.id).verification is None


def test_doctor_leaves_an_overlay_that_lost_its_lease_while_it_is_mounted(files: Scene) -> None:
    ctx = files.context()
    lease = attach.attach(
        ctx, ctx.catalog.load(backup(ctx, ctx.config.job("demo")).id), writable=True, why="verify", overlay=True
    )
    ctx.catalog.drop_lease(lease)
    try:
        clone = next(one for one in diagnose(collect_facts(ctx)) if lease.parts[0].record.id in one.what)
        assert "and it is mounted" in clone.what
        assert clone.repair is None
    finally:
        release(ctx, lease)


def test_an_overlay_is_ours_before_its_lease_says_so(files: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """This test will end the attaching right after the mount, as a signal would."""
    ctx = files.context()
    entry = ctx.catalog.load(backup(ctx, ctx.config.job("demo")).id)
    found = attach._mounted_at

    def end(*_arguments: object) -> None:
        monkeypatch.setattr(attach, "_mounted_at", found)
        raise KeyboardInterrupt

    monkeypatch.setattr(attach, "_mounted_at", end)
    with pytest.raises(KeyboardInterrupt), attached(ctx, entry, overlay=True):
        pass
