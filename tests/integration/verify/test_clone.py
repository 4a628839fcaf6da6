"""Clones with a server of their own: whose accounts, what they touch, who is told, how they end."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
from pathlib import Path

import pymysql
import pytest

from snapmgr.catalog.store import Catalog
from snapmgr.contract.errors import InUseError, MissingRequirementError
from snapmgr.verify.clone import clone, end_clone, plan_clone
from support.clones import ask, clones_of, ending_clones, leases, nothing_left, problems
from support.crashsite import tree_digest
from support.kinds import each_kind
from support.processes import ended, state, wait_until
from support.scene import btrfs_scene, scattered_scene
from support.server import free_port, server_user
from support.storage import loop_filesystem

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")


@pytest.fixture(name="scene")
def _scene(scene):
    with clones_of(scene):
        yield scene


# ------------------------------------------------------------------------------------------------------- what it is


@each_kind
def test_it_is_a_server_with_the_sources_accounts_and_data_of_its_own(kind):
    with btrfs_scene(kind=kind) as scene, ending_clones(scene):
        server = scene.server
        for statement in (
            "CREATE DATABASE shop",
            "CREATE TABLE shop.i (a INT PRIMARY KEY) ENGINE=InnoDB",
            "CREATE TABLE shop.m (a INT PRIMARY KEY) ENGINE=MyISAM",
            "INSERT INTO shop.i VALUES (1)",
            "INSERT INTO shop.m VALUES (1)",
            "CREATE USER dev@localhost IDENTIFIED BY 'secret'",
            "GRANT ALL ON *.* TO dev@localhost",
            # MySQL runs events by default.
            "CREATE EVENT shop.e ON SCHEDULE EVERY 1 SECOND DO"
            " INSERT IGNORE INTO shop.i SELECT 500 FROM shop.m WHERE @@server_id <> 1",
        ):
            server.query(statement)
        assert scene.run("backup", "demo").returncode == 0
        server.query("INSERT INTO shop.i VALUES (1000)")
        (snapshot,) = scene.snapshot_paths()[:1]
        before = tree_digest(snapshot, identity=True)
        port = free_port()
        given = ["--port", str(port), "--option", "max-connections=33"]
        mount = scene.json("clone", "latest", str(scene.folder / "dev"), *given)["mount"]
        facts = mount["server"]
        there = {"host": "127.0.0.1", "port": port, "user": "dev", "password": "secret"}
        by_socket = {"unix_socket": facts["socket"], "user": "dev", "password": "secret"}
        _check_accounts(there, by_socket)
        _check_identity(scene, mount, by_socket, port)
        _check_process(facts)

        # A second one beside it; what is written to one is in no other, nor in the snapshot, nor live.
        second = scene.json("clone", "latest", str(scene.folder / "other"))["mount"]["server"]
        alone = {**by_socket, "unix_socket": second["socket"]}
        assert second["port"] is None
        assert ask("SELECT @@skip_networking", **alone) == ((1,),)
        assert len({second["server_id"], facts["server_id"], 1}) == 3
        ask("INSERT INTO shop.i VALUES (2)", **there)
        ask("INSERT INTO shop.m VALUES (2)", **there)
        ask("DROP TABLE shop.m", **alone)
        assert ask("SELECT * FROM shop.m", **by_socket) == ((1,), (2,))
        # By now an event would have run.
        assert ask("SELECT * FROM shop.i", **by_socket) == ((1,), (2,))
        assert server.query("SELECT * FROM shop.i") == ((1,), (1000,))
        assert server.query("SELECT * FROM shop.m") == ((1,),)
        assert tree_digest(snapshot, identity=True) == before

        with open(facts["log"]) as log:
            assert scene.run("umount", str(scene.folder / "dev")).returncode == 0
            assert "Shutdown complete" in log.read()
        assert ended(facts["pid"])
        assert not ended(second["pid"])
        assert os.listdir(scene.folder / "dev") == []
        assert scene.run("umount", "--all").returncode == 0
        assert ended(second["pid"])
        assert tree_digest(snapshot, identity=True) == before
        nothing_left(scene)


def _check_accounts(there, by_socket):
    """Assert that the accounts are the source's: neither more nor less come in."""
    assert ask("SELECT * FROM shop.i", **there) == ((1,),)
    assert ask("SELECT * FROM shop.m", **by_socket) == ((1,),)
    for login in ({**there, "password": "wrong"}, {**by_socket, "password": ""}, {**there, "user": "nobody"}):
        with pytest.raises(pymysql.err.OperationalError) as caught:
            ask("SELECT 1", **login)
        assert caught.value.args[0] in (1045, 1698)


def _check_identity(scene, mount, by_socket, port):
    """Assert that it is nobody's twin, and does nothing of its own accord."""
    facts, data = mount["server"], mount["data_path"]
    told = ask(
        "SELECT @@server_id, @@port, @@bind_address, @@event_scheduler, @@read_only, @@log_bin_basename,"
        " @@max_connections, @@datadir",
        **by_socket,
    )
    assert told == ((facts["server_id"], port, "127.0.0.1", "OFF", 0, f"{data}/binlog", 33, f"{data}/"),)
    source = scene.entries()[0].manifest.server
    assert facts["server_id"] not in (0, source.server_id)
    assert facts["program"].startswith(f"{source.flavor} {source.version.partition('-')[0]}")
    if source.flavor == "mysql":
        assert ask("SELECT @@server_uuid", **by_socket) == ((facts["server_uuid"],),)
        assert facts["server_uuid"] != source.server_uuid
        assert ask("SHOW REPLICA STATUS", **by_socket) == ()
    else:
        assert facts["server_uuid"] is None
        assert ask("SHOW ALL SLAVES STATUS", **by_socket) == ()


def _check_process(facts):
    """Assert that its process is the datadir owner's, nobody's child, and has nothing of ours."""
    pid = facts["pid"]
    assert facts["running"] is True
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert status["Uid"].split()[1] == str(server_user().pw_uid) != "0"
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{pid}/fd/1") == facts["log"]
    assert [word for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0") if "grant" in word] == []


def test_everybody_is_told_and_nobody_takes_the_snapshot_away(scene):
    dev, port = scene.folder / "dev", free_port()
    facts = scene.json("clone", "latest", str(dev), "--port", str(port))["mount"]["server"]
    (entry,) = scene.entries()
    assert scene.run("list").stdout.splitlines()[1].endswith(f"clone at {dev} (port {port})")
    assert f"at 127.0.0.1:{port}, {facts['socket']}, pid {facts['pid']}" in scene.run("show", "latest").stdout
    assert f"clone of {entry.manifest.id} at {dev}: " in scene.run("status").stdout
    (named,) = scene.json("status")["clones"]
    assert (named["why"], named["point"], named["server"]) == ("clone", str(dev), facts)
    refused = scene.run("delete", "--force", "--yes", "latest")
    assert refused.returncode == 1
    assert "(clone by root)" in refused.stderr
    scene.configure("retention.keep-last = 1")
    assert scene.run("backup", "demo", "--prune").returncode == 0
    assert scene.states() == ["ready", "ready"]
    assert problems(scene) == []
    assert scene.run("umount", entry.manifest.id).returncode == 0
    assert scene.run("prune", "demo").returncode == 0
    assert scene.states() == ["ready"]
    nothing_left(scene)


def test_what_is_printed(scene):
    dev, port = scene.folder / "shown", free_port()
    plan = scene.run("clone", "latest", str(dev), "--port", str(port), "-n")
    assert plan.returncode == 0
    assert f"at {dev} and start a server on it, at 127.0.0.1:{port} and a socket" in plan.stdout
    assert scene.json("clone", "latest", str(dev), "-n")["mount"] is None
    assert not dev.exists()
    done = scene.run("clone", "latest", str(dev), "--port", str(port))
    assert done.returncode == 0, done.stderr
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert list(told) == ["socket", "port", "data", "log", "server"]
    assert told["port"] == f"127.0.0.1:{port}"
    assert told["data"] == f"{dev}/data"
    assert os.stat(told["log"]).st_mode & 0o077 == 0
    # Any local user gets to the socket, where its accounts say who may come in; the files are not for others.
    assert os.stat(Path(told["socket"]).parent).st_mode & 0o777 == 0o711
    assert f"snapmgr umount {dev}" in done.stderr

    # Somebody's shell in it: nothing is ended, and the error names it.
    (lease,) = leases(scene)
    with subprocess.Popen(["sleep", "60"], cwd=dev) as shell:
        busy = scene.run("umount", str(dev))
        assert busy.returncode == 1
        assert f"pid {shell.pid}" in busy.stderr
        assert "its server continues to run" in busy.stderr
        assert not ended(lease.server.process.pid)
        shell.kill()
    # The same port and folder again are refused; so is a bound that is too short for a shutdown, until it is forced.
    again = scene.run("clone", "latest", str(scene.folder / "more"), "--port", str(port))
    assert again.returncode == 2
    assert f"the clone at {dev} uses it" in again.stderr
    assert scene.run("clone", "latest", str(dev)).returncode == 2
    os.kill(lease.server.process.pid, signal.SIGSTOP)
    wait_until(lambda: state(lease.server.process.pid) == "T")
    with pytest.raises(InUseError, match=r"did not shut down within 0 s"):
        end_clone(scene.context(), lease, force=False, time_limit_s=0.0)
    assert leases(scene) == [lease]
    assert scene.run("umount", "--force", str(dev)).returncode == 0
    nothing_left(scene)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_what_will_not_do_is_refused_and_leaves_nothing(scene):
    full, live = scene.folder / "full", Path(scene.server.datadir)
    full.mkdir()
    (full / "file").touch()
    new = str(scene.folder / "new")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, code, said in (
            ([new, "--port", port], 2, f"port {port} of 127.0.0.1 is not free: Address already in use"),
            ([new, "--port", "70000"], 2, "is not in the range"),
            ([new, "--port", "80"], 2, "only root's servers may listen"),
            ([str(full)], 2, "is not empty"),
            ([str(live / "dev")], 2, "is in the source"),
            ([str(scene.state / "dev")], 2, "is in the state directory"),
            ([str(scene.folder / "no" / "dev")], 2, "is not an existing folder"),
            ([new, "--option", "skip-grant-tables"], 2, "any user of this machine could log in"),
            ([new, "--server", "/nowhere"], 2, "does not exist"),
            ([new, "--server", "/bin/true"], 7, "is not a mariadb server"),
            ([new, "--option", "innodb-data-file-path=ibdata1:100M"], 6, "the server ended instead of starting"),
            ([new, "--option", "no-such-option"], 7, "unknown option"),
        ):
            done = scene.run("clone", "latest", *arguments)
            assert done.returncode == code, (arguments, done.stderr)
            assert said in done.stderr, (arguments, done.stderr)
            assert done.stdout == ""
            nothing_left(scene)
    assert os.listdir(full) == ["file"]
    assert not (live / "dev").exists()
    manifest = scene.entries()[0].manifest
    Catalog(scene.state).write(manifest.with_state("broken", reason="why not"))
    broken = scene.run("clone", manifest.id, new)
    assert broken.returncode == 1
    assert "is BROKEN: why not: it cannot be cloned" in broken.stderr


def test_a_port_that_is_taken_in_between_is_what_the_machine_lacks(scene):
    ctx, port = scene.context(), free_port()
    plan = plan_clone(ctx, ctx.catalog.resolve("latest"), str(scene.folder / "dev"), port=port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(MissingRequirementError, match="Bind on TCP/IP port"):
            clone(ctx, plan)
    nothing_left(scene)


def test_a_directorys_snapshot_is_refused():
    with btrfs_scene(server=False, size_bytes=256 << 20) as scene:
        data = Path(scene.file_system.point) / "mysql"
        scene.configure(text=f'[job.files]\nsource = "directory"\npath = "{data}"\n')
        assert scene.run("backup", "files").returncode == 0
        done = scene.run("clone", "latest", str(scene.folder / "dev"))
        assert done.returncode == 2
        assert "a server cannot run on it" in done.stderr


# ----------------------------------------------------------------------------------------------------- parts elsewhere


def _is_free(device):
    try:
        os.close(os.open(device, os.O_RDWR | os.O_EXCL))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def test_parts_elsewhere_are_the_clones_and_no_other_disk_is_kept_busy():
    with scattered_scene() as scene, ending_clones(scene), loop_filesystem("ext4", 32 << 20) as disk:
        server, volume = scene.server, Path(scene.file_system.point) / "mysql"
        server.query("CREATE USER dev@localhost IDENTIFIED BY 'secret'")
        server.query("GRANT ALL ON *.* TO dev@localhost")
        assert scene.run("backup", "demo").returncode == 0
        index = (volume / "log/binlog.index").read_text()
        facts = scene.json("clone", "latest", str(scene.folder / "dev"))["mount"]["server"]
        login = {"unix_socket": facts["socket"], "user": "dev", "password": "secret"}
        ask("INSERT INTO d.t VALUES (7)", **login)
        ask("CREATE TABLE d.new (a INT) ENGINE=InnoDB", **login)
        assert ask("SELECT * FROM d.t", **login) == ((1,), (2,), (7,))
        assert server.query("SELECT * FROM d.t") == ((1,), (2,))
        assert server.query("SHOW TABLES FROM d") == (("t",),)
        assert (volume / "log/binlog.index").read_text() == index
        # Inside its namespace the live volume is not mounted at all.
        there = Path(f"/proc/{facts['pid']}/mountinfo").read_text()
        assert str(disk.point) not in there
        subprocess.run(["umount", disk.point], check=True)
        # In a while: servers of others may have copied the mounts meanwhile.
        wait_until(lambda: _is_free(disk.device))
        assert scene.run("umount", str(scene.folder / "dev")).returncode == 0
        assert server.query("SELECT * FROM d.t") == ((1,), (2,))
        nothing_left(scene)
