"""`snapmgr config init`: which server the file is for."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def folder(monkeypatch):
    """The working directory, with two listening sockets. Pytest's own folders are too long for a socket's path."""
    with (
        tempfile.TemporaryDirectory() as name,
        socket.socket(socket.AF_UNIX) as one,
        socket.socket(socket.AF_UNIX) as other,
    ):
        monkeypatch.chdir(name)
        for path, listener in (("one", one), ("other", other)):
            listener.bind(path)
            listener.listen()
        yield Path(name)


def test_config_init_writes_a_valid_file_once(run, folder):
    path = folder / "new" / "snapmgr.toml"
    assert run("config", "init", "--socket", "one", "-o", str(path))[0] == 0
    assert run("config", "validate", str(path))[0] == 0
    before = path.read_bytes()
    assert f'socket = "{folder}/one"'.encode() in before
    code, _, err = run("config", "init", "--socket", "one", "-o", str(path))
    assert code == 2
    assert "not overwritten" in err
    assert path.read_bytes() == before


def test_config_init_wants_a_server_at_the_socket(run, folder):
    code, out, err = run("config", "init", "--socket", "none")
    assert (code, out) == (2, "")
    assert f"no server answers at {folder}/none: No such file" in err
    login = folder / "login"
    login.write_text(f"[client]\nsocket = {folder}/none\n")
    login.chmod(0o600)
    assert run("config", "init", "--defaults-file", "login")[0] == 2
    login.write_text(f"[client]\nsocket = {folder}/other\n")
    code, _, err = run("config", "init", "--defaults-file", "login", "--socket", "one")
    assert code == 2
    assert f"leads to the server at {folder}/other, not to the one at {folder}/one" in err
    code, out, _ = run("config", "init", "--defaults-file", "login", "--socket", "other")
    assert code == 0
    assert f'defaults_file = "{login}"' in out
