"""Restores in a hurry: under a server that is still running, and of a replica beside itself."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from pathlib import Path

import pytest

from support.scene import btrfs_scene
from support.server import free_port, private_server, server_user
from support.storage import work_folder

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "mariadbd")


def test_a_datadir_that_was_emptied_under_its_server_is_refused():
    with btrfs_scene() as scene:
        assert scene.run("backup", "demo").returncode == 0
        datadir = scene.server.datadir
        for path in datadir.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        done = scene.run("restore", "latest", str(datadir))
        assert done.returncode == 2
        assert f"a server (pid {scene.server.pid}) still runs on {datadir}" in done.stderr
        assert not list(datadir.iterdir())
        scene.server.kill()
        done = scene.run("restore", "latest", str(datadir))
        assert done.returncode == 0, done.stderr
        scene.server.start()


def _replicates(replica, source):
    """Let `replica` follow `source` and wait until it does."""
    port = source.query("SELECT @@port")[0][0]
    replica.query(
        f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={port}, MASTER_USER='r', MASTER_PASSWORD='p', "
        "MASTER_USE_GTID=slave_pos"
    )
    replica.query("START SLAVE")
    until = time.monotonic() + 60
    while not any(row[4] == "Binlog Dump" for row in source.query("SHOW PROCESSLIST")):
        assert time.monotonic() < until
        time.sleep(0.1)


def _network(port: int) -> tuple[str, ...]:
    return ("--skip-networking=0", "--bind-address=127.0.0.1", f"--port={port}")


def test_a_restored_replica_leaves_source_and_live_replica_alone():
    with (
        work_folder() as folder,
        private_server(folder / "source", _network(free_port())) as source,
        btrfs_scene(server=False) as scene,
    ):
        source.query("GRANT REPLICATION SLAVE ON *.* TO r@'%' IDENTIFIED BY 'p'")
        volume = Path(scene.file_system.point) / "mysql"
        relay = volume / "relay"
        relay.mkdir()
        os.chown(relay, server_user().pw_uid, server_user().pw_gid)
        options = ("--server-id=2", f"--relay-log={relay}/relay", f"--relay-log-index={relay}/relay.index")
        with private_server(volume / "data", options) as replica:
            scene._server = replica
            scene.configure()
            _replicates(replica, source)
            dumps = [row[0] for row in source.query("SHOW PROCESSLIST") if row[4] == "Binlog Dump"]
            assert scene.run("backup", "demo").returncode == 0
            dest = Path(scene.file_system.point) / "restored"
            done = scene.run("restore", "latest", str(dest))
            assert done.returncode == 0, done.stderr
            assert f"{dest}/relay/relay.index: changed to name the restored logs" in done.stderr
            assert "points to" not in done.stderr
            line = next(line for line in done.stdout.splitlines() if "server options: " in line)
            given = shlex.split(line.partition("server options: ")[2])
            assert f"--relay-log={dest}/relay/relay" in given
            assert f"--relay-log-index={dest}/relay/relay.index" in given
            # As a my.cnf of the live replica would have it; what is printed comes after it.
            with private_server(dest / "data", (*options, *given), install_options=None) as restored:
                assert restored.query("SELECT @@relay_log_basename") == ((f"{dest}/relay/relay",),)
                assert restored.query("SHOW SLAVE STATUS")[0][10:12] == ("No", "No")
                time.sleep(1)
            assert [row[0] for row in source.query("SHOW PROCESSLIST") if row[4] == "Binlog Dump"] == dumps
            assert replica.query("SHOW SLAVE STATUS")[0][10:12] == ("Yes", "Yes")
            # Prepared, its index is right already.
            there = Path(scene.json("prepare", "latest")["mount"]["data_path"]).parent
            named = (there / "relay/relay.index").read_text().splitlines()
            assert {os.path.dirname(line) for line in named} == {f"{there}/relay"}
            for copy, logs in ((dest, dest), (there, there)):
                assert (copy / "data/relay-log.info").read_text().splitlines()[1].startswith(f"{logs}/relay/relay.")
            assert scene.run("umount", "--all").returncode == 0
