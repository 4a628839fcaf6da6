"""The main job on real input: a loaded MariaDB on btrfs, snapshots that restore exactly, and all that goes wrong."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from snapmgr.access.attach import attached, data_path
from snapmgr.backup.run import backup, plan_backup
from snapmgr.contract.errors import BusyError, NotQuiescedError, VerificationError
from snapmgr.keep.prune import prune
from snapmgr.mysql.lock.heldlock import HeldLock
from snapmgr.verify.run import verify
from support.exactness import take_and_check
from support.scene import Scene, btrfs_scene
from support.server import private_server, server_user
from support.storage import loop_filesystem, work_folder
from support.thoroughness import CAMPAIGN

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")


def test_snapshots_under_load_restore_exactly(scene: Scene) -> None:
    ctx, count = scene.context(), 20 if CAMPAIGN else 6
    take_and_check(ctx, scene.server, count)
    assert scene.states() == ["ready"] * count


def test_verify_proves_it_and_leaves_no_clone(scene: Scene) -> None:
    ctx = scene.context()
    manifest = backup(ctx, ctx.config.job("demo"))
    verification = verify(ctx, ctx.catalog.load(manifest.id))
    assert verification.result == "passed"
    said = " ".join(verification.checks)
    for expected in ("GTID", "CHECK TABLE", "recovered", "recorded position"):
        assert expected in said
    assert ctx.catalog.load(manifest.id).verified
    assert scene.stored() == [manifest.id]
    assert ctx.catalog.leases() == ([], [])
    assert os.listdir(scene.scratch) == []


def test_assertions_are_sql_that_must_be_true(scene: Scene) -> None:
    scene.configure(
        '[job.demo.verify]\ncheck = "none"\nassertions = ["SELECT 1 = 1", "SELECT COUNT(*) > 9e9 FROM mysql.db"]'
    )
    ctx = scene.context()
    job = ctx.config.job("demo")
    manifest = backup(ctx, job)
    with pytest.raises(VerificationError, match="assertion"):
        verify(ctx, ctx.catalog.load(manifest.id), job.verify)
    assert not ctx.catalog.load(manifest.id).verified


def test_a_damaged_tablespace_fails_its_verification(scene: Scene) -> None:
    """Damaged under the running server: the snapshot is a true picture of it, and verify must say what it is worth."""
    scene.server.query("CREATE DATABASE hurt")
    scene.server.query("CREATE TABLE hurt.t (id INT PRIMARY KEY, v VARCHAR(500)) ENGINE=InnoDB")
    scene.server.query("INSERT INTO hurt.t SELECT seq, REPEAT('x', 400) FROM hurt.seq_1_to_3000")
    # A clean restart: pages that the redo log made anew would be healed by recovery.
    scene.server.restart()
    path = scene.server.datadir / "hurt" / "t.ibd"
    with path.open("r+b") as file:
        file.seek(16384 * 5)
        file.write(b"\xa5" * 16384 * 3)
        os.fsync(file.fileno())
    try:
        done = scene.run("backup", "demo", "--verify")
        assert done.returncode == 6, done.stderr
        assert scene.states() == ["ready"]
        assert scene.entries()[0].verification is not None
        assert scene.entries()[0].verification.result == "failed"
        assert scene.run("list").stdout.count("FAILED") == 1
    finally:
        scene.server.query("DROP DATABASE hurt")


def test_retention_prunes_storage_and_catalog(scene: Scene) -> None:
    scene.configure("[job.demo.retention]\nkeep-last = 2")
    ctx = scene.context()
    job = ctx.config.job("demo")
    manifests = [backup(ctx, job) for _ in range(4)]
    assert sorted(prune(ctx, job).deleted) == sorted(manifest.id for manifest in manifests[:2])
    assert scene.stored() == sorted(manifest.id for manifest in manifests[2:])
    assert prune(ctx, job).deleted == ()


def test_what_is_mounted_is_not_pruned(scene: Scene) -> None:
    scene.configure("[job.demo.retention]\nkeep-last = 1")
    ctx = scene.context()
    job = ctx.config.job("demo")
    first = backup(ctx, job)
    with attached(ctx, ctx.catalog.load(first.id)):
        backup(ctx, job)
        assert prune(ctx, job).deleted == ()
    assert prune(ctx, job).deleted == (first.id,)


def test_the_clone_is_writable_and_the_original_never_changes(scene: Scene) -> None:
    ctx = scene.context()
    manifest = backup(ctx, ctx.config.job("demo"))
    original = scene.snapshot_paths()[0] / "data" / "ibdata1"
    before = original.read_bytes()
    with attached(ctx, ctx.catalog.load(manifest.id)) as lease:
        (data_path(lease) / "ibdata1").write_bytes(b"spoilt")
    assert original.read_bytes() == before


def test_dry_run_touches_and_locks_nothing(scene: Scene) -> None:
    log = scene.folder / "general.log"
    log.touch()
    os.chown(log, (scene.server.datadir / "ibdata1").stat().st_uid, -1)
    scene.folder.chmod(0o711)
    scene.server.query("SET GLOBAL general_log_file = %s", str(log))
    scene.server.query("SET GLOBAL general_log = 1")
    before = _tree(scene.folder)
    assert scene.run("backup", "demo", "--dry-run").returncode == 0
    assert scene.run("prune", "demo", "--dry-run").returncode == 0
    scene.server.query("SET GLOBAL general_log = 0")
    assert _tree(scene.folder) == before
    assert scene.stored() == []
    said = log.read_text(errors="replace").upper()
    assert "SHOW" in said
    for word in ("BACKUP STAGE", "READ LOCK", "LOCK TABLES"):
        assert word not in said


def _tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.suffix != ".log")


def test_once_a_backend_is_good_enough_the_others_walk_through_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(*_arguments: object, **_options: object) -> None:
        raise AssertionError("reflink was asked for the datadir")

    monkeypatch.setattr("snapmgr_reflink.backend.ReflinkBackend.locate", walk)
    ctx = scene.context()
    assert plan_backup(ctx, ctx.config.job("demo")).backend == "btrfs"
    scene.configure('backend = "reflink"')
    ctx = scene.context()
    with pytest.raises(AssertionError):
        plan_backup(ctx, ctx.config.job("demo"))


def test_the_socket_of_another_server_is_refused(scene: Scene) -> None:
    with work_folder() as folder, private_server(folder / "other", ("--general-log",)) as other:
        log = Path(str(other.query("SELECT CONCAT(@@datadir, @@general_log_file)")[0][0]))
        scene.configure(
            text=f'[job.demo]\nsource = "mysql"\nsocket = "{other.socket}"\nuser = "root"\n'
            f'datadir = "{scene.server.datadir}"\n'
        )
        done = scene.run("backup", "demo")
        assert done.returncode == 4
        assert str(scene.server.datadir) in done.stderr
        assert "BACKUP STAGE" not in log.read_text(errors="replace")
    assert scene.stored() == []


def test_files_outside_of_the_volume_are_refused_with_their_list() -> None:
    with (
        loop_filesystem("ext4", 200 << 20) as elsewhere,
        btrfs_scene(server=False) as scene,
    ):
        os.chown(elsewhere.point, server_user().pw_uid, -1)
        options = (f"--innodb-log-group-home-dir={elsewhere.point}",)
        datadir = Path(scene.file_system.point) / "mysql" / "data"
        with private_server(datadir, options, install_options=options) as server:
            scene._server = server
            scene.configure()
            ctx = scene.context()
            with pytest.raises(NotQuiescedError, match=f"redo log at {elsewhere.point}"):
                backup(ctx, ctx.config.job("demo"))
        assert scene.stored() == []


def test_a_subvolume_mounted_alone_on_an_ext4_parent() -> None:
    with (
        loop_filesystem("ext4", 200 << 20) as parent,
        btrfs_scene(server=False) as scene,
    ):
        top = Path(scene.file_system.point)
        subprocess.run(["btrfs", "-q", "subvolume", "create", top / "@mysql"], check=True)
        point = Path(parent.point) / "var-lib"
        point.mkdir()
        subprocess.run(["mount", "-o", "subvol=@mysql", scene.file_system.device, point], check=True)
        try:
            with private_server(point / "mysql") as server:
                scene._server = server
                scene.configure()
                ctx = scene.context()
                manifest = backup(ctx, ctx.config.job("demo"))
                assert manifest.members[0].subpath == "mysql"
                assert verify(ctx, ctx.catalog.load(manifest.id)).result == "passed"
        finally:
            subprocess.run(["umount", point], check=True)


def test_tables_with_a_data_directory_inside_the_volume(scene: Scene) -> None:
    """Their absolute paths lead a server on a clone to the live files: it must see the clone's instead."""
    extra = Path(scene.file_system.point) / "mysql" / "extra"
    extra.mkdir()
    os.chown(extra, (scene.server.datadir / "ibdata1").stat().st_uid, -1)
    scene.server.query("CREATE DATABASE wide")
    scene.server.query(f"CREATE TABLE wide.t (id INT PRIMARY KEY) ENGINE=InnoDB DATA DIRECTORY '{extra}'")
    scene.server.query("INSERT INTO wide.t SELECT seq FROM wide.seq_1_to_1000")
    try:
        scene.configure('[job.demo.verify]\nassertions = ["SELECT COUNT(*) = 1000 FROM wide.t"]')
        ctx = scene.context()
        job = ctx.config.job("demo")
        manifest = backup(ctx, job)
        scene.server.query("DELETE FROM wide.t WHERE id > 10")
        assert verify(ctx, ctx.catalog.load(manifest.id), job.verify).result == "passed"
        assert scene.server.query("SELECT COUNT(*) FROM wide.t") == ((10,),)
    finally:
        scene.server.query("DROP DATABASE wide")


def test_a_stopped_server(scene: Scene) -> None:
    scene.server.stop()
    text = f'[job.demo]\nsource = "mysql"\nquiesce = "stopped"\ndatadir = "{scene.server.datadir}"\n'
    try:
        scene.configure(text=text)
        ctx = scene.context()
        manifest = backup(ctx, ctx.config.job("demo"))
        assert manifest.quiesce is not None
        assert manifest.quiesce.level == "stopped"
        assert manifest.position is None
        assert verify(ctx, ctx.catalog.load(manifest.id)).result == "passed"
    finally:
        scene.server.start()
    with pytest.raises(NotQuiescedError, match="runs on"):
        backup(ctx, ctx.config.job("demo"))


def test_the_last_look_at_the_layout_needs_no_further_connection(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.configure('quiesce = "global-read-lock"')
    ctx, release = scene.context(), HeldLock.release

    def connections() -> int:
        return int(scene.server.query("SHOW GLOBAL STATUS LIKE 'Connections'")[0][1])

    def gone(lock: HeldLock) -> None:
        release(lock)
        lock.connection.drop()

    once = connections()
    more = connections() - once  # what our question costs
    once = connections()
    backup(ctx, ctx.config.job("demo"))
    assert connections() - once - more == 2
    # If the lock's connection is gone after the proof, another one does.
    monkeypatch.setattr(HeldLock, "release", gone)
    once = connections()
    assert backup(ctx, ctx.config.job("demo")).state == "ready"
    assert connections() - once - more == 3


def test_two_runs_at_once(scene: Scene) -> None:
    ctx = scene.context()
    ctx.catalog.make()
    with ctx.catalog.job_lock("demo"):
        assert scene.run("backup", "demo").returncode == 3
        with pytest.raises(BusyError):
            prune(ctx, ctx.config.job("demo"))
    assert scene.run("backup", "demo").returncode == 0


def test_a_full_state_directory_takes_nothing(scene: Scene) -> None:
    scene.state.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", scene.state], check=True)
    try:
        assert scene.run("backup", "demo").returncode == 0
        for number in range(100):
            try:
                (scene.state / f"filler{number}").write_bytes(b"x" * 4096)
            except OSError:
                break
        done = scene.run("backup", "demo")
        assert done.returncode == 1
        assert "make room" in done.stderr
        assert len(scene.stored()) == 1
        for path in scene.state.glob("filler*"):
            path.unlink()
        assert scene.run("backup", "demo").returncode == 0
        assert scene.states().count("ready") == 2
    finally:
        subprocess.run(["umount", scene.state], check=True)


def test_the_password_appears_nowhere(scene: Scene) -> None:
    secret = "Tr0ub4dor-and-3"
    scene.server.query("CREATE USER backup@localhost IDENTIFIED BY %s", secret)
    scene.server.query("GRANT ALL ON *.* TO backup@localhost")
    options = scene.folder / "client.cnf"
    options.write_text(f"[client]\nuser=backup\npassword={secret}\nsocket={scene.server.socket}\n")
    options.chmod(0o600)
    scene.configure(text=f'[job.demo]\nsource = "mysql"\ndefaults_file = "{options}"\n')
    good = scene.run("--debug", "backup", "demo", "--verify")
    assert good.returncode == 0, good.stderr
    scene.server.query("REVOKE ALL PRIVILEGES, GRANT OPTION FROM backup@localhost")
    denied = scene.run("--debug", "backup", "demo")
    scene.server.query("DROP USER backup@localhost")
    refused = scene.run("--debug", "backup", "demo")
    assert (denied.returncode, refused.returncode) == (4, 4)
    for done in (good, denied, refused):
        assert secret not in done.stdout + done.stderr
    written = [path for folder in (scene.state, scene.scratch) for path in folder.rglob("*") if path.is_file()]
    written += Path(scene.file_system.point, ".snapmgr").glob("*.json")
    assert len(written) >= 3
    assert not [path for path in written if secret.encode() in path.read_bytes()]
    options.chmod(0o644)
    open_ = scene.run("backup", "demo")
    assert open_.returncode == 2
    assert "chmod" in open_.stderr
