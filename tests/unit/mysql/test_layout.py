"""The pure parts of the search for a server's files."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.mysql.datadir.layout import DataPlace, ServerLayout, _Scan, data_files, gather
from snapmgr.mysql.datadir.settings import source_settings


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("ibdata1:12M:autoextend", ("ibdata1",)),
        ("ibdata1:12M;/b/ibdata2:1G:autoextend:max:2G", ("ibdata1", "/b/ibdata2")),
        ("/dev/sdb1:10Gnewraw;/dev/sdc1:5Graw", ("/dev/sdb1", "/dev/sdc1")),
        ("odd:name:12M", ("odd:name",)),
        ("", ()),
    ],
)
def test_data_files_are_read_from_their_setting(text, paths):
    assert data_files(text) == paths


@given(st.lists(st.tuples(st.from_regex(r"/?[a-z0-9_./-]{1,20}", fullmatch=True), st.integers(1, 999)), max_size=5))
def test_every_data_file_is_found(files):
    text = ";".join(f"{path}:{size}M" for path, size in files)
    assert data_files(text) == tuple(path for path, _ in files)


def test_what_is_inside_is_dropped_and_what_is_outside_is_named_once(tmp_path):
    datadir = tmp_path / "d"
    other = tmp_path / "d2"
    (datadir / "sub").mkdir(parents=True)
    other.mkdir()
    (tmp_path / "link").symlink_to(other)
    found = [
        DataPlace(what="datadir", path=str(datadir)),
        DataPlace(what="inside", path=str(datadir / "sub" / ".." / "x")),
        DataPlace(what="redo log", path=str(other)),
        DataPlace(what="undo tablespaces", path=str(tmp_path / "link")),
        DataPlace(what="redo log", path=str(tmp_path / "link" / ".")),
    ]
    assert gather(found, str(datadir)) == (DataPlace(what="redo log, undo tablespaces", path=str(other)),)
    (place,) = gather([], str(datadir), (str(datadir / "sub"),))
    assert place.path == str(datadir / "sub")


def layout(datadir: str, *paths: str) -> ServerLayout:
    return ServerLayout(
        datadir=datadir,
        places=tuple(DataPlace(what="x", path=path) for path in paths),
        log_bin_basename=None,
        settings={},
        engines={},
    )


def test_paths_in_settings_are_relative_so_that_they_hold_in_a_copy(tmp_path):
    datadir = str(tmp_path / "v" / "data")
    os.makedirs(datadir)
    (tmp_path / "v" / "redo").mkdir()
    (tmp_path / "by-link").symlink_to(tmp_path / "v" / "redo")
    settings = source_settings(
        {
            "innodb_log_group_home_dir": str(tmp_path / "by-link"),
            "innodb_undo_directory": "./",
            "log_bin_basename": f"{datadir}/binlog",
            "log_bin_index": f"{tmp_path}/v/redo/binlog.index",
            "innodb_page_size": "16384",
            "gtid_mode": "",
        },
        datadir,
    )
    assert settings == {
        "innodb_log_group_home_dir": "../redo",
        "innodb_undo_directory": ".",
        "log_bin_basename": "binlog",
        "log_bin_index": "../redo/binlog.index",
        "innodb_page_size": "16384",
    }


def test_a_scan_finds_links_and_counts_tables_not_partitions(tmp_path):
    schema = tmp_path / "shop"
    (tmp_path / "mysql").mkdir()
    schema.mkdir()
    for name in ("t.MYI", "t.MYD", "p#P#p0.MYI", "p#P#p1.MYI", "a.MAI", "c.CSV"):
        (schema / name).write_text("")
    (tmp_path / "mysql" / "user.MYI").write_text("")
    (schema / "far.isl").write_text("/elsewhere/shop/far.ibd\n")
    (schema / "dangling.MYD").symlink_to("/no/such/file")
    scan = _Scan(str(tmp_path))
    assert {engine: len(tables) for engine, tables in scan.engine_files.items()} == {"MyISAM": 2, "Aria": 1, "CSV": 1}
    found = {place.path for place in gather(scan.places, str(tmp_path))}
    assert found == {"/elsewhere/shop/far.ibd", "/no/such/file"}
    assert scan.foreign == ()
