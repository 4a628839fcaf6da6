"""Whether a copy is at the recorded position: by the ends of its binary logs, and by what its server says."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from snapmgr.catalog.manifest import Manifest, Position, QuiesceRecord, ServerRecord
from snapmgr.verify.binlog_check import BinlogFindings, check_binlog, compare_gtid, logs_absent

RECORDED = Path(__file__).parents[2] / "golden/binlog"
UUID = "3e11fa47-71ca-11e1-9e33-c80aa9429562"


def manifest(flavor="mysql", *, level="backup-lock", gtid=f"{UUID}:1-7", absent=(), log_bin="../log/b") -> Manifest:
    return Manifest(
        id="j.20260101T000000Z.00000000",
        job="j",
        source="mysql",
        path="/live/data",
        state="ready",
        created_at=datetime.now(UTC),
        machine_id="m",
        absent=absent,
        position=Position(file="b.000002", offset=1000, gtid=gtid),
        quiesce=QuiesceRecord(level=level, why="", proof="", attempts=1, waited_s=0.0, held_s=0.0),
        server=ServerRecord(
            flavor=flavor, version="9.7.4", server_id=1, server_uuid=UUID, datadir="/live/data", log_bin=log_bin
        ),
    )


class Answers:
    """A connection that has one answer."""

    def __init__(self, answer: str | None) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def value(self, sql: str) -> str | None:
        self.asked.append(sql)
        return self.answer


def compared(one: Manifest, answer: str | None) -> tuple[BinlogFindings, list[str]]:
    connection: Any = Answers(answer)
    found = BinlogFindings()
    compare_gtid(one, connection, found)
    return found, connection.asked


@pytest.mark.parametrize(
    ("level", "content", "right"),
    [
        ("backup-lock", bytes(1000), True),
        ("backup-lock", bytes(1001), False),
        ("backup-lock", bytes(999), False),
        ("crash-consistent", bytes(1000), True),
        ("crash-consistent", bytes(1300), True),
        ("crash-consistent", bytes(999), False),
        # MySQL's encrypted logs have a header that positions do not count.
        ("backup-lock", b"\xfdbin" + bytes(1508), True),
        ("backup-lock", b"\xfdbin" + bytes(996), False),
        ("backup-lock", None, False),
    ],
)
def test_the_log_ends_at_the_position_or_behind_it_where_nothing_was_locked(tmp_path, level, content, right):
    (tmp_path / "log").mkdir()
    if content is not None:
        (tmp_path / "log/b.000002").write_bytes(content)
    found = BinlogFindings()
    there = {"/live/data": tmp_path / "data", "/live/log": tmp_path / "log"}
    check_binlog(manifest(level=level), there, found)
    assert (len(found.checks), len(found.failures)) == ((1, 0) if right else (0, 1))


def test_logs_that_are_not_in_the_snapshot_are_no_failure(tmp_path):
    one = manifest(absent=("/live/log",))
    found = BinlogFindings()
    check_binlog(one, {"/live/data": tmp_path}, found)
    assert found.failures == []
    assert found.checks == []
    assert "does not contain them" in found.notes[0]
    assert logs_absent(one)
    assert not logs_absent(manifest(absent=("/live/lo",)))
    assert not logs_absent(manifest(absent=("/live/log",), log_bin=None))


def test_mysql_is_asked_even_without_its_logs_and_mariadb_only_with_them():
    found, asked = compared(manifest(absent=("/live/log",)), f"{UUID}:1-7")
    assert asked == ["SELECT @@GLOBAL.gtid_executed"]
    assert (len(found.checks), found.failures) == (1, [])
    found, asked = compared(manifest("mariadb", gtid="0-1-7", absent=("/live/log",)), "0-1-5")
    assert asked == []
    assert (found.checks, len(found.notes), found.failures) == ([], 1, [])
    found, asked = compared(manifest("mariadb", gtid="0-1-7"), "0-1-5")
    assert asked == ["SELECT @@GLOBAL.gtid_binlog_pos"]
    assert found.failures == ["its GTID is 0-1-5, the recorded one is 0-1-7"]


@pytest.mark.parametrize(
    ("file", "encrypted"),
    [("mariadb-10.11-encrypted.000001", True), ("mysql-9-encrypted.000001", True), ("mariadb-10.11.000002", False)],
)
def test_encrypted_logs_are_known_by_their_first_events(tmp_path, file, encrypted):
    (tmp_path / "log").mkdir()
    shutil.copy(RECORDED / file, tmp_path / "log/b.000002")
    found = BinlogFindings()
    check_binlog(manifest(), {"/live/data": tmp_path / "data", "/live/log": tmp_path / "log"}, found)
    assert found.encrypted is encrypted


def test_gtid_sets_are_compared_and_not_their_spelling():
    other = "4e11fa47-71ca-11e1-9e33-c80aa9429562"
    one = manifest(gtid=f"{UUID}:1-7,{other}:1")
    assert compared(one, f"{UUID}:1-7,\n{other}:1")[0].failures == []
    assert compared(one, f"{other}:1,{UUID}:1-5:6-7")[0].failures == []
    assert len(compared(one, f"{UUID}:1-7")[0].failures) == 1
    assert len(compared(one, None)[0].failures) == 1
    assert len(compared(one, "nonsense")[0].failures) == 1


def test_without_a_position_nothing_is_compared(tmp_path):
    found = BinlogFindings()
    check_binlog(replace(manifest(), position=None), {"/live/data": tmp_path}, found)
    assert (found.checks, found.failures) == ([], [])
    assert compared(replace(manifest(), position=None), "x")[1] == []
