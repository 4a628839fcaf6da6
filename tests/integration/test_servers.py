"""The kinds of servers that tests run on, how they are got, and what happens where one is not to be had."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.exactness import take_and_check
from support.kinds import KINDS, cache_folder, each_kind, kinds
from support.load import InvariantError, check_invariant, write_load
from support.processes import ended, wait_until
from support.scene import btrfs_scene
from support.server import _template, install, private_server, server_user
from support.storage import leftovers, sweep_dead, work_folder

_TESTS = Path(__file__).parents[1]
_UNPACK = _TESTS / "servers/unpack"


@each_kind
@pytest.mark.needs("root")
def test_a_server_of_each_kind_installs_starts_and_takes_writes(kind):
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        server = stack.enter_context(private_server(folder / "data", ["--server-id=77"], kind=kind))
        ((version, user, networking, server_id),) = server.query(
            "SELECT VERSION(), CURRENT_USER(), @@skip_networking, @@server_id"
        )
        assert version.startswith(KINDS[kind].version or "")
        assert ("MariaDB" in version) == (KINDS[kind].flavor == "mariadb")
        assert (user, networking, server_id) == ("root@localhost", 1, 77)
        assert os.stat(f"/proc/{server.pid}").st_uid == server_user().pw_uid != 0
        running = Path(f"/proc/{server.pid}/exe").resolve()
        assert running == Path(KINDS[kind].program("mysqld")).resolve()
        server.query("CREATE USER plain@localhost IDENTIFIED BY 'secret'")
        server.connect(user="plain", password="secret").close()
        engines = KINDS[kind].engines
        with write_load(server.socket, writers=2, engines=engines) as load:
            load.warm_up(5)
            load.stop()
            acknowledged = load.acknowledged()
        server.kill()
        server.start()
        with server.connect() as connection, connection.cursor() as cursor:
            assert check_invariant(connection, before=acknowledged, engines=engines) == acknowledged
            cursor.execute("DELETE FROM load_test.journal_myisam WHERE writer = 1 AND n = 2")
            with pytest.raises(InvariantError, match="journal_myisam: writer 1 is at"):
                check_invariant(connection, engines=engines)


@each_kind
def test_programs_of_a_kind_are_its_own(kind):
    here = KINDS[kind]
    said = {
        name: subprocess.run([here.program(name), "--version"], capture_output=True, text=True, check=True).stdout
        for name in ("mysqld", "mysql", "mysqlbinlog")
    }
    assert all(("MariaDB" in text) == (here.flavor == "mariadb") for text in said.values())
    assert (here.version or "") in said["mysqld"]
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        here.program("no-such-program")


_LAB = """
import sys, time
from pathlib import Path
from support.server import private_server
with private_server(Path(sys.argv[1]), kind="mysql-9", install_options=None) as server:
    print(server.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.needs("mysql-9")
def test_a_mysql_has_a_uuid_of_its_own_and_dies_with_us():
    with work_folder() as folder:
        datadir = folder / "data"
        install(datadir, kind="mysql-9")
        with subprocess.Popen(
            [sys.executable, "-c", _LAB, datadir],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(_TESTS)},
        ) as lab:
            server = int(lab.stdout.readline())
            assert not ended(server)
            assert "server-uuid=" in (datadir / "auto.cnf").read_text()
            assert (datadir / "auto.cnf").read_text() != (_template("mysql-9") / "auto.cnf").read_text()
            lab.send_signal(signal.SIGKILL)
        wait_until(lambda: ended(server))
    sweep_dead()
    assert leftovers(lab.pid) == []


@kinds("mysql-9")
@pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")
def test_snapshots_of_a_loaded_server_of_another_kind_are_exact(kind):
    with btrfs_scene(kind=kind) as scene:
        ctx = scene.context()
        take_and_check(ctx, scene.server, 2)
        assert scene.states() == ["ready"] * 2


# ------------------------------------------------------------------------------------------------- how they are got


def _unpack(folder, *arguments, **environment):
    # An archive that gives nothing, and that apt asks but once.
    given = {"SNAPMGR_TEST_SERVERS": str(folder), "SNAPMGR_TEST_MIRROR": "file:/no-such-archive"} | environment
    return subprocess.run([_UNPACK, *arguments], capture_output=True, text=True, check=False, env=os.environ | given)


@pytest.fixture
def cache():
    """A folder for servers in which nothing is."""
    with work_folder() as folder:
        yield folder / "servers"


def _seem_unpacked(cache, name, version):
    (cache / name).mkdir(parents=True)
    (cache / name / "version").write_text(f"{version}\n")
    recipe = next(line for line in _UNPACK.read_text().splitlines() if line.startswith("recipe="))
    (cache / name / "recipe").write_text(f"{recipe.removeprefix('recipe=')}\n")


def test_what_is_unpacked_needs_no_network(cache):
    _seem_unpacked(cache, "mariadb-11.8", "11.8.99")
    _seem_unpacked(cache, "mysql-9", "9.99.1")
    done = _unpack(cache)
    assert done.returncode == 0, done.stderr
    assert "mariadb-11.8: 11.8.99" in done.stdout
    assert "mysql-9: 9.99.1" in done.stdout
    assert done.stderr == ""


def test_a_stable_server_that_cannot_be_had_is_an_error_and_an_unstable_one_is_not_covered(cache):
    done = _unpack(cache)
    assert done.returncode == 7
    assert "mariadb-11.8 is missing: the archive's lists for trixie could not be had (E: " in done.stderr
    assert "NOT COVERED: mysql-9: the archive's lists for sid could not be had (E: " in done.stdout
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "mariadb-11.8.absent", "mysql-9.not-covered"]
    _seem_unpacked(cache, "mariadb-11.8", "11.8.99")
    # Where nothing listens.
    done = _unpack(cache, SNAPMGR_TEST_MIRROR="http://127.0.0.1:9/debian")
    assert done.returncode == 0
    assert "NOT COVERED: mysql-9: no network: " in done.stdout


def test_a_killed_one_leaves_nothing_that_looks_whole(cache):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            "SNAPMGR_TEST_SERVERS": str(cache),
            "SNAPMGR_TEST_MIRROR": f"http://127.0.0.1:{silent.getsockname()[1]}/debian",
        }
        with subprocess.Popen([_UNPACK], env=os.environ | environment, start_new_session=True) as process:
            silent.accept()[0].close()
            os.killpg(process.pid, signal.SIGKILL)
    assert [path.name[:5] for path in sorted(cache.iterdir())] == [".lock", ".new."]
    for name, version in (("mariadb-11.8", "11.8.99"), ("mysql-9", "9.99.1")):
        _seem_unpacked(cache, name, version)
    assert _unpack(cache).returncode == 0
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "mariadb-11.8", "mysql-9"]


def test_a_fault_of_this_machine_excuses_nothing(cache, tmp_path):
    _seem_unpacked(cache, "mariadb-11.8", "11.8.99")
    for name in ["bash", "cat", "flock", "grep", "id", "mkdir", "mktemp", "mv", "rm", "setpriv", "test"]:
        (tmp_path / name).symlink_to(shutil.which(name))
    done = _unpack(cache, PATH=str(tmp_path))
    assert done.returncode == 7
    assert "mysql-9 is missing: this is no Debian system" in done.stderr
    assert "NOT COVERED" not in done.stdout
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "mariadb-11.8", "mysql-9.absent"]


@pytest.mark.needs("root")
def test_a_folder_that_the_servers_user_cannot_enter_is_refused(cache):
    cache.mkdir()
    cache.chmod(0o700)
    done = _unpack(cache / "deeper")
    assert done.returncode == 7
    assert "cannot enter" in done.stderr


@pytest.mark.parametrize("environment", [{}, {"SNAPMGR_TEST_SERVERS": "/a b"}, {"XDG_CACHE_HOME": "/c"}])
def test_the_script_and_the_tests_mean_the_same_folder(environment, monkeypatch):
    for name in ("SNAPMGR_TEST_SERVERS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = subprocess.run([_UNPACK, "--where"], capture_output=True, text=True, check=True).stdout
    assert said == f"{cache_folder()}\n"


# ------------------------------------------------------------------------------------- what is not covered, and what is

_INNER = """
import pytest
@pytest.mark.needs("mysql-9")
def test_mysql(): pass
@pytest.mark.needs("mysql-9", "mariadb-11.8")
def test_both(): pass
@pytest.mark.needs("mariadb-11.8")
def test_mariadb(): pass
def test_none(): pass
def test_own(): pytest.skip("NOT COVERED: it says")
"""


def _run_inner(folder, cache):
    (folder / "unit").mkdir(exist_ok=True)
    shutil.copy(_TESTS / "conftest.py", folder / "conftest.py")
    (folder / "unit/test_inner.py").write_text(_INNER)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", f"--rootdir={folder}", "-c", "/dev/null", folder],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(_TESTS), "SNAPMGR_TEST_SERVERS": str(cache), "SNAPMGR_FORBID_SKIP": "1", "COLUMNS": "200"},
    ).stdout


def test_only_an_unstable_server_that_its_archive_lacks_may_be_missing(cache, tmp_path):
    cache.mkdir()
    (cache / "mysql-9.absent").write_text("no patchelf\n")
    said = _run_inner(tmp_path, cache)
    outcomes = {"both": "ERROR", "mariadb": "ERROR", "none": "PASSED", "own": "FAILED"}
    assert _outcomes(said) == outcomes | {"mysql": "ERROR"}
    assert "NOT COVERED ==" not in said
    (cache / "mysql-9.absent").rename(cache / "mysql-9.not-covered")
    (cache / "mariadb-11.8.absent").write_text("network: down\n")
    said = _run_inner(tmp_path, cache)
    assert _outcomes(said) == outcomes | {"mysql": "SKIPPED"}
    assert "= NOT COVERED =" in said
    assert "1 tests × mysql-9: no patchelf" in said
    assert "(./run servers): network: down" in said


def _outcomes(said):
    found = {
        name: outcome for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) .*::test_(\w+)", said, re.MULTILINE)
    }
    return found | ({"mysql": "SKIPPED"} if re.search(r"^SKIPPED \[1\]", said, re.MULTILINE) else {})
