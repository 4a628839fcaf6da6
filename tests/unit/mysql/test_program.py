"""Which server program starts on which data, and how it finds out who wrote them."""

from __future__ import annotations

import sys

import pytest

from snapmgr.catalog.manifest import ServerRecord
from snapmgr.contract.errors import MissingRequirementError
from snapmgr.mysql.datadir.origin import Origin, read_origin, version_number
from snapmgr.mysql.server.options import plugin_folder, program_folders
from snapmgr.mysql.server.program import ServerBinary, choose_server, find_server, running_programs, wrote_last


def binary(version: str) -> ServerBinary:
    flavor = "mariadb" if "MariaDB" in version else "mysql"
    return ServerBinary(path=f"/x/{version}", flavor=flavor, version=version)


@pytest.mark.parametrize(
    ("wrote", "found", "chosen"),
    [
        # The same one, then one of its series, then the nearest newer one.
        ("8.4.3", ["9.7.4-2", "8.4.5", "8.4.3"], "8.4.3"),
        ("8.4.3", ["9.7.4-2", "8.4.5", "8.4.4"], "8.4.4"),
        ("8.4.3", ["9.7.4-2", "9.1.0"], "9.1.0"),
        ("8.4.3-debug", ["8.4.2", "8.3.9"], None),
        ("10.11.6-MariaDB-log", ["11.8.6-MariaDB", "10.11.4-MariaDB"], "10.11.4-MariaDB"),
        ("10.11.6-MariaDB", ["10.11.4-MariaDB", "10.11.9-MariaDB"], "10.11.9-MariaDB"),
        ("10.11.6-MariaDB", ["11.8.6-MariaDB", "11.4.2-MariaDB"], "11.4.2-MariaDB"),
        ("11.8.6-MariaDB", ["11.4.9-MariaDB", "10.11.19-MariaDB"], None),
        ("10.11.6-MariaDB", ["10.6.30-MariaDB"], None),
        ("9.10.1", ["9.9.9"], None),
        ("9.7.4", [], None),
    ],
)
def test_the_nearest_program_that_is_not_older_is_chosen(wrote, found, chosen):
    programs = [binary(version) for version in found]
    for order in (programs, programs[::-1]):
        got = choose_server(order, wrote)
        assert (got.version if got else None) == chosen


def test_a_newer_program_upgrades_the_data_but_for_mariadbs_patches():
    assert binary("8.4.4").is_upgrade("8.4.3")
    assert not binary("8.4.3").is_upgrade("8.4.3")
    assert not binary("10.11.9-MariaDB").is_upgrade("10.11.6-MariaDB")
    assert binary("11.4.2-MariaDB").is_upgrade("10.11.6-MariaDB-log")
    assert not binary("11.4.2-MariaDB").is_upgrade("")


def script(path, text):
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return str(path)


def test_an_older_program_is_refused_with_what_wrote_the_data_and_what_was_found(tmp_path):
    path = script(tmp_path / "mysqld", "mysqld  Ver 8.0.36 for Linux on x86_64 (MySQL Community Server - GPL)")
    assert find_server("mysql", path, wrote="8.0.36").version == "8.0.36"
    with pytest.raises(MissingRequirementError) as caught:
        find_server("mysql", path, wrote="8.4.0")
    assert (
        f"written by mysql 8.4.0, which an older server must not open; found: {path} (8.0.36)" in caught.value.message
    )
    assert caught.value.exit_code == 7


def test_a_symlink_called_mysqld_is_what_it_leads_to(tmp_path):
    script(tmp_path / "mariadbd", "mysqld  Ver 10.11.6-MariaDB-0+deb12u1 for debian-linux-gnu on x86_64 (Debian 12)")
    (tmp_path / "mysqld").symlink_to("mariadbd")
    with pytest.raises(MissingRequirementError, match="is not a mysql server"):
        find_server("mysql", str(tmp_path / "mysqld"))
    assert find_server("mariadb", str(tmp_path / "mysqld")).flavor == "mariadb"


def test_a_program_that_others_may_exchange_is_never_run(tmp_path):
    """What a manifest or a process names is obeyed only if nobody but root and us could have put it there."""
    mark, path = tmp_path / "ran", tmp_path / "mysqld"
    path.write_text(f"#!/bin/sh\ntouch {mark}\necho 'mysqld  Ver 99.1.1 for Linux on x86_64 (MySQL)'\n")
    path.chmod(0o757)
    with pytest.raises(MissingRequirementError):
        find_server("mysql", wrote="99.1.1", ran=str(path))
    assert not mark.exists()
    path.chmod(0o755)
    assert find_server("mysql", wrote="99.1.1", ran=str(path)).path == str(path)
    assert mark.exists()


def test_running_servers_are_known_by_their_name_and_their_file(tmp_path):
    for pid, comm in (("10", "mysqld"), ("11", "nginx"), ("12", "mariadbd")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "comm").write_text(f"{comm}\n")
        (tmp_path / pid / "exe").symlink_to(sys.executable if pid != "12" else "/gone (deleted)")
    assert list(running_programs(tmp_path)) == [sys.executable]


@pytest.mark.parametrize(
    ("files", "origin"),
    [
        ({"mysql.ibd": bytes(8) + (9_07_04).to_bytes(4, "big")}, Origin(flavor="mysql", version="9.7.4")),
        ({"mysql.ibd": bytes(8) + (8_00_36).to_bytes(4, "big")}, Origin(flavor="mysql", version="8.0.36")),
        ({"mysql.ibd": b""}, Origin(flavor="mysql", version="")),
        ({"mysql_upgrade_info": b"5.7.44\0"}, Origin(flavor="mysql", version="5.7.44")),
        ({"mysql_upgrade_info": b"10.6.18-MariaDB"}, Origin(flavor="mariadb", version="10.6.18-MariaDB")),
        (
            {"aria_log_control": b"", "mariadb_upgrade_info": b"11.8.6-MariaDB\n"},
            Origin(flavor="mariadb", version="11.8.6-MariaDB"),
        ),
        ({"aria_log_control": b"", "mysql_upgrade_info": b"garbage"}, Origin(flavor="mariadb", version="")),
        ({"mysql/global_priv.MAI": b""}, Origin(flavor="mariadb", version="")),
        ({}, Origin(flavor="mysql", version="")),
    ],
)
def test_the_files_tell_who_wrote_them(tmp_path, files, origin):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert read_origin(tmp_path) == origin


def test_a_version_is_its_first_three_numbers():
    assert version_number("10.11.19-MariaDB-0+deb12u1-log") == (10, 11, 19)
    assert version_number("9.7.4-2") == (9, 7, 4)
    assert version_number("nonsense 1.2.3") == ()


def test_mysqls_data_are_believed_before_what_its_server_said():
    def record(flavor, version):
        return ServerRecord(flavor=flavor, version=version, server_id=1, server_uuid=None, datadir="/d", log_bin=None)

    assert wrote_last(record("mysql", "5.7.1-for-that-tool"), Origin(flavor="mysql", version="9.7.4")) == "9.7.4"
    assert wrote_last(record("mysql", "9.7.4"), Origin(flavor="mysql", version="")) == "9.7.4"
    # Of MariaDB the file says only who upgraded the system tables.
    old = Origin(flavor="mariadb", version="10.6.1-MariaDB")
    assert wrote_last(record("mariadb", "10.11.6-MariaDB"), old) == "10.11.6-MariaDB"


@pytest.mark.parametrize(
    ("flavor", "share", "plugins"),
    [
        ("mysql", "share/mysql", "lib/mysql/plugin"),
        ("mysql", "share", "lib/plugin"),
        ("mysql", "share/mysql-8.4", "lib64/mysql/plugin"),
        ("mariadb", "share/mariadb", "lib64/mariadb/plugin"),
    ],
)
def test_an_unpacked_server_finds_its_own_files(tmp_path, flavor, share, plugins):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mysqld").write_text("")
    for name in (f"{share}/english/errmsg.sys", f"{share}/charsets/Index.xml", f"{plugins}/x.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    program = ServerBinary(path=str(tmp_path / "bin/mysqld"), flavor=flavor, version="8.4.3")
    assert list(program_folders(program)) == [
        f"--basedir={tmp_path}",
        f"--lc-messages-dir={tmp_path}/{share}",
        f"--character-sets-dir={tmp_path}/{share}/charsets",
        f"--plugin-dir={tmp_path}/{plugins}",
    ]
    bare = ServerBinary(path="/nowhere/bin/mysqld", flavor=flavor, version="8.4.3")
    assert list(program_folders(bare)) == []
    assert plugin_folder(bare) is None
