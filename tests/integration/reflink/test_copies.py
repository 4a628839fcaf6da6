"""Reflink copies on real file systems: what is in them, what they cost, and who uses them."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from snapmgr.api import FireError, InUseError, StorageError
from snapmgr.system.command import CommandRunner
from snapmgr.system.mount import bind, unmount
from snapmgr.testing import FolderLab, plant, processes
from snapmgr.testing.lab import new_id, new_record
from snapmgr.testing.trees import flush
from support.reflink import store_of

pytestmark = pytest.mark.needs("root", "loop", "xfs", "btrfs")
_RUNNER = CommandRunner()


def test_blocks_are_shared(lab: FolderLab) -> None:
    origin = lab.make_origin()
    (origin / "big").write_bytes(os.urandom(32 << 20))
    flush(origin)
    before = os.statvfs(origin)
    ref = lab.take_one(origin)
    after = os.statvfs(origin)
    assert (before.f_bfree - after.f_bfree) * before.f_frsize < 8 << 20
    assert lab.backend().usage(ref, exact=True).exclusive_bytes == 0
    with lab.attached(ref, writable=True) as clone:
        assert (clone / "big").read_bytes() == (origin / "big").read_bytes()
        assert (before.f_bfree - os.statvfs(origin).f_bfree) * before.f_frsize < 8 << 20


def test_forecast_holds(lab: FolderLab) -> None:
    origin = lab.make_origin()
    for number in range(600):
        (origin / str(number)).write_bytes(b"x" * 9000)
    with (origin / "fragmented").open("wb") as file:
        for number in range(1500):
            file.seek(number * 8192)
            file.write(b"x" * 4096)
    with lab.backend().arm((lab.volume(origin),), new_id()) as armed:
        armed.sync()
        start, cpu_start = time.monotonic(), time.process_time()
        armed.fire(start + 60)
        took_s, cpu_s = time.monotonic() - start, time.process_time() - cpu_start
    # Other work on the machine makes the former longer; a wrong count of files or extents shows as much more.
    assert cpu_s / 4 < armed.stall_s < took_s * 10


def test_deadline_ends_it_between_two_files(lab: FolderLab) -> None:
    origin, small = lab.make_origin(), lab.make_origin()
    for number in range(2000):
        (origin / str(number)).write_bytes(b"x")
    volumes = (lab.volume(small), lab.volume(origin))
    # On a busy machine the small one may need longer.
    for patience_s in (0.02, 0.05, 0.1, 0.2, 0.4):
        snapshot_id = new_id()
        with lab.backend().arm(volumes, snapshot_id) as armed:
            armed.launched = True
            start = time.monotonic()
            with pytest.raises(FireError, match="not finished in time|before the copy was begun") as caught:
                armed.fire(start + patience_s)
            assert time.monotonic() - start < 5
        if caught.value.shots:
            break
        lab.repair_all(volumes[0].pool)
    assert [shot.ref.volume_id for shot in caught.value.shots] == [volumes[0].id]
    kinds = [found.kind for found in lab.found(volumes[0].pool) if found.snapshot_id == snapshot_id]
    assert sorted(kinds) == ["debris", "snapshot"]
    lab.repair_all(volumes[0].pool)
    lab.backend().delete(caught.value.shots[0].ref)


def test_a_writer_is_noticed(lab: FolderLab) -> None:
    origin = lab.make_origin()
    for number in range(3000):
        (origin / f"{number}").write_bytes(b"x")
    with lab.backend().arm((lab.volume(origin),), new_id()) as armed:
        pid = processes.spawn(lambda: [os.unlink(origin / f"{number}") for number in range(2999, 0, -1)])
        with pytest.raises(FireError, match="changed or vanished"):
            armed.fire(time.monotonic() + 60)
        assert processes.succeeds(pid)


def test_hard_links_of_a_file_whose_path_is_too_long_for_a_call(lab: FolderLab) -> None:
    origin = lab.make_origin()
    names = [f"{number:02}" + "x" * 250 for number in range(20)]
    with ExitStack() as stack:
        fd = opened(stack, origin)
        for name in names:
            os.mkdir(name, dir_fd=fd)
            fd = opened(stack, name, fd)
        os.close(os.open("one", os.O_WRONLY | os.O_CREAT, 0o640, dir_fd=fd))
        os.link("one", "other", src_dir_fd=fd, dst_dir_fd=fd)
        ref = lab.take_one(origin)
        copy = opened(stack, store_of(lab) / ref.name / "data")
        for name in names:
            copy = opened(stack, name, copy)
        one, other = (os.stat(name, dir_fd=copy).st_ino for name in ("one", "other"))
        assert one == other


def opened(stack: ExitStack, path: Path | str, above: int | None = None) -> int:
    """Open a folder until the stack ends."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=above)
    stack.callback(os.close, fd)
    return fd


def test_bind_mount_of_the_same_file_system_is_left_out(lab: FolderLab) -> None:
    # st_dev does not tell it.
    origin, elsewhere = lab.make_origin(), lab.make_origin()
    (elsewhere / "not-ours").write_bytes(b"x")
    (elsewhere / "file").write_bytes(b"not ours")
    (origin / "nested").mkdir()
    (origin / "file").write_bytes(b"ours")
    bind(str(elsewhere), str(origin / "nested"), read_only=False)
    _RUNNER.run(["mount", "--bind", str(elsewhere / "file"), str(origin / "file")])
    try:
        assert set(lab.volume(origin).excluded) == {str(origin / "nested"), str(origin / "file")}
        ref = lab.take_one(origin)
        with lab.attached(ref, writable=False) as reached:
            assert os.listdir(reached / "nested") == []
            assert (reached / "file").read_bytes() == b""
    finally:
        unmount(str(origin / "file"))
        unmount(str(origin / "nested"))


def test_mount_that_appears_after_locate_is_refused(lab: FolderLab) -> None:
    origin, elsewhere = lab.make_origin(), lab.make_origin()
    (origin / "nested").mkdir()
    (origin / "file").write_bytes(b"ours")
    (elsewhere / "file").write_bytes(b"not ours")
    volume = lab.volume(origin)
    bind(str(elsewhere), str(origin / "nested"), read_only=False)
    try:
        with pytest.raises(StorageError, match="appeared"), lab.backend().arm((volume,), new_id()):
            pass
    finally:
        unmount(str(origin / "nested"))
    _RUNNER.run(["mount", "--bind", str(elsewhere / "file"), str(origin / "file")])
    try:
        with pytest.raises(StorageError, match="appeared.*/file"), lab.backend().arm((volume,), new_id()):
            pass
    finally:
        unmount(str(origin / "file"))
    with lab.backend().arm((volume,), new_id()) as armed:
        bind(str(elsewhere), str(origin / "nested"), read_only=False)
        try:
            with pytest.raises(FireError, match="another mount"):
                armed.fire(time.monotonic() + 60)
        finally:
            unmount(str(origin / "nested"))


def test_symlinks_are_never_followed(lab: FolderLab) -> None:
    origin, secret = lab.make_origin(), lab.make_origin()
    (secret / "secret").write_bytes(b"not for copies")
    (origin / "folder").mkdir()
    with lab.backend().arm((lab.volume(origin),), new_id()) as armed:
        (origin / "folder").rmdir()
        (origin / "folder").symlink_to(secret)
        armed.launched = True
        (shot,) = armed.fire(time.monotonic() + 60)
    data = store_of(lab) / shot.ref.name / "data"
    assert os.readlink(data / "folder") == str(secret)


def test_nothing_but_system_calls_under_the_lock(lab: FolderLab) -> None:
    origin = lab.make_origin()
    plant(origin)
    with lab.backend().arm((lab.volume(origin),), new_id()) as armed:

        def forbidden(event: str, _args: object) -> None:
            if watching and event in {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "import"}:
                raise AssertionError(event)

        watching = True
        sys.addaudithook(forbidden)
        try:
            armed.fire(time.monotonic() + 60)
        finally:
            watching = False


def test_read_only_attachment_in_use_elsewhere_is_not_deleted(lab: FolderLab, tmp_path: Path) -> None:
    origin = lab.make_origin()
    (origin / "file").write_bytes(b"x")
    ref = lab.take_one(origin)
    point = tmp_path / "point"
    bind(str(store_of(lab) / ref.name / "data"), str(point), read_only=True)
    try:
        with pytest.raises(InUseError, match=str(point)):
            lab.backend().delete(ref)
        assert (point / "file").read_bytes() == b"x"
    finally:
        unmount(str(point))
    _RUNNER.run(["mount", "-t", "tmpfs", "x", str(store_of(lab) / ref.name / "data")])
    try:
        with pytest.raises(InUseError):
            lab.backend().delete(ref)
    finally:
        _RUNNER.run(["umount", str(store_of(lab) / ref.name / "data")])
    lab.backend().delete(ref)


def test_clone_with_a_mount_in_it_is_not_detached(lab: FolderLab) -> None:
    origin = lab.make_origin()
    (origin / "folder").mkdir()
    ref = lab.take_one(origin)
    record = new_record(ref, writable=True)
    folder = Path(str(lab.backend().attach(record).directory), "folder")
    with lab._tmpfs(folder):
        (folder / "precious").write_bytes(b"x")
        with pytest.raises(InUseError):
            lab.backend().detach(record)
        assert (folder / "precious").read_bytes() == b"x"
    lab.backend().detach(record)
    assert not folder.exists()
