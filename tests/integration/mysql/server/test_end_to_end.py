"""From a loaded server to verified, prepared and restored data, for servers that are not installed on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.backup.run import backup
from support.kinds import KINDS, kinds
from support.load import Acknowledged, check_invariant, write_load
from support.scene import Scene, btrfs_scene
from support.server import private_server, server_user

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Manifest
    from support.kinds import Kind
    from support.server import PrivateServer

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")
UNPACKED = ("mariadb-11.8", "mysql-9")


@dataclass(frozen=True)
class Taken:
    """A scene with one snapshot, taken under load."""

    scene: Scene
    kind: Kind
    manifest: Manifest
    before: tuple[Acknowledged, ...]
    after: tuple[Acknowledged, ...]

    def require_all(self, server: PrivateServer) -> None:
        """Everything that was acknowledged is there, and nothing that was written after the snapshot."""
        assert server.query("SELECT a FROM d.t") == ((1,),)
        with server.connect() as connection:
            check_invariant(connection, before=self.before, after=self.after, engines=self.kind.engines)


@pytest.fixture(
    name="taken", scope="module", params=[pytest.param(name, marks=pytest.mark.needs(name)) for name in UNPACKED]
)
def _taken(request: pytest.FixtureRequest) -> Iterator[Taken]:
    """Redo, undo and binary logs lie beside the datadir, with MySQL a table as well."""
    kind = str(request.param)
    mysql = KINDS[kind].flavor == "mysql"
    with btrfs_scene(server=False) as scene:
        volume = Path(scene.file_system.point) / "mysql"
        for name in ("redo", "undo", "log", "tables"):
            (volume / name).mkdir()
            os.chown(volume / name, server_user().pw_uid, server_user().pw_gid)
        moved = [f"--innodb-log-group-home-dir={volume}/redo", f"--innodb-undo-directory={volume}/undo"]
        moved += [f"--innodb-directories={volume}/tables"] if mysql else []
        options = [*moved, f"--log-bin={volume}/log/binlog"]
        with private_server(volume / "data", options, install_options=moved, kind=kind) as server:
            scene._server = server
            scene.configure()
            server.query("CREATE DATABASE d")
            # MariaDB's redo log names such tables, so that what is restored has to be prepared first.
            elsewhere = f"DATA DIRECTORY='{volume}/tables'" if mysql else ""
            server.query(f"CREATE TABLE d.t (a INT PRIMARY KEY) {elsewhere}")
            server.query("INSERT INTO d.t VALUES (1)")
            ctx = scene.context()
            with write_load(server.socket, writers=2, engines=KINDS[kind].engines) as load:
                load.warm_up()
                before = load.acknowledged()
                manifest = backup(ctx, ctx.config.job("demo"))
                after = load.acknowledged()
            # Whoever sees it has opened the live file.
            server.query("INSERT INTO d.t VALUES (2)")
            yield Taken(scene, KINDS[kind], manifest, before, after)
            assert server.query("SELECT a FROM d.t ORDER BY a") == ((1,), (2,))


def test_what_was_taken_under_load_is_proved(taken):
    done = taken.scene.run("verify", "latest")
    assert done.returncode == 0, done.stderr
    assert taken.manifest.position.gtid
    assert f"its GTID is the recorded one ({taken.manifest.position.gtid})" in done.stdout
    # The program of the source, among all that are here.
    assert f"{taken.kind.flavor} {taken.kind.version}" in done.stdout


def test_it_is_prepared_so_that_a_server_starts_at_once(taken):
    document = taken.scene.json("prepare", "latest")
    prepared = document["prepared"]
    assert prepared["recovered"] is True
    assert prepared["gtid"] == taken.manifest.position.gtid
    data = Path(document["mount"]["data_path"])
    with private_server(data, prepared["options"], install_options=None, kind=taken.kind.name) as copy:
        assert "tarting crash recovery" not in copy.log_text()
        taken.require_all(copy)
        if taken.kind.flavor == "mysql":
            assert prepared["server_uuid"] != taken.manifest.server.server_uuid
            assert copy.query("SELECT @@server_uuid") == ((prepared["server_uuid"],),)
    assert taken.scene.run("umount", "--all").returncode == 0


def test_it_is_restored_and_started_with_the_options_that_are_printed(taken):
    dest = Path(taken.scene.file_system.point) / "restored"
    restored = taken.scene.json("restore", "latest", str(dest))["restored"]
    word = "replica" if taken.kind.flavor == "mysql" else "slave"
    assert f"--skip-{word}-start" in restored["options"]
    with private_server(dest / "data", restored["options"], install_options=None, kind=taken.kind.name) as copy:
        taken.require_all(copy)
        assert copy.query("SELECT @@innodb_undo_directory") == ((f"{dest}/undo",),)


@kinds("mysql-9")
def test_flipped_bytes_in_a_stopped_servers_table_are_exit_code_6_with_its_name(kind):
    with btrfs_scene(kind=kind) as scene:
        server = scene.server
        server.query("CREATE DATABASE d")
        server.query("CREATE TABLE d.flipped (a INT PRIMARY KEY AUTO_INCREMENT, b VARCHAR(250))")
        server.query("INSERT INTO d.flipped (b) VALUES (REPEAT('y', 250))")
        for _ in range(10):
            server.query("INSERT INTO d.flipped (b) SELECT b FROM d.flipped")
        server.stop()
        table = server.datadir / "d/flipped.ibd"
        data = table.read_bytes()
        # FIL_PAGE_INDEX; the last ones are leaves.
        trees = [at for at in range(0, len(data), 16384) if data[at + 24 : at + 26] == b"\x45\xbf"]
        with open(table, "r+b") as file:
            file.seek(trees[-2] + 200)
            file.write(bytes(byte ^ 255 for byte in data[trees[-2] + 200 : trees[-2] + 210]))
        text = f'[job.demo]\nsource = "mysql"\ndatadir = "{server.datadir}"\nquiesce = "stopped"\n'
        scene.configure(text=text)
        assert scene.run("backup", "demo").returncode == 0
        done = scene.run("verify", "latest")
        assert done.returncode == 6, done.stderr
        assert "`d`.`flipped`" in done.stderr
