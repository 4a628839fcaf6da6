"""Somebody exchanges folders and symlinks while we work: nothing outside is mounted over, taken down or removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.access.attach import attach, release
from snapmgr.backup.run import backup
from snapmgr.catalog.store import Catalog
from snapmgr.config.model import Config
from snapmgr.context import Context
from snapmgr.contract.errors import ConfigError, SnapmgrError, StorageError
from snapmgr.doctor.fix import fix
from snapmgr.mysql.server.rundir import make_run_dir
from snapmgr.mysql.server.throwaway import run_folder
from snapmgr.restore.run import restore
from snapmgr.system.blockdev import read_mounts
from snapmgr.system.mount import bind, remove_point, unmount
from support.btrfs import run
from support.scene import btrfs_scene
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root")
USER = 65534
ROUNDS = 150
# Another user's process: PATH is a folder, then a symlink to TARGET, then a folder again, and never missing.
EXCHANGE = """
import ctypes, os, sys
path, target = sys.argv[1:]
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
os.symlink(target, path + '.link')
libc, here, exchange = ctypes.CDLL(None), -100, 2
names = os.fsencode(path), os.fsencode(path + '.link')
print('ready', flush=True)
while True:
    libc.renameat2(here, names[0], here, names[1], exchange)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A work folder with "theirs", which belongs to another user, and "outside", which must stay as it is."""
    with work_folder() as made:
        (made / "theirs").mkdir()
        os.chown(made / "theirs", USER, USER)
        (made / "theirs").chmod(0o755)
        (made / "source").mkdir()
        (made / "source" / "file").write_text("ours")
        (made / "outside" / "point").mkdir(parents=True)
        yield made
        for mount in reversed(read_mounts()):
            if mount.point.startswith(f"{made}/"):
                run("umount", mount.point)


@contextmanager
def _exchanging(path: Path, target: Path) -> Iterator[None]:
    path.mkdir()
    os.chown(path, USER, USER)
    command = [sys.executable, "-c", EXCHANGE, str(path), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.kill()


def _points(below: Path) -> list[str]:
    return [mount.point for mount in read_mounts() if mount.point.startswith(f"{below}/")]


def test_mounting_below_a_folder_that_is_exchanged(folder: Path) -> None:
    outside = folder / "outside"
    done = refused = 0
    with _exchanging(folder / "theirs" / "x", outside):
        for _ in range(ROUNDS):
            try:
                bind(str(folder / "source"), str(folder / "theirs" / "x" / "point"), read_only=True)
                done += 1
            except SnapmgrError:
                refused += 1
            assert _points(outside) == []
            while _points(folder / "theirs"):
                with suppress(SnapmgrError):
                    unmount(str(folder / "theirs" / "x" / "point"))
    assert done
    assert refused
    assert os.listdir(outside) == ["point"]


def test_unmounting_below_a_folder_that_is_exchanged_takes_down_only_ours(folder: Path) -> None:
    outside, point = folder / "outside", folder / "theirs" / "x" / "point"
    run("mount", "-t", "tmpfs", "tmpfs", outside / "point")
    (outside / "point" / "precious").touch()
    done = refused = 0
    with _exchanging(folder / "theirs" / "x", outside):
        # Where others take the processors, the two of us seldom meet.
        end = time.monotonic() + 60
        while (done < ROUNDS // 10 or not refused) and time.monotonic() < end:
            try:
                bind(str(folder / "source"), str(point), read_only=True)
            except SnapmgrError:
                continue
            ours = next(mount for mount in read_mounts() if mount.point.startswith(f"{folder / 'theirs'}/"))
            while _points(folder / "theirs"):
                try:
                    unmount(str(point), mount_id=ours.id)
                    done += 1
                except SnapmgrError:
                    refused += 1
                assert (outside / "point" / "precious").exists(), "somebody else's mount was taken down"
    assert done
    assert refused


def test_removing_a_point_below_a_folder_that_is_exchanged(folder: Path) -> None:
    outside = folder / "outside"
    with _exchanging(folder / "theirs" / "x", outside):
        for _ in range(ROUNDS * 10):
            remove_point(str(folder / "theirs" / "x" / "point"))
            assert (outside / "point").is_dir()


def test_somebody_elses_symlink_is_named_by_mount_and_umount(folder: Path) -> None:
    link = folder / "theirs" / "x"
    link.symlink_to(folder / "outside")
    os.lchown(link, USER, USER)
    with pytest.raises(StorageError, match="another user's symlink"):
        bind(str(folder / "source"), str(link / "point"), read_only=True)
    with pytest.raises(StorageError, match="another user's symlink"):
        unmount(str(link / "point"))


def test_the_folder_of_a_throwaway_server_is_given_away_without_following_anything(folder: Path) -> None:
    """As a second server finds it: it belongs to the first one's user, who has laid symlinks in it."""
    run_dir, target, secret = folder / "v", folder / "outside", folder / "outside" / "secret"
    secret.write_text("precious")
    secret.chmod(0o600)
    _, log = make_run_dir(str(run_dir), USER, USER)
    log.close()
    assert run_dir.stat().st_uid == (run_dir / "tmp").stat().st_uid == USER
    assert (run_dir / "server.log").stat().st_uid == 0
    (run_dir / "server.log").unlink()
    (run_dir / "server.log").symlink_to(secret)
    _, log = make_run_dir(str(run_dir), USER, USER)
    log.write(b"said")
    log.close()
    assert secret.read_text() == "precious"
    assert (run_dir / "server.log").read_text() == "said"
    (run_dir / "tmp").rmdir()
    (run_dir / "tmp").symlink_to(target)
    before = target.stat()
    with pytest.raises(OSError, match="Not a directory|symbolic links"):
        make_run_dir(str(run_dir), USER, USER)
    assert (target.stat().st_uid, target.stat().st_mode) == (before.st_uid, before.st_mode)


def test_the_folder_of_a_throwaway_server_is_removed_without_following_anything(folder: Path) -> None:
    for _ in range(10):
        with ExitStack() as attack:
            with suppress(StorageError), run_folder(folder) as made:
                os.chown(made, USER, USER)
                (Path(made) / "tmp").symlink_to(folder / "outside")
                attack.enter_context(_exchanging(Path(made) / "x", folder / "outside"))
            assert (folder / "outside" / "point").is_dir()
    with run_folder(folder) as made:
        (Path(made) / "tmp").symlink_to(folder / "outside")
    assert not Path(made).exists()
    assert (folder / "outside" / "point").is_dir()


@pytest.mark.needs("loop", "btrfs", "btrfsutil")
def test_a_symlink_in_a_snapshot_in_place_of_a_folder_is_not_followed() -> None:
    with btrfs_scene(server=False, size_bytes=256 << 20) as scene:
        data = Path(scene.file_system.point, "mysql", "above", "data")
        data.mkdir(parents=True)
        scene.configure(text=f'[job.demo]\nsource = "directory"\npath = "{data}"\n')
        ctx = scene.context()
        backup(ctx, ctx.config.job("demo"))
        # As if it had been exchanged after we looked and before the snapshot.
        (data.parent / "link").symlink_to("/etc")
        taken = backup(ctx, ctx.config.job("demo"))
        (member,) = taken.members
        for subpath, places in (("above/link", {}), ("above/data", {str(data): "above/link/ssl"})):
            changed = replace(taken, members=(replace(member, subpath=subpath, places=places),))
            ctx.catalog.write(changed)
            with pytest.raises(StorageError, match="symlink"):
                attach(ctx, ctx.catalog.load(taken.id), writable=True, why="mount")
            assert ctx.catalog.leases() == ([], [])
        assert len(scene.stored()) == 2
        ctx.catalog.write(taken)
        release(ctx, attach(ctx, ctx.catalog.load(taken.id), writable=True, why="mount"))


def test_doctor_empties_no_mount_in_what_a_dead_server_left(folder: Path) -> None:
    scratch = folder / "scratch"
    left = scratch / "v4194305-abcdefgh"  # beyond the largest pid
    (left / "tmp").mkdir(parents=True)
    run("mount", "--bind", folder / "source", left / "tmp")
    config = Config(files=(), state_dir=folder / "state", scratch_dir=scratch, jobs={}, backends={})
    ctx = Context(config=config, catalog=Catalog(config.state_dir), tell=print)
    ctx.catalog.make()
    (action,) = fix(ctx, ()).actions
    assert action.result == "failed"
    assert "mounted at" in str(action.error)
    assert (folder / "source" / "file").read_text() == "ours"
    run("umount", left / "tmp")
    assert [one.result for one in fix(ctx, ()).actions] == ["done"]
    assert not left.exists()


@pytest.mark.needs("loop", "btrfs", "btrfsutil")
def test_a_copy_is_no_place_to_restore_to() -> None:
    with btrfs_scene(server=False, size_bytes=256 << 20) as scene:
        data = Path(scene.file_system.point, "data")
        data.mkdir()
        scene.configure(text=f'[job.demo]\nsource = "directory"\npath = "{data}"\nbackend = "reflink"\n')
        ctx = scene.context()
        taken = backup(ctx, ctx.config.job("demo"))
        store = Path(taken.members[0].ref.pool.id)
        for dest in (store / taken.id / "data" / "x", store / "x", store):
            with pytest.raises(ConfigError, match="is in the folder of copies"):
                restore(ctx, ctx.catalog.load(taken.id), str(dest))
        assert restore(ctx, ctx.catalog.load(taken.id), f"{scene.file_system.point}/x").differences == ()
