"""Snapshot sets: one member for each volume that the server writes to, all of one instant while it stands still."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pymysql
import pytest

from snapmgr.access.attach import attach, copies, release
from snapmgr.access.deletion import delete
from snapmgr.backup.run import backup
from snapmgr.contract.errors import NotQuiescedError, StorageError
from snapmgr.verify.run import verify
from support.exactness import take_and_check
from support.faults import Faults
from support.scene import Scene
from support.server import private_server, server_user
from support.storage import LoopFileSystem, loop_filesystem, work_folder
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Lease, Manifest

pytestmark = pytest.mark.needs("root", "loop", "xfs", "mariadbd")
# 20 were shown once; CI repeats a few.
SNAPSHOTS = int(os.environ.get("SNAPMGR_FREEZE_SNAPSHOTS", "20" if CAMPAIGN else "3"))
STORE = ".snapmgr-reflink"


class TwoVolumes(Scene):
    """A server with its data on one file system, its redo log and the undo tablespaces on another."""

    def __init__(self, first: LoopFileSystem, second: LoopFileSystem, folder: Path) -> None:
        super().__init__(first, folder, None)
        self.redo = second.point / "redo"
        self.redo.mkdir()
        os.chown(self.redo, server_user().pw_uid, server_user().pw_gid)
        self.stores = (first.point / STORE, second.point / STORE)

    def stored(self) -> list[str]:
        """Return the names in both stores of copies."""
        return sorted(path.name for store in self.stores if store.exists() for path in store.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def scene() -> Iterator[TwoVolumes]:
    with loop_filesystem("xfs", 1 << 30) as first, loop_filesystem("xfs", 1 << 30) as second, work_folder() as folder:
        scene = TwoVolumes(first, second, folder)
        moved = (f"--innodb-log-group-home-dir={scene.redo}", f"--innodb-undo-directory={scene.redo}")
        with private_server(
            first.point / "data",
            moved,
            install_options=(*moved, "--innodb-undo-tablespaces=2"),
        ) as scene._server:
            yield scene


@pytest.fixture(autouse=True)
def _clean(scene: TwoVolumes) -> Iterator[None]:
    scene.state = scene.folder / f"state-{time.monotonic_ns()}"
    scene.configure('quiesce = "freeze-process"')
    yield
    scene.server.query("DROP DATABASE IF EXISTS load_test")
    for store in scene.stores:
        if store.exists():
            shutil.rmtree(store)


def _options(scene: TwoVolumes, lease: Lease, manifest: Manifest) -> tuple[str, ...]:
    redo = copies(lease, manifest)[str(scene.redo)]
    return (f"--innodb-log-group-home-dir={redo}", f"--innodb-undo-directory={redo}")


def test_sets_under_load_restore_exactly(scene: TwoVolumes) -> None:
    ctx = scene.context()
    taken = take_and_check(
        ctx,
        scene.server,
        SNAPSHOTS,
        options=lambda lease, manifest: _options(scene, lease, manifest),
    )
    for manifest in taken:
        assert manifest.quiesce is not None
        assert 0 < manifest.quiesce.frozen_s <= manifest.quiesce.held_s
        assert [member.path for member in manifest.members] == [str(scene.server.datadir), str(scene.redo)]
        assert len({member.ref.pool.id for member in manifest.members}) == 2
        result = verify(ctx, ctx.catalog.load(manifest.id))
        assert any("CHECK TABLE" in check for check in result.checks)
    assert scene.stored() == sorted(member.ref.name for manifest in taken for member in manifest.members)


def test_without_standing_still_several_volumes_are_refused(scene: TwoVolumes) -> None:
    scene.configure()
    ctx = scene.context()
    with pytest.raises(NotQuiescedError, match=f"file by file.*redo log.* at {scene.redo}") as refused:
        backup(ctx, ctx.config.job("demo"))
    assert "freeze-process" in str(refused.value.hint)
    assert scene.stored() == []


def test_a_stopped_servers_set(scene: TwoVolumes) -> None:
    """What the files tell is enough: symlinks lead to the other volume."""
    elsewhere = scene.redo.parent / "tables"
    elsewhere.mkdir()
    os.chown(elsewhere, server_user().pw_uid, server_user().pw_gid)
    datadir = scene.file_system.point / "data2"
    with private_server(datadir) as server:
        server.query("CREATE DATABASE d")
        server.query(f"CREATE TABLE d.t (id INT PRIMARY KEY) ENGINE=InnoDB DATA DIRECTORY '{elsewhere}'")
        server.query("INSERT INTO d.t VALUES (1), (2), (3)")
        server.stop()
        scene.configure(
            text=f'[job.demo]\nsource = "mysql"\nquiesce = "stopped"\ndatadir = "{datadir}"\n[job.demo.verify]\n'
            'assertions = ["SELECT COUNT(*) = 3 FROM d.t"]\n'
        )
        ctx = scene.context()
        manifest = backup(ctx, ctx.config.job("demo"))
        assert [member.path for member in manifest.members] == [str(datadir), str(elsewhere / "d")]
        # Were the live table opened instead of the copy, this would be seen.
        server.start()
        server.query("DELETE FROM d.t")
        server.stop()
        assert verify(ctx, ctx.catalog.load(manifest.id), ctx.config.job("demo").verify).result == "passed"
    shutil.rmtree(datadir)
    shutil.rmtree(elsewhere)


def test_a_set_is_mounted_in_folders_and_taken_down_whole(scene: TwoVolumes) -> None:
    manifest = scene.json("backup", "demo")["jobs"][0]["snapshot"]
    mounted = scene.json("mount", "latest", "--read-only")["mount"]
    point = Path(mounted["point"])
    assert mounted["data_path"] == str(point / "data")
    assert sorted(path.name for path in point.iterdir()) == ["data", "redo"]
    assert (point / "redo" / "ib_logfile0").stat().st_size == (scene.redo / "ib_logfile0").stat().st_size
    named = scene.folder / "named"
    named.mkdir()
    (named / "mine").touch()
    refused = scene.run("mount", manifest["id"], str(named))
    assert refused.returncode == 1
    assert "not empty" in refused.stderr
    scene.json("umount", "--all")
    assert not point.exists()
    assert scene.stored() == sorted([manifest["id"], f"{manifest['id']}.1"])


def test_both_members_are_deleted(scene: TwoVolumes) -> None:
    ctx = scene.context()
    delete(ctx, backup(ctx, ctx.config.job("demo")))
    assert scene.stored() == []


def test_a_set_without_one_of_its_members_is_not_attached_and_leaves_nothing(scene: TwoVolumes) -> None:
    ctx = scene.context()
    manifest = backup(ctx, ctx.config.job("demo"))
    lost = scene.stores[1] / manifest.members[1].ref.name
    shutil.rmtree(lost)
    failed = scene.run("verify", manifest.id)
    assert failed.returncode == 6, failed.stderr
    assert "storage is gone" in failed.stderr
    assert scene.stored() == [manifest.members[0].ref.name]
    assert ctx.catalog.leases() == ([], [])


def test_a_set_cut_short_between_its_members_is_removed(scene: TwoVolumes) -> None:
    """The second member's first clone hangs beyond the bound."""
    scene.configure('quiesce = "freeze-process"\nlock_hold = "2s"')
    files = sum(path.is_file() and path.stat().st_size > 0 for path in scene.server.datadir.rglob("*"))
    mark = scene.folder / "mark-second"
    # Two are tried while arming, one in each store.
    faults = Faults(delay_s=4.0, delay_mark=mark, delay_skip=files + 2)
    start = time.monotonic()
    with scene.start("backup", "demo", faults_=faults) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode in (1, 4), err
    assert mark.exists()
    assert "ready" not in scene.states()
    assert time.monotonic() - start < 30
    scene.server.query("SELECT 1")
    again = scene.run("backup", "demo")
    assert again.returncode == 0, again.stderr
    (ready,) = [entry.manifest for entry in scene.entries() if entry.manifest.state == "ready"]
    assert scene.stored() == sorted(member.ref.name for member in ready.members)


def test_a_lease_of_a_set_from_another_boot_is_released_whole(scene: TwoVolumes) -> None:
    ctx = scene.context()
    manifest = backup(ctx, ctx.config.job("demo"))
    lease = attach(ctx, ctx.catalog.load(manifest.id), writable=True, why="mount")
    assert len(scene.stored()) == 4
    release(ctx, lease)
    release(ctx, lease)
    assert scene.stored() == sorted(member.ref.name for member in manifest.members)


def test_a_job_that_names_a_folder_no_backend_takes_is_refused(scene: TwoVolumes) -> None:
    """A tablespace on a file system without reflinks: nothing could be of one instant with it."""
    elsewhere = scene.folder / "elsewhere"
    elsewhere.mkdir()
    os.chown(elsewhere, server_user().pw_uid, server_user().pw_gid)
    scene.server.query("CREATE DATABASE IF NOT EXISTS d")
    scene.server.query(f"CREATE TABLE d.t (id INT) ENGINE=InnoDB DATA DIRECTORY '{elsewhere}'")
    try:
        ctx = scene.context()
        with pytest.raises((StorageError, NotQuiescedError), match=str(elsewhere)):
            backup(ctx, ctx.config.job("demo"))
    finally:
        scene.server.query("DROP DATABASE d")
    assert scene.stored() == []


@pytest.mark.needs("btrfs", "btrfsutil")
def test_a_nested_subvolume_is_a_member_of_its_own() -> None:
    """In the datadir's snapshot it is an empty folder, which the copy's server must see filled."""
    with loop_filesystem("btrfs", 1 << 30) as file_system, work_folder() as folder:
        scene = Scene(file_system, folder, None)
        datadir = file_system.point / "mysql"
        for path in (datadir, datadir / "redo"):
            subprocess.run(["btrfs", "-q", "subvolume", "create", path], check=True)
            os.chown(path, server_user().pw_uid, server_user().pw_gid)
        moved = ("--innodb-log-group-home-dir=redo",)
        with private_server(datadir, moved, install_options=moved) as scene._server:
            scene.configure()
            ctx = scene.context()
            with pytest.raises(NotQuiescedError, match=f"subvolume at {datadir}/redo"):
                backup(ctx, ctx.config.job("demo"))
            scene.configure('quiesce = "freeze-process"')
            ctx = scene.context()
            scene.server.query("CREATE DATABASE d")
            manifest = backup(ctx, ctx.config.job("demo"))
            assert [member.path for member in manifest.members] == [str(datadir), str(datadir / "redo")]
            assert manifest.backend == "btrfs"
            assert manifest.excluded == ()
            assert verify(ctx, ctx.catalog.load(manifest.id)).result == "passed"
            assert scene.stored() == sorted(member.ref.name for member in manifest.members)


def test_a_server_runs_on_a_clone_of_a_set(scene: TwoVolumes) -> None:
    """In a mount namespace of its own it sees the clone at the paths of the live server, and nothing else there."""
    scene.server.query("CREATE DATABASE load_test")
    scene.server.query("CREATE TABLE load_test.t (a INT) ENGINE=InnoDB")
    scene.server.query("INSERT INTO load_test.t VALUES (1)")
    assert scene.run("backup", "demo").returncode == 0
    dev = scene.folder / "dev"
    facts = scene.json("clone", "latest", str(dev))["mount"]["server"]
    try:
        with pymysql.connect(
            unix_socket=facts["socket"], user="root", autocommit=True, ssl_disabled=True
        ) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT @@innodb_log_group_home_dir")
            assert cursor.fetchall() == ((str(scene.redo),),)
            cursor.execute("INSERT INTO load_test.t VALUES (2)")
        assert scene.server.query("SELECT * FROM load_test.t") == ((1,),)
        used = [path.stat() for path in Path(f"/proc/{facts['pid']}/fd").iterdir()]
        live, own = (scene.redo / "ib_logfile0").stat(), (dev / "redo/ib_logfile0").stat()
        assert not any(os.path.samestat(one, live) for one in used)
        assert any(os.path.samestat(one, own) for one in used)
    finally:
        done = scene.run("umount", str(dev))
    assert done.returncode == 0, done.stderr
    assert os.listdir(dev) == os.listdir(scene.scratch) == []
    assert [name for name in scene.stored() if name.startswith("attach")] == []
