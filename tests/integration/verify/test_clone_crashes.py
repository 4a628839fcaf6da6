"""Clones whose command, server or machine died: nothing runs that nobody knows, and the rest is cleared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from snapmgr.catalog.store import Catalog
from support.clones import ask, clones_of, leases, nothing_left, problems, unmounted
from support.faults import Faults
from support.processes import ended, wait_until
from support.storage import processes_of

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")


@pytest.fixture(name="scene")
def _scene(scene):
    with clones_of(scene):
        yield scene


# ------------------------------------------------------------------------------------------------ crashes and reboots

# Ends the command by SIGKILL at the Nth time that it writes its lease, before or after that.
KILLED = """
import os, signal, sys
from snapmgr.catalog.store import Catalog
from snapmgr.cli.main import main
number, after = int(sys.argv[1]), sys.argv[2] == "after"
write, calls = Catalog.write_lease, []
def killing(self, lease):
    calls.append(lease)
    if after:
        write(self, lease)
    if len(calls) == number:
        os.kill(os.getpid(), signal.SIGKILL)
    if not after:
        write(self, lease)
Catalog.write_lease = killing
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("number", "when", "runs"),
    [
        (2, "after", False),  # mounted
        (3, "after", False),  # its server's folder is on record
        (4, "before", False),  # the server is held back, and not on record
        (4, "after", False),  # on record, and still held back
        (5, "before", True),  # it answers, and nobody was told
        (5, "after", True),  # complete
    ],
)
def test_a_killed_one_leaves_nothing_that_nobody_knows(scene, number, when, runs):
    dev = scene.folder / "dev"
    argv = [sys.executable, "-c", KILLED, str(number), when, "--config", str(scene.config_file), "clone", "latest", dev]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (lease,) = leases(scene)
    assert lease.why == "clone"
    # What is held back has seen by now that nobody is there any more.
    wait_until(lambda: bool(processes_of(scene.scratch)) == runs)
    if runs:
        assert processes_of(scene.scratch) == [lease.server.process.pid]
    complete = (number, when) == (5, "after")
    assert lease.stays == complete
    assert problems(scene) == ([] if complete else ["was attached by a clone that was killed"])
    if complete:
        assert scene.run("doctor", "--fix").returncode == 0
        assert leases(scene) == [lease]
        assert ask("SELECT 1", unix_socket=lease.server.socket, user="root") == ((1,),)
        assert scene.run("umount", str(dev)).returncode == 0
    elif number == 2:
        # The same command once more.
        document = scene.json("clone", "latest", str(dev))
        assert ask("SELECT 1", unix_socket=document["mount"]["server"]["socket"], user="root") == ((1,),)
        assert scene.run("umount", "latest").returncode == 0
    elif when == "before":
        assert scene.run("doctor", "--fix").returncode == 0
    elif number == 3:
        assert scene.run("umount", str(dev)).returncode == 0
    else:
        assert scene.run("backup", "demo").returncode == 0
    nothing_left(scene)


def test_an_interrupted_one_leaves_nothing(scene):
    process = scene.start("clone", "latest", str(scene.folder / "dev"))
    wait_until(lambda: process.poll() is not None or [pid for pid in processes_of(scene.scratch) if pid != process.pid])
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    nothing_left(scene)


def test_a_server_that_died_is_named_and_the_rest_cleared(scene):
    dev = scene.folder / "dev"
    facts = scene.json("clone", "latest", str(dev))["mount"]["server"]
    os.kill(facts["pid"], signal.SIGKILL)
    wait_until(lambda: ended(facts["pid"]))
    assert problems(scene) == ["is a clone whose server is not running"]
    assert f"its server ({facts['socket']}) is not running" in scene.run("status").stdout
    # Its snapshot is kept, and what was written to it is there, until somebody says so.
    assert scene.run("backup", "demo").returncode == 0
    assert (dev / "data" / "ibdata1").exists()
    done = scene.run("umount", str(dev))
    assert done.returncode == 0, done.stderr
    nothing_left(scene)


def test_after_a_boot_the_rest_is_cleared(scene, tmp_path):
    dev = scene.folder / "dev"
    facts = scene.json("clone", "latest", str(dev))["mount"]["server"]
    os.kill(facts["pid"], signal.SIGKILL)
    wait_until(lambda: ended(facts["pid"]))
    wait_until(lambda: unmounted(dev))
    (tmp_path / "boot").write_text("5d2a1b9e-0000-4000-8000-000000000000\n")
    # Whoever has its number now is somebody else.
    (lease,) = leases(scene)
    process = replace(lease.server.process, pid=os.getpid())
    Catalog(scene.state).write_lease(replace(lease, server=replace(lease.server, process=process)))
    scene.run("doctor", "--fix", faults_=Faults(boot_id=tmp_path / "boot"))
    nothing_left(scene)


def test_a_server_that_no_lease_knows_is_named(scene):
    dev = scene.folder / "dev"
    facts = scene.json("clone", "latest", str(dev))["mount"]["server"]
    (lease,) = leases(scene)
    Catalog(scene.state).drop_lease(lease)
    folder = Path(facts["socket"]).parent
    long_ago = time.time() - 7200
    os.utime(folder, (long_ago, long_ago))
    told = problems(scene)
    assert f"belongs to a clone's server (pid {facts['pid']}) that is running without a lease" in told
    Catalog(scene.state).write_lease(lease)
    assert scene.run("umount", str(dev)).returncode == 0
    nothing_left(scene)
