"""The laboratory itself: what other tests stand on must hold, clean up, and tell a torn copy from a whole one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pymysql
import pytest

from support import requirements
from support.load import InvariantError, check_invariant, write_load
from support.server import install, private_server, server_user
from support.storage import (
    LeftBehindError,
    leftovers,
    loop_devices,
    loop_filesystem,
    processes_of,
    shielded,
    sweep_dead,
    work_folder,
)

MIB = 1 << 20
SIZES = {"btrfs": 256 * MIB, "xfs": 320 * MIB, "ext4": 64 * MIB}


def _mounts():
    return Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize("fs_type", SIZES)
@pytest.mark.needs("root", "loop", "btrfs", "xfs", "ext4")
def test_file_system_is_real_and_gone_afterwards(fs_type):
    with loop_filesystem(fs_type, SIZES[fs_type], mount_options=("noatime",)) as system:
        assert f" {system.point} " in _mounts()
        assert loop_devices()[system.device] == str(system.image)
        found = subprocess.check_output(["blkid", "-p", "-s", "TYPE", "-o", "value", system.device], text=True)
        assert found.strip() == fs_type
        (system.point / "file").write_bytes(os.urandom(MIB))
        options = next(line for line in _mounts().splitlines() if f" {system.point} " in line)
        assert "noatime" in options
    assert str(system.point) not in _mounts()
    assert system.device not in loop_devices() or loop_devices()[system.device] != str(system.image)
    assert not system.image.parent.exists()


@pytest.mark.needs("root", "loop", "ext4")
def test_further_mounts_of_the_device_are_released_too(tmp_path):
    with loop_filesystem("ext4", 64 * MIB) as system:
        (system.point / "inner").mkdir()
        subprocess.check_call(["mount", "-t", "tmpfs", "none", str(system.point / "inner")])
        subprocess.check_call(["mount", system.device, str(tmp_path)])
    assert str(tmp_path) not in _mounts()
    assert str(system.point) not in _mounts()


@pytest.mark.needs("root", "loop", "ext4")
def test_cleanup_happens_on_an_exception_and_keeps_it():
    with pytest.raises(ZeroDivisionError), loop_filesystem("ext4", 64 * MIB) as system:
        _ = 1 / 0
    assert str(system.image) not in loop_devices().values()


@pytest.mark.needs("root", "loop", "ext4")
def test_failed_mkfs_leaves_nothing():
    before = leftovers()
    with pytest.raises(Exception, match="mkfs"), loop_filesystem("ext4", 64 * MIB, mkfs_options=("-b", "17")):
        pass
    assert leftovers() == before


@pytest.mark.needs("root", "loop", "ext4")
def test_what_is_still_held_is_named_and_released_all_the_same(monkeypatch):
    monkeypatch.setattr("support.storage._PATIENCE_S", 0.5)
    holder = None
    try:
        with (
            pytest.raises(LeftBehindError, match=r"held by \d+ \(sleep\)"),
            loop_filesystem("ext4", 64 * MIB) as system,
        ):
            holder = subprocess.Popen(["sleep", "30"], cwd=system.point)
    finally:
        holder.kill()
        holder.wait()
    assert str(system.point) not in _mounts()
    deadline = time.monotonic() + 25
    while system.device in loop_devices() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [line for line in leftovers() if str(system.image.parent) in line] == []


def test_signals_wait_behind_the_shield():
    arrived = []
    old = signal.signal(signal.SIGTERM, lambda *_: arrived.append("outside"))
    try:
        with shielded():
            signal.raise_signal(signal.SIGTERM)
            assert arrived == []
        assert arrived == ["outside"]
    finally:
        signal.signal(signal.SIGTERM, old)


_LAB = """
import sys, time
sys.path.insert(0, {tests!r})
from support.load import write_load
from support.server import private_server
from support.storage import loop_filesystem
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
with loop_filesystem("ext4", 300 << 20) as system, private_server(system.point / "data") as server, \
        write_load(server.socket) as load:
    load.warm_up(2)
    print(system.point.parent.name, flush=True)
    time.sleep(60)
"""


def _start_lab():
    process = subprocess.Popen(
        [sys.executable, "-c", _LAB.format(tests=str(Path(__file__).parents[1]))], stdout=subprocess.PIPE, text=True
    )
    with process.stdout:
        folder = process.stdout.readline().strip()
    assert folder, "the laboratory did not come up"
    mark = f"snapmgr-test-{process.pid}-"
    assert folder.startswith(mark)
    assert len(processes_of(mark)) >= 5  # a server, four writers
    return process, mark


@pytest.mark.needs("root", "loop", "ext4", "mariadbd")
def test_interrupted_laboratory_leaves_nothing():
    process, _ = _start_lab()
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert leftovers(process.pid) == []


@pytest.mark.needs("root", "loop", "ext4", "mariadbd")
def test_killed_laboratory_loses_its_processes_at_once_and_the_rest_is_swept():
    process, mark = _start_lab()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 25
    while processes_of(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_of(mark) == []
    assert any("loop device" in line for line in leftovers(process.pid))
    sweep_dead()
    assert leftovers(process.pid) == []


@pytest.mark.needs("root", "loop", "ext4", "mariadbd")
def test_server_is_unprivileged_private_and_answers():
    with (
        loop_filesystem("ext4", 300 * MIB) as system,
        private_server(system.point / "data", ["--server-id=77"]) as server,
    ):
        assert server.running
        ((user, networking, binlog, server_id),) = server.query(
            "SELECT current_user(), @@skip_networking, @@log_bin, @@server_id"
        )
        assert (user, networking, binlog, server_id) == ("root@localhost", 1, 1, 77)
        assert os.stat(f"/proc/{server.pid}").st_uid == server_user().pw_uid != 0
        assert Path(f"/proc/{server.pid}/exe").readlink().name == "mariadbd"
        assert len(server.socket) < 100
        assert "ready for connections" in server.log_text()
        server.query("CREATE DATABASE kept")
        pid = server.pid
        server.restart()
        assert server.pid != pid
        assert ("kept",) in server.query("SHOW DATABASES")
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 20
        assert not server.running
        server.stop()
        server.start()
        server.kill()
        server.start()
        assert "after a crash" in server.log_text()
    with pytest.raises(RuntimeError):
        _ = server.pid


@pytest.mark.needs("mariadbd")
def test_server_that_does_not_come_up_says_why():
    with (
        work_folder() as folder,
        pytest.raises(RuntimeError, match="no-such-option"),
        private_server(folder / "data", ["--no-such-option"]),
    ):
        pass


@pytest.mark.needs("root", "mariadbd")
def test_install_options_reach_the_initialisation():
    with work_folder() as folder:
        undo = folder / "undo"
        undo.mkdir()
        os.chown(undo, server_user().pw_uid, server_user().pw_gid)
        options = (f"--innodb-undo-directory={undo}", "--innodb-undo-tablespaces=3")
        install(folder / "data", options)
        assert sorted(path.name for path in undo.iterdir()) == ["undo001", "undo002", "undo003"]
        with private_server(folder / "data", options, install_options=None) as server:
            assert server.query("SELECT @@innodb_undo_directory")[0][0].rstrip("/") == str(undo)


@pytest.fixture
def loaded():
    """A btrfs subvolume with a server in it under load."""
    with loop_filesystem("btrfs", 600 * MIB) as system:
        data = system.point / "data"
        subprocess.check_call(["btrfs", "subvolume", "create", str(data)], stdout=subprocess.DEVNULL)
        with private_server(data) as server, write_load(server.socket) as load:
            load.warm_up()
            yield system, server, load


def _snapshot(system, name):
    target = system.point / name
    command = ["btrfs", "subvolume", "snapshot", str(system.point / "data"), str(target)]
    subprocess.check_call(command, stdout=subprocess.DEVNULL)
    return target


def _lock(connection):
    with connection.cursor() as cursor:
        for stage in ("START", "FLUSH", "BLOCK_DDL", "BLOCK_COMMIT"):
            cursor.execute(f"BACKUP STAGE {stage}")


@pytest.mark.needs("root", "loop", "btrfs", "mariadbd")
def test_locked_copy_keeps_the_invariant_and_the_stall_is_seen(loaded):
    system, server, load = loaded
    with server.connect() as connection:
        before = load.acknowledged()
        since_ns = time.monotonic_ns()
        _lock(connection)
        copy = _snapshot(system, "copy")
        time.sleep(0.3)
        # The writers wait now; that shows already before the lock goes.
        assert load.statistics(since_ns=since_ns).worst_s > 0.25
    after = load.acknowledged()
    load.warm_up()
    load.stop()
    assert load.errors() == []
    statistics = load.statistics()
    assert statistics.writes >= 3 * sum(line.innodb for line in load.acknowledged()) > 0
    assert 0 < statistics.p50_s <= statistics.p95_s <= statistics.worst_s
    assert statistics.worst_s > 0.3
    with private_server(copy, install_options=None) as second, second.connect() as connection:
        found = check_invariant(connection, before=before, after=after)
    assert len(found) == load.writers
    # The original itself, at rest.
    with server.connect() as connection:
        assert check_invariant(connection, before=load.acknowledged(), after=load.acknowledged()) == load.acknowledged()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("UPDATE accounts SET balance = balance - 1 WHERE id = 3", "the accounts hold"),
        ("DELETE FROM ledger WHERE writer = 1 AND n = 2", "ledger: writer 1 is at"),
        ("DELETE FROM journal_myisam WHERE writer = 0 AND n > 3", "different instants"),
        ("DELETE FROM journal_aria WHERE writer = 2", "different instants"),
        ("UPDATE counter_aria SET n = n + 1 WHERE writer = 3", "counter is"),
        ("DELETE FROM ledger WHERE writer = 3 AND n > 5", "was acknowledged"),
        ("INSERT INTO ledger SELECT writer, n + (SELECT MAX(n) FROM ledger WHERE writer = 0), '' FROM ledger"
         " WHERE writer = 0 AND n < 4", "written after the copy was made"),
    ],
)  # fmt: skip
@pytest.mark.needs("root", "mariadbd")
def test_invariant_tells_each_kind_of_damage(damaged_server, damage, complaint):
    server, acknowledged = damaged_server
    with server.connect() as connection, connection.cursor() as cursor:
        check_invariant(connection, before=acknowledged, after=acknowledged)
        # The tables that the damage is done to are put back by hand: no engine but InnoDB rolls back.
        for table in ("accounts", "ledger", "journal_aria", "journal_myisam", "counter_aria"):
            cursor.execute(f"CREATE OR REPLACE TABLE keep.{table} AS SELECT * FROM load_test.{table}")
        cursor.execute("USE load_test")
        cursor.execute(damage)
        assert cursor.rowcount > 0
        try:
            with pytest.raises(InvariantError, match=complaint):
                check_invariant(connection, before=acknowledged, after=acknowledged)
        finally:
            for table in ("accounts", "ledger", "journal_aria", "journal_myisam", "counter_aria"):
                cursor.execute(f"DELETE FROM load_test.{table}")
                cursor.execute(f"INSERT INTO load_test.{table} SELECT * FROM keep.{table}")


@pytest.fixture(scope="module")
def damaged_server():
    if requirements.lacking(["root", "mariadbd"]):
        pytest.skip("; ".join(requirements.lacking(["root", "mariadbd"])))
    with work_folder() as folder, private_server(folder / "data") as server:
        server.query("CREATE DATABASE keep")
        with write_load(server.socket) as load:
            load.warm_up(10)
            load.stop()
            yield server, load.acknowledged()


@pytest.mark.needs("root", "mariadbd")
def test_writer_that_lost_its_server_is_noticed():
    with (
        work_folder() as folder,
        private_server(folder / "data") as server,
        write_load(server.socket, writers=2) as load,
    ):
        load.warm_up(3)
        server.kill()
        with pytest.raises((RuntimeError, TimeoutError)):
            load.warm_up(10**6, timeout_s=10)
        assert any("server has gone away" in text or "Lost connection" in text for text in load.errors())
        acknowledged = load.acknowledged()
        # A crash loses nothing that was acknowledged: sync_binlog and flush_log_at_trx_commit are 1.
        server.start()
        load.stop()
        with server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SELECT writer, MAX(n) FROM load_test.ledger GROUP BY writer")
            reached = dict(cursor.fetchall())
        assert all(reached[writer] >= line.innodb for writer, line in enumerate(acknowledged))


def test_unknown_requirement_is_an_error_and_all_that_is_lacking_is_named(monkeypatch):
    with pytest.raises(KeyError, match="unknown requirements"):
        requirements.lacking(["brtfs"])
    monkeypatch.setitem(requirements._CHECKS, "a", lambda: "no a")
    monkeypatch.setitem(requirements._CHECKS, "b", lambda: "no b")
    monkeypatch.setitem(requirements._CHECKS, "c", lambda: None)
    assert requirements.lacking(["b", "c", "a", "b"]) == ["no b", "no a"]


def test_password_login_is_refused_for_root():
    # Root comes in by the socket alone, as on a Debian server.
    if requirements.lacking(["root", "mariadbd"]):
        pytest.skip("; ".join(requirements.lacking(["root", "mariadbd"])))
    with work_folder() as folder, private_server(folder / "data") as server:
        server.query("CREATE USER plain@localhost IDENTIFIED BY 'secret'")
        with pytest.raises(pymysql.err.OperationalError, match="Access denied"):
            server.connect(user="plain", password="wrong")
        server.connect(user="plain", password="secret").close()
