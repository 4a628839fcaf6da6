"""Freezing a real server: it stops, and it runs again whatever happens to us."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.lock.freeze import frozen, refuse_unsafe, thaw_leftovers
from snapmgr.system.host import is_alive, this_process
from support.load import write_load
from support.processes import state, wait_until
from support.server import private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.server import PrivateServer

pytestmark = pytest.mark.needs("mariadbd")


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateServer]:
    with work_folder() as folder, private_server(folder / "data") as server:
        yield server


@pytest.fixture(autouse=True)
def _no_load_left(server: PrivateServer) -> Iterator[None]:
    yield
    server.query("DROP DATABASE IF EXISTS load_test")


def eventually_runs(pid: int, timeout_s: float) -> bool:
    """Whether a stopped process goes on within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while state(pid) == "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    return state(pid) != "T"


def test_it_stands_still_and_goes_on(server: PrivateServer, tmp_path: Path) -> None:
    record = tmp_path / "frozen" / "1"
    with write_load(str(server.socket), writers=2) as load:
        load.warm_up()
        with frozen(this_process(server.pid), 5.0, record) as still:
            assert state(server.pid) == "T"
            assert record.exists()
            acknowledged = load.acknowledged()
            time.sleep(0.3)
            assert load.acknowledged() == acknowledged
            still.prove()
        assert not record.exists()
        assert still.frozen_s is not None
        assert 0.3 <= still.frozen_s < 5
        load.warm_up()


def test_at_the_bound_it_goes_on_and_nothing_is_proven(server: PrivateServer, tmp_path: Path) -> None:
    with frozen(this_process(server.pid), 0.3, tmp_path / "r") as still:
        assert eventually_runs(server.pid, 2)
        with pytest.raises(NotQuiescedError, match="ran on"):
            still.prove()


def test_a_server_that_ran_in_between_is_noticed(server: PrivateServer, tmp_path: Path) -> None:
    """Even if it stands still again at the proof: its CPU ticks and threads tell."""
    with (
        write_load(str(server.socket), writers=4) as load,
        frozen(this_process(server.pid), 20.0, tmp_path / "r") as still,
    ):
        os.kill(server.pid, signal.SIGCONT)
        load.warm_up(50)
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(0.2)
        with pytest.raises(NotQuiescedError, match="ran on"):
            still.prove()


def freeze_elsewhere(pid: int, bound_s: float, folder: Path) -> tuple[int, int]:
    """Freeze in another process that never ends by itself; return its pid and the thawer's."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException), frozen(this_process(pid), bound_s, folder / "r"):
            (folder / "ready").touch()
            time.sleep(300)
        os._exit(0)
    deadline = time.monotonic() + 60
    while not (folder / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return child, int((folder / "r").read_text().splitlines()[1].split()[0])


def test_sigkill_of_everything_but_the_thawer(server: PrivateServer, tmp_path: Path) -> None:
    child, _ = freeze_elsewhere(server.pid, 60, tmp_path)
    assert state(server.pid) == "T"
    os.kill(child, signal.SIGKILL)
    assert eventually_runs(server.pid, 2)
    os.waitpid(child, 0)


def test_all_of_ours_stopped_but_the_thawer(server: PrivateServer, tmp_path: Path) -> None:
    child, _ = freeze_elsewhere(server.pid, 1.0, tmp_path)
    os.kill(child, signal.SIGSTOP)
    assert eventually_runs(server.pid, 3)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_even_the_thawer_killed(server: PrivateServer, tmp_path: Path) -> None:
    folder = tmp_path / "frozen"
    folder.mkdir()
    (tmp_path / "ready").unlink(missing_ok=True)
    child, thawer = freeze_elsewhere(server.pid, 60, folder)
    (folder / "ready").unlink()
    assert thaw_leftovers(folder) == []
    assert state(server.pid) == "T"
    os.kill(thawer, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    time.sleep(0.1)
    assert state(server.pid) == "T"
    (line,) = thaw_leftovers(folder)
    assert str(server.pid) in line
    assert eventually_runs(server.pid, 2)
    assert list(folder.iterdir()) == []
    assert thaw_leftovers(folder) == []


def test_a_record_cut_short_and_one_of_another_process_stop_nothing(server: PrivateServer, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("12 3")
    ours = this_process(server.pid)
    (tmp_path / "b").write_text(f"{ours.pid} {ours.start_ticks + 1} {ours.boot_id}\n1 1 {ours.boot_id}\n")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: state(server.pid) == "T")
        assert thaw_leftovers(tmp_path) == []
        assert state(server.pid) == "T"
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_server_and_one_that_is_gone_are_refused(server: PrivateServer, tmp_path: Path) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: state(server.pid) == "T")
        with (
            pytest.raises(NotQuiescedError, match="already stopped"),
            frozen(this_process(server.pid), 1, tmp_path / "r"),
        ):
            pass
        assert state(server.pid) == "T"
    finally:
        os.kill(server.pid, signal.SIGCONT)
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(NotQuiescedError, match="gone"):
        refuse_unsafe(this_process(gone.pid), 1)
    assert not is_alive(this_process(gone.pid))


def test_a_close_systemd_watchdog_is_refused(tmp_path: Path) -> None:
    watched = subprocess.Popen(["sleep", "60"], env={"WATCHDOG_USEC": "3000000"})
    try:
        time.sleep(0.1)
        with (
            pytest.raises(NotQuiescedError, match="systemd kills"),
            frozen(this_process(watched.pid), 2, tmp_path / "r"),
        ):
            pass
        with frozen(this_process(watched.pid), 1, tmp_path / "r") as still:
            still.prove()
    finally:
        watched.kill()
        watched.wait()
