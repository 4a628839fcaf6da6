"""Physical backups on real input: a loaded MariaDB, its own tool, XFS clones; each point restored and compared."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.backup.run import backup, plan_backup
from snapmgr.catalog.manifest import Verification
from snapmgr.contract.errors import ConfigError, NotQuiescedError, SnapmgrError, StorageError, VerificationError
from snapmgr.physical import run as physical_module
from snapmgr.restore.run import restore
from snapmgr.verify.run import verify
from support.exactness import take
from support.kinds import SYSTEM
from support.load import check_invariant
from support.processes import wait_until
from support.scene import Scene
from support.server import private_server
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Manifest
    from support.server import PrivateServer

pytestmark = pytest.mark.needs("root", "loop", "xfs", "mariadbd", "mariadb-backup")


@contextmanager
def physical_scene(*options: str, kind: str = SYSTEM) -> Iterator[Scene]:
    """Yield a scene whose server is on other storage than the staging folder of its job "demo"."""
    with ExitStack() as stack:
        file_system = stack.enter_context(loop_filesystem("xfs", 1 << 30))
        folder = stack.enter_context(work_folder())
        server = stack.enter_context(private_server(folder / "data", ("--log-bin=binlog", *options), kind=kind))
        scene = Scene(file_system, folder, server)
        Path(file_system.point, "staging").mkdir()
        configure(scene)
        yield scene


def configure(scene: Scene, mode: str = "incremental") -> None:
    scene.configure(
        text=f'[job.demo]\nsource = "physical"\nsocket = "{scene.server.socket}"\nuser = "root"\nmode = "{mode}"\n'
        f'backend = "reflink"\nstaging = "{scene.file_system.point}/staging"\n'
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[Scene]:
    with physical_scene() as scene:
        yield scene


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    shared.state = shared.folder / f"state-{len(os.listdir(shared.folder))}"
    configure(shared)
    shared.server.query("DROP DATABASE IF EXISTS load_test")
    shared.lines.clear()
    yield shared
    assert os.listdir(Path(shared.file_system.point, "staging")) == []
    subprocess.run(["rm", "-rf", f"{shared.file_system.point}/.snapmgr-reflink"], check=True)


def physical(manifest: Manifest):
    assert manifest.physical is not None
    return manifest.physical


def test_every_point_is_a_full_backup_by_itself(scene: Scene) -> None:
    """Full, then increments under load; the base deleted; each restored, started and compared with what was written."""
    ctx = scene.context()
    job = ctx.config.job("demo")
    taken, _ = take(ctx, scene.server, 4, writers=2, pause_s=0.01, take_one=lambda: backup(ctx, job))
    records = [physical(one.manifest) for one in taken]
    assert [record.kind for record in records] == ["full", "incremental", "incremental", "incremental"]
    assert [record.state for record in records] == ["raw", "prepared", "prepared", "prepared"]
    assert [record.base for record in records] == [None, *(one.manifest.id for one in taken[:-1])]
    assert all(later.fetched_bytes < records[0].fetched_bytes / 2 for later in records[1:])
    # Rows of MyISAM are in the binary log before they are committed: the tool's lock does not hold them off.
    assert [one.manifest.position for one in taken] == [None] * 4
    assert scene.run("delete", "--yes", taken[1].manifest.id).returncode == 0
    for one in (taken[0], *taken[2:]):
        ctx = scene.context()
        entry = ctx.catalog.load(one.manifest.id)
        assert (
            "the tool applied the redo log" in verify(ctx, entry).checks or physical(one.manifest).state == "prepared"
        )
        restored = restore(ctx, entry, str(scene.folder / f"restored-{one.manifest.short_id}"))
        with (
            private_server(Path(restored.data_path), install_options=None) as copy,
            copy.connect() as connection,
        ):
            check_invariant(connection, before=one.before, after=one.after)


def test_an_increment_follows_a_restart_that_the_binary_log_vouches_for(scene: Scene) -> None:
    ctx = scene.context()
    job = ctx.config.job("demo")
    scene.server.query("CREATE DATABASE load_test")
    scene.server.query(
        "CREATE TABLE load_test.t AS SELECT seq, REPEAT('x', 200) AS filler FROM load_test.seq_1_to_2000"
    )
    backup(ctx, job)
    scene.server.restart()
    scene.server.query("INSERT INTO load_test.t VALUES (0, 'after')")
    again = physical(backup(ctx, job))
    assert (again.kind, again.full_because) == ("incremental", None)
    scene.server.query("RESET MASTER")
    scene.server.restart()
    third = physical(backup(ctx, job))
    assert third.kind == "full"
    assert "binary log does not show" in str(third.full_because)


@pytest.mark.parametrize(
    ("put_back", "why"),
    [
        # With their binary logs, into the same files: only what is in them is older.
        ('cp -a "$1".old/. "$1"/', "binary log does not show"),
        # The binary logs are left, as they are where they have a folder of their own.
        ('cd "$1" && rm -rf $(ls | grep -v binlog) && rm "$1".old/binlog* && cp -a "$1".old/. .', "were put back"),
    ],
    ids=["with its logs", "without its logs"],
)
def test_data_that_were_put_back_get_a_full_backup(scene: Scene, put_back: str, why: str) -> None:
    """The LSN is beyond the backup's soon: an increment would go in without an error, and be wrong."""
    server = scene.server
    server.query("CREATE DATABASE load_test")
    server.query("CREATE TABLE load_test.t (n INT PRIMARY KEY, v VARCHAR(300))")
    server.stop()
    old = Path(f"{server.datadir}.old")
    try:
        subprocess.run(["cp", "-a", server.datadir, old], check=True)
        server.start()
        server.query("INSERT INTO load_test.t SELECT seq, 'forsaken' FROM load_test.seq_1_to_3000")
        ctx = scene.context()
        job = ctx.config.job("demo")
        backup(ctx, job)
        server.stop()
        subprocess.run(["bash", "-c", put_back, "put-back", server.datadir], check=True)
    finally:
        shutil.rmtree(old)
        if not server.running:
            server.start()
    server.query("INSERT INTO load_test.t SELECT seq, 'kept, and more of it' FROM load_test.seq_1_to_9000")
    manifest = physical(backup(ctx, job))
    assert manifest.kind == "full"
    assert why in str(manifest.full_because)


@pytest.mark.parametrize("victim", ["tool", "us"])
def test_a_kill_leaves_nothing_that_looks_finished(scene: Scene, victim: str) -> None:
    ctx = scene.context()
    backup(ctx, ctx.config.job("demo"))
    staging = Path(scene.file_system.point, "staging", "demo")
    process = scene.start("backup", "demo")
    try:
        while not (any(staging.glob("increment/*")) and (found := tools_below(process.pid))):
            assert process.poll() is None, process.communicate()
        os.kill(found[0] if victim == "tool" else process.pid, signal.SIGKILL)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    if victim == "tool":
        assert process.returncode == 1, error
        assert not staging.exists()
    else:
        assert staging.exists()
    assert scene.states() == ["ready"]
    ctx = scene.context()
    again = backup(ctx, ctx.config.job("demo"))
    assert physical(again).kind == "incremental"
    verify(ctx, ctx.catalog.load(again.id))


def tools_below(pid: int) -> list[int]:
    """Return the pids of mariadb-backup that `pid` has started, in any generation."""
    below, found = [pid], []
    while below:
        parent = below.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                for child in task.read_text().split():
                    below.append(int(child))
                    if Path(f"/proc/{child}/comm").read_text().startswith("mariadb-backup"):
                        found.append(int(child))
    return found


def test_what_changes_after_the_seal_makes_it_broken(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(scene, "full")
    ctx = scene.context()

    def meddle(folder: str, **options: bool):
        fingerprint = sealed(folder, **options)
        with Path(folder, "ibdata1").open("r+b") as file:
            file.seek(1 << 20)
            file.write(b"\1" * 512)
        return fingerprint

    sealed = physical_module.seal
    monkeypatch.setattr(physical_module, "seal", meddle)
    with pytest.raises(NotQuiescedError, match="ibdata1"):
        backup(ctx, ctx.config.job("demo"))
    assert scene.states() == ["broken"]


def test_a_base_that_is_damaged_is_noticed(scene: Scene) -> None:
    ctx = scene.context()
    manifest = backup(ctx, ctx.config.job("demo"))
    (log,) = Path(scene.file_system.point, ".snapmgr-reflink").rglob("ib_logfile0")
    with log.open("r+b") as file:
        file.seek(0)
        file.write(b"\0" * 4096)
    with pytest.raises(VerificationError):
        verify(ctx, ctx.catalog.load(manifest.id))


def test_a_base_that_is_of_no_use_gets_a_full_backup(scene: Scene) -> None:
    """One that failed its verification would hand its fault on for ever; one that is lost would stop all backups."""
    ctx = scene.context()
    job = ctx.config.job("demo")
    first = backup(ctx, job)
    failed = Verification(at=datetime.now(UTC), result="failed", duration_s=1.0, failures=("a table is missing",))
    ctx.catalog.write_verification(first.id, failed)
    second = backup(ctx, job)
    assert physical(second).full_because == f"{first.id} failed its verification"
    shutil.rmtree(Path(scene.file_system.point, ".snapmgr-reflink", second.id))
    third = physical(backup(ctx, job))
    assert third.kind == "full"
    assert f"an increment to {second.id} failed" in str(third.full_because)
    fourth = backup(ctx, job)
    assert physical(fourth).kind == "incremental"
    # What fetched it, and what applied it.
    log = (scene.state / "snapshots" / fourth.id / "tool.log").read_text()
    assert log.count("completed OK!") == 2
    assert os.listdir(scene.state / "tool-logs") == []


def test_a_table_that_the_tool_leaves_out_is_noticed(scene: Scene) -> None:
    """It takes a table that was imported since the last checkpoint for dropped, and says that it completed."""
    ctx = scene.context()
    job = ctx.config.job("demo")
    server = scene.server
    server.query("CREATE DATABASE load_test")
    server.query("CREATE TABLE load_test.t (n INT PRIMARY KEY)")
    backup(ctx, job)
    import_copy(server, "copied")
    with pytest.raises(StorageError, match="left out tables.*: load_test/copied$"):
        backup(ctx, job)
    assert scene.states() == ["ready"]
    server.query("SET GLOBAL innodb_max_dirty_pages_pct = 0")
    wait_until(lambda: int(server.query("SHOW STATUS LIKE 'Innodb_checkpoint_age'")[0][1]) < 1000)
    server.query("SET GLOBAL innodb_max_dirty_pages_pct = DEFAULT")
    manifest = backup(ctx, job)
    assert physical(manifest).kind == "incremental"
    assert Path(scene.file_system.point, ".snapmgr-reflink", manifest.id, "data/load_test/copied.ibd").exists()


def import_copy(server: PrivateServer, name: str) -> None:
    """Import the tablespace of load_test.t as another table."""
    server.query(f"CREATE TABLE load_test.{name} LIKE load_test.t")
    server.query(f"ALTER TABLE load_test.{name} DISCARD TABLESPACE")
    schema = server.datadir / "load_test"
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("FLUSH TABLES load_test.t FOR EXPORT")
        for suffix in (".ibd", ".cfg"):
            copied = Path(shutil.copy(schema / f"t{suffix}", schema / f"{name}{suffix}"))
            os.chown(copied, schema.stat().st_uid, schema.stat().st_gid)
        cursor.execute("UNLOCK TABLES")
    server.query(f"ALTER TABLE load_test.{name} IMPORT TABLESPACE")


@pytest.mark.needs("mariadb-11.8")
def test_the_tool_beside_the_servers_program_is_taken() -> None:
    """The one in the PATH is of another series."""
    with physical_scene(kind="mariadb-11.8") as scene:
        ctx = scene.context()
        manifest = backup(ctx, ctx.config.job("demo"))
        assert physical(manifest).tool_version.startswith("11.8")
        verify(ctx, ctx.catalog.load(manifest.id))


def test_the_plan_says_what_would_be_fetched(scene: Scene) -> None:
    ctx = scene.context()
    job = ctx.config.job("demo")
    assert "all data" in plan_backup(ctx, job).why
    manifest = backup(ctx, job)
    assert manifest.id in plan_backup(ctx, job).why
    document = scene.json("backup", "demo", "--dry-run")
    assert document["jobs"][0]["plan"]["backend"] == "reflink"
    assert scene.run("doctor", "demo").returncode == 0


def test_doctor_prints_the_grant_that_is_missing(scene: Scene) -> None:
    scene.server.query("CREATE USER weak@localhost IDENTIFIED BY 'x'")
    login = scene.folder / "weak.cnf"
    login.write_text(f"[client]\nuser=weak\npassword=x\nsocket={scene.server.socket}\n")
    login.chmod(0o600)
    staging = Path(scene.file_system.point, "staging")
    scene.configure(text=f'[job.demo]\nsource = "physical"\ndefaults_file = "{login}"\nstaging = "{staging}"\n')
    try:
        done = scene.run("doctor", "demo")
        assert done.returncode != 0
        assert "GRANT RELOAD, BINLOG MONITOR, PROCESS ON *.* TO `weak`@`localhost`;" in done.stdout
    finally:
        scene.server.query("DROP USER weak@localhost")


def test_what_no_storage_can_take_is_not_fetched(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(physical_module, "_ToolBackupRun", lambda *_: pytest.fail("the tool was to run"))
    staging = Path(scene.file_system.point, "staging")
    text = f'[job.demo]\nsource = "physical"\nsocket = "{scene.server.socket}"\nuser = "root"\nbackend = "btrfs"\n'
    scene.configure(text=f'{text}staging = "{staging}"\n')
    ctx = scene.context()
    with pytest.raises(SnapmgrError, match="btrfs"):
        backup(ctx, ctx.config.job("demo"))
    # The top of a mount would do for the tool only.
    scene.configure(text=f'{text.replace("btrfs", "reflink")}staging = "{scene.file_system.point}"\n')
    ctx = scene.context()
    with pytest.raises(StorageError) as refused:
        plan_backup(ctx, ctx.config.job("demo"))
    assert refused.value.hint is not None
    assert refused.value.hint.startswith(f"make a folder in {scene.file_system.point}")
    scene.configure(text=f'{text}staging = "{staging}/none"\n')
    ctx = scene.context()
    with pytest.raises(ConfigError, match="staging/none does not exist"):
        plan_backup(ctx, ctx.config.job("demo"))


def test_a_strangers_folder_in_the_staging_folder_is_left_alone(scene: Scene) -> None:
    theirs = Path(scene.file_system.point, "staging", "demo")
    theirs.mkdir()
    (theirs / "data").mkdir()
    ctx = scene.context()
    try:
        with pytest.raises(ConfigError, match="not made by this job"):
            backup(ctx, ctx.config.job("demo"))
        assert (theirs / "data").is_dir()
    finally:
        subprocess.run(["rm", "-rf", theirs], check=True)


@pytest.mark.needs("mysql-9")
def test_a_clone_by_the_server_itself() -> None:
    """MySQL's CLONE: a full copy with the position that its own recovery tells; other engines' tables are refused."""
    with physical_scene("--plugin-load-add=mysql_clone.so", kind="mysql-9") as scene:
        configure(scene, "full")
        server = scene.server
        server.query("CREATE DATABASE load_test")
        server.query("CREATE TABLE load_test.t (n INT PRIMARY KEY)")
        server.query("INSERT INTO load_test.t VALUES (1), (2), (3)")
        ((file, offset, *_, gtid),) = server.query("SHOW BINARY LOG STATUS")
        ctx = scene.context()
        manifest = backup(ctx, ctx.config.job("demo"))
        assert (physical(manifest).tool, physical(manifest).state) == ("clone", "prepared")
        assert manifest.position is not None
        assert (manifest.position.file, manifest.position.offset) == (file, int(offset))
        assert manifest.position.gtid == gtid
        verify(ctx, ctx.catalog.load(manifest.id))
        server.query("CREATE TABLE load_test.m (n INT) ENGINE=MyISAM")
        done = scene.run("backup", "demo")
        assert done.returncode == 4
        assert "load_test.m" in done.stderr
        assert os.listdir(Path(scene.file_system.point, "staging")) == []
