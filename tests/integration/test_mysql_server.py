"""A throwaway server on copies of a real datadir: good ones, damaged ones, ones that would lead to the live data."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from snapmgr.errors import LackingError, VerificationError
from snapmgr.mysql.check import check_tables, run_assertions
from snapmgr.mysql.client import Credentials, connect
from snapmgr.mysql.identity import identify
from snapmgr.mysql.layout import read_layout
from snapmgr.mysql.server import find_server, throwaway
from support.server import PrivateServer, private_server, server_user
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from snapmgr.mysql.layout import Layout

pytestmark = pytest.mark.needs("root", "mariadbd")

MEMORY = 96 * 1024 * 1024
ROWS = 5000


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def source(base: Path) -> Iterator[tuple[PrivateServer, Layout]]:
    """A running server with a table in each engine, and its layout."""
    with private_server(base / "live", ["--default-storage-engine=InnoDB"]) as server:
        server.query("CREATE DATABASE shop")
        server.query("CREATE DATABASE `we``ird é`")
        server.query("CREATE TABLE `we``ird é`.`t``ä.1` (a INT) ENGINE=InnoDB")
        for engine in ("InnoDB", "Aria", "MyISAM"):
            server.query(f"CREATE TABLE shop.{engine} (id INT PRIMARY KEY, t VARCHAR(200), KEY (t)) ENGINE={engine}")
            server.query(
                f"INSERT INTO shop.{engine} SELECT seq, REPEAT(CHAR(65 + seq % 26), 150) FROM shop.seq_1_to_{ROWS}"
            )
        server.query("CREATE VIEW shop.v AS SELECT * FROM shop.InnoDB")
        server.query("CREATE TABLE shop.blobs (id INT PRIMARY KEY, b LONGBLOB) ENGINE=InnoDB")
        server.query("INSERT INTO shop.blobs SELECT seq, REPEAT(CHAR(65 + seq % 26), 50000) FROM shop.seq_1_to_50")
        # Else crash recovery writes every page anew, and no damage to a page outlives it.
        server.restart()
        with connect(Credentials(socket=server.socket)) as connection:
            yield server, read_layout(connection, identify(connection))


@contextmanager
def frozen(server: PrivateServer) -> Iterator[None]:
    """Stop the process, so that a file-by-file copy is of one instant."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with open(f"/proc/{server.pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "T":
                    break
            time.sleep(0.01)
        else:
            raise AssertionError("the server did not stop")
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.fixture
def copy(source: tuple[PrivateServer, Layout], base: Path) -> Iterator[Path]:
    """A crash-consistent copy of the live datadir."""
    server, _ = source
    target = base / "copy"
    with frozen(server):
        subprocess.run(["cp", "-a", "--reflink=auto", str(server.datadir), str(target)], check=True)
    yield target
    shutil.rmtree(target)


@pytest.fixture
def run_dir() -> Iterator[str]:
    with work_folder() as folder:
        yield str(folder / "run")


@pytest.fixture(scope="module")
def binary():
    return find_server("mariadb")


def gone(pid: int, within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def servers_on(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if any(word.startswith(b"--datadir=" + os.fsencode(str(folder))) for word in words):
                found.append(int(name))
    return found


def check(server, depth="extended", **options):
    with server.connect() as connection:
        arguments = {"share": 1.0, "seed": "x", "deadline": time.monotonic() + 60, "complaints": server.complaints}
        arguments |= options
        return check_tables(connection, depth=depth, **arguments)


def test_a_good_copy_starts_as_its_owner_and_every_table_is_whole(source, copy, run_dir, binary):
    live, layout = source
    seen = []
    with throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as server:
        pid = server.pid
        assert os.stat(f"/proc/{pid}").st_uid == server_user().pw_uid
        assert os.stat(run_dir).st_mode & 0o777 == 0o700
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
            failures = run_assertions(
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
        assert gone(pid)
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
    assert gone(pid, 0.1)
    assert servers_on(copy) == []


def damage(path: Path) -> None:
    """Overwrite a page in the middle of what is in use: the server must open the table and meet the damage later."""
    page, data = 16384, path.read_bytes()
    numbers = range(len(data) // page)
    if path.suffix == ".ibd":
        # Page type 17855 is a B-tree's; the file is longer than what is used of it.
        numbers = [n for n in numbers if int.from_bytes(data[n * page + 24 : n * page + 26], "big") == 17855]
    assert len(numbers) > 10
    with open(path, "r+b") as file:
        file.seek(numbers[len(numbers) // 2] * page)
        file.write(os.urandom(page))


@pytest.mark.parametrize(("engine", "extension"), [("InnoDB", ".ibd"), ("Aria", ".MAD"), ("MyISAM", ".MYD")])
@pytest.mark.parametrize("depth", ["quick", "extended"])
def test_overwritten_pages_are_found(source, copy, run_dir, binary, engine, extension, depth):
    _, layout = source
    path = copy / "shop" / f"{engine}{extension}"
    damage(path)
    failures: tuple[str, ...] = ()
    try:
        with throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as server:
            failures = check(server, depth).failures
    except VerificationError as error:
        failures = (error.message,)
    if depth == "quick" and engine != "InnoDB":
        # QUICK does not look at rows of Aria and MyISAM: docs/verify.md says so, and "extended" is there for it.
        assert failures == ()
        return
    assert failures
    assert any(engine in text for text in failures), failures


def test_a_damaged_blob_that_the_server_gives_back_as_empty_is_found(source, copy, run_dir, binary):
    """CHECK TABLE does not look at BLOB pages, and a SELECT gets an empty value without an error."""
    _, layout = source
    path = copy / "shop" / "blobs.ibd"
    data, page = path.read_bytes(), 16384
    # Page type 10: a BLOB's.
    blobs = [n for n in range(len(data) // page) if int.from_bytes(data[n * page + 24 : n * page + 26], "big") == 10]
    assert len(blobs) > 100
    with open(path, "r+b") as file:
        file.seek(blobs[len(blobs) // 2] * page + 2000)
        file.write(os.urandom(64))
    with throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as server:
        report = check(server, "extended")
        assert len(report.failures) == 1
        assert report.failures[0].startswith("`shop`.`blobs`: the server's log says: ")
        assert "blobs.ibd" in report.failures[0]


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


def test_a_missing_system_tablespace_is_damage_and_the_message_says_so(source, copy, run_dir, binary):
    _, layout = source
    (copy / "ibdata1").unlink()
    with (
        pytest.raises(VerificationError, match="ibdata1|system tablespace|redo") as caught,
        throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir),
    ):
        pass
    assert len(caught.value.message) < 3000
    assert servers_on(copy) == []


def test_files_of_another_owner_are_damage(source, copy, run_dir, binary):
    _, layout = source
    os.chown(copy / "ibdata1", 0, 0)
    os.chmod(copy / "ibdata1", 0o600)
    with (
        pytest.raises(VerificationError) as caught,
        throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir),
    ):
        pass
    assert "do not belong to the owner" in (caught.value.hint or "")


def test_a_datadir_of_root_with_files_of_others_is_damage(source, copy, run_dir, binary):
    _, layout = source
    os.chown(copy, 0, 0)
    with (
        pytest.raises(VerificationError, match="belongs to root"),
        throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir),
    ):
        pass


def test_missing_binary_logs_are_named_as_the_reason_or_harmless(source, copy, run_dir, binary):
    """Without its binary log a copy with prepared transactions must not come up; one without them may."""
    _, layout = source
    for path in copy.glob("binlog.*"):
        path.unlink()
    try:
        with throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as server:
            assert check(server).failures == ()
    except VerificationError as error:
        assert "binary log" in (error.hint or "")  # noqa: PT017 - one of two legal outcomes


def test_a_closed_folder_above_the_copy_is_not_damage(source, copy, binary):
    _, layout = source
    with work_folder() as folder:
        closed = folder / "closed"
        closed.mkdir(mode=0o700)
        with (
            pytest.raises(LackingError, match="cannot reach"),
            throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=str(closed / "run")),
        ):
            pass


def test_an_unknown_option_is_not_damage(source, copy, run_dir, binary):
    _, layout = source
    with (
        pytest.raises(LackingError, match="nonsense"),
        throwaway(
            binary,
            str(copy),
            settings=layout.settings,
            memory_bytes=MEMORY,
            run_dir=run_dir,
            options=["--nonsense=1"],
        ),
    ):
        pass


def test_a_full_file_system_is_not_damage(source, copy, run_dir, binary):
    """This test will give the server no room for its temporary tablespace."""
    _, layout = source
    # A server begins by removing the old one, which would make room.
    (copy / "ibtmp1").unlink()
    used = int(subprocess.run(["du", "-sk", str(copy)], check=True, capture_output=True).stdout.split()[0])
    with work_folder() as folder:
        point = folder / "full"
        point.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={used + 1024}k", "tmpfs", str(point)], check=True)
        try:
            subprocess.run(["cp", "-a", str(copy), str(point / "d")], check=True)
            arguments = {"settings": layout.settings, "memory_bytes": MEMORY, "run_dir": run_dir, "time_limit_s": 5}
            with pytest.raises(LackingError) as caught, throwaway(binary, point / "d", **arguments):
                pass
            assert "room" in (caught.value.hint or "")
        finally:
            subprocess.run(["umount", str(point)], check=True)


def test_a_frozen_server_meets_the_time_limit_and_is_ended(source, copy, run_dir, binary):
    _, layout = source
    stopped = threading.Event()

    def freeze() -> None:
        deadline = time.monotonic() + 10
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
    assert time.monotonic() - begun < 30
    assert servers_on(copy) == []


def test_a_server_that_freezes_or_dies_while_checking_is_a_failure(source, copy, run_dir, binary):
    _, layout = source
    with throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as server:
        os.kill(server.pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(Exception, match="did not answer"):
            server.connect(timeout_s=0.5)
        os.kill(server.pid, signal.SIGCONT)
        with server.connect() as connection:

            def strike(done: int, _all: int) -> None:
                if done == 3:
                    os.kill(server.pid, signal.SIGSTOP)

            report = check_tables(
                connection,
                depth="quick",
                share=1.0,
                seed="x",
                deadline=time.monotonic() + 1.5,
                progress=strike,
            )
            assert report.tables_checked == 3
            assert any("time limit" in text for text in report.failures)
        assert time.monotonic() - begun < 15
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
        "from snapmgr.mysql.server import *\n"
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
    assert gone(pid)
    assert servers_on(copy) == []


def test_an_absolute_index_of_the_binary_log_leads_to_the_copy(base, run_dir, binary):
    """With log-bin given as an absolute path the index has absolute names: the live files must not be touched."""
    live, logs = base / "live2", base / "logs2"
    logs.mkdir()
    os.chown(logs, server_user().pw_uid, server_user().pw_gid)
    copied = base / "volume2"
    copied.mkdir()
    try:
        with private_server(live, [f"--log-bin={logs}/bin"]) as server:
            server.query("CREATE DATABASE shop")
            server.query("FLUSH BINARY LOGS")
            with connect(Credentials(socket=server.socket)) as connection:
                layout = read_layout(connection, identify(connection))
            assert str(logs) in (logs / "bin.index").read_text()
            with frozen(server):
                for folder in (live, logs):
                    subprocess.run(["cp", "-a", str(folder), str(copied)], check=True)
            before = {path: path.read_bytes() for path in sorted(logs.iterdir())}
            with throwaway(
                binary,
                str(copied / "live2"),
                settings=layout.settings,
                memory_bytes=MEMORY,
                run_dir=run_dir,
            ) as started:
                with started.connect() as connection:
                    assert connection.variables("log_bin_basename")["log_bin_basename"] == str(copied / "logs2/bin")
                    assert len(connection.rows("SHOW BINARY LOGS")) == 3
                assert all(str(copied) in line for line in (copied / "logs2/bin.index").read_text().split())
            assert {path: path.read_bytes() for path in sorted(logs.iterdir())} == before
    finally:
        for folder in (live, logs, copied):
            shutil.rmtree(folder, ignore_errors=True)


def test_a_tablespace_elsewhere_is_refused_or_covered_and_the_live_one_is_never_opened(base, run_dir, binary):
    """DATA DIRECTORY names the live file by its absolute path, in .isl files, symlinks and the redo log."""
    volume, clone = base / "volume3", base / "clone3"
    elsewhere = volume / "elsewhere"
    elsewhere.mkdir(parents=True)
    os.chown(elsewhere, server_user().pw_uid, server_user().pw_gid)
    try:
        with private_server(volume / "data") as server:
            server.query("CREATE DATABASE shop")
            for engine in ("InnoDB", "MyISAM"):
                server.query(f"CREATE TABLE shop.{engine} (a INT) ENGINE={engine} DATA DIRECTORY='{elsewhere}'")
                server.query(f"INSERT INTO shop.{engine} VALUES (1)")
            with connect(Credentials(socket=server.socket)) as connection:
                layout = read_layout(connection, identify(connection))
            with frozen(server):
                subprocess.run(["cp", "-a", str(volume), str(clone)], check=True)
            arguments = {"settings": layout.settings, "memory_bytes": MEMORY, "run_dir": run_dir}
            with (
                pytest.raises(LackingError, match="outside of the copy"),
                throwaway(binary, str(clone / "data"), **arguments),
            ):
                pass
            # Later than the copy: whoever sees it has opened the live file.
            server.query("INSERT INTO shop.InnoDB VALUES (2)")
            server.query("INSERT INTO shop.MyISAM VALUES (2)")
            originals = {str(volume / "data"): str(clone / "data"), str(elsewhere): str(clone / "elsewhere")}
            with throwaway(binary, str(clone / "data"), originals=originals, **arguments) as started:
                with started.connect() as connection:
                    assert connection.rows("SELECT a FROM shop.InnoDB") == [{"a": 1}]
                    assert connection.rows("SELECT a FROM shop.MyISAM") == [{"a": 1}]
                    connection.execute("INSERT INTO shop.InnoDB VALUES (3)")
                    connection.execute("INSERT INTO shop.MyISAM VALUES (3)")
                assert check(started).failures == ()
                assert started.shutdown()
            for engine in ("InnoDB", "MyISAM"):
                assert server.query(f"SELECT a FROM shop.{engine}") == ((1,), (2,))
            server.kill()
            server.start()
            assert server.query("SELECT a FROM shop.InnoDB") == ((1,), (2,))
            with open("/proc/self/mountinfo") as file:
                assert str(volume) not in file.read()
    finally:
        for folder in (volume, clone):
            shutil.rmtree(folder, ignore_errors=True)


def test_no_server_of_that_flavor_is_lacking():
    with pytest.raises(LackingError, match="no mysql server"):
        find_server("mysql", "/usr/sbin/mariadbd")
    with pytest.raises(LackingError, match="no mariadb server") as caught:
        find_server("mariadb", "/nowhere/mariadbd")
    assert "apt-get install mariadb-server-core" in (caught.value.hint or "")


def test_an_unclosed_myisam_table_is_a_warning_and_no_damage(source, base, run_dir, binary):
    """A file-by-file copy with MyISAM tables in use says so, but the tables are whole."""
    server, layout = source
    target = base / "inuse"
    try:
        with server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("INSERT INTO shop.MyISAM VALUES (1000000, 'x')")
            with frozen(server):
                subprocess.run(["cp", "-a", str(server.datadir), str(target)], check=True)
            cursor.execute("DELETE FROM shop.MyISAM WHERE id = 1000000")
        with throwaway(binary, str(target), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as started:
            report = check(started, "extended")
        assert report.failures == ()
        assert any("hasn't closed the table properly" in note for note in report.notes)
    finally:
        shutil.rmtree(target, ignore_errors=True)
