"""The servers' own backup tools on real servers that are written to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.contract.errors import NotQuiescedError, StorageError
from snapmgr.mysql.connect.client import Credentials
from snapmgr.physical.seal import compare, seal
from snapmgr.physical.tools.infofile import read_info
from snapmgr.physical.tools.request import BrokenChainError
from support.kinds import kinds
from support.load import check_invariant, write_load
from support.processes import children, ended, halt, wait_until
from support.replicas import inserting, replica_pair, server_on
from support.server import private_server
from support.staging import apply_to, back_up_with_grants, clone, request, tool_of
from support.storage import work_folder
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.server import PrivateServer

pytestmark = pytest.mark.needs("root", "mariadbd", "mariadb-backup")
_EVIL = "a#b\"c'd\\e f"


@pytest.fixture
def folder() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateServer]:
    """A MariaDB with some data, for tests that leave it as it was."""
    with work_folder() as folder, private_server(folder / "data") as server:
        server.query("CREATE DATABASE some")
        server.query("CREATE TABLE some.thing (a INT PRIMARY KEY, b BLOB)")
        server.query("INSERT INTO some.thing SELECT seq, REPEAT('x', 20000) FROM some.seq_1_to_400")
        yield server


def executed(gtid: str) -> int:
    """Return how many transactions a GTID of MariaDB's only domain counts."""
    return int(gtid.rpartition("-")[2])


@kinds("mariadb-10.11", *(["mariadb-11.8"] if CAMPAIGN else []))
def test_a_full_backup_and_its_increment_under_load_become_servers_with_exact_positions(folder, kind):
    with private_server(folder / "data", kind=kind) as server:
        server.query("CREATE DATABASE other")
        server.query("CREATE TABLE other.plain (a INT PRIMARY KEY) ENGINE=MyISAM")
        server.query("INSERT INTO other.plain VALUES (1), (2)")
        tool = tool_of(server)
        phases: list[str] = []
        with write_load(server.socket, engines=()) as load:
            load.warm_up()
            first = load.acknowledged()
            full = tool.back_up(request(server, folder, parallel=2, progress=lambda now: phases.append(now.phase)))
            second = load.acknowledged()
            server.query("INSERT INTO other.plain VALUES (3)")
            increment = tool.back_up(request(server, folder, "increment", from_lsn=full.to_lsn))
            third = load.acknowledged()
        assert (full.tool, full.state, full.from_lsn) == ("mariadb-backup", "raw", 0)
        assert full.tool_version in server.query("SELECT VERSION()")[0][0]
        assert increment.from_lsn == full.to_lsn
        assert increment.size_bytes < full.size_bytes
        assert "copying data files" in phases
        log = folder / "full.log"
        assert log.read_text().rstrip().endswith("completed OK!")
        assert log.stat().st_mode & 0o777 == 0o600
        # The base stays as it was: all that is applied goes into copies.
        sealed = seal(str(folder / "full"), checksums=True)
        assert sealed.size_bytes == full.size_bytes
        assert sealed.files == full.files
        clone(folder / "full", folder / "older", server)
        apply_to(server, folder / "older")
        assert read_info(folder / "older").state == "prepared"
        clone(folder / "older", folder / "newer", server)
        apply_to(server, folder / "newer", folder / "increment")
        assert compare(str(folder / "full"), sealed, contents=True) == ()
        seen = []
        for name, made, before, after in (("older", full, first, second), ("newer", increment, second, third)):
            assert all(path.stat().st_uid == server.datadir.stat().st_uid for path in (folder / name).rglob("*"))
            with private_server(folder / name, kind=kind, install_options=None) as copy, copy.connect() as connection:
                found = check_invariant(connection, before=before, after=after, engines=())
                plain = copy.query("SELECT MAX(a) FROM other.plain")[0][0]
            assert made.position is not None
            assert read_info(folder / name).position.offset == made.position.offset
            seen.append((sum(one.innodb for one in found), plain, executed(made.position.gtid)))
        # One transaction for each row of the ledger, and one for the other table.
        assert seen[1][0] - seen[0][0] + 1 == seen[1][2] - seen[0][2]
        assert (seen[0][1], seen[1][1]) == (2, 3)


def test_the_account_gets_its_rights_by_the_printed_statements_and_its_password_is_nowhere(server, folder):
    server.query("CREATE OR REPLACE USER poor@localhost IDENTIFIED BY %s", _EVIL)
    login = folder / "my.cnf"
    quoted = _EVIL.replace("\\", "\\\\").replace('"', '\\"')
    login.write_text(f'[client]\nuser=poor\npassword="{quoted}"\n')
    login.chmod(0o600)
    seen: set[bytes] = set()

    def look(_now) -> None:
        for pid in children():
            with suppress(OSError):
                for name in ("cmdline", "environ"):
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        seen.add(file.read())

    asked = request(
        server, folder, credentials=Credentials(socket=server.socket, defaults_file=str(login)), progress=look
    )
    made, granted = back_up_with_grants(server, asked)
    assert granted == ["BINLOG MONITOR", "PROCESS", "RELOAD"]
    server.query("DROP USER poor@localhost")
    assert made.position is not None
    assert any(b"--backup" in one for one in seen)
    everything = b"".join(seen) + (folder / "full.log").read_bytes()
    assert b"a#b" not in everything
    assert b"IDENTIFIED BY PASSWORD '*" not in everything.replace(b"****", b"")
    # Nor in what the tool leaves about its own call.
    assert "a#b" not in (folder / "full" / "xtrabackup_info").read_text()


def test_another_server_than_is_meant_is_not_backed_up(server, folder):
    asked = request(server, folder)
    for other in (replace(asked.identity, pid=1), replace(asked.identity, datadir="/var/lib/mysql")):
        with pytest.raises(NotQuiescedError, match="instead of process"):
            tool_of(server).back_up(replace(asked, identity=other))
    assert list((folder / "full").iterdir()) == []


def test_what_is_in_the_folder_is_not_touched(server, folder):
    asked = request(server, folder)
    (folder / "full" / "precious").touch()
    with pytest.raises(StorageError, match="not empty"):
        tool_of(server).back_up(asked)
    assert [path.name for path in (folder / "full").iterdir()] == ["precious"]


def test_an_increment_of_other_data_is_refused(server, folder):
    with pytest.raises(BrokenChainError, match="these are other data"):
        tool_of(server).back_up(request(server, folder, from_lsn=1 << 50))


def test_no_position_is_claimed_where_rows_precede_their_commit(server, folder):
    server.query("CREATE TABLE some.aria (a INT) ENGINE=Aria TRANSACTIONAL=1")
    try:
        assert tool_of(server).back_up(request(server, folder)).position is None
    finally:
        server.query("DROP TABLE some.aria")
    # The tool itself has written one down.
    assert read_info(folder / "full").position is not None


def test_a_server_that_ends_idle_sessions_soon_is_backed_up_with_its_position(server, folder):
    server.query("SET GLOBAL wait_timeout = 1")
    begun = server.query("SELECT UNIX_TIMESTAMP()")[0][0]
    try:
        made = tool_of(server).back_up(request(server, folder, throttle=100))
    finally:
        server.query("SET GLOBAL wait_timeout = DEFAULT")
    assert server.query("SELECT UNIX_TIMESTAMP()")[0][0] - begun > 1
    assert made.position is not None


def test_no_position_is_claimed_when_such_a_table_came_during_the_backup(server, folder):
    came: list[str] = []

    def look(now) -> None:
        if now.phase != "starting" and not came:
            came.append(now.phase)
            server.query("CREATE TABLE some.late (a INT) ENGINE=Aria TRANSACTIONAL=1")

    try:
        assert tool_of(server).back_up(request(server, folder, throttle=100, progress=look)).position is None
    finally:
        server.query("DROP TABLE some.late")


def end_us(_server: PrivateServer, _tool: int) -> None:
    raise KeyboardInterrupt


def end_the_tool(_server: PrivateServer, tool: int) -> None:
    os.kill(tool, signal.SIGKILL)


def end_its_connections(server: PrivateServer, _tool: int) -> None:
    for number, *_ in server.query("SELECT id FROM information_schema.PROCESSLIST WHERE id <> CONNECTION_ID()"):
        with suppress(Exception):
            server.query(f"KILL {number}")


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (end_us, KeyboardInterrupt, None),
        (end_the_tool, StorageError, "signal 9"),
        (end_its_connections, StorageError, "connection to the server was lost"),
    ],
)
def test_an_interrupted_backup_leaves_nothing_finished_no_process_and_no_lock(server, folder, fault, kind, message):
    tools: set[int] = set()
    ours = children()

    def look(now) -> None:
        if now.phase != "starting" and not tools:
            tools.update(children() - ours)
            fault(server, *tools)

    # Slow enough to be met under way.
    with pytest.raises(kind, match=message):
        tool_of(server).back_up(request(server, folder, throttle=1, progress=look))
    assert len(tools) == 1
    assert all(ended(pid) for pid in tools)
    require_nothing_left(server, folder)


def require_nothing_left(server: PrivateServer, folder: Path) -> None:
    with pytest.raises(StorageError, match=r"never finished|not a physical backup"):
        read_info(folder / "full")
    wait_until(lambda: len(server.query("SELECT id FROM information_schema.PROCESSLIST")) == 1, 60)
    # A lock of the backup's would hold this off.
    server.query("SET STATEMENT lock_wait_timeout = 5 FOR CREATE TABLE some.after (a INT)")
    server.query("DROP TABLE some.after")


_FILL = """
import sys
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.physical.tools.choose import choose_tool
from snapmgr.physical.tools.request import CopyRequest

credentials = Credentials(socket=sys.argv[1], user="root")
with connect(credentials) as connection:
    server = identify(connection)
choose_tool("auto", server.flavor, server.version).back_up(
    CopyRequest(folder=sys.argv[2], log=sys.argv[2] + ".log", credentials=credentials, identity=server, throttle=1)
)
"""


def test_a_backup_ends_when_we_are_killed(server, folder):
    (folder / "full").mkdir()
    with subprocess.Popen([sys.executable, "-c", _FILL, server.socket, str(folder / "full")]) as us:
        try:
            log = folder / "full.log"
            wait_until(lambda: log.exists() and " Copying " in log.read_text(), 60)
            (tool,) = children(us.pid)
        finally:
            us.kill()
    wait_until(lambda: ended(tool), 60)
    require_nothing_left(server, folder)


def test_a_server_that_dies_ends_the_backup(folder):
    with private_server(folder / "data") as server:

        def look(now) -> None:
            if now.phase != "starting" and server.running:
                server.kill()

        with pytest.raises(StorageError, match="connection to the server was lost|signal|exit code"):
            tool_of(server).back_up(request(server, folder, throttle=1, progress=look))
    with pytest.raises(StorageError, match=r"never finished|not a physical backup"):
        read_info(folder / "full")


def test_redo_log_that_is_overwritten_ends_the_backup_before_its_end(folder):
    with private_server(folder / "data", ["--innodb-log-file-size=4M", "--skip-log-bin"]) as server:
        server.query("CREATE DATABASE d")
        server.query("CREATE TABLE d.t (a BIGINT AUTO_INCREMENT PRIMARY KEY, b BLOB)")
        ours = children()
        stopped: set[int] = set()

        def look(now) -> None:
            if now.phase != "starting" and not stopped:
                stopped.update(children() - ours)
                for pid in stopped:
                    halt(pid)
                for _ in range(8):
                    server.query("INSERT INTO d.t (b) SELECT REPEAT('x', 6000) FROM d.seq_1_to_300")
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)

        with pytest.raises(StorageError, match="overwrote redo log"):
            tool_of(server).back_up(request(server, folder, throttle=2, progress=look))
    assert "Was only able to copy" not in (folder / "full.log").read_text()


def test_a_full_disk_is_told(server, folder):
    with tmpfs(folder / "small", "4m") as small, pytest.raises(StorageError, match="file system is full"):
        tool_of(server).back_up(request(server, small))


@contextmanager
def tmpfs(point: Path, size: str) -> Iterator[Path]:
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


@pytest.mark.parametrize("by", ["gtid", "file"])
def test_a_backup_of_a_replica_tells_where_another_one_goes_on(folder, by):
    with replica_pair(folder / "data", "mariadb-10.11", by=by) as pair:
        with inserting(pair.source):
            wait_until(lambda: pair.replica.query("SELECT COUNT(*) FROM load_test.t0")[0][0] > 20, 60)
            made = tool_of(pair.replica).back_up(request(pair.replica, folder))
        apply_to(pair.replica, folder / "full")
        (at,) = made.sources
        assert (bool(at.gtid), bool(at.file)) == (by == "gtid", by == "file")
        with server_on(pair, folder / "full") as third:
            pair.replicate(third, by, at)
            pair.start(third)
            pair.wait_equal(third)
