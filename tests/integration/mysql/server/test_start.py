"""A throwaway server on a good copy: its properties, and its end whatever happens to it or to us."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from snapmgr.contract.errors import MissingRequirementError, VerificationError
from snapmgr.mysql.server.check import check_tables, run_assertions
from snapmgr.mysql.server.program import find_server
from snapmgr.mysql.server.throwaway import throwaway
from support.copies import MEMORY, ROWS, check
from support.processes import ended, halt, servers_on, wait_until
from support.server import private_server, server_user

pytestmark = pytest.mark.needs("root", "mariadbd")


def addresses_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmPeak:")[2].split()[0]) << 10


def test_a_good_copy_starts_as_its_owner_and_every_table_is_whole(source, copy, run_dir, binary):
    live, layout = source
    seen = []
    with throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as server:
        pid = server.pid
        assert os.stat(f"/proc/{pid}").st_uid == server_user().pw_uid
        assert os.stat(run_dir).st_mode & 0o777 == 0o700
        # No 8 TiB of addresses, which there are not everywhere.
        assert addresses_bytes(pid) < 8 << 30
        report = check(server, progress=lambda done, todo: seen.append((done, todo)))
        assert report.failures == ()
        assert report.tables_checked == report.tables_total > 20
        assert seen[-1] == (report.tables_total, report.tables_total)
        with server.connect() as connection:
            values = connection.variables(
                "skip_networking", "server_id", "event_scheduler", "log_bin_basename", "performance_schema"
            )
            assert values["skip_networking"] == "ON"
            assert values["server_id"] != "1"
            assert values["event_scheduler"] in ("OFF", "DISABLED")
            assert values["performance_schema"] == "OFF"
            assert values["log_bin_basename"] == str(copy / "binlog")
            logs = connection.rows("SHOW BINARY LOGS")
            assert logs
            failures, _ = run_assertions(
                connection,
                [
                    f"SELECT COUNT(*) = {ROWS} FROM shop.InnoDB",
                    "SELECT COUNT(*) = 1 FROM shop.InnoDB",
                    "SELECT 1, 2",
                    "SELECT id FROM shop.Aria WHERE id < 3",
                    "SELECT nonsense FROM shop.Aria",
                    "SET @a = 1",
                    "SELECT NULL",
                    f"SELECT CAST({ROWS} AS CHAR) = COUNT(*) FROM shop.MyISAM",
                    # Longer than a connection waits for any other answer.
                    "SELECT SLEEP(5.5) = 0",
                ],
                deadline=time.monotonic() + 60,
            )
        assert [text.partition(":")[0] for text in failures] == [f"assertion {n}" for n in (2, 3, 4, 5, 6, 7)]
        assert server.shutdown()
        wait_until(lambda: ended(pid))
    assert live.query("SELECT COUNT(*) FROM shop.InnoDB") == ((ROWS,),)


def test_a_server_that_is_left_is_ended_also_by_an_exception(source, copy, run_dir, binary):
    _, layout = source
    pid = 0
    with (  # noqa: PT012 - the server must run first
        pytest.raises(ZeroDivisionError),
        throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as server,
    ):
        pid = server.pid
        raise ZeroDivisionError
    assert ended(pid)
    assert servers_on(copy) == []


@pytest.mark.parametrize("size", ["4096", "65536"])
def test_a_copy_of_a_stopped_server_is_started_with_its_own_page_size(base, run_dir, binary, size):
    datadir = base / "pages"
    options = [f"--innodb-page-size={size}"]
    try:
        with private_server(datadir, options, install_options=options) as server:
            server.query("CREATE DATABASE shop")
            server.query("CREATE TABLE shop.t (a INT) ENGINE=InnoDB")
        with throwaway(binary, datadir, settings={}, memory_bytes=MEMORY, run_dir=run_dir) as started:
            assert check(started).failures == ()
            with started.connect() as connection:
                assert connection.variables("innodb_page_size") == {"innodb_page_size": size}
    finally:
        shutil.rmtree(datadir)


def test_a_frozen_server_meets_the_time_limit_and_is_ended(source, copy, run_dir, binary):
    _, layout = source
    stopped = threading.Event()

    def freeze() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for pid in servers_on(copy):
                with open(f"/proc/{pid}/comm") as file:
                    if file.read().strip() == "mariadbd":
                        os.kill(pid, signal.SIGSTOP)
                        stopped.set()
                        return
            time.sleep(0.001)

    thread = threading.Thread(target=freeze)
    thread.start()
    begun = time.monotonic()
    try:
        with (
            pytest.raises(VerificationError, match="did not answer within 2.0 s"),
            throwaway(
                binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir, time_limit_s=2
            ),
        ):
            pass
    finally:
        thread.join()
    assert stopped.is_set()
    assert time.monotonic() - begun < 60
    assert servers_on(copy) == []


@pytest.mark.parametrize("limit_s", [0.03, 0.045, 0.06, 0.075])
def test_a_server_that_is_only_just_starting_is_ended_at_once(source, copy, run_dir, binary, limit_s):
    _, layout = source
    begun = time.monotonic()
    with (
        pytest.raises(VerificationError, match="did not answer"),
        throwaway(
            binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir, time_limit_s=limit_s
        ),
    ):
        pass
    assert time.monotonic() - begun < 30
    assert servers_on(copy) == []


def test_a_server_that_freezes_or_dies_while_checking_is_a_failure(source, copy, run_dir, binary):
    _, layout = source
    with throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as server:
        halt(server.pid)
        begun = time.monotonic()
        with pytest.raises(Exception, match="did not answer"):
            server.connect(timeout_s=0.5)
        os.kill(server.pid, signal.SIGCONT)
        with server.connect() as connection:

            def strike(done: int, _all: int) -> None:
                if done == 3:
                    halt(server.pid)

            report = check_tables(
                connection,
                depth="quick",
                share=1.0,
                seed="x",
                deadline=time.monotonic() + 4,
                progress=strike,
            )
            assert report.tables_checked == 3
            assert any("time limit" in text for text in report.failures)
        assert time.monotonic() - begun < 30
        os.kill(server.pid, signal.SIGCONT)
        with server.connect() as connection:
            report = check_tables(
                connection,
                depth="quick",
                share=1.0,
                seed="x",
                deadline=time.monotonic() + 30,
                progress=lambda done, _all: os.kill(server.pid, signal.SIGKILL) if done == 3 else None,
            )
            assert any("the server ended" in text for text in report.failures)


def test_our_own_death_by_sigkill_takes_the_server_with_us(source, copy, run_dir):
    """This test will kill the process that runs the throwaway server, with SIGKILL."""
    _, layout = source
    program = (
        "import sys, time\n"
        "from snapmgr.mysql.server.program import find_server\n"
        "from snapmgr.mysql.server.throwaway import throwaway\n"
        f"with throwaway(find_server('mariadb'), {str(copy)!r}, settings={layout.settings!r}, memory_bytes={MEMORY}, "
        f"run_dir={run_dir!r}) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    with child, child.stdout:
        pid = int(child.stdout.readline())
        assert servers_on(copy) == [pid]
        child.kill()
        child.wait()
    wait_until(lambda: ended(pid))
    assert servers_on(copy) == []


def test_no_server_of_that_flavor_is_lacking():
    with pytest.raises(MissingRequirementError, match="no mysql server"):
        find_server("mysql", "/usr/sbin/mariadbd")
    with pytest.raises(MissingRequirementError, match="no mariadb server") as caught:
        find_server("mariadb", "/nowhere/mariadbd")
    assert "apt-get install mariadb-server-core" in (caught.value.hint or "")
