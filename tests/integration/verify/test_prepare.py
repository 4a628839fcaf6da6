"""Preparing: what is printed is a datadir with nothing left to recover, and an interrupted one leaves nothing."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from snapmgr.backup.run import backup
from snapmgr.catalog.store import Catalog
from snapmgr.system.blockdev import read_mounts
from support.load import check_invariant, write_load
from support.scene import btrfs_scene, scattered_scene
from support.server import private_server

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")


def _leases(scene):
    return Catalog(scene.state).leases()[0]


def _nothing_left(scene):
    assert _leases(scene) == []
    assert os.listdir(scene.scratch) == []
    assert [mount.point for mount in read_mounts() if mount.point.startswith(f"{scene.folder}/")] == []
    assert [name for name in scene.stored() if name.startswith("attach")] == []


def test_the_clone_is_recovered_and_cleanly_shut_down(scene):
    ctx = scene.context()
    with write_load(str(scene.server.socket), writers=3) as load:
        load.warm_up()
        before = load.acknowledged()
        manifest = backup(ctx, ctx.config.job("demo"))
        after = load.acknowledged()
    document = scene.json("prepare", "latest", "--use-memory", "48M")
    prepared = document["prepared"]
    assert set(prepared) == {"server", "recovered", "server_uuid", "gtid", "options", "duration_s"}
    assert manifest.position is not None
    assert prepared["gtid"] == manifest.position.gtid
    assert prepared["recovered"] is True
    assert prepared["server_uuid"] is None
    assert document["mount"]["why"] == "mount"
    data = Path(document["mount"]["data_path"])
    # Its index leads nowhere else.
    assert {line.rpartition("/")[0] for line in (data / "binlog.index").read_text().splitlines()} == {"."}
    with private_server(data, install_options=None) as server:
        assert "crash recovery" not in server.log_text()
        assert "Recovering after a crash" not in server.log_text()
        with server.connect() as connection:
            check_invariant(connection, before=before, after=after)
        assert server.query("SELECT @@gtid_binlog_pos") == ((manifest.position.gtid,),)
    # The same files without it are recovered: this test can fail.
    mounted = scene.json("mount", "latest")["mount"]["data_path"]
    with private_server(Path(mounted), install_options=None) as server:
        assert "crash recovery" in server.log_text()
    assert scene.run("umount", "--all").returncode == 0
    _nothing_left(scene)


def test_the_buffer_pool_is_as_large_as_asked(scene):
    assert scene.run("backup", "demo").returncode == 0
    log = scene.folder / "server.log"
    wrapper = scene.folder / "mariadbd"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec /usr/sbin/mariadbd "$@"\n')
    wrapper.chmod(0o755)
    log.touch()
    log.chmod(0o666)
    scene.configure(f'[job.demo.verify]\nserver = "{wrapper}"\nmemory = "112M"\noptions = ["--innodb-io-capacity=300"]')
    path = scene.run("prepare", "latest").stdout.strip()
    starts = [line for line in log.read_text().splitlines() if "--datadir" in line]
    assert len(starts) == 2
    assert all("--innodb-buffer-pool-size=64M " in line and "--innodb-io-capacity=300" in line for line in starts)
    assert scene.run("umount", path).returncode == 0
    log.write_text("")
    path = scene.run("prepare", "latest", "--use-memory", "40M").stdout.strip()
    starts = [line for line in log.read_text().splitlines() if "--datadir" in line]
    last = [line.rpartition("--innodb-buffer-pool-size=")[2].split()[0] for line in starts]
    assert last == [str(40 << 20)] * 2
    assert scene.run("umount", path).returncode == 0
    _nothing_left(scene)


def test_at_a_folder_of_ones_choice(scene):
    assert scene.run("backup", "demo").returncode == 0
    point = scene.folder / "ready"
    planned = scene.json("prepare", "latest", str(point), "--dry-run")
    assert planned["mount"] is planned["prepared"] is None
    assert not point.exists()
    done = scene.run("prepare", "latest", str(point))
    assert done.stdout == f"{point}/data\n"
    assert f"snapmgr umount {point}" in done.stderr
    # What is prepared is not deleted.
    assert scene.run("prune", "demo").returncode == 0
    assert scene.states() == ["ready"]
    assert scene.run("umount", str(point)).returncode == 0
    point.rmdir()
    _nothing_left(scene)


def _caught_preparing(scene):
    """Start a prepare whose server waits before it recovers, and return it when that server was started."""
    waiting = scene.folder / "waiting"
    waiting.write_text('#!/bin/sh\ncase "$*" in *--datadir*) exec sleep 60;; esac\nexec /usr/sbin/mariadbd "$@"\n')
    waiting.chmod(0o755)
    scene.configure(f'[job.demo.verify]\nserver = "{waiting}"')
    process = scene.start("prepare", "latest")
    deadline = time.monotonic() + 60
    while not list(scene.scratch.glob("v*/server.log")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_one_leaves_nothing(scene, number):
    assert scene.run("backup", "demo").returncode == 0
    process = _caught_preparing(scene)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    _nothing_left(scene)


def test_a_killed_one_is_swept_by_the_next_run_of_its_job(scene):
    assert scene.run("backup", "demo").returncode == 0
    process = _caught_preparing(scene)
    (lease,) = _leases(scene)
    busy = scene.run("umount", lease.point)
    assert busy.returncode == 1
    assert "in use by a running prepare" in busy.stderr
    process.kill()
    process.communicate()
    (lease,) = _leases(scene)
    assert lease.why == "prepare"
    assert scene.run("backup", "demo").returncode == 0
    assert _leases(scene) == []
    # Its server's folder is doctor's.
    subprocess.run(["rm", "-rf", *scene.scratch.glob("v*")], check=True)
    _nothing_left(scene)


def test_what_does_not_recover_is_an_error_and_leaves_nothing(scene):
    scene.server.query("CREATE DATABASE IF NOT EXISTS hurt")
    assert scene.run("backup", "demo").returncode == 0
    scene.configure('[job.demo.verify]\noptions = ["--innodb-data-file-path=ibdata1:100M"]')
    done = scene.run("prepare", "latest")
    assert done.returncode in (6, 7), done.stderr
    assert "the server ended instead of starting" in done.stderr
    _nothing_left(scene)


def test_a_directorys_snapshot_is_refused():
    with btrfs_scene(server=False) as scene:
        data = Path(scene.file_system.point) / "mysql"
        scene.configure(text=f'[job.files]\nsource = "directory"\npath = "{data}"\n')
        assert scene.run("backup", "files").returncode == 0
        for more in ([], ["--dry-run"]):
            done = scene.run("prepare", "latest", *more)
            assert done.returncode == 2
            assert "only a database's files have to be recovered" in done.stderr


def test_tablespaces_and_logs_elsewhere_are_recovered_at_the_clone():
    with scattered_scene() as scene:
        server, volume = scene.server, Path(scene.file_system.point) / "mysql"
        server.query("INSERT INTO d.t VALUES (3)")
        live = (volume / "log/binlog.index").read_text()
        done = scene.run("prepare", "latest")
        assert done.returncode == 0, done.stderr
        assert (volume / "log/binlog.index").read_text() == live
        data = Path(done.stdout.strip())
        there = data.parent
        names = (there / "log/binlog.index").read_text().splitlines()
        assert {os.path.dirname(name) for name in names} == {f"{there}/log"}
        server.stop()
        (volume / "tables").rename(volume / "gone")
        (data / "d/t.isl").write_text(f"{there}/tables/d/t.ibd")
        # All its paths lead into the clone: a my.cnf may name the live ones.
        (told,) = re.findall("^server options: (.*)$", done.stderr, re.MULTILINE)
        given = shlex.split(told)
        assert str(volume) not in told.replace(str(there), "")
        assert {f"--innodb-log-group-home-dir={there}/redo", f"--log-bin={there}/log/binlog"} <= set(given)
        with private_server(data, given, install_options=None) as copy:
            assert "crash recovery" not in copy.log_text()
            assert copy.query("SELECT * FROM d.t") == ((1,), (2,))
        (volume / "gone").rename(volume / "tables")
        assert scene.run("umount", "--all").returncode == 0


def test_transactions_that_a_client_has_prepared_are_no_crash(scene):
    """InnoDB names them at each start, until they are committed or rolled back: they are data."""
    scene.server.query("CREATE DATABASE IF NOT EXISTS xa")
    scene.server.query("CREATE TABLE xa.t (a INT) ENGINE=InnoDB")
    with scene.server.connect() as connection, connection.cursor() as cursor:
        for statement in ("XA START 'x'", "INSERT INTO xa.t VALUES (1)", "XA END 'x'", "XA PREPARE 'x'"):
            cursor.execute(statement)
        assert scene.run("backup", "demo").returncode == 0
        cursor.execute("XA ROLLBACK 'x'")
    scene.server.query("DROP DATABASE xa")
    document = scene.json("prepare", "latest")
    with private_server(Path(document["mount"]["data_path"]), install_options=None) as server:
        assert [row[3] for row in server.query("XA RECOVER")] == [b"x"]
        server.query("XA COMMIT 'x'")
        assert server.query("SELECT * FROM xa.t") == ((1,),)
    assert scene.run("umount", "--all").returncode == 0
