"""Which of a snapshot's binary logs is the last one: index, numbers, unfinished rotations, foreign files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from snapmgr.mysql.binlog.reader import BinlogError
from snapmgr.mysql.binlog.tail import read_tail
from support.binlogs import made_event

RECORDED = Path(__file__).parents[2] / "golden/binlog"
EVENTS = json.loads((RECORDED / "mysql-9.json").read_text())
WHOLE = (RECORDED / "mysql-9.000002").read_bytes()
END, GTID = EVENTS["positions"][-1]
HEAD, BEGINNING = EVENTS["events"][0][3], EVENTS["events"][1][3]
NEW = WHOLE[:BEGINNING]
"""A file just begun: its GTIDs are those that the recorded one began with."""
ROTATED = WHOLE + made_event(4, len(WHOLE), bytes(8) + b"log.000003")


@pytest.fixture
def base(tmp_path):
    return tmp_path / "log"


def put(base, number, data, *, index=True):
    base.with_name(f"log.{number:06}").write_bytes(data)
    if index:
        with base.with_name("log.index").open("a") as file:
            file.write(f"/live/elsewhere/log.{number:06}\n")


def position(base, **arguments):
    found = read_tail(base, **arguments).position
    return found and (found.file, found.offset, found.gtid)


def test_the_last_file_of_the_index_counts(base):
    put(base, 1, NEW)
    put(base, 2, WHOLE)
    assert position(base) == ("log.000002", END, GTID)


def test_a_file_just_begun_has_the_gtids_of_those_before(base):
    put(base, 2, ROTATED)
    put(base, 3, NEW)
    assert position(base) == ("log.000003", BEGINNING, EVENTS["positions"][0][1])


@pytest.mark.parametrize("beginning", [b"", WHOLE[:3], WHOLE[:4], WHOLE[:50], WHOLE[:HEAD], WHOLE[: HEAD + 9], NEW])
def test_a_file_that_the_index_does_not_name_yet_does_not_count(base, beginning):
    put(base, 2, ROTATED)
    put(base, 3, beginning, index=False)
    assert position(base) == ("log.000002", len(ROTATED), GTID)
    assert read_tail(base).rotated


@pytest.mark.parametrize("beginning", [b"", WHOLE[:50], WHOLE[:HEAD], WHOLE[: HEAD + 9]])
def test_a_file_that_the_index_names_has_a_beginning(base, beginning):
    put(base, 2, ROTATED)
    put(base, 3, beginning)
    with pytest.raises(BinlogError, match="000003.*beginning is incomplete"):
        read_tail(base)


def test_a_file_with_transactions_that_the_index_does_not_name_is_of_another_instant(base):
    put(base, 1, ROTATED)
    put(base, 2, WHOLE, index=False)
    with pytest.raises(BinlogError, match="000002.*index does not name it") as caught:
        read_tail(base)
    assert caught.value.hint is not None


def test_a_file_that_the_index_names_is_there(base):
    put(base, 1, ROTATED)
    put(base, 2, WHOLE)
    base.with_name("log.000002").unlink()
    with pytest.raises(BinlogError, match="000002.*does not exist"):
        read_tail(base)


def test_files_that_were_purged_do_not_matter(base):
    put(base, 1, ROTATED)
    put(base, 2, WHOLE)
    base.with_name("log.000001").unlink()
    assert position(base) == ("log.000002", END, GTID)


def test_a_name_that_is_being_written_does_not_count(base):
    put(base, 2, ROTATED)
    put(base, 3, NEW, index=False)
    with base.with_name("log.index").open("a") as file:
        file.write("./log.00000")
    assert position(base) == ("log.000002", len(ROTATED), GTID)


def test_mysql_replaces_its_index_by_a_new_one(base):
    put(base, 2, WHOLE)
    base.with_name("log.index").rename(base.with_name("log.index_crash_safe"))
    put(base, 3, NEW, index=False)
    assert position(base) == ("log.000002", END, GTID)


def test_the_index_may_be_elsewhere_and_have_another_name(base, tmp_path):
    put(base, 2, WHOLE)
    put(base, 3, NEW, index=False)
    elsewhere = tmp_path / "sub" / "names"
    elsewhere.parent.mkdir()
    base.with_name("log.index").rename(elsewhere)
    assert position(base, index=elsewhere) == ("log.000002", END, GTID)


@pytest.mark.parametrize("beginning", [b"", WHOLE[:50], WHOLE[:HEAD]])
def test_without_an_index_the_numbers_decide(base, beginning):
    put(base, 999_999, NEW, index=False)
    put(base, 1_000_000, ROTATED, index=False)
    assert position(base) == ("log.1000000", len(ROTATED), GTID)
    put(base, 1_000_001, beginning, index=False)
    assert position(base) == ("log.1000000", len(ROTATED), GTID)


def test_what_a_rotation_left_behind_has_an_end(base):
    put(base, 2, WHOLE[:-3], index=False)
    put(base, 3, b"", index=False)
    with pytest.raises(BinlogError, match="000002.*has no end"):
        read_tail(base)


def test_files_of_other_names_do_not_count(base):
    put(base, 2, WHOLE, index=False)
    for name in ("log.index~", "log.00003", "log.000003.bak", "xlog.000003", "log2.000003", "log.٠٠٠٠٠٣"):
        base.with_name(name).write_bytes(b"not a log")
    assert position(base) == ("log.000002", END, GTID)


def test_no_logs_are_no_position(base):
    assert read_tail(base).position is None
    base.with_name("log.index").write_bytes(b"")
    assert read_tail(base).position is None


def test_a_first_file_without_its_beginning_is_no_position(base):
    put(base, 1, WHOLE[:HEAD], index=False)
    assert read_tail(base).position is None


def test_no_folder_is_an_error(base):
    with pytest.raises(BinlogError, match="cannot read its folder"):
        read_tail(base / "log")


def test_gtids_that_were_never_in_the_logs_can_be_counted_in(base):
    put(base, 2, WHOLE)
    uuid, purged = GTID.partition(":")[0], "00000000-0000-0000-0000-000000000001:1-9:tag:5"
    assert position(base, gtid_purged=f"{purged},\n{uuid}:1-2") == ("log.000002", END, f"{purged},{GTID}")


def test_logs_inside_innodb_are_named_as_such(base):
    base.with_name("binlog-000000.ibb").write_bytes(bytes(100))
    with pytest.raises(BinlogError, match="binlog_storage_engine"):
        read_tail(base)


@pytest.mark.parametrize(("name", "said"), [("log.000003", "cannot read it"), ("log.index", "cannot read the index")])
@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder", "dangling"])
def test_what_is_no_plain_file_is_refused_at_once(base, name, said, kind, tmp_path):
    put(base, 2, ROTATED)
    put(base, 3, NEW)
    stranger = base.with_name(name)
    target = tmp_path / "target"
    stranger.rename(target)
    match kind:
        case "symlink":
            stranger.symlink_to(target)
        case "dangling":
            stranger.symlink_to("nowhere")
        case "fifo":
            os.mkfifo(stranger)
        case "folder":
            stranger.mkdir()
    with pytest.raises(BinlogError, match=said):
        read_tail(base)


def test_an_error_names_file_and_place(base):
    damaged = bytearray(WHOLE)
    damaged[BEGINNING + 30] ^= 1
    put(base, 2, damaged)
    with pytest.raises(BinlogError, match=f"log.000002 at {BEGINNING}: damaged") as caught:
        read_tail(base)
    assert caught.value.file == str(base.with_name("log.000002"))
    assert caught.value.offset == BEGINNING
    assert caught.value.hint is not None
    assert caught.value.exit_code == 1
