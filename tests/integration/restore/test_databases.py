"""What a server finds in a restored datadir."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from snapmgr.backup.run import backup
from support.load import check_invariant, write_load
from support.restored import require_nothing_left
from support.scene import Scene, btrfs_scene, scattered_scene
from support.server import private_server, server_user
from support.storage import loop_filesystem, work_folder

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "ext4")


@pytest.mark.needs("mariadbd")
def test_a_server_on_the_restored_datadir_has_all_that_was_acknowledged(other):
    with btrfs_scene() as scene:
        ctx = scene.context()
        with write_load(str(scene.server.socket), writers=3) as load:
            load.warm_up()
            before = load.acknowledged()
            manifest = backup(ctx, ctx.config.job("demo"))
            after = load.acknowledged()
        assert manifest.position is not None
        for dest in (Path(scene.file_system.point) / "new", other.point / "new"):
            document = scene.json("restore", "latest", str(dest))
            assert document["restored"]["external_paths"] == []
            with private_server(dest, document["restored"]["options"], install_options=None) as server:
                assert server.query("SELECT @@gtid_binlog_pos") == ((manifest.position.gtid,),)
                assert server.query("SELECT @@datadir") == ((f"{dest}/",),)
                with server.connect() as connection:
                    check_invariant(connection, before=before, after=after)
        subprocess.run(["rm", "-r", other.point / "new"], check=True)


@pytest.mark.needs("mariadbd")
def test_folders_elsewhere_get_folders_of_their_own_and_what_leads_back_is_named(other):
    with scattered_scene() as scene:
        server, volume = scene.server, Path(scene.file_system.point) / "mysql"
        dest = other.point / "several"
        done = scene.run("restore", "latest", str(dest))
        assert done.returncode == 0, done.stderr
        assert sorted(os.listdir(dest)) == ["d", "data", "log", "redo"]
        # The .isl file names the live one; the index of the binary logs did.
        assert f"{dest}/data/d/t.isl points to {volume}/tables/d/t.ibd, a path of the source" in done.stderr
        assert f"{dest}/log/binlog.index: changed to name the restored logs" in done.stderr
        assert "binlog.index points to" not in done.stderr
        assert set((volume / "log/binlog.index").read_text().split()) == {f"{volume}/log/binlog.000001"}
        assert set((dest / "log/binlog.index").read_text().split()) == {f"{dest}/log/binlog.000001"}
        assert "before you start a server on it" in done.stderr
        assert f"{volume}/redo -> {dest}/redo" in done.stdout
        line = next(line for line in done.stdout.splitlines() if "server options: " in line)
        given = shlex.split(line.partition("server options: ")[2])
        assert f"--innodb-log-group-home-dir={dest}/redo" in given
        assert f"--log-bin={dest}/log/binlog" in given
        assert "the redo log also contains the external tablespaces' paths" in done.stderr
        subprocess.run(["rm", "-r", dest], check=True)
        # Without such tables nothing has to be changed: it stands by itself.
        server.query("CREATE TABLE d.u SELECT * FROM d.t")
        server.query("DROP TABLE d.t")
        assert scene.run("backup", "demo").returncode == 0
        assert scene.run("restore", "latest", str(dest)).returncode == 0
        server.stop()
        (volume / "redo").rename(volume / "gone")
        with private_server(dest / "data", given, install_options=None) as restored:
            assert restored.query("SELECT * FROM d.u") == ((1,), (2,))
            assert restored.query("SELECT @@innodb_log_group_home_dir") == ((f"{dest}/redo",),)
    subprocess.run(["rm", "-r", dest], check=True)


@pytest.mark.needs("mariadbd", "xfs")
def test_a_set_of_two_volumes_becomes_one_folder():
    with (
        loop_filesystem("xfs", 512 << 20) as first,
        loop_filesystem("xfs", 512 << 20) as second,
        work_folder() as folder,
    ):
        redo = second.point / "redo"
        redo.mkdir()
        os.chown(redo, server_user().pw_uid, server_user().pw_gid)
        moved = (f"--innodb-log-group-home-dir={redo}", f"--innodb-undo-directory={redo}")
        install = (*moved, "--innodb-undo-tablespaces=2")
        with private_server(first.point / "data", moved, install_options=install) as server:
            scene = Scene(first, folder, server)
            scene.configure('quiesce = "freeze-process"')
            ctx = scene.context()
            with write_load(str(server.socket), writers=3) as load:
                load.warm_up()
                before = load.acknowledged()
                manifest = backup(ctx, ctx.config.job("demo"))
                after = load.acknowledged()
            assert len(manifest.members) == 2
            assert manifest.position is not None
            # On the file system of one of them: that one's blocks are shared, the other one's are copied.
            dest = second.point / "new"
            document = scene.json("restore", "latest", str(dest))
            restored = document["restored"]
            assert sorted(os.listdir(dest)) == ["data", "redo"]
            assert restored["data_path"] == f"{dest}/data"
            assert document["places"] == [
                {"original": str(server.datadir), "path": f"{dest}/data"},
                {"original": str(redo), "path": f"{dest}/redo"},
            ]
            assert restored["shared_files"] >= 1
            assert restored["copied_files"] > restored["shared_files"]
            with private_server(dest / "data", restored["options"], install_options=None) as copy:
                assert copy.query("SELECT @@gtid_binlog_pos") == ((manifest.position.gtid,),)
                assert copy.query("SELECT @@innodb_undo_directory") == ((f"{dest}/redo",),)
                with copy.connect() as connection:
                    check_invariant(connection, before=before, after=after)
            prepared = scene.json("prepare", "latest")
            data = Path(prepared["mount"]["data_path"])
            there = data.parent / "redo"
            options = (f"--innodb-log-group-home-dir={there}", f"--innodb-undo-directory={there}")
            with private_server(data, options, install_options=None) as copy:
                assert "crash recovery" not in copy.log_text()
                with copy.connect() as connection:
                    check_invariant(connection, before=before, after=after)
            assert scene.run("umount", "--all").returncode == 0
            require_nothing_left(scene)
