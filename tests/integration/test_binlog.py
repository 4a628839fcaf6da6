"""Our reader of binary logs beside what real servers say about the same files."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from snapmgr.mysql.binlog import iterate, read_tail
from snapmgr.mysql.binlog_events import GtidList, MariadbTransaction, Rotate, Xid
from support import binlogs
from support.load import write_load
from support.server import private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.server import PrivateServer

pytestmark = pytest.mark.needs("mariadbd")

EVERYTHING = (
    *binlogs.SETUP,
    *binlogs.TRANSACTIONS,
    *binlogs.STATEMENTS,
    *binlogs.XA,
    *binlogs.LARGE,
    *binlogs.MIXED_ENGINES,
    *binlogs.MARIADB_DOMAINS,
    *binlogs.ROTATION,
)
# Our names of types differ from the server's by underscores and case only.
_NAMES = {"Format_desc": 15, "Query": 2, "Rotate": 4, "Gtid": 162, "Gtid_list": 163, "Xid": 16, "XA_prepare": 38}


@pytest.fixture
def folder() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


def position_of(server: PrivateServer) -> binlogs.Said:
    with server.connect() as connection, connection.cursor() as cursor:
        return binlogs.say(cursor)


def assert_tail_is(base: Path, said: binlogs.Said) -> None:
    found = read_tail(base)
    assert found.position is not None
    assert (found.position.file, found.position.offset, found.position.gtid) == (said.file, said.offset, said.gtid)
    assert not found.truncated


def assert_events_are(path: Path, shown: list[tuple[int, str, int, int, str]]) -> None:
    """Compare every event of a file with the server's SHOW BINLOG EVENTS."""
    ours = list(iterate(path, thorough=True))
    assert [(event.offset, event.server_id, event.next_offset) for event in ours] == [
        (offset, server_id, stop) for offset, _, server_id, stop, _ in shown
    ]
    for event, (_, name, _, _, text) in zip(ours, shown, strict=True):
        if name in _NAMES:
            assert event.type == _NAMES[name]
        match event.body:
            case Xid(xid=xid):
                assert f"xid={xid} " in text
            case MariadbTransaction(gtid=gtid):
                assert re.search(rf"\bGTID {gtid}(\D|$)", text)
            case GtidList(gtids=gtids):
                assert sorted(text.strip("[]").split(",")) == sorted(map(str, gtids)) or not (gtids or text != "[]")
            case Rotate(next_file=file, position=position):
                assert text == f"{file};pos={position}"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="crc32-none"),
        pytest.param(("--binlog-checksum=CRC32",), id="crc32"),
        pytest.param(("--binlog-checksum=NONE",), id="no-checksum"),
        pytest.param(("--log-bin-compress=1", "--log-bin-compress-min-len=10"), id="compressed"),
    ],
)
def test_after_each_statement_the_tail_is_where_the_server_says(folder, options):
    with private_server(folder / "data", options) as server:
        base = server.datadir / "binlog"
        with server.connect() as connection, connection.cursor() as cursor:
            for statement in EVERYTHING:
                (said,) = binlogs.replay(cursor, [statement])
                # A Binlog_checkpoint may be written at any time.
                while (found := read_tail(base).position) is None or found.offset != said.offset:
                    again = binlogs.say(cursor)
                    assert again != said, (statement, found, said)
                    said = again
                assert (found.file, found.gtid) == (said.file, said.gtid), statement
            for path in binlogs.logs(base):
                assert_events_are(path, binlogs.events(cursor, path.name))


def test_of_a_killed_server_the_tail_is_where_its_recovery_ends(folder):
    with private_server(folder / "data") as server, write_load(server.socket, writers=4) as load:
        for _ in range(3):
            load.warm_up(5)
            server.kill()
            load.kill()
            copy = folder / "copy"
            copy.mkdir()
            for path in server.datadir.glob("binlog.*"):
                shutil.copy(path, copy)
            found = read_tail(copy / "binlog")
            shutil.rmtree(copy)
            server.start()
            said = position_of(server)
            assert found.position is not None
            assert found.in_use
            assert found.position.gtid == said.gtid
            # It has begun a new file; in the old one it can show just the events that are whole.
            with server.connect() as connection, connection.cursor() as cursor:
                shown = binlogs.events(cursor, found.position.file)
            assert shown[-1][3] >= found.position.offset
            assert found.position.offset in {stop for _, _, _, stop, _ in shown}
            if not found.truncated:
                assert shown[-1][3] == found.position.offset
            load.start()
