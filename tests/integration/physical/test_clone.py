"""MySQL's CLONE on real servers that are written to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pymysql
import pytest

from snapmgr.contract.errors import MissingRequirementError, NotQuiescedError, StorageError
from snapmgr.mysql.connect.client import Credentials
from snapmgr.mysql.server.program import ServerBinary
from snapmgr.mysql.server.throwaway import throwaway
from snapmgr.physical.seal import compare, seal
from snapmgr.physical.tools.cloneplugin import read_position
from snapmgr.physical.tools.infofile import read_info
from snapmgr.physical.tools.request import BrokenChainError
from support.copies import MEMORY
from support.kinds import KINDS, kinds
from support.load import check_invariant, write_load
from support.processes import wait_until
from support.server import private_server
from support.staging import back_up_with_grants, clone, request, tool_of
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.needs("root")
_MYSQL_MEMORY = 200 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


def clone_server(folder: Path):
    return private_server(folder / "data", ["--plugin-load-add=mysql_clone.so"], kind="mysql-9")


@kinds("mysql-9")
def test_a_clone_under_load_starts_and_tells_its_exact_position(folder, kind):
    with clone_server(folder) as server:
        with write_load(server.socket, engines=()) as load:
            load.warm_up()
            before = load.acknowledged()
            made = tool_of(server).back_up(request(server, folder))
            after = load.acknowledged()
        assert (made.tool, made.state, made.position, made.to_lsn) == ("clone", "prepared", None, 0)
        assert "completed" in (folder / "full.log").read_text()
        sealed = seal(str(folder / "full"))
        clone(folder / "full", folder / "copy", server)
        binary = ServerBinary(path=KINDS[kind].program("mysqld"), flavor="mysql", version=KINDS[kind].version or "")
        with throwaway(
            binary,
            str(folder / "copy"),
            settings={},
            memory_bytes=max(MEMORY, _MYSQL_MEMORY),
            run_dir=str(folder / "run"),
            options=KINDS[kind].server_command()[2:],
        ) as started:
            with started.connect() as connection:
                position = read_position(str(folder / "copy"), connection)
            with server_connection(started.socket) as raw:
                found = check_invariant(raw, before=before, after=after, engines=())
        assert compare(str(folder / "full"), sealed) == ()
        assert position is not None
        # In the server's own binary log: as many transactions as are in the clone end exactly there.
        events = server.query(f"SHOW BINLOG EVENTS IN '{position.file}'")
        assert any(event[2] == "Xid" and event[4] == position.offset for event in events)
        transactions = sum(event[2] == "Gtid" and event[1] < position.offset for event in events)
        assert transactions == int(position.gtid.rpartition("-")[2])
        ledgers = sum(
            event[2] == "Table_map" and "ledger" in event[5] for event in events if event[1] < position.offset
        )
        assert ledgers == sum(one.innodb for one in found)


def server_connection(socket: str):
    return pymysql.connections.Connection(unix_socket=socket, user="root", autocommit=True, ssl_disabled=True)


@kinds("mysql-9")
def test_what_a_clone_cannot_do_is_refused_with_what_to_do(folder, kind):
    with private_server(folder / "data", kind=kind) as server:
        tool = tool_of(server)
        server.query("CREATE USER weak@localhost IDENTIFIED BY 'w'")
        with pytest.raises(MissingRequirementError, match="plugin for cloning is not installed") as lacking:
            tool.back_up(request(server, folder))
        server.query(lacking.value.hint.partition(";")[0])
        with pytest.raises(BrokenChainError, match="no increments"):
            tool.back_up(request(server, folder, from_lsn=5))
        server.query("CREATE DATABASE old")
        server.query("CREATE TABLE old.fashioned (a INT) ENGINE=MyISAM")
        with pytest.raises(NotQuiescedError, match=r"old\.fashioned \(MyISAM\)"):
            tool.back_up(request(server, folder))
        server.query("DROP TABLE old.fashioned")
        closed = folder / "closed"
        closed.mkdir(mode=0o700)
        with pytest.raises(MissingRequirementError, match="cannot reach"):
            tool.back_up(request(server, closed))
        assert list((folder / "full").iterdir()) == []

        def interrupt(_now) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tool.back_up(request(server, folder, progress=interrupt))
        with pytest.raises(StorageError, match="not a physical backup"):
            read_info(folder / "full")
        under_way = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE info LIKE 'CLONE %'"
        wait_until(lambda: server.query(under_way)[0][0] == 0, 60)

        def late(_now) -> None:
            server.query("CREATE TABLE IF NOT EXISTS old.late (a INT) ENGINE=MyISAM")

        with pytest.raises(NotQuiescedError, match=r"old\.late \(MyISAM\)"):
            tool.back_up(request(server, folder, "late", progress=late))
        with pytest.raises(StorageError, match="not a physical backup"):
            read_info(folder / "late")
        server.query("DROP TABLE old.late")
        login = folder / "my.cnf"
        login.write_text("[client]\nuser=weak\npassword=w\n")
        login.chmod(0o600)
        weak = request(server, folder, "weak", credentials=Credentials(socket=server.socket, defaults_file=str(login)))
        made, granted = back_up_with_grants(server, weak)
        assert granted == ["BACKUP_ADMIN", "PROCESS", "REPLICATION CLIENT"]
        assert read_info(folder / "weak").server_version in server.query("SELECT VERSION()")[0][0]
        assert made.files > 0
