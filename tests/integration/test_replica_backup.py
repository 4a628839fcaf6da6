"""``snapmgr backup`` of a replica: what is recorded of its source, and that replication goes on afterwards."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.catalog.manifest import SourcePosition
from support.processes import wait_until
from support.replicas import Pair, applies, inserting, replica_pair, server_on, snapshot, sql_error
from support.scene import Scene
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd"),
    pytest.mark.timeout(180),
    pytest.mark.parametrize(
        "site", ["mariadb-10.11", pytest.param("mysql-9", marks=pytest.mark.needs("mysql-9"))], indirect=True
    ),
]


@pytest.fixture(name="site", scope="module")
def _site(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, Scene]]:
    mariadb = ("--slave-parallel-threads=4", "--read-only")
    options = mariadb if request.param.startswith("mariadb") else ("--super-read-only",)
    with loop_filesystem("btrfs", 2 << 30, base=Path("/dev/shm")) as btrfs, work_folder() as folder:
        subvolume = Path(btrfs.point) / "replica"
        subprocess.run(["btrfs", "-q", "subvolume", "create", subvolume], check=True)
        with replica_pair(subvolume / "data", request.param, replica_options=options) as pair:
            scene = Scene(btrfs, folder, pair.replica)
            scene.configure()
            yield pair, scene


def test_a_replica_under_load(site: tuple[Pair, Scene]) -> None:
    """With and without its applier stopped; the recorded GTID is that of the copy, and a new replica goes on there."""
    pair, scene = site
    with inserting(pair.source, writers=3):
        first = scene.run("backup", "demo")
        assert first.returncode == 0, first.stderr
        scene.configure("stop_replica = true")
        second = scene.run("backup", "demo")
        assert second.returncode == 0, second.stderr
        assert applies(pair.status()[0])
    shown = [scene.json("show", entry.manifest.id)["snapshot"] for entry in scene.entries()]
    assert len(shown) == 2
    running, standing = (one["sources"][0] for one in shown)
    assert running["gtid"] != standing["gtid"]
    assert (running["file"], running["offset"]) == (None, None)
    assert (standing["host"], standing["port"], standing["channel"]) == ("127.0.0.1", pair.source_port, "")
    # By GTID, MariaDB's threads may have one domain ahead of another.
    assert (standing["file"] is None) == pair.mariadb
    variable = "gtid_slave_pos" if pair.mariadb else "gtid_executed"
    for number, one in enumerate(shown):
        copy = Path(scene.file_system.point) / f"copy{number}"
        (stored,) = (path for path in scene.snapshot_paths() if path.name == one["members"][0]["name"])
        snapshot(stored, copy)
        with server_on(pair, copy / "data") as server:
            ((found,),) = server.query(f"SELECT @@GLOBAL.{variable}")
            assert "".join(found.split()) == one["sources"][0]["gtid"]
            if one["sources"][0] is standing:
                continue
            texts = {key: one["sources"][0][key] or "" for key in ("channel", "host", "file", "gtid")}
            at = SourcePosition(**texts, port=pair.source_port, offset=one["sources"][0]["offset"] or 0)
            pair.replicate(server, "gtid", at)
            pair.start(server)
            pair.wait_equal(server)
    assert f"127.0.0.1:{pair.source_port} up to" in scene.run("show", "latest").stdout
    assert list((scene.state / "appliers").iterdir()) == []


def test_a_delayed_and_then_a_broken_applier(site: tuple[Pair, Scene]) -> None:
    """What was received and not executed does not count; a broken one is backed up, with a warning, and left broken."""
    pair, scene = site
    scene.configure("stop_replica = true")
    if pair.mariadb:
        change = "CHANGE MASTER '' TO MASTER_DELAY"
        verbs = ("STOP SLAVE '' SQL_THREAD", "START SLAVE '' SQL_THREAD")
    else:
        change = "CHANGE REPLICATION SOURCE TO SOURCE_DELAY"
        verbs = ("STOP REPLICA SQL_THREAD", "START REPLICA SQL_THREAD")

    def delay(seconds: int) -> None:
        pair.replica.query("STOP ALL SLAVES" if pair.mariadb else "STOP REPLICA")
        pair.replica.query(f"{change} = {seconds}")
        pair.start()

    variable = "gtid_slave_pos" if pair.mariadb else "gtid_executed"
    ((before,),) = pair.replica.query(f"SELECT @@GLOBAL.{variable}")
    delay(3600)
    read = "Read_Master_Log_Pos" if pair.mariadb else "Read_Source_Log_Pos"
    pair.source.query("INSERT INTO load_test.t0 VALUES (77, 1, 'late')")
    wait_until(lambda: int(pair.status()[0][read]) == pair.end()[1])
    scene.json("backup", "demo")
    (source,) = scene.json("show", "latest")["snapshot"]["sources"]
    assert source["gtid"] == "".join(before.split())
    assert applies(pair.status()[0])
    # root may write all the same, but on MySQL not even that.
    if not pair.mariadb:
        pair.replica.query("SET GLOBAL super_read_only = 0")
    pair.replica.query("INSERT INTO load_test.t0 VALUES (77, 1, 'mine')")
    delay(0)
    wait_until(lambda: sql_error(pair.status()[0]))
    done = scene.run("backup", "demo")
    assert done.returncode == 0, done.stderr
    assert "stopped with an error" in done.stderr
    assert not applies(pair.status()[0])
    (source,) = scene.json("show", "latest")["snapshot"]["sources"]
    assert source["gtid"]
    pair.replica.query("DELETE FROM load_test.t0 WHERE w = 77")
    pair.replica.query(verbs[1])


def test_no_position_where_the_applier_writes_ahead_of_the_binary_log(site: tuple[Pair, Scene]) -> None:
    """MariaDB, other engines, BACKUP STAGE: measured to be behind the rows; MySQL's position is exact all the same."""
    pair, scene = site
    pair.source.query("CREATE TABLE load_test.other (id INT PRIMARY KEY) ENGINE=MyISAM")
    wait_until(lambda: pair.replica.query("SHOW TABLES FROM load_test LIKE 'other'"))
    try:
        scene.configure('quiesce = "backup-lock"')
        done = scene.run("backup", "demo")
        if pair.mariadb:
            assert done.returncode == 4, done.stderr
            assert "stop_replica = true" in done.stderr
            planned = scene.run("backup", "--dry-run", "demo")
            assert planned.returncode == 4, planned.stdout
            scene.configure('quiesce = "backup-lock"\nposition = "best"')
            done = scene.run("backup", "demo")
        assert done.returncode == 0, done.stderr
        assert (scene.entries()[-1].manifest.position is None) == pair.mariadb
        scene.configure('quiesce = "backup-lock"\nstop_replica = true')
        done = scene.run("backup", "demo", "--verify")
        assert done.returncode == 0, done.stderr
        assert scene.entries()[-1].manifest.position is not None
        assert applies(pair.status()[0])
    finally:
        pair.source.query("DROP TABLE load_test.other")
