"""The client against a real server: login, loss of the connection, and secrecy of the password."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from snapmgr.contract.errors import ConfigError
from snapmgr.mysql.connect.client import ConnectionLostError, Credentials, MysqlError, connect
from support.processes import halt
from support.server import PrivateServer, private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.needs("root", "mariadbd")

PASSWORD = "pä§#'; §ecret"


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[PrivateServer]:
    with private_server(base / "d") as running:
        running.query("CREATE USER backup@localhost IDENTIFIED BY %s", PASSWORD)
        running.query("CREATE DATABASE shop")
        running.query("CREATE TABLE shop.t (a INT, b VARBINARY(9)) ENGINE=InnoDB")
        yield running


@pytest.fixture
def defaults(base: Path, server: PrivateServer) -> Path:
    path = base / "client.cnf"
    path.write_text(f'[mysqld]\nskip-foo\n[client]\nuser = backup\npassword = "{PASSWORD}"\nsocket={server.socket}\n')
    path.chmod(0o600)
    return path


def by_socket(server: PrivateServer) -> Credentials:
    return Credentials(socket=server.socket)


def everything_of(error: BaseException) -> str:
    """All that a report could print: text, hint, frames with their variables, chained exceptions, also suppressed."""
    texts, seen = [], set()
    queue: list[BaseException | None] = [error]
    while queue:
        one = queue.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        texts += [repr(one), str(one.args), str(vars(one))]
        texts += traceback.TracebackException.from_exception(one, capture_locals=True).format()
        frame = one.__traceback__
        while frame is not None:
            texts.append(repr(frame.tb_frame.f_locals))
            # A report may look into objects, too.
            texts += [repr(getattr(value, "__dict__", "")) for value in frame.tb_frame.f_locals.values()]
            frame = frame.tb_next
        queue += [one.__cause__, one.__context__]
    return "\n".join(texts)


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    os.setresuid(uid, uid, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_login_by_socket_and_by_defaults_file(server, defaults):
    with connect(by_socket(server)) as connection:
        assert connection.peer_pid() == server.pid
        assert connection.value("SELECT CONNECTION_ID()") == connection.connection_id
        assert "MariaDB" in connection.server_version
        assert not connection.server_version.startswith("5.5.5")
        assert connection.value("SELECT @@autocommit") == 1
        assert connection.value("SELECT 'ä💾'") == "ä💾"
        assert connection.value("SELECT 1 FROM shop.t") is None
        assert connection.variables("DataDir", "no_such") == {"datadir": f"{server.datadir}/"}
        connection.execute("INSERT INTO shop.t VALUES (%s, %s)", (1, b"\xff\x00"))
        assert connection.rows("SELECT a, b FROM shop.t WHERE b LIKE '%%' AND a = %s", (1,)) == [
            {"a": 1, "b": b"\xff\x00"}
        ]
        assert connection.rows("SELECT '100%' AS p") == [{"p": "100%"}]
    with connect(Credentials(defaults_file=str(defaults))) as connection:
        assert connection.value("SELECT CURRENT_USER()") == "backup@localhost"
        assert PASSWORD not in repr(vars(connection._raw))


def test_a_refused_password_appears_nowhere(defaults):
    defaults.write_text(defaults.read_text().replace(PASSWORD, "Wr0ng-" + PASSWORD))
    with pytest.raises(MysqlError) as caught:
        connect(Credentials(defaults_file=str(defaults)))
    assert caught.value.errno == 1045
    assert caught.value.exit_code == 4
    assert "defaults-file" in (caught.value.hint or "")
    told = everything_of(caught.value)
    for form in (PASSWORD, "Wr0ng", repr(PASSWORD.encode())[2:-1]):
        assert form not in told


def test_a_failed_statement_does_not_show_the_password_or_its_arguments(defaults):
    with connect(Credentials(defaults_file=str(defaults))) as connection:
        with pytest.raises(MysqlError) as caught:
            connection.execute("SELECT * FROM shop.t WHERE a = %s AND nonsense", ("top-secret-argument",))
        assert PASSWORD not in everything_of(caught.value)
        assert caught.value.__context__ is None
        assert "top-secret-argument" not in caught.value.message
        with pytest.raises(MysqlError, match="^FLUSH TABLES WITH READ LOCK: Access denied") as caught:
            connection.execute("FLUSH TABLES WITH READ LOCK")
        assert caught.value.errno == 1227
        with pytest.raises(MysqlError) as caught:
            connection.execute("SELEC 'top-secret-argument'")
        assert "top-secret" not in caught.value.message


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_defaults_file_open_to_others_is_refused(defaults, mode):
    defaults.chmod(mode)
    with pytest.raises(ConfigError, match="open to others"):
        connect(Credentials(defaults_file=str(defaults)))


def test_other_defaults_files_that_are_refused(defaults, base):
    os.chown(defaults, 12345, 0)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        connect(Credentials(defaults_file=str(defaults)))
    os.chown(defaults, 0, 0)
    defaults.write_text(f"password = {PASSWORD}\n")
    with pytest.raises(ConfigError, match="is not an option file") as caught:
        connect(Credentials(defaults_file=str(defaults)))
    assert PASSWORD not in str(caught.value.args)
    assert caught.value.__context__ is None
    defaults.write_text(f"[client]\npassword = {PASSWORD}\nhost = db.example.org\n")
    with pytest.raises(ConfigError, match="TCP connection to db.example.org"):
        connect(Credentials(defaults_file=str(defaults)))
    fifo = base / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        connect(Credentials(defaults_file=str(fifo)))
    with pytest.raises(ConfigError, match="No such file"):
        connect(Credentials(defaults_file=str(base / "missing")))


def test_an_odd_but_legal_defaults_file_works(server, defaults):
    defaults.write_text(
        f"# note\n[client]\nuser=nobody-else\nuser = 'backup'\nloose-flag\nport=1\npassword='{PASSWORD}'\n"
        f"[mysql]\nno-auto-rehash\n!unknown /etc/nowhere/\n"
    )
    with connect(Credentials(socket=server.socket, defaults_file=str(defaults))) as connection:
        assert connection.value("SELECT CURRENT_USER()") == "backup@localhost"


def test_sockets_that_lead_nowhere_say_what_to_do(base):
    with pytest.raises(MysqlError, match="No such file") as caught:
        connect(Credentials(socket=str(base / "nothing")))
    assert "running?" in (caught.value.hint or "")
    stale = str(base / "stale")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(stale)
    with pytest.raises(MysqlError, match="refused") as caught:
        connect(Credentials(socket=stale))
    assert "nobody listens" in (caught.value.hint or "")
    with pytest.raises(MysqlError, match="too long"):
        connect(Credentials(socket="/" + "x" * 200))
    guarded = base / "guarded"
    guarded.mkdir(mode=0o700)
    with as_user(12345), pytest.raises(MysqlError) as caught:
        connect(Credentials(socket=str(guarded / "s"), user="root"))
    assert "may not use this socket" in (caught.value.hint or "")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x05\x00\x00\x00\x0a\x00", None])
def test_what_is_no_server_is_recognised(base, answer):
    path = str(base / "garbage")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        held = []

        def serve() -> None:
            peer, _ = listener.accept()
            if answer is None:
                held.append(peer)
                return
            with peer:
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        begun = time.monotonic()
        try:
            with pytest.raises(MysqlError, match="does not speak|did not answer|cannot connect"):
                connect(Credentials(socket=path), timeout_s=0.5)
        finally:
            thread.join()
            for peer in held:
                peer.close()
            os.unlink(path)
    assert time.monotonic() - begun < 20


def test_a_killed_connection_is_lost_and_stays_lost(server):
    with connect(by_socket(server)) as connection:
        server.query(f"KILL {connection.connection_id}")
        with pytest.raises(ConnectionLostError):
            connection.value("SELECT 1")
        with pytest.raises(ConnectionLostError):
            connection.value("SELECT 1")
        with pytest.raises(ConnectionLostError):
            connection.peer_pid()


def test_a_killed_statement_is_an_error_and_not_the_end(server):
    with connect(by_socket(server), timeout_s=20) as connection:
        timer = threading.Timer(0.3, lambda: server.query(f"KILL QUERY {connection.connection_id}"))
        timer.start()
        with pytest.raises(MysqlError) as caught:
            connection.execute(
                "SELECT SUM(SQRT(a.seq + b.seq)) FROM shop.seq_1_to_100000 a JOIN shop.seq_1_to_1000000 b"
            )
        timer.join()
        assert not isinstance(caught.value, ConnectionLostError)
        assert connection.value("SELECT 7") == 7


def test_a_hung_server_cannot_hold_us(server):
    connection = connect(by_socket(server))
    halt(server.pid)
    try:
        connection.set_read_timeout(0.3)
        begun = time.monotonic()
        with pytest.raises(ConnectionLostError):
            connection.value("SELECT 1")
        with pytest.raises(ConnectionLostError):
            connect(by_socket(server), timeout_s=0.3)
        connection.close()
        assert time.monotonic() - begun < 20
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("end", ["exception", "drop", "close"])
def test_the_end_of_the_connection_is_the_end_of_its_lock(server, end):
    connection = connect(by_socket(server))
    connection.execute("FLUSH TABLES WITH READ LOCK")
    if end == "exception":
        with pytest.raises(ZeroDivisionError), connection:
            raise ZeroDivisionError
    else:
        getattr(connection, end)()
    begun = time.monotonic()
    server.query("INSERT INTO shop.t VALUES (2, NULL)")
    assert time.monotonic() - begun < 10


def test_drop_from_a_thread_wakes_a_waiting_statement_at_once(server):
    connection = connect(by_socket(server), timeout_s=60)
    threading.Timer(0.3, connection.drop).start()
    begun = time.monotonic()
    with pytest.raises(ConnectionLostError):
        connection.execute("SELECT SLEEP(30)")
    assert time.monotonic() - begun < 20
    connection.drop()
    connection.close()


def test_a_signal_handlers_error_passes_through_and_leaves_no_half_read_answer(server):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    connection = connect(by_socket(server), timeout_s=60)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            connection.execute("SELECT SLEEP(30)")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    with pytest.raises(ConnectionLostError):
        connection.value("SELECT 1")
