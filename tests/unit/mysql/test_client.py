"""The client without a server: logins that it refuses, and what its errors may show."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.contract.errors import ConfigError, NotQuiescedError
from snapmgr.mysql.connect.client import ConnectionLostError, Credentials, MysqlError, connect, quote
from snapmgr.mysql.connect.statements import first_words

_GREETING = (
    b"\x0a5.5.5-10.11.0-MariaDB\0" + (7).to_bytes(4, "little") + b"12345678\0"
    b"\xff\xf7\x21\x02\x00\xff\x81\x15" + bytes(10) + b"123456789012\0mysql_native_password\0"
)


def _packet(number, body):
    return len(body).to_bytes(3, "little") + bytes((number,)) + body


def test_errors_end_with_the_exit_code_of_a_database_that_was_not_quiesced():
    error = ConnectionLostError("gone", errno=2006)
    assert isinstance(error, MysqlError)
    assert isinstance(error, NotQuiescedError)
    assert (error.errno, error.exit_code) == (2006, 4)


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("FLUSH TABLES WITH READ LOCK", "FLUSH TABLES WITH READ LOCK"),
        ("BACKUP STAGE BLOCK_COMMIT", "BACKUP STAGE BLOCK_COMMIT"),
        ("CHECK TABLE `secret`.`t` QUICK", "CHECK TABLE"),
        ("SET PASSWORD='secret'", "SET PASSWORD"),
        ("SELECT 'secret'", "SELECT"),
        ("select a'secret'", "select"),
        ("  KILL 12", "KILL"),
        ("SET STATEMENT max_statement_time = 1.5 FOR BACKUP STAGE START", "BACKUP STAGE START"),
        ("'secret'", "statement"),
        ("", "statement"),
    ],
)
def test_a_message_names_a_statement_without_its_literals(sql, words):
    assert first_words(sql) == words


@given(st.text(alphabet="SELECT abc", max_size=40), st.sampled_from("'\"`(0"), st.text(max_size=20))
def test_nothing_after_the_first_literal_is_named(before, mark, after):
    assert len(first_words(before + mark + after)) <= max(len(before), len("statement"))


@given(st.text())
def test_a_quoted_name_cannot_end_early(name):
    quoted = quote(name)
    assert quoted[0] == quoted[-1] == "`"
    assert quoted[1:-1].replace("``", "").count("`") == 0


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return Credentials(defaults_file=str(path))


@pytest.mark.parametrize("line", ["host=db.example.org", "host = 127.0.0.1", "protocol = TCP"])
def test_tcp_is_refused_with_the_reason(tmp_path, line):
    with pytest.raises(ConfigError, match="TCP connection") as caught:
        connect(write(tmp_path / "c", f"[client]\n{line}\n"))
    assert "unix socket" in (caught.value.hint or "")


def test_a_defaults_file_that_others_can_read_is_refused_before_anything_is_sent(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(0)
        with pytest.raises(ConfigError, match="mode 0640") as caught:
            connect(write(tmp_path / "c", f"[client]\nsocket={path}\npassword=secret\n", 0o640))
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert caught.value.hint == f"chmod 600 {tmp_path}/c"


def test_a_malformed_file_is_not_quoted(tmp_path):
    with pytest.raises(ConfigError) as caught:
        connect(write(tmp_path / "c", "password=hunter2\n"))
    assert "hunter2" not in f"{caught.value.args}{caught.value.hint}{caught.value.__cause__}{caught.value.__context__}"


@contextmanager
def answered_by(path, packet):
    """Run a false server at a socket, which answers the first login with `packet`; yield what it receives."""
    received = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve():
            peer, _ = listener.accept()
            with peer:
                peer.sendall(_packet(0, _GREETING))
                received.append(peer.recv(65536))
                peer.sendall(_packet(2, packet))

        thread = threading.Thread(target=serve)
        thread.start()
        yield received
        thread.join()


def test_a_password_sent_in_the_handshake_only_as_a_scramble_is_not_in_the_error(tmp_path):
    """This test will let a false server reject us and look at everything that the error holds."""
    refusal = b"\xff" + (1045).to_bytes(2, "little") + b"#28000Access denied for user 'x'"
    with answered_by(tmp_path / "s", refusal) as received, pytest.raises(MysqlError, match="refuses us") as caught:
        connect(write(tmp_path / "c", f"[client]\nsocket={tmp_path / 's'}\nuser=x\npassword=hunter2\n"))
    assert b"hunter2" not in received[0]
    assert caught.value.errno == 1045
    assert caught.value.__context__ is None
    # The first frame is this test, which knows the password.
    frame = caught.value.__traceback__.tb_next
    while frame is not None:
        assert "hunter2" not in repr(frame.tb_frame.f_locals)
        frame = frame.tb_next


def test_the_driver_is_not_loaded_until_it_is_needed():
    program = "import sys, snapmgr.mysql.connect.client; sys.exit('pymysql' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0


def test_the_driver_is_loaded_without_what_a_unix_socket_does_not_need():
    program = """if True:
        import sys
        from snapmgr.mysql.connect.client import Credentials, MysqlError, connect
        try:
            connect(Credentials(socket="/nonexistent/socket"))
        except MysqlError:
            print(*sorted({"pymysql", "ssl", "cryptography"} & set(sys.modules)))
        import ssl  # whoever needs it still gets it
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "pymysql\n"


def test_another_thread_loads_meanwhile_what_the_driver_does_without():
    """Say a backend's thread that talks to its storage's interface: without ssl, http.client has no HTTPS for ever."""
    program = """if True:
        import sys, threading
        from snapmgr.mysql.connect.client import Credentials, MysqlError, connect
        def load():
            import http.client
            print(hasattr(http.client, "HTTPSConnection"))
        def hook(event, arguments):
            if event == "import" and arguments[0] == "pymysql.connections":
                print("ssl" in sys.modules)
                thread = threading.Thread(target=load)
                thread.start()
                thread.join()
        sys.addaudithook(hook)
        try:
            connect(Credentials(socket="/nonexistent/socket"))
        except MysqlError:
            print(sys.modules["pymysql"].connections.SSL_ENABLED)
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["False", "True"]


@pytest.mark.parametrize("plugin", [b"client_ed25519", b"parsec"])
def test_an_account_of_a_kind_that_the_driver_cannot_do_is_refused_as_such(tmp_path, plugin):
    switch = b"\xfe" + plugin + b"\0" + bytes(range(1, 33)) + b"\0"
    refused = pytest.raises(MysqlError, match="refuses us: .*(ed25519|parsec)")
    with answered_by(tmp_path / "s", switch), refused as caught:
        connect(write(tmp_path / "c", f"[client]\nsocket={tmp_path / 's'}\nuser=x\npassword=hunter2\n"))
    assert "user 'x', with password" in (caught.value.hint or "")
    assert caught.value.exit_code == 4
