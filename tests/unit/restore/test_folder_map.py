"""The targets of a snapshot's folders, and the options that a server needs there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapmgr.catalog.manifest import Member, ServerRecord
from snapmgr.mysql.datadir.relocation import (
    absolute_folders,
    absolute_names,
    name_own_logs,
    relocated_options,
    seen_from,
)
from snapmgr.restore.folder_map import expected_map, map_folders
from support import sample


def _map(*pairs):
    return map_folders({original: Path(copy) for original, copy in pairs})


def _targets(folder_map):
    return {folder.original: folder.target for folder in folder_map.folders}


def test_one_folder_is_the_destination_itself():
    one = _map(("/srv/mysql/data", "/m/data"))
    assert _targets(one) == {"/srv/mysql/data": ""}
    assert one.moved("/srv/mysql/data/ibdata1", "/new") == "/new/ibdata1"
    assert one.moved("/srv/mysql/data", "/new") == "/new"
    assert one.moved("/etc/my.cnf", "/new") == "/etc/my.cnf"
    assert one.apart(one.folders[0]) == frozenset()


def test_several_get_folders_by_their_names():
    several = _map(("/srv/data", "/m/data"), ("/ssd/redo", "/m/redo"), ("/log/data", "/n"))
    assert _targets(several) == {"/srv/data": "data", "/ssd/redo": "redo", "/log/data": "data-2"}


def test_equal_names_are_told_apart():
    assert _targets(_map(("/a/data", "/m/a"), ("/b/data", "/m/b"), ("/c/data", "/m/c"))) == {
        "/a/data": "data",
        "/b/data": "data-2",
        "/c/data": "data-3",
    }


def test_what_lies_in_another_copy_comes_with_it():
    inner = _map(("/srv/mysql/data", "/m/x/data"), ("/srv/mysql", "/m/x"))
    assert _targets(inner) == {"/srv/mysql": ""}
    assert inner.moved("/srv/mysql/data/ibdata1", "/new") == "/new/data/ibdata1"
    assert inner.moved("/srv/mysql/binlog.000001", "/new") == "/new/binlog.000001"


def test_two_names_of_one_folder_are_one():
    one = _map(("/var/lib/mysql", "/m/data"), ("/srv/mysql/data", "/m/data"))
    assert [folder.target for folder in one.folders] == [""]
    assert one.moved("/srv/mysql/data/a", "/new") == one.moved("/var/lib/mysql/a", "/new") == "/new/a"


def test_a_volume_mounted_in_another_goes_back_into_it():
    nested = _map(("/srv/data", "/m/data"), ("/srv/data/redo", "/n"), ("/srv/log", "/m/log"))
    assert _targets(nested) == {"/srv/data": "data", "/srv/log": "log", "/srv/data/redo": "data/redo"}
    outer, _, inner = nested.folders
    assert nested.apart(outer) == {"redo"}
    assert nested.apart(inner) == frozenset()
    assert nested.moved("/srv/data/redo/ib_logfile0", "/new") == "/new/data/redo/ib_logfile0"
    alone = _map(("/srv/data", "/m/data"), ("/srv/data/redo", "/n"))
    assert _targets(alone) == {"/srv/data": "", "/srv/data/redo": "redo"}
    assert alone.apart(alone.folders[0]) == {"redo"}
    assert alone.moved("/srv/data/redo/x", "/new") == "/new/redo/x"


def test_names_that_only_begin_alike_are_not_inside():
    assert _targets(_map(("/srv/data", "/m/data"), ("/srv/data2", "/m/data2"))) == {
        "/srv/data": "data",
        "/srv/data2": "data2",
    }


def test_no_target_leads_out_whatever_a_stranger_wrote():
    assert _targets(_map(("/a/b/data", "/m/data"), ("/a/b/data/../../../etc/cron.d", "/m/evil"))) == {
        "/a/b/data": "data",
        "/a/b/data/../../../etc/cron.d": "cron.d",
    }
    assert _targets(_map(("/a/data", "/m/data"), ("/b/c/..", "/m/evil"))) == {"/a/data": "data", "/b/c/..": "b"}


def test_a_manifest_alone_tells_the_same():
    ref = sample.manifest().members[0].ref
    manifest = sample.manifest(
        path="/srv/data",
        members=(
            Member(ref=ref, subpath="data", call_s=0.1, path="/srv", places={"/srv/data": "data", "/srv/log": "log"}),
            Member(ref=ref, subpath="", call_s=0.1, path="/ssd", places={"/ssd": ""}),
        ),
    )
    assert _targets(expected_map(manifest)) == {"/srv/data": "data", "/srv/log": "log", "/ssd": "ssd"}


def _server(**settings):
    return ServerRecord(
        flavor="mariadb",
        version="10.11.6",
        server_id=1,
        server_uuid=None,
        datadir="/srv/data",
        log_bin=None,
        settings=settings,
    )


def test_every_path_is_named_so_that_no_configuration_leads_back():
    folder_map = _map(("/srv/data", "/m/data"), ("/srv/redo", "/m/redo"), ("/srv/log", "/m/log"))
    server = _server(
        innodb_log_group_home_dir="../redo",
        innodb_undo_directory=".",
        log_bin_basename="../log/bin",
        log_bin_index="../log/bin.index",
        relay_log_basename="../log/relay",
        innodb_page_size="4096",
        innodb_data_file_path="ibdata1:12M;/srv/redo/ibdata2:1G:autoextend",
        gtid_mode="ON",
    )
    assert set(relocated_options(server, lambda path: folder_map.moved(path, "/new"))) == {
        "--datadir=/new/data",
        "--innodb-log-group-home-dir=/new/redo",
        "--innodb-undo-directory=/new/data",
        "--log-bin=/new/log/bin",
        "--log-bin-index=/new/log/bin.index",
        "--innodb-data-file-path=ibdata1:12M;/new/redo/ibdata2:1G:autoextend",
        "--innodb-page-size=4096",
        "--relay-log=/new/log/relay",
        "--skip-slave-start",
    }


@pytest.fixture(name="datadir")
def _datadir(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/t.isl").write_text("/live/d/t.ibd\n")
    (tmp_path / "d/relative.isl").write_text("../x.ibd")
    (tmp_path / "d/empty.isl").write_text("")
    (tmp_path / "bin.index").write_text("./bin.000001\n/live/log/bin.000002\n/live/log/bin.000003\n")
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_absolute_names_in_the_data_are_found(datadir):
    assert list(absolute_names(datadir)) == [("d/t.isl", "/live/d/t.ibd")]
    assert absolute_folders("bin.index", datadir) == ["/live/log"]
    assert absolute_folders("no.index", datadir) == []


def test_folders_in_the_datadir_are_named_relative_to_it():
    named = [seen_from("/new/data", folder) for folder in ("/new/data", "/new/data/a/b", "/new/data2", "/new")]
    assert named == [".", "./a/b", "/new/data2", "/new"]


def test_a_list_of_logs_names_the_copys_own(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        index = tmp_path / "bin.index"
        index.write_bytes(b"./bin.000001\n/live/bin.000002\n/live/purged.000001\n/old/bin.00\xff\n")
        present = {"bin.000001", "bin.000002", os.fsdecode(b"bin.00\xff")}
        assert name_own_logs("bin.index", fd, ".", present)
        assert index.read_bytes() == b"./bin.000001\n./bin.000002\n/live/purged.000001\n./bin.00\xff\n"
        assert not name_own_logs("bin.index", fd, "/elsewhere", {"bin.000001"})
        # relay-log.info: the number of lines, and the log with a position.
        (tmp_path / "relay-log.info").write_text("5\n/live/relay/relay.000002\n256\nbin.000009\n330\n")
        assert name_own_logs("relay-log.info", fd, "/new/relay", {"relay.000002", "bin.000009"})
        assert (tmp_path / "relay-log.info").read_text() == "5\n/new/relay/relay.000002\n256\nbin.000009\n330\n"
        live = tmp_path / "live.index"
        live.write_text("/live/bin.000001\n")
        (tmp_path / "link.index").symlink_to(live)
        os.mkfifo(tmp_path / "pipe.index")
        for name in ("link.index", "pipe.index", "no.index"):
            assert not name_own_logs(name, fd, ".", {"bin.000001"})
        assert live.read_text() == "/live/bin.000001\n"
    finally:
        os.close(fd)
