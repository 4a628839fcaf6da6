"""The whole chain by the command line, each exit code, and signals in the middle of the work."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.access.deletion import delete
from snapmgr.catalog.store import Catalog
from snapmgr.config.load import load_config
from support.faults import Faults
from support.scene import Scene, btrfs_scene
from support.server import private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def shared() -> Iterator[Scene]:
    with btrfs_scene() as scene:
        yield scene


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    shared.configure()
    yield shared
    shared.configure()
    assert shared.run("umount", "--all").returncode == 0
    ctx = shared.context()
    for entry in shared.entries():
        delete(ctx, entry.manifest)
    assert shared.stored() == []


def _wait_for(process: subprocess.Popen[str], condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        # Whatever it died of stands in its stderr.
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _keys(value, path=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            if path[-1:] != ("settings",):
                yield key
            yield from _keys(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, path)


def test_the_whole_chain(scene: Scene) -> None:
    scene.configure('after_backup = ["verify"]\nretention.keep-last = 1')
    documents = [scene.json("backup", "--all", "--dry-run")]
    assert not scene.entries()
    documents += [scene.json("backup", "demo"), scene.json("backup", "demo", "--prune"), scene.json("list", "demo")]
    documents += [scene.json("show", "latest"), scene.json("verify", "demo@latest", "--tables", "10%")]
    _, _, second, listed, shown, verified = documents
    (kept,) = listed["snapshots"]
    assert second["jobs"][0]["pruned"]["deleted"] == [documents[1]["jobs"][0]["snapshot"]["id"]]
    assert kept["id"] == second["jobs"][0]["snapshot"]["id"] == shown["snapshot"]["id"]
    assert 0 < kept["lock_held_s"] < 10
    assert kept["verification"]["result"] == verified["snapshot"]["verification"]["result"] == "passed"
    assert shown["snapshot"]["members"][0]["usage"]["problem"] is None
    # A mount: a path on stdout for shells, a lease that keeps it, and nothing left afterwards.
    done = scene.run("--quiet", "mount", kept["short_id"], "--for", "1h")
    assert (done.returncode, done.stderr) == (0, "")
    data = Path(done.stdout.rstrip("\n"))
    assert (data / "ibdata1").is_file()
    (data / "mine").write_text("a clone")
    documents += [scene.json("mount", "--list"), scene.json("prune"), scene.json("doctor")]
    assert documents[-2]["jobs"][0]["keep"][0]["id"] == kept["id"]
    assert "in use" in documents[-2]["jobs"][0]["keep"][0]["reasons"]
    assert "mounted" in scene.run("list").stdout
    documents.append(scene.json("umount", str(data)))
    assert not data.exists()
    documents.append(scene.json("mount", "latest", str(scene.folder / "look"), "--read-only"))
    with pytest.raises(OSError, match="Read-only"):
        (scene.folder / "look" / "data" / "mine").write_text("the snapshot")
    documents.append(scene.json("umount", "latest"))
    assert scene.stored() == [kept["id"]]
    documented = set(
        re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]+)`", (DOCS / "reference" / "json.md").read_text())))
    )
    seen = {key for document in documents for key in _keys(document)}
    assert seen <= documented, seen - documented


def test_verbose_names_programs_and_no_terminal_means_plain_lines(scene: Scene) -> None:
    done = scene.run("--verbose", "backup", "demo", "--verify")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert re.search(r"^\d\d:\d\d:\d\d checking tables: \d+ of \d+$", done.stderr, re.MULTILINE)
    assert re.search(r"^demo: demo\.\S+ ready; backup-lock: waited .* held .*; verified in ", done.stdout)
    quiet = scene.run("--quiet", "backup", "demo", "--verify")
    assert (quiet.returncode, quiet.stderr) == (0, "")


# -------------------------------------------------------------------------------------------------------- exit codes


def test_a_failure_is_1_and_the_others_go_on(scene: Scene) -> None:
    lost = f'[job.lost]\nsource = "directory"\npath = "{scene.folder}/nowhere"\n'
    text = f'[job.demo]\nsource = "mysql"\nsocket = "{scene.server.socket}"\n'
    scene.configure(text=lost + text)
    done = scene.run("backup", "--all", "--json")
    jobs = json.loads(done.stdout)["jobs"]
    assert [(job["job"], job["exit_code"]) for job in jobs] == [("lost", 1), ("demo", 0)]
    assert done.returncode == 1
    assert scene.states() == ["ready"]


def test_a_wrong_configuration_is_2(scene: Scene) -> None:
    scene.configure("retention.keep_daily = 3")
    done = scene.run("backup", "demo")
    assert done.returncode == 2
    assert "job.demo.retention.keep_daily: unknown key; did you mean 'keep-daily'?" in done.stderr
    assert not scene.entries()


def test_two_runs_at_once_are_3(scene: Scene) -> None:
    mark = scene.folder / "mark-two"
    with scene.start("backup", "demo", faults_=Faults(delay_s=8.0, delay_mark=mark)) as process:
        _wait_for(process, mark.exists)
        second = scene.run("backup", "demo")
        # A dry run neither waits nor fails.
        assert scene.run("backup", "demo", "-n").returncode == 0
        looked = scene.json("doctor")
        process.communicate(timeout=60)
    assert second.returncode == 3
    assert f"pid {process.pid}" in second.stderr
    assert process.returncode == 0
    assert [one["level"] for one in looked["findings"] if "a run of its job is active" in one["what"]] == ["note"]


def test_no_server_at_the_socket_is_4(scene: Scene) -> None:
    scene.configure(text=f'[job.demo]\nsource = "mysql"\nsocket = "{scene.folder}/none.sock"\n')
    done = scene.run("backup", "demo")
    assert done.returncode == 4
    assert "hint: is the server running?" in done.stderr
    assert not scene.entries()


def test_a_failed_assertion_is_6_and_nothing_is_pruned(scene: Scene) -> None:
    scene.configure('verify.assertions = ["SELECT 1 = 2"]\nretention.keep-last = 1')
    assert scene.run("backup", "demo").returncode == 0
    done = scene.run("backup", "demo", "--verify", "--prune", "--json")
    assert done.returncode == 6
    assert scene.states() == ["ready", "ready"]
    assert scene.json("list")["snapshots"][-1]["verification"]["result"] == "failed"
    alone = scene.run("verify", "latest", "--json")
    assert alone.returncode == json.loads(alone.stdout)["exit_code"] == 6
    assert json.loads(alone.stdout)["snapshot"]["verification"]["failures"] == ["assertion 1: is not true"]


def test_a_missing_server_program_is_7_and_says_nothing_about_the_snapshot(scene: Scene) -> None:
    scene.configure('verify.server = "/nowhere/mariadbd"')
    assert scene.run("backup", "demo").returncode == 0
    assert scene.run("verify", "latest").returncode == 7
    assert scene.entries()[0].verification is None
    # As a later step of a backup it is 5: the snapshot is kept.
    assert scene.run("backup", "demo", "--verify").returncode == 5
    assert scene.states() == ["ready", "ready"]
    assert scene.run("doctor").returncode == 0
    scene.configure('verify.server = "/nowhere/mariadbd"\nafter_backup = ["verify"]')
    assert scene.run("doctor").returncode == 7


def test_umount_names_who_holds_it(scene: Scene) -> None:
    assert scene.run("backup", "demo").returncode == 0
    data = scene.run("--quiet", "mount", "latest").stdout.rstrip("\n")
    with subprocess.Popen(["sleep", "60"], cwd=data) as holder:
        try:
            done = scene.run("umount", data)
        finally:
            holder.kill()
    assert done.returncode == 1
    assert f"sleep (pid {holder.pid}, working directory)" in done.stderr
    assert scene.run("umount", data).returncode == 0


# ----------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_hold_leaves_nothing(scene: Scene, number: int) -> None:
    mark = scene.folder / f"mark-{number}"
    with scene.start("backup", "demo", "--json", faults_=Faults(delay_s=1.0, delay_mark=mark)) as process:
        _wait_for(process, mark.exists)
        process.send_signal(number)
        # Impatience must not do any harm.
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert json.loads(out)["jobs"][0]["exit_code"] == 130
    assert "interrupted by" in err
    assert "Traceback" not in err
    assert scene.stored() == []
    assert scene.states() == ["broken"]
    assert scene.run("backup", "demo").returncode == 0


def test_a_signal_during_verification_leaves_no_clone_no_server_and_no_result(scene: Scene) -> None:
    assert scene.run("backup", "demo").returncode == 0
    for delay_s in (0.1, 0.25, 0.4):
        with scene.start("verify", "latest") as process:
            _wait_for(process, lambda: Catalog(scene.state).leases()[0])
            time.sleep(delay_s)
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        # It may have been quicker than the signal, which then meets it at its exit.
        assert process.returncode in (130, 0, -signal.SIGTERM), err
        assert process.returncode == 130 or "30 of 30" in err
        assert "Traceback" not in err
        assert Catalog(scene.state).leases() == ([], [])
        assert len(scene.stored()) == 1
        assert not list(scene.scratch.glob("*"))
        assert _servers_below(scene.scratch) == []
    assert scene.json("doctor")["exit_code"] == 0


def _servers_below(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"mariadbd" in os.path.basename(words[0]) and any(os.fsencode(folder) in word for word in words):
            found.append(process.name)
    return found


# ------------------------------------------------------------------------------------------------------------ doctor


def test_doctor_says_what_to_grant_and_then_is_content(scene: Scene) -> None:
    options = scene.folder / "client.cnf"
    options.write_text(f"[client]\nuser=weak\npassword=hunter2\nsocket={scene.server.socket}\n")
    options.chmod(0o600)
    scene.server.query("CREATE OR REPLACE USER weak@localhost IDENTIFIED BY 'hunter2'")
    scene.configure(text=f'[job.demo]\nsource = "mysql"\ndefaults_file = "{options}"\n')
    done = scene.run("doctor", "--json")
    assert done.returncode == 7
    (lacking,) = [one for one in json.loads(done.stdout)["findings"] if one["level"] == "missing"]
    scene.server.query(lacking["hint"].partition(": ")[2])
    assert scene.json("doctor")["exit_code"] == 0
    # And what doctor is content with is enough indeed.
    assert scene.run("backup", "demo").returncode == 0
    hashed = scene.server.query("SELECT authentication_string FROM mysql.user WHERE User = 'weak'")[0][0]
    assert hashed
    assert hashed not in done.stdout + done.stderr
    options.chmod(0o644)
    open_to_others = scene.run("doctor", "demo")
    assert open_to_others.returncode == 1
    assert f"hint: chmod 600 {options}" in open_to_others.stdout
    assert "hunter2" not in done.stdout + done.stderr + open_to_others.stdout + open_to_others.stderr


def test_doctor_finds_what_dead_runs_and_strangers_left(scene: Scene) -> None:
    mark = scene.folder / "mark-dead"
    assert scene.run("backup", "demo").returncode == 0
    with scene.start("verify", "latest") as process:
        _wait_for(process, lambda: Catalog(scene.state).leases()[0])
        process.kill()
    killed = scene.run("doctor")
    assert killed.returncode == 1
    assert "was attached by a verify that was killed" in killed.stdout
    with scene.start("backup", "demo", faults_=Faults(delay_s=0.3, delay_mark=mark)) as process:
        _wait_for(process, mark.exists)
        process.kill()
    time.sleep(0.6)
    done = scene.run("doctor")
    assert done.returncode == 1
    assert "is PENDING, left by a run that was interrupted" in done.stdout
    assert scene.run("prune", "demo").returncode == 0
    assert scene.run("doctor").returncode == 0
    # Somebody deletes the storage behind our back.
    (name,) = scene.stored()
    subprocess.run(["btrfs", "-q", "subvolume", "delete", Path(scene.file_system.point, ".snapmgr", name)], check=True)
    gone = scene.run("doctor")
    assert gone.returncode == 1
    assert f"the storage of {name} is gone" in gone.stdout


def test_config_init_writes_a_job_for_each_server_and_each_login_its_own(scene: Scene) -> None:
    with work_folder() as folder, private_server(folder / "other") as other:
        path = folder / "all.toml"
        assert scene.run("config", "init", "-o", str(path)).returncode == 0
        jobs = load_config(path).jobs.values()
        # Other servers may run on this machine.
        assert {(one.socket, str(one.datadir)) for one in (scene.server, other)} <= {
            (job.socket, job.datadir) for job in jobs
        }
        for server in (scene.server, other):
            login = folder / "login.cnf"
            login.write_text(f"[client]\nsocket={server.socket}\n")
            login.chmod(0o600)
            for given in (("--socket", server.socket), ("--defaults-file", str(login))):
                path.write_text(scene.run("config", "init", *given).stdout)
                (job,) = load_config(path).jobs.values()
                assert job.datadir == str(server.datadir)
                assert scene.run("config", "validate", str(path)).returncode == 0
    gone = scene.run("config", "init", "--socket", other.socket)
    assert (gone.returncode, gone.stdout) == (2, "")
    assert f"no server answers at {other.socket}" in gone.stderr
