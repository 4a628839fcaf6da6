"""Freezing at its edges: debugged, watched and stopped servers, dead and stopped thawers, leftovers of every kind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.contract.errors import MissingRequirementError, NotQuiescedError
from snapmgr.mysql.lock import freeze, guard
from snapmgr.mysql.lock.freeze import frozen, refuse_unsafe, thaw_leftovers
from snapmgr.system.host import this_process
from support import faults, processes
from support.freezing import frozen_file_system, traced
from support.processes import wait_until
from support.server import private_server
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.system.host import Process
    from support.server import PrivateServer

TOLERANCE_S = 10.0
CGROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))

pytestmark = pytest.mark.needs("root", "loop", "xfs", "mariadbd")


@pytest.fixture(scope="module")
def point() -> Iterator[str]:
    with loop_filesystem("xfs", 512 << 20) as xfs:
        yield str(xfs.point)


@pytest.fixture(scope="module")
def server(point: str) -> Iterator[PrivateServer]:
    with private_server(Path(point) / "data") as server:
        server.query("CREATE DATABASE probe")
        server.query("CREATE TABLE probe.t (v INT) ENGINE=InnoDB")
        yield server


@contextmanager
def sleeper(*, environment: dict[str, str] | None = None) -> Iterator[Process]:
    """A process that can be frozen as well as any server."""
    with subprocess.Popen(["sleep", "300"], env=environment) as process:
        try:
            while b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                time.sleep(0.001)
            yield this_process(process.pid)
        finally:
            process.kill()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def thawer_in(record: Path) -> int:
    return int(record.read_text().splitlines()[1].split()[0])


def soon(true: object, timeout_s: float = 60.0) -> bool:
    """Whether a callable comes to be true."""
    assert callable(true)
    limit = time.monotonic() + timeout_s
    while not true() and time.monotonic() < limit:
        time.sleep(0.005)
    return bool(true())


# ---- who must not be frozen, or cannot be


def test_threads_that_hang_in_the_kernel(server: PrivateServer, point: str, tmp_path: Path) -> None:
    """They do not stop, the bound holds all the same, and the server goes on once its storage does."""
    done = threading.Event()

    def insert() -> None:
        server.query("INSERT INTO probe.t VALUES (1)")
        done.set()

    with ExitStack() as stack:
        stack.enter_context(frozen_file_system(point))
        writer = threading.Thread(target=insert)
        writer.start()
        tasks = Path(f"/proc/{server.pid}/task")
        assert soon(lambda: any(" D " in (task / "stat").read_text() for task in tasks.iterdir()))
        start = time.monotonic()
        with (
            pytest.raises(NotQuiescedError, match="not all threads") as caught,
            frozen(this_process(server.pid), 1.0, tmp_path / "r"),
        ):
            pass
        assert time.monotonic() - start < 1.0 + TOLERANCE_S
        assert "storage" in str(caught.value.hint)
    assert done.wait(60)
    writer.join()
    assert server.query("SELECT 1") == ((1,),)


def test_a_server_in_a_frozen_control_group(server: PrivateServer, tmp_path: Path) -> None:
    root = next(path for path in CGROUPS if (path / "cgroup.procs").exists())
    group = root / f"snapmgr-test-{os.getpid()}"
    with ExitStack() as stack:
        group.mkdir()
        stack.callback(group.rmdir)
        (group / "cgroup.procs").write_text(f"{server.pid}\n")
        stack.callback((root / "cgroup.procs").write_text, f"{server.pid}\n")
        (group / "cgroup.freeze").write_text("1\n")
        stack.callback((group / "cgroup.freeze").write_text, "0\n")
        assert soon(lambda: "frozen 1" in (group / "cgroup.events").read_text())
        with (
            pytest.raises(NotQuiescedError, match="not all threads") as caught,
            frozen(this_process(server.pid), 0.5, tmp_path / "r"),
        ):
            pass
        assert "control group" in str(caught.value.hint)
    assert server.query("SELECT 1") == ((1,),)


def test_somebody_attaches_a_debugger_meanwhile(server: PrivateServer, tmp_path: Path) -> None:
    with frozen(this_process(server.pid), 10.0, tmp_path / "r") as still:
        still.prove()
        with traced(server.pid):
            assert soon(lambda: not is_stopped(server.pid))
            with pytest.raises(NotQuiescedError, match="ran on"):
                still.prove()
    assert server.query("SELECT 1") == ((1,),)


def test_a_traced_server(server: PrivateServer) -> None:
    with (
        traced(server.pid) as tracer,
        pytest.raises(NotQuiescedError, match=f"debugged by process {tracer}"),
    ):
        refuse_unsafe(this_process(server.pid), 1.0)
    refuse_unsafe(this_process(server.pid), 1.0)


def test_a_moment_of_running_is_noticed(server: PrivateServer, tmp_path: Path) -> None:
    """Far shorter than a CPU tick, on an idle server."""
    for _ in range(5):
        with frozen(this_process(server.pid), 10.0, tmp_path / "r") as still:
            time.sleep(0.02)
            still.prove()
            os.kill(server.pid, signal.SIGCONT)
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(0.02)
            with pytest.raises(NotQuiescedError, match="ran on"):
                still.prove()


def test_a_server_that_ends_meanwhile(tmp_path: Path) -> None:
    with sleeper() as process, frozen(process, 5.0, tmp_path / "r") as still:
        os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.05)
        with pytest.raises(NotQuiescedError, match="ended"):
            still.prove()
    with pytest.raises(NotQuiescedError, match="gone"), frozen(process, 5.0, tmp_path / "r"):
        pass


def test_no_time_left_stops_nothing(tmp_path: Path) -> None:
    with sleeper() as process, pytest.raises(NotQuiescedError, match="no time"), frozen(process, 0.0, tmp_path / "r"):
        pass


@pytest.mark.parametrize("value", ["0", "", "soon", "-5"])
def test_a_watchdog_that_is_none(value: str, tmp_path: Path) -> None:
    with sleeper(environment={"WATCHDOG_USEC": value}) as process, frozen(process, 5.0, tmp_path / "r") as still:
        still.prove()


def test_without_the_right_to_signal_it() -> None:
    with sleeper() as process:
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                os.setuid(54321)
                try:
                    refuse_unsafe(process, 1.0)
                except MissingRequirementError as error:
                    code = error.exit_code
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_server_in_another_pid_namespace(tmp_path: Path) -> None:
    """Seen from outside it is a process as any other; there it is the first one, which only we outside can stop."""
    with subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", "sleep", "300"]) as outer:
        try:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            assert soon(lambda: children.read_text().strip())
            inner = this_process(int(children.read_text()))
            with frozen(inner, 5.0, tmp_path / "r") as still:
                assert is_stopped(inner.pid)
                still.prove()
            assert soon(lambda: not is_stopped(inner.pid))
        finally:
            outer.kill()


# ---- the thawer


def test_a_stopped_thawer_delays_nothing(tmp_path: Path) -> None:
    with sleeper() as process:
        with frozen(process, 60.0, tmp_path / "r") as still:
            os.kill(thawer_in(tmp_path / "r"), signal.SIGSTOP)
            still.prove()
            start = time.monotonic()
        assert time.monotonic() - start < TOLERANCE_S
        assert still.frozen_s is not None
        assert still.frozen_s < TOLERANCE_S
        assert not is_stopped(process.pid)
        assert list(tmp_path.iterdir()) == []


def test_a_killed_thawer_spoils_no_proof(tmp_path: Path) -> None:
    with sleeper() as process:
        with frozen(process, 60.0, tmp_path / "r") as still:
            os.kill(thawer_in(tmp_path / "r"), signal.SIGKILL)
            still.prove()
        assert not is_stopped(process.pid)


def test_killed_between_the_record_and_the_stop(tmp_path: Path) -> None:
    """Who would be frozen, who would thaw it and when is there before the stop; nothing was stopped."""
    record = tmp_path / "frozen" / "1"
    with sleeper() as process:
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                freeze.signal.pidfd_send_signal = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]
                with frozen(process, 60.0, record):
                    pass
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        server, thawer, deadline = record.read_text().splitlines()
        assert server == f"{process.pid} {process.start_ticks} {process.boot_id}"
        assert time.monotonic() < float(deadline) < time.monotonic() + 60
        assert not is_stopped(process.pid)
        assert soon(lambda: not Path("/proc", thawer.split()[0]).exists())
        assert thaw_leftovers(record.parent) == []
        assert not record.exists()


def own_groups() -> set[str]:
    return {path.name for root in CGROUPS for path in root.glob("snapmgr-thaw-*")}


def groups_can_be_made() -> bool:
    root = next((path for path in CGROUPS if (path / "cgroup.procs").exists()), None)
    if root is None:
        return False
    with suppress(OSError):
        (root / f"snapmgr-test-{os.getpid()}").mkdir()
        (root / f"snapmgr-test-{os.getpid()}").rmdir()
        return True
    return False


def test_the_control_group_of_the_thawer(tmp_path: Path) -> None:
    """Its own where control groups (version 2) may be made; gone after the end, also after ours, also after its own."""
    with sleeper() as process:
        with frozen(process, 60.0, tmp_path / "r"):
            name = f"snapmgr-thaw-{thawer_in(tmp_path / 'r')}"
            # By the guard itself, while we go on.
            grouped = groups_can_be_made()
            membership = Path("/proc", name.rpartition("-")[2], "cgroup")
            assert not grouped or soon(lambda: f"/{name}" in membership.read_text())
        assert name not in own_groups()
        for thawer_too in (False, True):
            child = os.fork()
            if child == 0:
                with suppress(BaseException), frozen(process, 60.0, tmp_path / "r"):
                    os.kill(os.getpid(), signal.SIGSTOP)
                os._exit(1)
            os.waitpid(child, os.WUNTRACED)
            thawer = thawer_in(tmp_path / "r")
            name = f"snapmgr-thaw-{thawer}"
            assert not grouped or soon(lambda name=name: name in own_groups())
            if thawer_too:
                os.kill(thawer, signal.SIGKILL)
                # It is dying, and a living one would still be trusted with the server.
                assert soon(lambda thawer=thawer: processes.ended(thawer))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if thawer_too:
                assert len(thaw_leftovers(tmp_path)) == 1
            assert soon(lambda name=name: name not in own_groups())
            assert soon(lambda: not is_stopped(process.pid))


def test_without_control_groups_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(guard, "_CGROUPS", (tmp_path / "none", tmp_path / "cgroup"))
    with sleeper() as process, frozen(process, 5.0, tmp_path / "r") as still:
        still.prove()
    assert [path.name for path in tmp_path.rglob("*")] == ["cgroup"]


# ---- leftovers


def write_record(path: Path, server: Process, thawer: Process, deadline: float) -> None:
    freeze._write_record(path, server, thawer, deadline)


def test_leftovers_of_every_kind(tmp_path: Path) -> None:
    folder = tmp_path / "frozen"
    past, later = time.monotonic() - 10, time.monotonic() + 600
    with ExitStack() as stack:
        servers = [stack.enter_context(sleeper()) for _ in range(6)]
        for server in servers:
            os.kill(server.pid, signal.SIGSTOP)
            wait_until(lambda pid=server.pid: processes.state(pid) == "T")  # type: ignore[misc]
        alive = stack.enter_context(sleeper())
        with sleeper() as dead:
            pass
        write_record(folder / "a", servers[0], dead, later)
        write_record(folder / "b", servers[1], alive, past)
        write_record(folder / "watched", servers[2], alive, later)
        write_record(folder / "other-boot", replace(servers[3], boot_id="another"), dead, past)
        write_record(folder / "reused", replace(servers[4], start_ticks=servers[4].start_ticks - 1), dead, past)
        write_record(folder / "gone", dead, dead, past)
        (folder / "empty").touch()
        (folder / "binary").write_bytes(bytes(range(256)))
        (folder / "cut").write_text((folder / "a").read_text()[:-20])
        (folder / "foreign").write_text("-1 0 x\n0 0 x\nnan\n")
        (folder / "folder").mkdir()
        (folder / "link").symlink_to("/nonexistent")
        said = thaw_leftovers(folder)
        assert {word for line in said for word in line.split() if word.strip(")").isdigit()} == {
            f"{servers[0].pid})",
            f"{servers[1].pid})",
        }
        assert [is_stopped(server.pid) for server in servers] == [False, False, True, True, True, True]
        # What is no file of ours is reported, and stays.
        assert sorted(path.name for path in folder.iterdir()) == ["folder", "link", "watched"]
        assert ["its record cannot be read" in line for line in thaw_leftovers(folder)] == [True, True]


@pytest.mark.parametrize("command", ["doctor", "list", "status"])
def test_any_command_by_itself_thaws_several_servers(command: str) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        servers = [stack.enter_context(sleeper()) for _ in range(2)]
        with sleeper() as dead:
            pass
        state = folder / "state"
        (state / "frozen").mkdir(parents=True, mode=0o700)
        state.chmod(0o700)
        for server in servers:
            write_record(state / "frozen" / str(server.pid), server, dead, time.monotonic() + 600)
            os.kill(server.pid, signal.SIGSTOP)
        (state / "frozen" / "junk").write_text("junk")
        config = folder / "snapmgr.toml"
        job = f'[job.files]\nsource = "directory"\npath = "{folder}"\n'
        config.write_text(f'state_dir = "{state}"\nscratch_dir = "{folder}/scratch"\n{job}')
        done = faults.run(config, command, "--json")
        for server in servers:
            assert f"(pid {server.pid}) frozen; it is resumed now" in done.stderr
            assert not is_stopped(server.pid)
        assert list((state / "frozen").iterdir()) == []
