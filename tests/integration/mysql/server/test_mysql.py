"""A throwaway server on copies of a MySQL: its own ways of storing data, damage and keys."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from snapmgr.contract.errors import MissingRequirementError
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.datadir.layout import read_layout
from snapmgr.mysql.datadir.origin import read_origin
from snapmgr.mysql.server.program import find_server, server_for
from snapmgr.mysql.server.throwaway import throwaway
from support.copies import MEMORY, check, frozen
from support.kinds import KINDS
from support.server import private_server, server_user
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from snapmgr.mysql.datadir.layout import ServerLayout
    from support.server import PrivateServer

pytestmark = pytest.mark.needs("root", "mysql-9")
KIND = KINDS["mysql-9"]


@pytest.fixture(name="folder", scope="module")
def _folder() -> Iterator[Path]:
    with work_folder() as folder:
        folder.chmod(0o755)
        yield folder


@pytest.fixture(name="live", scope="module")
def _live(folder: Path) -> Iterator[tuple[PrivateServer, ServerLayout]]:
    """A running server with its binary logs and some tablespaces beside its datadir."""
    for name in ("tables", "logs"):
        (folder / name).mkdir()
        os.chown(folder / name, server_user().pw_uid, server_user().pw_gid)
    options = [f"--innodb-directories={folder}/tables", f"--log-bin={folder}/logs/bin"]
    with private_server(folder / "live", options, kind=KIND.name) as server:
        server.query("CREATE DATABASE shop")
        server.query("CREATE TABLE shop.big (a INT PRIMARY KEY AUTO_INCREMENT, b VARCHAR(250))")
        server.query("INSERT INTO shop.big (b) VALUES (REPEAT('y', 250))")
        for _ in range(12):
            server.query("INSERT INTO shop.big (b) SELECT b FROM shop.big")
        server.query("CREATE TABLE shop.old (a INT PRIMARY KEY) ENGINE=MyISAM")
        server.query("CREATE TABLESPACE general ADD DATAFILE 'general.ibd'")
        server.query("CREATE TABLE shop.inside (a INT PRIMARY KEY) TABLESPACE general")
        server.query(f"CREATE TABLE shop.elsewhere (a INT PRIMARY KEY) DATA DIRECTORY='{folder}/tables'")
        server.query("SET GLOBAL event_scheduler = OFF")
        server.query("CREATE EVENT shop.e ON SCHEDULE EVERY 1 SECOND DO DELETE FROM shop.big")
        # Written to its place, or recovery would write each page anew.
        server.restart(["--event-scheduler=OFF"])
        for table in ("elsewhere", "inside", "old"):
            server.query(f"INSERT INTO shop.{table} VALUES (1)")
        with connect(Credentials(socket=server.socket)) as connection:
            yield server, read_layout(connection, identify(connection))


@pytest.fixture(name="copy")
def _copy(live: tuple[PrivateServer, ServerLayout], folder: Path) -> Iterator[Path]:
    """A crash-consistent copy of all but the binary logs, whose engines' logs were flushed."""
    server, _ = live
    server.query("FLUSH NO_WRITE_TO_BINLOG ENGINE LOGS")
    copy = folder / "copy"
    copy.mkdir()
    with frozen(server):
        for name in ("live", "tables"):
            subprocess.run(["cp", "-a", "--reflink=auto", str(folder / name), str(copy)], check=True)
    yield copy
    shutil.rmtree(copy)


@pytest.fixture(name="run_dir")
def _run_dir() -> Iterator[str]:
    with work_folder() as folder:
        yield str(folder / "run")


def originals(folder: Path) -> dict[str, str]:
    """Where the folders of the source are in the copy."""
    return {str(folder / name): str(folder / "copy" / name) for name in ("live", "tables")}


def resident_bytes(pid: int) -> int:
    """Return the memory of a process that is its own, without mapped files."""
    with open(f"/proc/{pid}/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon:"))


def test_it_sees_the_copy_alone_and_knows_its_gtids_without_the_binary_logs(live, folder, copy, run_dir):
    server, layout = live
    assert read_origin(copy / "live").flavor == "mysql"
    assert KIND.version is not None
    assert KIND.version.startswith(read_origin(copy / "live").version)
    binary = server_for(None, copy / "live", None)
    assert os.path.samefile(binary.path, KIND.program("mysqld"))
    ((uuid, gtid),) = server.query("SELECT @@server_uuid, @@gtid_executed")
    before = sorted(os.listdir(folder / "logs"))
    # Later than the copy: whoever sees it has opened the live file.
    server.query("INSERT INTO shop.elsewhere VALUES (2)")
    arguments = {"settings": layout.settings, "memory_bytes": 256 << 20, "run_dir": run_dir}
    with throwaway(binary, copy / "live", originals=originals(folder), **arguments) as started:
        assert check(started).failures == ()
        assert resident_bytes(started.pid) < 320 << 20
        with started.connect() as connection:
            assert connection.rows("SELECT a FROM shop.elsewhere") == [{"a": 1}]
            assert connection.value("SELECT COUNT(*) FROM shop.big") == 4096
            values = connection.variables(
                "server_uuid", "gtid_executed", "event_scheduler", "skip_networking", "log_bin_basename", "mysqlx_port"
            )
            assert str(connection.value("SELECT CURRENT_USER()")).startswith("skip-grants user")
            connection.execute("INSERT INTO shop.elsewhere VALUES (3)")
        assert values["server_uuid"] != uuid
        assert values["event_scheduler"] == "DISABLED"
        assert values["skip_networking"] == "ON"
        assert "mysqlx_port" not in values
        assert values["log_bin_basename"] == f"{run_dir}/bin"
        # From its tables.
        assert values["gtid_executed"] == gtid
        assert started.shutdown()
    assert sorted(os.listdir(folder / "logs")) == before
    assert server.query("SELECT a FROM shop.elsewhere ORDER BY a") == ((1,), (2,))
    server.query("DELETE FROM shop.elsewhere WHERE a = 2")


@pytest.mark.usefixtures("live")
def test_what_only_the_data_dictionary_names_is_not_opened(copy, run_dir):
    """A stopped server could not say where its tablespaces are, and MySQL leaves no .isl files."""
    binary = find_server("mysql")
    arguments = {"settings": {}, "memory_bytes": MEMORY, "run_dir": run_dir}
    with (
        pytest.raises(MissingRequirementError, match=r"data dictionary names .*/tables/shop/elsewhere\.ibd"),
        throwaway(binary, copy / "live", **arguments),
    ):
        pass


def test_other_settings_than_the_datas_and_a_newer_writer_say_nothing_about_them(live, folder, copy, run_dir):
    _, layout = live
    settings = layout.settings | {"lower_case_table_names": "1"}
    arguments = {"settings": settings, "memory_bytes": MEMORY, "run_dir": run_dir}
    with (
        pytest.raises(MissingRequirementError, match="Different lower_case_table_names"),
        throwaway(find_server("mysql"), copy / "live", originals=originals(folder), **arguments),
    ):
        pass
    with open(copy / "live/mysql.ibd", "r+b") as file:
        file.seek(8)
        file.write((99_99_99).to_bytes(4, "big"))
    with pytest.raises(
        MissingRequirementError, match=r"written by mysql 99\.99\.99, which an older server must not open; found"
    ):
        server_for(None, copy / "live", None)


@pytest.fixture(name="keyed")
def _keyed(folder: Path) -> Iterator[Path]:
    """A program with a keyring component beside it: the unpacked one's, in a tree of its own."""
    root, own = folder / "root", KIND.folder
    (root / "usr/lib").mkdir(parents=True)
    (root / "usr/sbin").mkdir()
    for path in own.iterdir():
        if path.name != "usr":
            (root / path.name).symlink_to(path)
    for path in (own / "usr").iterdir():
        if path.name not in ("lib", "sbin"):
            (root / "usr" / path.name).symlink_to(path)
    for path in (own / "usr/lib").iterdir():
        if path.name != "mysql":
            (root / "usr/lib" / path.name).symlink_to(path)
    shutil.copytree(own / "usr/lib/mysql", root / "usr/lib/mysql", copy_function=os.symlink)
    # The server looks beside the program that it is, not beside a symlink to it.
    shutil.copy(own / "usr/sbin/mysqld", root / "usr/sbin/mysqld")
    keys = folder / "keys"
    keys.mkdir(mode=0o700)
    os.chown(keys, server_user().pw_uid, server_user().pw_gid)
    (root / "usr/sbin/mysqld.my").write_text('{"components": "file://component_keyring_file"}')
    config = root / "usr/lib/mysql/plugin/component_keyring_file.cnf"
    config.write_text(json.dumps({"path": str(keys / "ring"), "read_only": False}))
    yield root
    shutil.rmtree(root)


def test_encrypted_tables_are_read_with_the_keyring_and_not_judged_without(folder, keyed, run_dir, monkeypatch):
    source, program = folder / "secret", keyed / "usr/sbin/mysqld"
    options = [f"--plugin-dir={keyed}/usr/lib/mysql/plugin", "--binlog-encryption=ON"]
    monkeypatch.setattr(type(KIND), "program", lambda _self, _name: str(program))
    with private_server(source, options, kind=KIND.name) as server:
        server.query("CREATE DATABASE shop")
        server.query("CREATE TABLE shop.t (a INT PRIMARY KEY) ENCRYPTION='Y'")
        server.query("INSERT INTO shop.t VALUES (1)")
        with connect(Credentials(socket=server.socket)) as connection:
            layout = read_layout(connection, identify(connection))
        server.stop()
    monkeypatch.undo()
    ring = folder / "keys/ring"
    assert layout.settings["keyring_file"] == str(ring)
    before = (ring.read_bytes(), ring.stat().st_mtime_ns)
    arguments = {"settings": layout.settings, "memory_bytes": MEMORY, "run_dir": run_dir}
    with throwaway(find_server("mysql", str(program)), source, **arguments) as started:
        assert check(started).failures == ()
        assert started.missing_keys("x") is None
        with started.connect() as connection:
            assert connection.rows("SELECT a FROM shop.t") == [{"a": 1}]
            # It makes a new key, for the copy alone.
            connection.execute("ALTER INSTANCE ROTATE INNODB MASTER KEY")
        started.shutdown()
    assert (ring.read_bytes(), ring.stat().st_mtime_ns) == before
    # Another program, without a keyring: its binary logs and its table cannot be read, which is no damage.
    shutil.rmtree(run_dir)
    arguments["settings"] = {name: value for name, value in layout.settings.items() if not name.startswith("log_bin")}
    with throwaway(find_server("mysql", KIND.program("mysqld")), source, **arguments) as started:
        report = check(started, "quick")
        assert report.failures == ()
        assert report.unchecked == ("`shop`.`t`: its encryption key is not available",)
        assert report.user_tables_checked == 0
        lacking = started.missing_keys("not judged")
        assert lacking is not None
        assert "mysqld.my does not load component_keyring_file, which its source did" in lacking.message
    shutil.rmtree(source)
