"""The helper process: fires within its deadline, holds nothing of the parent's, and clears up what nobody awaits."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from snapmgr.backup.trigger import DeadlineError, Trigger
from snapmgr.contract.errors import StorageError
from snapmgr.contract.records import FireError, Intent, Pool, Shot, SnapshotRef
from snapmgr.system.host import is_alive
from snapmgr.testing.processes import spawn

if TYPE_CHECKING:
    from collections.abc import Callable

POOL = Pool(backend="fake", id="p", hint="p")
SHOT = Shot(
    ref=SnapshotRef(backend="fake", snapshot_id="s", pool=POOL, volume_id="v", name="s", native_id="n"),
    start_ns=1,
    finish_ns=2,
)


class FakeArmed:
    """Writes a file when it fires; what else it does is the test's."""

    intents = (Intent(pool=POOL, volume_id="v", name="s"),)
    stall_s = 0.0
    fds: tuple[int, ...] = ()
    launched = False

    def __init__(self, folder: Path, *, delay_s: float = 0.0, error: Exception | None = None) -> None:
        self.folder = folder
        self.delay_s = delay_s
        self.error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def sync(self) -> None:
        pass

    def fire(self, deadline: float) -> tuple[Shot, ...]:
        del deadline
        (self.folder / "fds").write_text(" ".join(os.readlink(f"/proc/self/fd/{fd}") for fd in _open_fds()))
        (self.folder / "sid").write_text(f"{os.getsid(0)}")
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        (self.folder / "snapshot").touch()
        return (SHOT,)

    def undo(self, shot: Shot) -> None:
        assert shot == SHOT
        (self.folder / "snapshot").unlink()
        (self.folder / "undone").touch()


def _open_fds() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            os.fstat(int(name))
            found.append(int(name))
    return found


def wait_for(path: Path, timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.exists()


def test_the_helper_fires_and_its_shots_come_back(tmp_path: Path) -> None:
    armed = FakeArmed(tmp_path)
    with Trigger(armed, armed.undo) as trigger:
        trigger.fire(time.monotonic() + 5)
        assert trigger.shots() == (SHOT,)
        assert armed.launched
    assert not is_alive(trigger.process)
    assert (tmp_path / "snapshot").exists()


def test_the_helper_holds_no_socket_no_lock_no_terminal(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    needed = os.open(tmp_path, os.O_RDONLY)
    armed = FakeArmed(tmp_path)
    armed.fds = (needed,)
    with Trigger(armed, armed.undo) as trigger:
        trigger.fire(time.monotonic() + 5)
    for fd in (lock, needed):
        os.close(fd)
    ours.close()
    theirs.close()
    held = (tmp_path / "fds").read_text().split()
    assert str(tmp_path) in held
    assert not [name for name in held if "socket" in name or name.endswith("/lock") or "/dev/pts" in name]
    assert [name for name in held if name.startswith("pipe")] != []
    assert int((tmp_path / "sid").read_text()) == trigger.pid


def test_leaving_without_firing_ends_the_helper(tmp_path: Path) -> None:
    armed = FakeArmed(tmp_path)
    with Trigger(armed, armed.undo) as trigger:
        assert is_alive(trigger.process)
    assert not is_alive(trigger.process)
    assert not (tmp_path / "snapshot").exists()
    assert not armed.launched


def test_a_late_snapshot_is_removed_by_the_helper_itself(tmp_path: Path) -> None:
    armed = FakeArmed(tmp_path, delay_s=2.0)
    start = time.monotonic()
    with Trigger(armed, armed.undo) as trigger:
        with pytest.raises(DeadlineError):
            trigger.fire(time.monotonic() + 0.1)
        assert time.monotonic() - start < 1.8
        assert wait_for(tmp_path / "undone")
    assert not (tmp_path / "snapshot").exists()


def test_a_snapshot_nobody_awaits_any_more_is_removed(tmp_path: Path) -> None:
    armed = FakeArmed(tmp_path, delay_s=0.4)

    def fire() -> None:
        with Trigger(armed, armed.undo) as trigger:
            trigger.fire(time.monotonic() + 30)

    parent = spawn(fire)
    assert wait_for(tmp_path / "sid")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert wait_for(tmp_path / "undone")
    assert not (tmp_path / "snapshot").exists()


def test_a_helper_without_order_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    armed = FakeArmed(tmp_path)
    reader, writer = os.pipe()

    def wait() -> None:
        trigger = Trigger(armed, armed.undo)
        os.write(writer, f"{trigger.pid}".encode())
        time.sleep(60)

    parent = spawn(wait)
    helper = int(os.read(reader, 32))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{helper}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{helper}").exists() or "Z" in Path(f"/proc/{helper}/stat").read_text().split()[2]
    assert not (tmp_path / "snapshot").exists()


def test_errors_come_back_with_the_members_already_made(tmp_path: Path) -> None:
    armed = FakeArmed(tmp_path, error=FireError("the pool is full", hint="extend it", shots=(SHOT,)))
    with Trigger(armed, armed.undo) as trigger, pytest.raises(FireError, match="the pool is full") as failure:
        trigger.fire(time.monotonic() + 5)
    assert failure.value.hint == "extend it"
    assert failure.value.shots == (SHOT,)


def test_an_unexpected_error_is_told_as_well(tmp_path: Path) -> None:
    armed = FakeArmed(tmp_path, error=ValueError("what"))
    with Trigger(armed, armed.undo) as trigger, pytest.raises(FireError, match="ValueError: what"):
        trigger.fire(time.monotonic() + 5)


class AnnouncingArmed(FakeArmed):
    """Takes its snapshot at once, and needs `delay_s` to learn its id."""

    fired: Callable[[], None]

    def __init__(self, folder: Path, *, before_s: float = 0.0, **more: Any) -> None:
        super().__init__(folder, **more)
        self.before_s = before_s
        self.fired = lambda: None

    def fire(self, deadline: float) -> tuple[Shot, ...]:
        time.sleep(self.before_s)
        self.fired()
        return super().fire(deadline)


def test_no_lock_waits_for_ids_that_the_storage_tells_late(tmp_path: Path) -> None:
    armed = AnnouncingArmed(tmp_path, delay_s=2.0)
    with Trigger(armed, armed.undo) as trigger:
        start = time.monotonic()
        trigger.fire(start + 1.8)
        assert time.monotonic() - start < 1.8
        assert trigger.shots() == trigger.shots() == (SHOT,)
        assert time.monotonic() - start > 2.0
    assert (tmp_path / "snapshot").exists()


def test_what_was_announced_too_late_is_removed(tmp_path: Path) -> None:
    armed = AnnouncingArmed(tmp_path, before_s=0.3)
    with Trigger(armed, armed.undo) as trigger:
        with pytest.raises(DeadlineError):
            trigger.fire(time.monotonic() + 0.1)
        assert wait_for(tmp_path / "undone")


def test_ids_that_cannot_be_learnt_are_an_error_after_the_lock(tmp_path: Path) -> None:
    armed = AnnouncingArmed(tmp_path, error=FireError("cannot be found again", shots=(SHOT,)))
    with Trigger(armed, armed.undo) as trigger:
        trigger.fire(time.monotonic() + 5)
        with pytest.raises(FireError, match="cannot be found again") as failure:
            trigger.shots()
    assert failure.value.shots == (SHOT,)


def test_a_killed_helper_is_a_storage_error(tmp_path: Path) -> None:
    armed = FakeArmed(tmp_path)
    with Trigger(armed, armed.undo) as trigger:
        os.kill(trigger.pid, signal.SIGKILL)
        trigger.reap(5)
        with pytest.raises(StorageError, match="died"):
            trigger.fire(time.monotonic() + 5)


def test_ctrl_c_at_the_terminal_does_not_reach_the_helper(tmp_path: Path) -> None:
    armed = FakeArmed(tmp_path)
    with Trigger(armed, armed.undo) as trigger:
        assert os.getpgid(trigger.pid) != os.getpgid(0)
        trigger.fire(time.monotonic() + 5)
        assert trigger.shots()


class ReadyingArmed(FakeArmed):
    """Has something to do in the helper beforehand."""

    def get_ready(self) -> None:
        (self.folder / "ready").write_text(f"{os.getpid()}")


def test_the_helper_gets_ready_before_there_is_any_lock(tmp_path: Path) -> None:
    armed = ReadyingArmed(tmp_path)
    with Trigger(armed, armed.undo) as trigger:
        # At once: the lock is asked for when the trigger is there.
        assert int((tmp_path / "ready").read_text()) == trigger.pid
        assert not (tmp_path / "fds").exists()
        trigger.fire(time.monotonic() + 5)
        assert trigger.shots() == (SHOT,)
