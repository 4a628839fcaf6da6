from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.catalog.manifest import Position
from snapmgr.contract.errors import MissingRequirementError, NotFoundError, StorageError
from snapmgr.physical.tools.infofile import (
    parse_binlog_info,
    parse_checkpoints,
    parse_info,
    parse_slave_info,
    read_info,
    read_slave_info,
)

_CHECKPOINTS = "backup_type = {}\nfrom_lsn = {}\nto_lsn = {}\nlast_lsn = {}\nrecover_binlog_info = 0\n"
_INFO = "tool_name = mariadb-backup\ntool_version = 10.11.19-MariaDB\nserver_version = 10.11.19-MariaDB\n"
lsns = st.integers(min_value=0, max_value=(1 << 64) - 1)
words = st.text(
    st.characters(codec="utf-8", exclude_characters="\t\n\r\0/\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), min_size=1
)


def folder(path, **texts: str):
    """Make a folder with a tool's files; names are those without the prefix."""
    path.mkdir(exist_ok=True)
    given = {"info": _INFO, "checkpoints": _CHECKPOINTS.format("full-backuped", 0, 100, 120)} | texts
    for name, text in given.items():
        if text is not None:
            (path / f"xtrabackup_{name}").write_text(text)
    return path


@given(begin=lsns, length=lsns, last=lsns)
def test_what_the_tool_writes_about_lsns_is_read(begin, length, last):
    end = min(begin + length, (1 << 64) - 1)
    found = parse_checkpoints(_CHECKPOINTS.format("incremental", begin, end, last), "f")
    assert (found.backup_type, found.from_lsn, found.to_lsn, found.last_lsn) == ("incremental", begin, end, last)


@given(text=st.text() | st.from_regex(r"(backup_type|from_lsn|to_lsn|last_lsn) = \w*\n", fullmatch=True))
def test_whatever_stands_in_the_files_a_parser_answers_or_says_that_it_is_damaged(text):
    told = [complaint(parse, text) for parse in (parse_checkpoints, parse_binlog_info, parse_info, parse_slave_info)]
    assert all(one is None or "/s/xtrabackup_file is damaged" in one for one in told)


def complaint(parse, text: str) -> str | None:
    try:
        parse(text, "/s/xtrabackup_file")
    except StorageError as error:
        return error.message
    return None


@given(cut=st.integers(min_value=0, max_value=len(_CHECKPOINTS)))
def test_lsns_that_were_cut_off_are_never_taken_for_smaller_ones(cut):
    whole = _CHECKPOINTS.format("full-backuped", 0, 44894, 174920).removesuffix("recover_binlog_info = 0\n")
    cut_off = whole[:cut]
    try:
        found = parse_checkpoints(cut_off, "f")
    except StorageError:
        return
    # Only the very last number's end cannot be seen.
    assert (found.from_lsn, found.to_lsn) == (0, 44894)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "backup_type = full-backuped\n",
        _CHECKPOINTS.format("something", 0, 1, 1),
        _CHECKPOINTS.format("full-backuped", 0, 1 << 64, 1),
        _CHECKPOINTS.format("full-backuped", 0, -1, 1),
        _CHECKPOINTS.format("full-backuped", 5, 10, 1),
        _CHECKPOINTS.format("incremental", 10, 5, 10),
        _CHECKPOINTS.format("full-backuped", 0, 1, 1) * 2,
    ],
)
def test_damaged_checkpoints_are_refused(text):
    with pytest.raises(StorageError, match="damaged"):
        parse_checkpoints(text, "f")


@given(
    file=words, offset=lsns, gtid=st.from_regex(r"([0-9]-[0-9]-[0-9]{1,5}(,[0-9]-[0-9]-[0-9]{1,5})*)?", fullmatch=True)
)
def test_a_position_is_read_as_it_was_written(file, offset, gtid):
    found = parse_binlog_info(f"{file}\t{offset}\t{gtid}\n", "f")
    assert found == Position(file=file, offset=offset, gtid=gtid)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", None),
        ("binlog.000001\t325\t\n", Position(file="binlog.000001", offset=325, gtid="")),
        ("binlog.000001\t325\n", Position(file="binlog.000001", offset=325, gtid="")),
        ("b.1\t7\ta-b:1-5,\nc-d:1-9,\ne:tag:7\n", Position(file="b.1", offset=7, gtid="a-b:1-5,c-d:1-9,e:tag:7")),
        # Several files, as older ones write them; the last is where it ends.
        ("b.1\t7\t[]\nb.2\t9\t0-1-5\n", Position(file="b.2", offset=9, gtid="0-1-5")),
    ],
)
def test_positions_of_all_forms(text, position):
    assert parse_binlog_info(text, "f") == position


@pytest.mark.parametrize(
    "text", ["binlog", "b.1\tx\n", "b.1\t7\t'quoted'\n", "../b\t7\n", "b.1\t99999999999999999999\n"]
)
def test_a_damaged_position_is_an_error_and_not_absent(text):
    with pytest.raises(StorageError, match="damaged"):
        parse_binlog_info(text, "f")


def test_a_replicas_sources_are_read():
    by_file = "CHANGE MASTER TO MASTER_LOG_FILE='m.000003', MASTER_LOG_POS=77;\n"
    assert parse_slave_info(by_file, "f").files == {"": ("m.000003", 77)}
    named = by_file + "CHANGE MASTER 'two' TO MASTER_LOG_FILE='n.1', MASTER_LOG_POS=8;\n"
    assert parse_slave_info(named, "f").files == {"": ("m.000003", 77), "two": ("n.1", 8)}
    gtid = "SET GLOBAL gtid_slave_pos = '0-1-44,7-2-9';\nCHANGE MASTER TO master_use_gtid = slave_pos;\n"
    assert parse_slave_info(gtid, "f").gtid == "0-1-44,7-2-9"
    # It has not fetched anything yet.
    assert parse_slave_info("CHANGE MASTER TO MASTER_LOG_FILE='', MASTER_LOG_POS=0;\n", "f").files == {}


def test_no_file_about_sources_is_no_replica(tmp_path):
    assert read_slave_info(str(folder(tmp_path / "b"))).files == {}


def test_a_backup_that_was_not_finished_is_none(tmp_path):
    for absent in ("info", "checkpoints"):
        with pytest.raises(StorageError, match="never finished"):
            read_info(folder(tmp_path / absent, **{absent: None}))


def test_a_foreign_folder_is_no_backup(tmp_path):
    (tmp_path / "ibdata1").touch()
    with pytest.raises(StorageError, match="is not a physical backup"):
        read_info(tmp_path)
    with pytest.raises(NotFoundError):
        read_info(tmp_path / "nothing")
    with pytest.raises(NotFoundError):
        read_info(tmp_path / "ibdata1")


@pytest.mark.parametrize("name", ["partial", "compressed"])
def test_what_a_prepare_could_not_use_is_refused(tmp_path, name):
    with pytest.raises(MissingRequirementError, match=name):
        read_info(folder(tmp_path / "b", info=_INFO + f"{name} = Y\n"))


def test_files_of_both_names_are_of_two_backups(tmp_path):
    path = folder(tmp_path / "b")
    (path / "mariadb_backup_info").write_text(_INFO)
    with pytest.raises(StorageError, match="is there as well"):
        read_info(path)


def test_files_that_are_none_are_not_waited_for_nor_followed(tmp_path):
    path = folder(tmp_path / "b", checkpoints=None)
    os.mkfifo(path / "xtrabackup_checkpoints")
    with pytest.raises(StorageError, match="never finished"):
        read_info(path)
    (path / "xtrabackup_checkpoints").unlink()
    (tmp_path / "elsewhere").write_text(_CHECKPOINTS.format("full-backuped", 0, 1, 1))
    (path / "xtrabackup_checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="never finished"):
        read_info(path)


@pytest.mark.parametrize("data", [b"\0\0\0", b"\xff\xfe", b"x" * (5 << 20)])
def test_what_is_no_text_is_damaged(tmp_path, data):
    path = folder(tmp_path / "b")
    (path / "xtrabackup_checkpoints").write_bytes(data)
    with pytest.raises(StorageError, match="it is not text"):
        read_info(path)


def test_a_clone_that_is_under_way_or_failed_is_none(tmp_path):
    marks = tmp_path / "#clone"
    marks.mkdir()
    with pytest.raises(StorageError, match="never finished"):
        read_info(tmp_path)
    (marks / "#view_status").write_text("3 1\n1 2\nLOCAL INSTANCE\n1\n")
    with pytest.raises(StorageError, match="failed"):
        read_info(tmp_path)
    (marks / "#view_status").write_text("2 1\n1 2\nLOCAL INSTANCE\n0\n")
    with pytest.raises(StorageError, match="an incomplete clone"):
        read_info(tmp_path)
    (marks / "#in_progress").touch()
    with pytest.raises(StorageError, match="never finished"):
        read_info(tmp_path)
