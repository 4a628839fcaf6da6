"""Every kind of server with its parts on several volumes: what is taken, what is refused, and what is left out."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.backup.run import backup
from snapmgr.contract.errors import NotQuiescedError, VerificationError
from snapmgr.mysql.lock import levels
from snapmgr.source.server import LiveServer
from snapmgr.verify.run import verify
from support.exactness import take
from support.faults import Faults
from support.kinds import KINDS, SYSTEM
from support.layouts import SETTINGS, check, memory, owned, scattered, subvolume
from support.load import InvariantError
from support.processes import ended, state, wait_until
from support.scene import Scene
from support.server import private_server
from support.storage import loop_filesystem, work_folder
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.context import Context
    from snapmgr.mysql.connect.client import Connection
    from support.exactness import Taken

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")
# 20 were shown once; CI repeats a few.
SNAPSHOTS = int(os.environ.get("SNAPMGR_FREEZE_SNAPSHOTS", "20" if CAMPAIGN else "2"))
_GIB = 1 << 30


# ------------------------------------------------------------------------------------------- data on several volumes


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("mysql-9", "btrfs"), marks=pytest.mark.needs("mysql-9")),
        pytest.param(("mariadb-11.8", "xfs"), marks=pytest.mark.needs("mariadb-11.8", "xfs")),
    ],
    ids=lambda param: "-".join(param),
)
def spread(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """A server with redo log, undo tablespaces and more on another file system than its datadir; frozen by its job."""
    with scattered(*request.param) as scene:
        yield scene


def test_sets_of_a_frozen_server_are_of_one_instant(spread: Scene) -> None:
    ctx, kind = spread.context(), spread.server.kind
    taken, statistics = take(ctx, spread.server, SNAPSHOTS)
    spread.server.query("DROP DATABASE load_test")
    for one in taken:
        quiesce = one.manifest.quiesce
        assert quiesce is not None
        assert 0 < quiesce.frozen_s <= quiesce.held_s
        assert len({member.ref.pool.id for member in one.manifest.members}) == 2
        places = {path.rpartition("/")[2] for member in one.manifest.members for path in member.places}
        assert places == {"data", *SETTINGS[kind.flavor]}
        assert check(ctx, one, kind.name).failures == []
    assert len({one.manifest.position for one in taken}) == len(taken)
    # By default a lock is held for 10 s at most; a minute would be a server that nobody thawed.
    assert statistics.worst_s < 30


def test_no_lock_will_do(spread: Scene) -> None:
    parts = SETTINGS[spread.server.kind.flavor]
    states = spread.states()
    try:
        for level in ("auto", "backup-lock", "global-read-lock", "crash-consistent"):
            spread.configure(f'quiesce = "{level}"')
            ctx = spread.context()
            with pytest.raises(NotQuiescedError, match=r"redo log.* at /.*/redo") as caught:
                backup(ctx, ctx.config.job("demo"))
            assert all(f"/{part};" in caught.value.message + ";" for part in parts)
        spread.configure()
        refused = spread.run("backup", "demo")
        doctor = spread.run("doctor", "demo")
    finally:
        spread.configure('quiesce = "freeze-process"')
    assert refused.returncode == 4
    assert doctor.returncode != 0
    for said in (refused.stderr, doctor.stdout):
        text = " ".join(said.split())
        assert all(f"/{part}" in text for part in parts)
        assert 'quiesce = "freeze-process"' in text
    assert spread.states() == states


def test_the_server_goes_on_when_all_but_the_thawer_is_killed_in_a_set(spread: Scene) -> None:
    """During the first member; what it left is cleared up, and the next set is whole."""
    server, known = spread.server, len(spread.entries())
    # On XFS clones are tried while arming, one for each member at most.
    tried = 0 if spread.file_system.fs_type == "btrfs" else 1 + len(SETTINGS[server.kind.flavor])
    faults = Faults(delay_s=20.0, delay_mark=spread.folder / "mark", delay_skip=tried)
    with spread.start("backup", "demo", faults_=faults) as process:
        try:
            wait_until(lambda: state(server.pid) == "T" or process.poll() is not None, 60)
            assert state(server.pid) == "T"
            record = spread.state / "frozen" / str(server.pid)
            thawer = int(record.read_text().splitlines()[1].split()[0])
            helper = spread.entries()[-1].manifest.helper
            assert helper is not None
            assert len({thawer, helper.pid, process.pid}) == 3
            for pid in (helper.pid, process.pid):
                os.kill(pid, signal.SIGKILL)
        finally:
            process.kill()
    wait_until(lambda: state(server.pid) != "T", 10)
    server.query("SELECT 1")
    wait_until(lambda: ended(thawer))
    again = spread.run("backup", "demo")
    assert again.returncode == 0, again.stderr
    assert spread.states()[known:].count("ready") == 1
    ctx = spread.context()
    assert verify(ctx, spread.entries()[-1]).result == "passed"


# ------------------------------------------------------------------------------------------------------ logs elsewhere


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.needs(name)) for name in KINDS])
def logging(request: pytest.FixtureRequest) -> Iterator[tuple[Scene, dict[str, Path]]]:
    """A server of each kind on a btrfs subvolume, stopped, and folders for its binary logs."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(loop_filesystem("btrfs", _GIB)) for _ in range(2))
        folder = stack.enter_context(work_folder())
        fleeting = stack.enter_context(memory(stack.enter_context(work_folder()), "512M"))
        home = subvolume(first.point / "mysql")
        server = stack.enter_context(private_server(home / "data", kind=request.param, start=False))
        scene = Scene(first, folder, server)
        scene.configure()
        yield (
            scene,
            {
                "same": subvolume(first.point / "logs"),
                "other": subvolume(second.point / "logs"),
                "tmpfs": owned(fleeting / "logs"),
            },
        )


def test_binary_logs_elsewhere_are_a_member_or_absent(logging: tuple[Scene, dict[str, Path]]) -> None:
    """Another subvolume and ext4: the matrix of locks has them for each kind (test_lock_matrix.py)."""
    scene, places = logging
    _try_logs(scene, "other" if scene.server.kind.name == "mariadb-10.11" else "tmpfs", places)


def _try_logs(scene: Scene, where: str, places: dict[str, Path]) -> None:
    server, logs, kind = scene.server, places[where], scene.server.kind
    server.start([f"--log-bin={logs}/binlog"])
    try:
        ctx = scene.context()
        (one,), _ = take(ctx, server, 1, writers=8)
        manifest = one.manifest
        assert "engines' logs are flushed" in str(manifest.quiesce)
        taken = [member.path for member in manifest.members]
        assert taken == [str(server.datadir.parent), *([] if where == "tmpfs" else [str(logs)])]
        assert manifest.absent == ((str(logs),) if where == "tmpfs" else ())
        before = sorted((path.name, path.read_bytes()) for path in logs.glob("*.index"))
        found = check(ctx, one, kind.name)
        assert found.failures == []
        assert len(found.checks) + len(found.notes) == 2
        # The live logs are not the copy's.
        assert sorted((path.name, path.read_bytes()) for path in logs.glob("*.index")) == before
    finally:
        server.query("DROP DATABASE load_test")
        server.stop()


def test_without_the_flush_such_a_snapshot_is_worth_little(
    logging: tuple[Scene, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four MariaDB started none ("Found 2 prepared transactions"), of four MySQL none had all GTIDs."""
    scene, places = logging
    if not CAMPAIGN and scene.server.kind.name != SYSTEM:
        return  # what is proved is that the test above can fail
    scene.server.start([f"--log-bin={places['tmpfs']}/binlog"])
    monkeypatch.setattr(levels, "_flush", lambda _: ())
    try:
        ctx = scene.context()
        taken, _ = take(ctx, scene.server, 3, writers=8)
        assert any(_is_broken(ctx, one, scene.server.kind.name) for one in taken)
    finally:
        scene.server.query("DROP DATABASE load_test")
        scene.server.stop()


def _is_broken(ctx: Context, one: Taken, kind: str) -> bool:
    try:
        return bool(check(ctx, one, kind).failures)
    except (VerificationError, InvariantError):
        return True


# ------------------------------------------------------------------------------------------- what moves, what is left


@pytest.fixture(scope="module")
def roomy() -> Iterator[Scene]:
    """A MySQL with folders for tables on another btrfs ("known", "new"); temporary files in memory, in the datadir."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(loop_filesystem("btrfs", _GIB)) for _ in range(2))
        folder = stack.enter_context(work_folder())
        home = subvolume(first.point / "mysql")
        known, new = (subvolume(second.point / name) for name in ("known", "new"))
        options = [f"--innodb-directories={known};{new}", f"--tmpdir={home}/data/tmp"]
        server = stack.enter_context(private_server(home / "data", options, kind="mysql-9", start=False))
        for name in ("tmp", "#innodb_temp"):
            stack.enter_context(memory(server.datadir / name, "64M"))
        # Before what is mounted in its datadir goes.
        stack.callback(server.stop)
        server.start()
        server.query("CREATE DATABASE d")
        yield Scene(first, folder, server)


@pytest.mark.needs("mysql-9")
def test_temporary_files_need_no_volume(roomy: Scene) -> None:
    roomy.configure("verify.assertions = ['SELECT COUNT(*) = 1 FROM d.kept']")
    roomy.server.query("CREATE TABLE d.kept (a INT PRIMARY KEY)")
    roomy.server.query("INSERT INTO d.kept VALUES (1)")
    ctx = roomy.context()
    manifest = backup(ctx, ctx.config.job("demo"))
    assert len(manifest.members) == 1
    assert sorted(path.rpartition("/")[2] for path in manifest.excluded) == ["#innodb_temp", "tmp"]
    assert verify(ctx, ctx.catalog.load(manifest.id), ctx.config.job("demo").verify).result == "passed"
    schema = subvolume(roomy.server.datadir / "nested")
    try:
        with pytest.raises(NotQuiescedError, match=f"subvolume at {schema}"):
            backup(ctx, ctx.config.job("demo"))
    finally:
        subprocess.run(["btrfs", "-q", "subvolume", "delete", schema], check=True)


@pytest.mark.needs("mysql-9")
@pytest.mark.parametrize("level", ["auto", "global-read-lock", "freeze-process", "crash-consistent"])
def test_a_table_made_elsewhere_at_the_last_moment(roomy: Scene, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """MySQL leaves no .isl file in the datadir: only its own list tells."""
    roomy.configure(f'quiesce = "{level}"')
    ctx, check_, calls = roomy.context(), LiveServer.check, count()
    where = Path(roomy.server.query("SELECT @@innodb_directories")[0][0].split(";")[1])

    def last_moment(live: LiveServer, connection: Connection) -> None:
        check_(live, connection)
        if next(calls) == 0:
            roomy.server.query(f"CREATE TABLE d.late (a INT) DATA DIRECTORY='{where}'")

    monkeypatch.setattr(LiveServer, "check", last_moment)
    try:
        with pytest.raises(NotQuiescedError, match=f"began to write elsewhere .*{where}/d"):
            backup(ctx, ctx.config.job("demo"))
    finally:
        roomy.server.query("DROP TABLE IF EXISTS d.late")


@pytest.mark.needs("mysql-9")
def test_a_table_of_another_engine_at_the_last_moment(roomy: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock only InnoDB is whole: what was looked at before DDL is counted may be out of date."""
    roomy.configure('quiesce = "crash-consistent"')
    ctx, check_, calls = roomy.context(), LiveServer.check, count()

    def last_moment(live: LiveServer, connection: Connection) -> None:
        check_(live, connection)
        if next(calls) == 0:
            roomy.server.query("CREATE TABLE d.late (a INT) ENGINE=MyISAM")

    monkeypatch.setattr(LiveServer, "check", last_moment)
    try:
        with pytest.raises(NotQuiescedError, match="new or changed since the server was probed: MyISAM"):
            backup(ctx, ctx.config.job("demo"))
    finally:
        roomy.server.query("DROP TABLE d.late")


@pytest.mark.needs("mysql-9")
def test_a_stopped_mysqls_tablespaces_elsewhere_are_members(roomy: Scene) -> None:
    """Nothing in its datadir but the data dictionary names them; what was dropped is named there, too."""
    server, job = roomy.server, '[job.demo]\nsource = "mysql"\nquiesce = "stopped"\n'
    known, new = (Path(path) for path in server.query("SELECT @@innodb_directories")[0][0].split(";"))
    for statement in (
        f"CREATE TABLESPACE space ADD DATAFILE '{known}/space.ibd'",
        "CREATE TABLE d.general (a INT) TABLESPACE space",
        f"CREATE TABLE d.single (a INT) DATA DIRECTORY='{new}'",
        f"CREATE TABLE d.gone (a INT) DATA DIRECTORY='{new}'",
        "INSERT INTO d.general VALUES (1), (2)",
        "INSERT INTO d.single VALUES (3)",
        "DROP TABLE d.gone",
    ):
        server.query(statement)
    server.stop()
    check_ = (
        f"server = '{server.kind.program('mysqld')}'\nassertions = ['SELECT COUNT(*) = 2 FROM d.general, d.single']"
    )
    roomy.configure(text=f"{job}datadir = '{server.datadir}'\n[job.demo.verify]\n{check_}\n")
    for folder in ("tmp", "#innodb_temp"):
        subprocess.run(["umount", server.datadir / folder], check=True)
    try:
        ctx = roomy.context()
        manifest = backup(ctx, ctx.config.job("demo"))
        assert [member.path for member in manifest.members] == [str(server.datadir.parent), str(known), str(new)]
        # Were the live tables opened instead of the copies, this would be seen.
        server.start()
        server.query("DELETE FROM d.general")
        assert verify(ctx, ctx.catalog.load(manifest.id), ctx.config.job("demo").verify).result == "passed"
    finally:
        if not server.running:
            server.start()
        server.query("DROP TABLE d.general, d.single")
        server.query("DROP TABLESPACE space")
