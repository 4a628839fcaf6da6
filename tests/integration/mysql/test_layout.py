"""Finding a real server's files outside its datadir, for each way of putting them there."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from snapmgr.mysql.connect.client import Credentials, MysqlError, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.connect.openfiles import open_files
from snapmgr.mysql.datadir.layout import DataPlace, ServerLayout, _beside, read_layout
from support.kinds import KINDS, kinds
from support.layouts import moved
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
    path.mkdir(parents=True)
    os.chown(path, server_user().pw_uid, server_user().pw_gid)
    return path


def layout_of(server: PrivateServer, **login: str) -> ServerLayout:
    with connect(Credentials(socket=server.socket)) as connection:
        identity = identify(connection)
    with connect(Credentials(socket=server.socket, **login)) as connection:
        return read_layout(connection, identity)


def places(layout: ServerLayout) -> dict[str, str]:
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


@kinds("mariadb-11.8", "mysql-9")
def test_every_place_of_a_newer_server_is_found(base, kind):
    """Variables, its list of tablespaces, and what only its open files tell; nothing of the temporary ones."""
    home = base / kind
    mysql = KINDS[kind].flavor == "mysql"
    parts, absolute = moved(kind, home), folder(home, "absolute")
    if not mysql:
        # There it is below innodb_data_home_dir all the same.
        below = home / f"system{absolute}"
        below.parent.mkdir(parents=True)
        below.symlink_to(absolute)
    moves = [
        *parts,
        f"--innodb-data-file-path=ibdata1:12M;{absolute}/ibdata2:1M;../relative/ibdata3:1M:autoextend",
        "--innodb-temp-data-file-path=../temporary/ibtmp1:12M:autoextend",
    ]
    logs = [f"--log-bin={folder(home, 'logs')}/b", f"--log-bin-index={folder(home, 'index')}/b.index"]
    logs += [f"--relay-log={folder(home, 'relay')}/r", f"--relay-log-index={folder(home, 'relay-index')}/r.index"]
    for name in ("relative", "temporary", "general", "tables", "states", "ddl", "sessions"):
        folder(home, name)
    if mysql:
        moves.append(f"--innodb-temp-tablespaces-dir={home}/sessions")
        logs.append(f"--innodb-directories={home}/general;{home}/tables")
    else:
        logs += [f"--master-info-file={home}/states/master.info", f"--log-ddl-recovery={home}/ddl/ddl_recovery.log"]
    with private_server(home / "data", [*moves, *logs], install_options=moves, kind=kind) as server:
        server.query("CREATE DATABASE d")
        server.query(f"CREATE TABLE d.t (a INT) DATA DIRECTORY='{home}/tables'")
        server.query(
            "CREATE TABLE d.p (a INT) PARTITION BY HASH (a) "
            f"(PARTITION p0 DATA DIRECTORY='{home}/general', PARTITION p1)"
        )
        if mysql:
            server.query(f"CREATE TABLESPACE s ADD DATAFILE '{home}/general/s.ibd'")
            server.query(f"CREATE UNDO TABLESPACE u ADD DATAFILE '{home}/tables/u.ibu'")
        else:
            server.query("CHANGE MASTER TO master_host='192.0.2.1', master_user='x'")
        first = layout_of(server)
        server.restart()
        layout = layout_of(server)
    found = {os.path.relpath(path, home): what for path, what in places(layout).items()}
    expected = {
        "redo": "redo log",
        "undo": "undo tablespaces",
        "system": "system tablespace",
        "absolute/ibdata2": "system tablespace",
        "relative/ibdata3": "system tablespace",
        "logs": "binary log",
        "index": "index of the binary log",
        "relay": "relay log",
        "relay-index": "index of the relay log",
        "tables/d/t.ibd": "tablespace",
    }
    if mysql:
        expected |= {"dblwr": "doublewrite buffer", "general/s.ibd": "tablespace", "tables/u.ibu": "tablespace"}
        expected |= {"general/d/p#p#p0.ibd": "tablespace"}
    else:
        expected |= {"aria": "Aria log", "general/d/p#P#p0.ibd": "tablespace"}
        expected |= {"states/multi-master.info": "replication state", "ddl/ddl_recovery.log": "DDL recovery log"}
    assert all(os.path.isfile(home / f"{name}") for name in ("absolute/ibdata2", "relative/ibdata3", "system/ibdata1"))
    # Each undo tablespace is listed by itself as well.
    found = {path: what for path, what in found.items() if not path.startswith(("undo/", "system/"))}
    assert found.items() >= expected.items()
    # An info file that is open for a connection is of the same kind.
    assert {what for path, what in found.items() if path not in expected} <= {"replication state"}
    assert {place.path for place in first.places} >= {place.path for place in layout.places if "info" not in place.path}
    assert {place.path for place in layout.places if place.log} >= {str(home / "logs"), str(home / "relay")}
    assert not any(place.log for place in layout.places if place.what == "redo log")
    assert layout.unknown_files == ()
    assert layout.scratch == ()


@kinds("mysql-9")
def test_what_an_account_may_not_see_is_said(base, kind):
    with private_server(base / "blind", kind=kind) as server:
        server.query("CREATE DATABASE shop")
        for engine, name in (("InnoDB", "i"), ("MyISAM", "m"), ("CSV", "c")):
            server.query(f"CREATE TABLE shop.{name} (a INT NOT NULL) ENGINE={engine}")
        server.query("CREATE USER blind@localhost IDENTIFIED BY ''")
        with pytest.raises(MysqlError, match="PROCESS") as caught:
            layout_of(server, user="blind")
        assert caught.value.errno == 1227
        server.query("GRANT PROCESS ON *.* TO blind@localhost")
        engines = layout_of(server, user="blind").engines
        server.query("GRANT SELECT ON *.* TO blind@localhost")
        assert layout_of(server, user="blind").engines == {"CSV": 1, "InnoDB": 1, "MyISAM": 1}
    # Its own tables are all that such an account could miss: files tell the others.
    assert {engine: number for engine, number in engines.items() if number} == {"CSV": 1, "MyISAM": 1}
    assert all(number == 0 for engine, number in engines.items() if engine not in {"CSV", "MyISAM"})


def test_links_in_folders_elsewhere_are_followed(base, plain):
    redo, away = folder(base, "redo-of-links"), folder(base, "away")
    (redo / "ib_logfile0").symlink_to(away / "ib_logfile0")
    (redo / "notes.txt").symlink_to(away / "notes.txt")
    named = [DataPlace(what="redo log", path=str(redo))]
    assert list(_beside(named, str(plain.datadir))) == [DataPlace(what="redo log", path=str(redo / "ib_logfile0"))]


def test_open_files_tell_what_no_variable_names(base):
    """Of this process: data by their names, unknown files; no files that only grow, deleted or temporary files."""
    home, known = folder(base, "open"), folder(base, "known")
    with ExitStack() as stack:
        for name in ("multi-master.info", "x.ibd", "report.csv", "#sql-1.MYD", "ibtmp1"):
            stack.enter_context((home / name).open("w"))
        stack.enter_context((home / "audit.log").open("a"))
        stack.enter_context((known / "y.ibd").open("w"))
        gone = stack.enter_context((home / "gone.ibd").open("w"))
        os.unlink(gone.name)
        (home / "read.ibd").touch()
        stack.enter_context((home / "read.ibd").open())
        found, unknown = open_files(os.getpid(), {str(known)})
    assert {path: what for path, what in found.items() if path.startswith(str(base))} == {
        str(home / "multi-master.info"): "replication state",
        str(home / "x.ibd"): "tablespace",
    }
    assert [path for path in unknown if path.startswith(str(base))] == [str(home / "report.csv")]
