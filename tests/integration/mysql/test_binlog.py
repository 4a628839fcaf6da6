"""Our reader of binary logs compared with other readers: the servers, their programs, a library."""

from __future__ import annotations

import random
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.event import GtidEvent, MariadbGtidEvent, XidEvent

from snapmgr.mysql.binlog.events import (
    EventType,
    GtidList,
    MariadbTransaction,
    MysqlTransaction,
    PreviousGtids,
    Rotate,
    Xid,
)
from snapmgr.mysql.binlog.reader import Event, open_binlog
from snapmgr.mysql.binlog.tail import read_tail
from support import binlogs
from support.kinds import KINDS, SYSTEM, each_kind
from support.server import private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pymysql

    from support.server import PrivateServer

_ALIKE = (*binlogs.SETUP, *binlogs.TRANSACTIONS, *binlogs.STATEMENTS, *binlogs.XA, *binlogs.LARGE)
EVERYTHING = {
    "mariadb": (*_ALIKE, *binlogs.MIXED_ENGINES, *binlogs.MARIADB_DOMAINS, *binlogs.ROTATION, *binlogs.UNFINISHED_XA),
    "mysql": (*_ALIKE, *binlogs.MYSQL_TAGS, *binlogs.ROTATION, *binlogs.UNFINISHED_XA),
}
_MARIADB_COMPRESSED = ("--log-bin-compress=1", "--log-bin-compress-min-len=10")
_MYSQL_ODD = (
    *("--gtid-mode=OFF", "--enforce-gtid-consistency=OFF"),
    *("--binlog-checksum=NONE", "--binlog-transaction-compression=ON"),
)
# What is written is the same, and sooner.
_QUICK = ("--sync-binlog=0", "--innodb-flush-log-at-trx-commit=0")
# The servers' names of types.
_NAMES = {
    "Format_desc": EventType.FORMAT_DESCRIPTION,
    "Query": EventType.QUERY,
    "Rotate": EventType.ROTATE,
    "Xid": EventType.XID,
    "XA_prepare": EventType.XA_PREPARE,
    "Gtid_list": EventType.GTID_LIST,
    "Previous_gtids": EventType.PREVIOUS_GTIDS,
    "Anonymous_Gtid": EventType.ANONYMOUS_GTID,
    "Gtid_tagged_log_event": EventType.MYSQL_TAGGED_GTID,
    "Transaction_payload": EventType.TRANSACTION_PAYLOAD,
}
_PRINTED_MYSQL = re.compile(
    r"^# at (\d+)\n.*\t(?:Anonymous_)?GTID\tlast_committed=(\d+)\tsequence_number=(\d+)\t.*"
    r"original_committed_timestamp=(\d+)\timmediate_commit_timestamp=(\d+)\t(?:.*\n)*?"
    r"SET @@SESSION.GTID_NEXT= '([^']*)'",
    re.MULTILINE,
)
_PRINTED_MARIADB = re.compile(r"^# at (\d+)\n.*\tGTID ([\d-]+)(?: cid=(\d+))?( ddl)?( trans)?", re.MULTILINE)
_DDL, _TRANSACTIONAL = 0x20, 0x04
# DDL has one as well, at its line's end.
_PRINTED_XID = re.compile(r"^# at (\d+)\n#[^\t\n]*\tXid = (\d+)", re.MULTILINE)


@pytest.fixture
def folder() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


def events_of(path: Path) -> list[Event]:
    """Return all events of a file, after verifying all checksums."""
    with open_binlog(path) as reader:
        events = list(reader.events())
        reader.verify(events[1].offset, events[-1].next_offset)
    return events


def settled(path: Path, cursor: pymysql.cursors.Cursor) -> tuple[list[Event], list[tuple[int, str, int, int, str]]]:
    """Return a file's events as we and the server read them, of one size: MariaDB adds checkpoints late."""
    for _ in range(20):
        size = path.stat().st_size
        shown, ours = binlogs.events(cursor, path.name), events_of(path)
        if path.stat().st_size == size:
            return ours, binlogs.shown_once(shown, size)
    raise AssertionError(f"{path} did not stop to grow")


def assert_shown(path: Path, cursor: pymysql.cursors.Cursor) -> None:
    """Compare every event of a file with the server's SHOW BINLOG EVENTS."""
    ours, rows = settled(path, cursor)
    assert [(event.offset, event.server_id, event.next_offset) for event in ours] == [
        (offset, server_id, stop) for offset, _, server_id, stop, _ in rows
    ]
    for event, (_, name, _, _, text) in zip(ours, rows, strict=True):
        assert event.type == _NAMES.get(name, event.type)
        match event.body:
            case Xid(xid=xid):
                assert f"xid={xid} " in text
            case MariadbTransaction(gtid=gtid):
                assert re.search(rf"\bGTID {gtid}(\D|$)", text)
            case MysqlTransaction():
                assert f"'{gtid_of(event.body)}'" in text
            case GtidList(gtids=gtids):
                assert sorted(text.strip("[]").split(",")) == sorted(map(str, gtids)) or not (gtids or text != "[]")
            case PreviousGtids(gtids=gtids):
                assert str(gtids) == text.replace("\n", "")
            case Rotate(next_file=file, position=position):
                assert text == f"{file};pos={position}"


def gtid_of(body: MysqlTransaction) -> str:
    return ":".join(filter(None, (body.uuid, body.tag, str(body.number)))) if body.uuid else "ANONYMOUS"


def assert_printed(path: Path, kind: str) -> None:
    """Compare what begins and ends transactions with the text of mysqlbinlog or mariadb-binlog."""
    text = subprocess.run(
        [KINDS[kind].program("mysqlbinlog"), "--base64-output=decode-rows", "--verify-binlog-checksum", path],
        capture_output=True,
        text=True,
        check=True,
        errors="replace",
    ).stdout
    ours = [(event.offset, event.body) for event in events_of(path)]
    # What is in a Transaction_payload is printed as well, at the payload's end.
    ends = {event.next_offset for event in events_of(path) if event.type == EventType.TRANSACTION_PAYLOAD}
    assert [(offset, body.xid) for offset, body in ours if isinstance(body, Xid)] == [
        (int(offset), int(xid)) for offset, xid in _PRINTED_XID.findall(text) if int(offset) not in ends
    ]
    assert [
        (offset, str(body.gtid), body.commit_id, body.flags & (_DDL | _TRANSACTIONAL))
        for offset, body in ours
        if isinstance(body, MariadbTransaction)
    ] == [
        (int(offset), gtid, int(cid) if cid else None, bool(ddl) * _DDL + bool(trans) * _TRANSACTIONAL)
        for offset, gtid, cid, ddl, trans in _PRINTED_MARIADB.findall(text)
    ]
    assert [
        (
            *(offset, body.last_committed, body.sequence_number),
            *(body.originally_committed_us, body.committed_us, gtid_of(body)),
        )
        for offset, body in ours
        if isinstance(body, MysqlTransaction)
    ] == [(*map(int, numbers), gtid) for *numbers, gtid in _PRINTED_MYSQL.findall(text)]


def assert_streamed(server: PrivateServer, path: Path) -> None:
    """Compare with what the PyPI package mysql-replication gets from the server as its replica."""
    stream = BinLogStreamReader(
        connection_settings={"unix_socket": server.socket, "user": "root", "ssl_disabled": True},
        server_id=77,
        log_file=path.name,
        log_pos=4,
        resume_stream=True,
        is_mariadb=server.kind.flavor == "mariadb",
        # It breaks off at some statements of MariaDB 11.8 and MySQL 9.
        only_events=[GtidEvent, MariadbGtidEvent, XidEvent],
    )
    try:
        theirs = [
            (
                event.packet.log_pos,
                None if isinstance(event, XidEvent) else str(event.gtid),
                event.xid if isinstance(event, XidEvent) else None,
                event.last_committed if isinstance(event, GtidEvent) else None,
            )
            for event in stream
        ]
    finally:
        stream.close()
    # It goes on through all files, and does not know tags.
    ours = [
        (
            event.next_offset,
            gtid_of(body) if isinstance(body, MysqlTransaction) else None if isinstance(body, Xid) else str(body.gtid),
            body.xid if isinstance(body, Xid) else None,
            body.last_committed if isinstance(body, MysqlTransaction) else None,
        )
        for file in binlogs.logs(path.parent / "binlog")
        for event in events_of(file)
        if isinstance(body := event.body, Xid | MariadbTransaction | MysqlTransaction)
        and event.type != EventType.MYSQL_TAGGED_GTID
    ]
    assert len(ours) > 20
    assert theirs == ours


@pytest.mark.filterwarnings("ignore:'db' is deprecated:DeprecationWarning")  # mysql-replication's
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, id="-".join((kind, *names)), marks=pytest.mark.needs(kind, "mariadb-11.8"))
        for kind, names, options in (
            (SYSTEM, ["compressed", "no-checksum"], ["--binlog-checksum=NONE", *_MARIADB_COMPRESSED]),
            ("mariadb-11.8", [], ["--binlog-checksum=CRC32", "--binlog-alter-two-phase=1"]),
            ("mysql-9", [], []),
            ("mysql-9", ["compressed", "no-checksum", "no-gtids"], _MYSQL_ODD),
        )
    ],
)
def test_after_each_statement_the_tail_is_where_the_server_says(folder, kind, options):
    with private_server(folder / "data", [*_QUICK, *options], kind=kind) as server:
        base = server.datadir / "binlog"
        with server.connect() as connection, connection.cursor() as cursor:
            for statement in EVERYTHING[KINDS[kind].flavor]:
                if "gtid_next" in statement and "--gtid-mode=OFF" in options:
                    continue
                (said,) = binlogs.replay(cursor, [statement])
                # A Binlog_checkpoint may be written at any time.
                while (found := read_tail(base).position) is None or found.offset != said.offset:
                    again = binlogs.say(cursor)
                    assert again != said, (statement, found, said)
                    said = again
                assert (found.file, found.gtid) == (said.file, said.gtid), statement
            for path in binlogs.logs(base):
                assert_shown(path, cursor)
                assert_printed(path, kind)
            if "--binlog-checksum=NONE" not in options:
                assert_streamed(server, binlogs.logs(base)[0])


@each_kind
def test_domains_tags_and_purged_gtids_are_printed_as_the_server_prints_them(folder, kind):
    rng = random.Random(kind)
    with (
        private_server(folder / "data", _QUICK, kind=kind) as server,
        server.connect() as connection,
        connection.cursor() as cursor,
    ):
        binlogs.replay(cursor, binlogs.SETUP)
        purged = ""
        if KINDS[kind].flavor == "mariadb":
            for number, domain in enumerate(rng.sample(range(1 << 32), 12)):
                cursor.execute(f"SET gtid_domain_id = {domain}, server_id = {rng.randrange(1, 9)}")
                cursor.execute(f"INSERT INTO i VALUES ({number}, 'x')")
        else:
            cursor.execute("SET GLOBAL gtid_purged = '+aaaaaaaa-0000-0000-0000-00000000000a:1-99:tag:5'")
            for number in range(12):
                uuid = f"{rng.choice('0af')}aaaaaaa-0000-0000-0000-00000000000a"
                tag = rng.choice(["", "b:", "a_1:", "_:"])
                cursor.execute(f"SET gtid_next = '{uuid}:{tag}{rng.randrange(100, 115)}'")
                cursor.execute(f"REPLACE INTO i VALUES ({number}, 'x')")
            cursor.execute("SET gtid_next = AUTOMATIC")
            cursor.execute("SELECT @@gtid_purged")
            purged = cursor.fetchone()[0]
            assert purged
        for _ in range(2):
            said = binlogs.say(cursor)
            position = read_tail(server.datadir / "binlog", gtid_purged=purged).position
            assert position is not None
            assert position.gtid == said.gtid
            cursor.execute("FLUSH BINARY LOGS")


@pytest.mark.needs("mariadb-11.8")
def test_a_large_transaction_that_becomes_a_file_is_read(folder):
    options = [*_QUICK, "--binlog-large-commit-threshold=10M", "--max-allowed-packet=64M", "--binlog-checksum=CRC32"]
    with (
        private_server(folder / "data", options, kind="mariadb-11.8") as server,
        server.connect() as connection,
        connection.cursor() as cursor,
    ):
        binlogs.replay(cursor, binlogs.SETUP)
        for number in range(2):
            (said,) = binlogs.replay(cursor, [f"INSERT INTO i VALUES ({number}, REPEAT('x', 12000000))"])
            position = read_tail(server.datadir / "binlog").position
            assert position is not None
            assert (position.file, position.gtid) == (said.file, said.gtid)
        assert said.file == "binlog.000003"
        for path in binlogs.logs(server.datadir / "binlog"):
            assert_shown(path, cursor)
