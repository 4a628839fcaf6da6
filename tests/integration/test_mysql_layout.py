"""What a real server writes outside of its datadir: each way of putting it there is found."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from snapmgr.mysql.client import Credentials, MysqlError, connect
from snapmgr.mysql.identity import identify
from snapmgr.mysql.layout import Layout, read_layout
from support.server import PrivateServer, private_server, server_user
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.needs("root", "mariadbd")


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def plain(base: Path) -> Iterator[PrivateServer]:
    with private_server(base / "plain") as server:
        server.query("CREATE DATABASE shop")
        yield server


def folder(base: Path, name: str) -> Path:
    path = base / name
    path.mkdir()
    os.chown(path, server_user().pw_uid, server_user().pw_gid)
    return path


def layout_of(server: PrivateServer, **login: str) -> Layout:
    with connect(Credentials(socket=server.socket)) as connection:
        identity = identify(connection)
    with connect(Credentials(socket=server.socket, **login)) as connection:
        return read_layout(connection, identity)


def places(layout: Layout) -> dict[str, str]:
    return {place.path: place.what for place in layout.places}


def test_a_plain_server_writes_nothing_outside(plain):
    layout = layout_of(plain)
    assert layout.places == ()
    assert layout.datadir == str(plain.datadir)
    assert layout.log_bin_basename == str(plain.datadir / "binlog")
    assert layout.settings["log_bin_basename"] == "binlog"
    assert layout.settings["innodb_log_group_home_dir"] == "."
    assert layout.settings["innodb_page_size"] == "16384"
    assert layout.engines == {}
    assert "relay_log_basename" not in layout.settings


def test_logs_and_system_files_elsewhere_are_each_named(base):
    redo, undo, logs, aria, data = (folder(base, name) for name in ("redo", "undo", "logs", "aria", "system"))
    options = [
        f"--innodb-log-group-home-dir={redo}",
        f"--innodb-undo-directory={undo}",
        "--innodb-undo-tablespaces=3",
        f"--aria-log-dir-path={aria}",
        f"--innodb-data-home-dir={data}",
        "--innodb-data-file-path=ibdata1:12M;../system2/ibdata2:1M:autoextend",
    ]
    (base / "system2").mkdir()
    os.chown(base / "system2", server_user().pw_uid, server_user().pw_gid)
    own = [f"--log-bin={logs}/bin", f"--relay-log={base}/relay/r"]
    folder(base, "relay")
    with private_server(base / "spread", [*options, *own], install_options=options) as server:
        # Nothing is replicated, but the server then has a relay log.
        server.query("CHANGE MASTER TO master_host='192.0.2.1', master_user='x'")
        layout = layout_of(server)
    found = places(layout)
    assert "redo log" in found[str(redo)]
    assert "undo tablespaces" in found[str(undo)]
    assert "Aria log" in found[str(aria)]
    assert "binary log" in found[str(logs)]
    assert "relay log" in found[str(base / "relay")]
    assert "system tablespace" in found[str(data)]
    assert "system tablespace" in found[str(base / "system2/ibdata2")]
    assert layout.log_bin_basename == f"{logs}/bin"
    assert layout.settings["log_bin_basename"] == "../logs/bin"
    assert layout.settings["innodb_log_group_home_dir"] == "../redo"
    assert layout.settings["innodb_undo_tablespaces"] == "3"
    assert layout.settings["relay_log_basename"] == "../relay/r"


def test_tables_elsewhere_are_found_before_and_after_a_restart(plain, base):
    """After a restart MariaDB lists only tablespaces that were opened; the datadir itself still tells."""
    elsewhere = folder(base, "elsewhere")
    for engine in ("InnoDB", "MyISAM", "Aria"):
        plain.query(f"CREATE TABLE shop.d{engine} (a INT) ENGINE={engine} DATA DIRECTORY='{elsewhere}'")
    plain.query(
        "CREATE TABLE shop.dparted (a INT) ENGINE=InnoDB PARTITION BY HASH (a) "
        f"(PARTITION p0 DATA DIRECTORY='{elsewhere}', PARTITION p1)"
    )
    try:
        before = places(layout_of(plain))
        plain.restart()
        after = places(layout_of(plain))
    finally:
        for name in ("dInnoDB", "dMyISAM", "dAria", "dparted"):
            plain.query(f"DROP TABLE shop.{name}")
    assert before.keys() == after.keys()
    assert {path.removeprefix(f"{elsewhere}/") for path in after} == {
        "shop/dInnoDB.ibd",
        "dMyISAM.MYD",
        "dAria.MAD",
        "shop/dparted#P#p0.ibd",
    }


def test_symlinked_schemas_and_files_are_found(plain, base):
    target = folder(base, "schema")
    (plain.datadir / "linked").symlink_to(target)
    inner = folder(base, "inner")
    (target / "deep").symlink_to(inner)
    try:
        found = places(layout_of(plain))
    finally:
        (plain.datadir / "linked").unlink()
    assert found[str(target)] == f"target of the symlink {plain.datadir}/linked"
    assert str(inner) in found


def test_a_folder_on_another_file_system_is_a_place_of_its_own(plain):
    point = plain.datadir / "mounted"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(point)], check=True)
    try:
        layout = layout_of(plain)
    finally:
        subprocess.run(["umount", str(point)], check=True)
        point.rmdir()
    assert places(layout) == {str(point): "folder on another file system or subvolume"}


def test_a_symlink_above_the_datadir_changes_nothing(base):
    real = base / "really"
    real.mkdir()
    link = base / "by-name"
    link.symlink_to(real)
    with private_server(link / "d") as server:
        layout = layout_of(server)
    assert layout.datadir == str(real / "d")
    assert layout.places == ()
    assert layout.settings["innodb_log_group_home_dir"] == "."
    assert layout.settings["log_bin_basename"] == "binlog"


def test_engines_are_counted_also_for_an_account_that_sees_no_table(plain):
    for engine, name in (("InnoDB", "i1"), ("InnoDB", "i2"), ("MyISAM", "m"), ("Aria", "a"), ("CSV", "c")):
        plain.query(f"CREATE TABLE shop.{name} (a INT NOT NULL) ENGINE={engine}")
    plain.query("CREATE TABLE shop.mp (a INT) ENGINE=MyISAM PARTITION BY HASH (a) PARTITIONS 4")
    plain.query("CREATE VIEW shop.v AS SELECT * FROM shop.i1")
    # Each account logs in by the socket as the system's user of its name.
    plain.query("CREATE USER seesnothing@localhost IDENTIFIED BY ''")
    plain.query("GRANT PROCESS, RELOAD ON *.* TO seesnothing@localhost")
    plain.query("CREATE USER mayless@localhost IDENTIFIED BY ''")
    try:
        everything = layout_of(plain).engines
        blind = layout_of(plain, user="seesnothing").engines
        with pytest.raises(MysqlError, match="PROCESS") as caught:
            layout_of(plain, user="mayless")
    finally:
        for name in ("i1", "i2", "m", "a", "c", "mp"):
            plain.query(f"DROP TABLE shop.{name}")
        plain.query("DROP VIEW shop.v")
    assert everything == {"Aria": 1, "CSV": 1, "InnoDB": 2, "MyISAM": 2}
    assert blind == {"Aria": 1, "CSV": 1, "MyISAM": 2}
    assert caught.value.errno == 1227


def test_without_a_binary_log_there_is_none(base):
    with private_server(base / "nolog", ["--skip-log-bin"]) as server:
        layout = layout_of(server)
    assert layout.log_bin_basename is None
    assert "log_bin_basename" not in layout.settings
