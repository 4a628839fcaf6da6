"""Clones without storage: options, mounts, held processes, and what is said of their leases."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from msgspec.structs import replace

from snapmgr.catalog.manifest import CloneServer, Lease, decode, encode
from snapmgr.contract.errors import CatalogError, ConfigError
from snapmgr.contract.records import Mount
from snapmgr.mysql.datadir.copy import IsolatedCopy
from snapmgr.mysql.server.development import check_options, development_options, end_server, port_problem, unneeded
from snapmgr.mysql.server.program import ServerBinary
from snapmgr.system.boot import boot_id
from snapmgr.system.command import end_process, let_go, start_held
from snapmgr.system.host import this_process
from support.processes import children, ended, wait_until
from support.sample import NOW, lease, manifest

COPY = IsolatedCopy(
    datadir="/clone", home="/clone", settings={}, paths={}, log_bin_options=("--skip-log-bin",), covers=()
)


def _options(flavor="mariadb", version="10.11.6", port=3307, options=()):
    binary = ServerBinary(path="/nowhere/sbin/server", flavor=flavor, version=version)
    return development_options(
        binary, COPY, memory_bytes=256 << 20, run_dir="/r", socket="/r/s", uid=5, port=port, options=options
    )


def _last(options, name):
    return [one.partition("=")[2] for one in options if one.partition("=")[0] == f"--{name}"][-1]


@pytest.mark.parametrize(("flavor", "version"), [("mariadb", "10.11.6"), ("mysql", "8.0.20"), ("mysql", "9.7.0")])
@pytest.mark.parametrize("port", [None, 3307])
def test_its_accounts_are_active_and_it_listens_where_it_was_told(flavor, version, port):
    options = _options(flavor, version, port)
    assert [one for one in options if "grant" in one] == []
    assert ("--skip-networking" in options) == (port is None)
    if port is not None:
        assert (_last(options, "port"), _last(options, "bind-address")) == ("3307", "127.0.0.1")
    assert _last(options, "event-scheduler") == "OFF"
    assert _last(options, "read-only") == "OFF"
    assert [one for one in options if one in ("--skip-slave-start", "--skip-replica-start")] != []
    assert ("--loose-persisted-globals-load=OFF" in options) == (flavor == "mysql")


def test_the_last_option_wins():
    assert _last(_options(options=["--max-connections=7"]), "max-connections") == "7"


@pytest.mark.parametrize(
    "option",
    [
        "--datadir=/x",
        "--skip-grant-tables",
        "--skip_grant_tables=ON",
        "--skip-grant",
        "--loose-skip-grant-tables",
        "--enable-loose-skip_grant_tables",
        "--socket=/x",
        "--port=1",
        "--pid_file=/x",
        "--log-err=/x",
        "--user=root",
        "--daemonize",
    ],
)
def test_options_that_would_belie_the_record_are_refused(option):
    with pytest.raises(ConfigError, match="is not allowed"):
        check_options([option])


@pytest.mark.parametrize("option", ["--port-open-timeout=3", "--socket-buffer=1", "--max-connections=1", "--userstat"])
def test_others_are_not(option):
    check_options([option])


def _mount(point, source="/dev/sdb"):
    return Mount(id=1, parent_id=0, device="8:1", root="/", point=point, fs_type="ext4", source=source)


def test_disks_that_hold_nothing_needed_are_left_out_of_its_namespace():
    mounts = [
        _mount("/", "/dev/sda"),
        _mount("/proc", "proc"),
        _mount("/usr"),
        _mount("/srv"),
        _mount("/srv/mysql"),
        _mount("/srv/mysql/inner"),
        _mount("/srv/mysql2"),
        _mount("/mnt/dev"),
        _mount("/mnt/other"),
        _mount("/run", "tmpfs"),
    ]
    out = unneeded(mounts, {"/usr/sbin/mariadbd", "/run/snapmgr/c1", "/mnt/dev/data", "/srv"})
    assert out == ["/mnt/other", "/srv/mysql2", "/srv/mysql/inner", "/srv/mysql"]


def test_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        assert "Address already in use" in port_problem(port)
    assert port_problem(port) is None
    assert "only root's servers" in port_problem(1)


# --------------------------------------------------------------------------------------------------------- processes


@pytest.mark.usefixtures("no_child_is_left")
def test_a_held_program_does_nothing_until_it_is_let_go(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = start_held(["sh", "-c", "echo $$; readlink /proc/$$/fd/0; sleep 60"], output=output)
        try:
            assert process.poll() is None
            assert log.read_text() == ""
            known = this_process(process.pid)
            let_go(process)
            wait_until(lambda: log.read_text().count("\n") == 2)
            assert log.read_text() == f"{process.pid}\n/dev/null\n"
            assert this_process(process.pid) == known
            assert os.getsid(process.pid) == process.pid
        finally:
            end_process(process)


@pytest.mark.usefixtures("no_child_is_left")
def test_a_held_program_that_is_not_there_says_so_by_its_exit_code(tmp_path):
    with (tmp_path / "log").open("wb") as output:
        process = start_held(["/no/such"], output=output)
        let_go(process)
        assert process.wait(10) == 127
        process = start_held(["true"], output=output)
        process.kill()
        process.wait()
        # It ended before it was let go: what is told to nobody is no error.
        let_go(process)


@pytest.mark.parametrize("go", [False, True])
def test_a_held_program_ends_with_us_and_one_that_was_let_go_does_not(tmp_path, go):
    log, pid_file = tmp_path / "log", tmp_path / "pid"
    script = f"""
import os, pathlib, signal
from snapmgr.system.command import let_go, start_held
with open({str(log)!r}, "wb") as output:
    process = start_held(["sh", "-c", "echo began; sleep 60"], output=output)
    pathlib.Path({str(pid_file)!r}).write_text(str(process.pid))
    if {go}:
        let_go(process)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    pid = int(pid_file.read_text())
    if go:
        wait_until(lambda: log.read_text() == "began\n")
        assert not ended(pid)
        assert end_server(this_process(pid), kill=False)
        # And what that has started.
        os.killpg(pid, signal.SIGKILL)
    else:
        wait_until(lambda: ended(pid))
        assert log.read_text() == ""


def test_only_the_very_process_is_ended():
    with subprocess.Popen(["sleep", "60"]) as process:
        known = this_process(process.pid)
        for other in (
            replace(known, start_ticks=known.start_ticks + 1),
            replace(known, boot_id="another"),
        ):
            assert end_server(other, kill=True)
            assert process.poll() is None
        process.send_signal(signal.SIGSTOP)
        # Stopped: it acts on it all the same.
        assert end_server(known, kill=False)
        assert process.wait() == -signal.SIGTERM
    assert end_server(known, kill=True)
    assert process.pid not in children()


# ------------------------------------------------------------------------------------------------------------ leases


def _clone_lease(**server):
    facts = CloneServer(**({"folder": "/run/snapmgr/c0", "port": 3307, "program": "mariadb 10.11.6"} | server))
    made = replace(lease(manifest(2)), why="clone", until=None, point="/srv/dev", server=facts)
    part = made.parts[0]
    return replace(made, parts=(replace(part, record=replace(part.record, id="f" * 16, boot_id=boot_id())),))


def test_a_lease_with_its_server_is_kept_whole():
    process = this_process()
    one = _clone_lease(process=process, server_id=7, server_uuid="u", answered_at=NOW)
    assert decode(encode(one), Lease, "here") == one
    assert one.stays
    assert one.server.socket == "/run/snapmgr/c0/s"
    assert not _clone_lease(process=process).stays
    relative = encode(one).replace(b'"/run/snapmgr/c0"', b'"run"')
    with pytest.raises(CatalogError, match="damaged"):
        decode(relative, Lease, "here")


def test_lists_name_clones(run, catalog):
    catalog.write_lease(_clone_lease(process=this_process(), server_id=7, answered_at=NOW))
    assert run("list")[1].splitlines()[3].endswith("clone at /srv/dev (port 3307)")
    told = f"mariadb 10.11.6 at 127.0.0.1:3307, /run/snapmgr/c0/s, pid {os.getpid()}"
    assert told in run("status")[1]
    assert told in run("show", "latest")[1]
    document = json.loads(run("status", "--json")[1])
    assert document["clones"][0]["server"] == {
        "program": "mariadb 10.11.6",
        "pid": os.getpid(),
        "running": True,
        "socket": "/run/snapmgr/c0/s",
        "port": 3307,
        "log": "/run/snapmgr/c0/server.log",
        "server_id": 7,
        "server_uuid": None,
        "answered_at": "2026-01-31T02:30:00.000Z",
    }
    # Of another job nothing is said.
    assert json.loads(run("status", "nightly", "--json")[1])["clones"] == document["clones"]
    assert "clone" in run("mount", "--list")[1]


def test_one_whose_server_is_gone_says_so(run, catalog):
    dead = replace(this_process(), start_ticks=1)
    catalog.write_lease(_clone_lease(process=dead, answered_at=NOW))
    assert "its server (127.0.0.1:3307, /run/snapmgr/c0/s) is not running" in run("status")[1]
    found = json.loads(run("doctor", "--json")[1])["findings"]
    (one,) = [finding for finding in found if finding["subject"] == "/srv/dev"]
    assert one["what"] == "is a clone whose server is not running"
    assert one["fix"] == "removes the clone, with all changes to it"


@pytest.mark.parametrize("arguments", [["clone"], ["clone", "latest"], ["clone", "latest", "/x", "--port", "0"]])
def test_a_wrong_command_line_is_exit_code_2(run, arguments):
    assert run(*arguments)[0] == 2
