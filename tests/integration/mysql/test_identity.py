"""The server behind a socket: real servers, a relay, replaced datadirs, namespaces; no lock before it is identified."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from snapmgr.contract.errors import MissingRequirementError, NotQuiescedError, SnapmgrError
from snapmgr.mysql.connect.client import Credentials, MysqlError, connect
from snapmgr.mysql.connect.identity import identify, still_same
from snapmgr.system.command import find_program
from support.server import PrivateServer, install, private_server, server_user
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from snapmgr.mysql.connect.identity import ServerIdentity

pytestmark = pytest.mark.needs("root", "mariadbd")

RELAY = """
import socket, sys, threading
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); listener.listen()
print("ready", flush=True)
def pump(a, b):
    while data := a.recv(65536): b.sendall(data)
    b.shutdown(socket.SHUT_RDWR)
while True:
    client, _ = listener.accept()
    server = socket.socket(socket.AF_UNIX); server.connect(sys.argv[2])
    for pair in ((client, server), (server, client)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def servers(base: Path) -> Iterator[tuple[PrivateServer, PrivateServer]]:
    with (
        private_server(base / "a", ["--general-log", f"--general-log-file={base}/a/general.log"]) as a,
        private_server(base / "b", ["--server-id=2"]) as b,
    ):
        yield a, b


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def identity_of(socket: str) -> ServerIdentity:
    with connect(Credentials(socket=socket)) as connection:
        return identify(connection)


def in_child(work: Callable[[], object]) -> tuple[str, str]:
    """Run `work` in a forked child and return (name of the error or "", its message and hint)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            result = ("", str(work()))
        except SnapmgrError as error:
            result = (type(error).__name__, f"{error.message} | {error.hint}")
        except BaseException as error:  # noqa: BLE001 - the child must end here
            result = ("bug", repr(error))
        os.write(writer, json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        name, text = json.loads(file.read())
    os.waitpid(child, 0)
    return name, text


def test_each_server_is_recognised_by_its_own_socket(servers):
    a, b = servers
    one, two = identity_of(a.socket), identity_of(b.socket)
    assert (one.pid, one.datadir, one.server_id) == (a.pid, str(a.datadir), 1)
    assert (two.pid, two.datadir, two.server_id) == (b.pid, str(b.datadir), 2)
    assert (one.flavor, one.uid, one.gid) == ("mariadb", server_user().pw_uid, server_user().pw_gid)
    assert "MariaDB" in one.version
    assert one == identity_of(a.socket)


def test_a_socket_that_is_a_symlink_to_another_server_gives_the_other_servers_identity(servers, base):
    """A job that names the datadir sees the difference; nothing but the answering server is ever described."""
    a, b = servers
    link = base / "link"
    link.symlink_to(b.socket)
    try:
        assert identity_of(str(link)).datadir == str(b.datadir) != str(a.datadir)
    finally:
        link.unlink()


def test_a_relay_is_refused_and_nothing_but_questions_reached_the_server(servers, base):
    a, _ = servers
    path = base / "relay"
    argv = [sys.executable, "-c", RELAY, str(path), a.socket]
    with ended(subprocess.Popen(argv, stdout=subprocess.PIPE)) as relay:
        assert relay.stdout is not None
        assert relay.stdout.readline() == b"ready\n"
        with connect(Credentials(socket=str(path))) as connection:
            assert connection.value("SELECT 1") == 1
            with pytest.raises(NotQuiescedError, match=f"process {relay.pid} .* does not have the datadir") as caught:
                identify(connection)
            number = connection.connection_id
    assert a.socket in (caught.value.hint or "")
    said = [
        line.split("\t")[-1].strip()
        for line in (a.datadir / "general.log").read_text().splitlines()
        if f" {number} " in line.replace("\t", " ") and "Query" in line
    ]
    assert said
    harmless = ("SET NAMES", "SET AUTOCOMMIT", "SET SESSION", "SELECT 1", "SHOW GLOBAL VARIABLES")
    assert [line for line in said if not line.startswith(harmless)] == []


def test_a_datadir_that_was_exchanged_under_the_server_is_refused(base):
    with private_server(base / "moved") as server:
        (base / "moved").rename(base / "away")
        try:
            with pytest.raises(NotQuiescedError, match="is gone|mount namespace|does not have the datadir"):
                identity_of(server.socket)
            install(base / "moved")
            with pytest.raises(NotQuiescedError, match="does not have the datadir"):
                identity_of(server.socket)
        finally:
            # Before the server is stopped, which writes to the path.
            subprocess.run(["rm", "-rf", str(base / "moved")], check=True)
            (base / "away").rename(base / "moved")


def test_a_server_in_another_mount_namespace_is_refused(base):
    """This test will run a server whose datadir is mounted at a path where we see another folder."""
    real, shown = base / "real", base / "shown"
    install(real)
    install(shown)
    user = server_user()
    with work_folder() as folder:
        os.chown(folder, user.pw_uid, user.pw_gid)
        script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        argv = [
            *("unshare", "--mount", "--propagation", "private", "--", "sh", "-c", script, "sh", str(real), str(shown)),
            *("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"),
            *("--pdeathsig", "KILL", "--", find_program("mariadbd"), "--no-defaults", f"--datadir={shown}"),
            *(f"--socket={folder}/s", "--skip-networking", "--innodb-buffer-pool-size=32M"),
            f"--pid-file={folder}/pid",
        ]
        with (
            open(folder / "log", "wb") as log,
            ended(subprocess.Popen(argv, stdout=log, stderr=log)) as process,
        ):
            for _ in range(300):
                try:
                    connection = connect(Credentials(socket=f"{folder}/s"))
                    break
                except MysqlError:
                    assert process.poll() is None, (folder / "log").read_text()
                    signal.sigtimedwait([], 0.1)
            with connection, pytest.raises(NotQuiescedError, match="mount namespace of its own") as caught:
                identify(connection)
            assert f"nsenter --target {process.pid}" in (caught.value.hint or "")


def test_from_another_pid_namespace_the_server_is_not_visible_and_that_is_said(servers):
    a, _ = servers
    program = (
        "from snapmgr.mysql.connect.client import *; from snapmgr.mysql.connect.identity import identify\n"
        f"c = connect(Credentials(socket={a.socket!r}))\n"
        "try: identify(c)\n"
        "except Exception as error: print(type(error).__name__, error, error.hint)\n"
    )
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("NotQuiescedError the process that listens at")
    assert "another PID namespace" in done.stdout


def test_without_the_right_to_look_it_is_lacking(servers):
    a, _ = servers

    def look() -> object:
        with connect(Credentials(socket=a.socket)) as connection:
            os.setresuid(12345, 12345, 12345)
            return identify(connection)

    name, text = in_child(look)
    assert name == MissingRequirementError.__name__, text
    assert "as root or as the server's user" in text


def test_the_servers_own_user_may_look(servers):
    a, _ = servers

    def look() -> object:
        with connect(Credentials(socket=a.socket)) as connection:
            user = server_user()
            os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
            os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
            return identify(connection).pid

    assert in_child(look) == ("", str(a.pid))


def test_a_restarted_server_and_a_zombie_are_not_the_same(base):
    with private_server(base / "again") as server:
        first = identity_of(server.socket)
        assert still_same(first)
        os.kill(server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        assert os.path.exists(f"/proc/{server.pid}"), "it should be a zombie now"
        assert not still_same(first)
        server.kill()
        assert not still_same(first)
        server.start()
        assert not still_same(first)
        assert identity_of(server.socket) != first
