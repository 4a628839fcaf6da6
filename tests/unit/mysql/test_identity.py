"""Reading /proc: our own process, and processes with odd names."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from msgspec.structs import replace

from snapmgr.mysql.connect import identity
from snapmgr.mysql.connect.identity import ServerIdentity, process_name, still_same
from snapmgr.system import host


def of(pid: int, start_ticks: int) -> ServerIdentity:
    return ServerIdentity(
        pid=pid,
        start_ticks=start_ticks,
        uid=0,
        gid=0,
        flavor="mariadb",
        version="10.11.0-MariaDB",
        server_id=1,
        server_uuid=None,
        datadir="/d",
        socket="/s",
    )


def test_our_own_process_is_the_same_until_the_start_time_differs():
    own = of(os.getpid(), host.start_ticks(os.getpid()))
    assert still_same(own)
    assert not still_same(replace(own, start_ticks=own.start_ticks + 1))


def test_a_name_with_brackets_and_spaces_is_no_trap(tmp_path):
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as process:
        try:
            ticks = host.start_ticks(process.pid)
            assert ticks >= host.start_ticks(os.getpid())
            assert still_same(of(process.pid, ticks))
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # A zombie runs no more.
        assert not still_same(of(process.pid, ticks))
    assert process.returncode == -signal.SIGKILL
    assert not still_same(of(process.pid, ticks))
    assert process_name(process.pid) == "?"


def test_effective_ids_are_our_own():
    assert identity._effective_ids(os.getpid()) == (os.geteuid(), os.getegid())


def test_only_a_file_below_the_datadir_that_is_open_for_writing_counts(tmp_path):
    datadir = tmp_path / "d"
    datadir.mkdir()
    (tmp_path / "d-other").write_text("")
    path = datadir / "ibdata1"
    path.write_text("x")
    pid = os.getpid()

    def proven(fd: int, folder: object = datadir) -> bool:
        return identity._is_written_below(pid, str(fd), os.path.realpath(str(folder)))

    reading, writing = os.open(path, os.O_RDONLY), os.open(path, os.O_RDWR)
    beside, folder = os.open(tmp_path / "d-other", os.O_RDWR), os.open(datadir, os.O_RDONLY)
    try:
        assert proven(writing)
        assert not proven(reading)
        assert not proven(beside)
        assert not proven(folder, tmp_path)
        path.rename(datadir / "moved")
        # The kernel follows the rename: it is still the file that we see under its new name.
        assert proven(writing)
        (datadir / "moved").unlink()
        assert not proven(writing)
        (datadir / "moved (deleted)").write_text("planted")
        assert not proven(writing)
    finally:
        for fd in (reading, writing, beside, folder):
            os.close(fd)
    assert not proven(writing)


@pytest.mark.parametrize(
    ("pid", "name", "words"),
    [(1, "systemd", "socket activation"), (99, "mysqlrouter", "it is a proxy"), (99, "python3", "is it a proxy")],
)
def test_the_hint_says_what_answers_instead(monkeypatch, pid, name, words):
    monkeypatch.setattr(identity, "process_name", lambda _pid: name)
    hint = identity._why_not(pid, "/run/own.sock", "/run/proxy.sock")
    assert words in hint
    assert "/run/own.sock" in hint
    assert "/run/own.sock" not in identity._why_not(pid, "/run/own.sock", "/run/own.sock")
