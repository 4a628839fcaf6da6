"""A raw physical backup's snapshot prepared by its id, as its job says."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.scene import Scene
from support.server import private_server
from support.storage import loop_filesystem, work_folder

pytestmark = pytest.mark.needs("root", "loop", "xfs", "mariadbd", "mariadb-backup")


def test_a_raw_snapshot_is_prepared_by_its_id() -> None:
    with ExitStack() as stack:
        point = Path(stack.enter_context(loop_filesystem("xfs", 1 << 30)).point)
        folder = stack.enter_context(work_folder())
        server = stack.enter_context(private_server(folder / "data"))
        scene = Scene(None, folder, server)
        (point / "staging").mkdir()
        scene.configure(
            text=f'[job.demo]\nsource = "physical"\nsocket = "{server.socket}"\nuser = "root"\nbackend = "reflink"\n'
            f'staging = "{point}/staging"\nprepare.use_memory = "64M"\n'
        )
        server.query("CREATE DATABASE shop")
        server.query("CREATE TABLE shop.t (n INT PRIMARY KEY)")
        server.query("INSERT INTO shop.t VALUES (1), (2), (3)")
        assert scene.run("backup", "demo").returncode == 0
        plan = scene.json("prepare", "latest", "--dry-run")["plan"]
        assert plan["use_memory_bytes"] == 64 << 20
        for options in ([], ["--strategy", "storage"], ["--strategy", "scratch", "--result", "storage"]):
            done = scene.run("prepare", "latest", *options)
            assert done.returncode == 0, done.stderr
            ready = Path(done.stdout.strip())
            in_storage = point in ready.parents
            assert in_storage or not options
            with private_server(ready, install_options=None) as copy:
                assert copy.query("SELECT SUM(n) FROM shop.t") == ((6,),)
            # A result is never overwritten.
            assert scene.run("prepare", "latest", str(ready)).returncode == 2
            shutil.rmtree(ready)
            assert scene.json("mount", "--list")["mounts"] == []
        assert scene.run("verify", "latest").returncode == 0
        assert scene.run("prepare", "latest", str(folder / "elsewhere"), "--result", "storage").returncode == 2
        tuned = scene.run("prepare", "latest", "--tune=1m", "--dry-run")
        assert tuned.returncode == 0, tuned.stderr
