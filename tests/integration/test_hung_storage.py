"""Storage that hangs and processes that are stopped or killed while a server is held still.

Each test runs for both ways of holding: the lock, with a btrfs snapshot under it, and the frozen process, with a copy
by reflink on XFS. Whatever happens, writers go on at the bound, nothing is READY without its proof, what arrives late
is removed, and the next backup succeeds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.access.attach import attach, release
from snapmgr.backup.run import backup
from snapmgr.backup.sweep import sweep
from snapmgr.catalog.store import Catalog
from snapmgr.contract.errors import SnapmgrError, StorageError
from snapmgr.keep.pin import pin
from snapmgr.keep.prune import prune
from snapmgr.system import probe
from support.faults import Faults
from support.freezing import frozen_file_system
from support.scene import Scene, btrfs_scene
from support.server import private_server
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs", "mariadbd")

BOUND_S = 1.0
# For what comes after the bound: waking up on a busy machine, a signal, a connection.
TOLERANCE_S = 2.5
# Longer than anything here takes: what ends before was not ended by the bound.
LONG_BOUND_S = 30.0
# The server itself ends a lock whose owner does not run: whole seconds, one more than the bound.
SERVER_BOUND_S = 2.0


class Site:
    """A scene, its way of holding the server still, and what there is to see."""

    def __init__(self, scene: Scene, *, freezes: bool) -> None:
        self.scene = scene
        self.freezes = freezes
        self.point = str(scene.file_system.point)
        self._earlier: list[str] = []

    def renew(self, bound_s: float = BOUND_S) -> None:
        """A fresh state directory; what earlier tests left in the storage is not looked at."""
        self.scene.state = self.scene.folder / f"state-{time.monotonic_ns()}"
        self.scene.configure(
            f'lock_hold = "{bound_s:g}s"\nretention.keep-last = 1'
            + ('\nquiesce = "freeze-process"' if self.freezes else "")
        )
        self._earlier = self._all_stored()
        self.scene.server.query("CREATE DATABASE IF NOT EXISTS probe")
        self.scene.server.query("CREATE TABLE IF NOT EXISTS probe.t (v INT) ENGINE=InnoDB")

    def _all_stored(self) -> list[str]:
        if not self.freezes:
            return self.scene.stored()
        return sorted(path.name for path in Path(self.point, ".snapmgr-reflink").glob("demo.*"))

    def stored(self) -> list[str]:
        """What this test has left in the storage."""
        return [name for name in self._all_stored() if name not in self._earlier]

    def start(self, delay_s: float) -> tuple[subprocess.Popen[str], Path]:
        """Start a backup whose storage call is delayed in C; return it and the file that appears when it begins."""
        mark = self.scene.folder / f"mark-{time.monotonic_ns()}"
        # Arming tries one clone.
        fault = Faults(delay_s=delay_s, delay_mark=mark, delay_skip=1 if self.freezes else 0)
        return self.scene.start("backup", "demo", faults_=fault), mark

    def commit_s(self) -> float:
        """How long a commit takes now."""
        start = time.monotonic()
        self.scene.server.query("INSERT INTO probe.t VALUES (1)")
        return time.monotonic() - start

    @property
    def stopped(self) -> bool:
        """Whether the server process stands still."""
        return Path(f"/proc/{self.scene.server.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def held(self) -> bool:
        """Whether the server stands still, or another client is connected: the one with the lock."""
        if self.freezes:
            return self.stopped
        rows = self.scene.server.query("SELECT id FROM information_schema.processlist WHERE command <> 'Daemon'")
        return len(rows) > 1

    def thawer(self) -> int | None:
        """The pid of the process that thaws the server."""
        records = list((self.scene.state / "frozen").glob("*"))
        return int(records[0].read_text().splitlines()[1].split()[0]) if records else None

    def helpers(self, process: subprocess.Popen[str]) -> list[int]:
        """The pids of the processes that make the storage call."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return [int(pid) for pid in children if int(pid) != self.thawer()]

    def converges(self) -> None:
        """The next backup that can begin succeeds, and leaves nothing but itself."""
        assert "ready" not in self.scene.states()
        assert not self.stopped
        limit = time.monotonic() + 60
        while (done := self.scene.run("backup", "demo")).returncode and time.monotonic() < limit:
            time.sleep(0.2)
        assert done.returncode == 0, done.stderr
        ready = [entry.manifest.id for entry in self.scene.entries() if entry.manifest.state == "ready"]
        assert len(ready) == 1
        assert [name for name in self.stored() if not name.startswith(ready[0])] == []
        assert list((self.scene.state / "frozen").glob("*")) == []


@pytest.fixture(scope="module", params=["lock-on-btrfs", "freeze-on-xfs"])
def shared_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with ExitStack() as stack:
        if request.param == "lock-on-btrfs":
            yield Site(stack.enter_context(btrfs_scene()), freezes=False)
            return
        xfs = stack.enter_context(loop_filesystem("xfs", 1 << 30))
        folder = stack.enter_context(work_folder())
        server = stack.enter_context(private_server(Path(xfs.point) / "data"))
        yield Site(Scene(xfs, folder, server), freezes=True)


@pytest.fixture
def site(shared_site: Site) -> Site:
    shared_site.renew()
    return shared_site


def wait_for(path: Path) -> None:
    """Wait until the storage call has begun."""
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit
        time.sleep(0.002)


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Processes of ours, stopped while the context lasts."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_call_three_seconds_beyond_the_bound(site: Site) -> None:
    """In C, with Python's global lock held; the latecomer is removed."""
    process, mark = site.start(BOUND_S + 3)
    with process:
        wait_for(mark)
        assert site.commit_s() < BOUND_S + TOLERANCE_S
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "deadline" in err
    assert site.stored() == []
    site.converges()


def test_a_file_system_frozen_during_the_hold(site: Site) -> None:
    """The call hangs where no signal reaches it; the next run says why it cannot begin."""
    process, mark = site.start(0.3)
    with process:
        wait_for(mark)
        with frozen_file_system(site.point):
            limit = time.monotonic() + BOUND_S + TOLERANCE_S
            while site.held() and time.monotonic() < limit:
                time.sleep(0.02)
            assert not site.held()
            _, err = process.communicate(timeout=30)
            again = site.scene.run("backup", "demo", timeout_s=30)
            (helper,) = [entry.manifest.helper for entry in site.scene.entries()]
            assert helper is not None
            assert " D " in Path(f"/proc/{helper.pid}/stat").read_text()
    assert process.returncode == 1, err
    assert "deadline" in err
    assert again.returncode == 1
    assert "still hangs" in again.stderr
    site.converges()


def test_all_of_ours_stopped_but_the_thawer(site: Site) -> None:
    process, mark = site.start(0.5)
    with process:
        wait_for(mark)
        pids = [process.pid, *site.helpers(process)]
        assert len(pids) == 2
        with stopped(pids):
            start = time.monotonic()
            if site.freezes:
                # The server goes on at the bound; the lock of our connection goes when the server ends that.
                site.scene.server.query("SELECT 1")
                assert time.monotonic() - start < BOUND_S + TOLERANCE_S
            site.commit_s()
            assert time.monotonic() - start < SERVER_BOUND_S + TOLERANCE_S
        _, err = process.communicate(timeout=60)
    assert process.returncode in (1, 4), err
    assert site.stored() == []
    site.converges()


def test_the_parent_alone_killed(site: Site) -> None:
    site.renew(5.0)
    process, mark = site.start(4)
    with process:
        wait_for(mark)
        process.kill()
        assert site.commit_s() < 3.5
    # The helper still sits in its storage call: another run must neither join it nor take what it makes for good.
    again = site.scene.run("backup", "demo")
    assert again.returncode == 1
    assert "still hangs" in again.stderr
    site.converges()


def test_the_helper_alone_killed(site: Site) -> None:
    site.renew(LONG_BOUND_S)
    process, mark = site.start(LONG_BOUND_S / 2)
    with process:
        wait_for(mark)
        (helper,) = site.helpers(process)
        os.kill(helper, signal.SIGKILL)
        assert site.commit_s() < LONG_BOUND_S / 3
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "died" in err
    assert site.stored() == []
    site.converges()


def test_the_thawer_alone_killed(site: Site) -> None:
    """The parent has the deadline as well."""
    if not site.freezes:
        return  # there is none
    process, mark = site.start(BOUND_S + 3)
    with process:
        wait_for(mark)
        thawer = site.thawer()
        assert thawer is not None
        os.kill(thawer, signal.SIGKILL)
        assert site.commit_s() < BOUND_S + TOLERANCE_S
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    site.converges()


def test_all_of_ours_stopped_with_the_thawer(site: Site) -> None:
    """Nothing of ours can act: the server ends a lock, but not our SIGSTOP; the next command does, after the bound."""
    process, mark = site.start(0.5)
    with process:
        wait_for(mark)
        thawer = site.thawer()
        pids = [process.pid, *site.helpers(process), *([thawer] if thawer else [])]
        with stopped(pids):
            if site.freezes:
                # A thawer is given a second.
                time.sleep(BOUND_S + 1.6)
                assert site.stopped
                assert "frozen" in site.scene.run("doctor").stderr
            assert site.commit_s() < SERVER_BOUND_S + TOLERANCE_S
        _, err = process.communicate(timeout=60)
    assert process.returncode in (1, 4), err
    site.converges()


def test_everything_killed(site: Site) -> None:
    process, mark = site.start(BOUND_S + 3)
    with process:
        wait_for(mark)
        thawer = site.thawer()
        for pid in (*([thawer] if thawer else []), *site.helpers(process), process.pid):
            os.kill(pid, signal.SIGKILL)
    assert site.stopped == site.freezes
    listed = site.scene.run("doctor")
    assert ("left the server" in listed.stderr) == site.freezes
    assert site.commit_s() < LONG_BOUND_S
    site.converges()


def test_sigint_during_the_hold(site: Site) -> None:
    process, mark = site.start(0.5)
    with process:
        wait_for(mark)
        process.send_signal(signal.SIGINT)
        assert site.commit_s() < TOLERANCE_S
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert site.scene.states() == ["broken"]
    assert site.stored() == []
    site.converges()


def test_a_server_killed_during_the_hold(site: Site) -> None:
    process, mark = site.start(0.5)
    with process:
        wait_for(mark)
        site.scene.server.kill()
        _, err = process.communicate(timeout=60)
    site.scene.server.start()
    assert process.returncode in (1, 4), err
    assert site.stored() == []
    site.converges()


def test_a_file_system_that_is_frozen_already(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is begun, no lock is kept, no state is changed; after the thaw all goes on."""
    monkeypatch.setattr(probe, "ANSWER_S", 0.5)
    ctx = site.scene.context()
    job = ctx.config.job("demo")
    for _ in range(2):
        backup(ctx, job)
    newest = ctx.catalog.resolve("latest")
    lease = attach(ctx, newest, writable=True, why="mount")
    interrupted = ctx.catalog.entries("demo")[0][0].manifest.with_state("pending")
    ctx.catalog.write(interrupted)
    try:
        with frozen_file_system(site.point):
            time.sleep(probe._ASK_AGAIN_S)
            start = time.monotonic()
            with pytest.raises(StorageError, match="did not answer within") as caught:
                backup(ctx, job)
            assert "fsfreeze -u" in str(caught.value.hint)
            for writable in (True, False):
                with pytest.raises(StorageError, match="did not answer"):
                    attach(ctx, newest, writable=writable, why="mount")
            with pytest.raises(StorageError, match="did not answer"):
                release(ctx, lease)
            with pytest.raises(StorageError, match="did not answer"):
                pin(ctx, newest.manifest.id)
            assert sweep(ctx, "demo")
            assert prune(ctx, job).failures
            # One child hangs for all of them.
            assert time.monotonic() - start < 20
            with ctx.catalog.job_lock("demo"):
                pass
        assert site.scene.states() == ["pending", "ready"]
        assert len(ctx.catalog.leases()[0]) == 1
    finally:
        limit = time.monotonic() + 60
        while lease in ctx.catalog.leases()[0] and time.monotonic() < limit:
            # The child that hung needs a moment to end.
            with suppress(SnapmgrError):
                release(ctx, lease)
    assert sweep(ctx, "demo") == ()
    assert len(prune(ctx, job).deleted) == 1
    backup(ctx, job)


def test_commands_on_a_frozen_file_system(site: Site) -> None:
    """Each ends by itself, in time and with a reason."""
    if not site.freezes:
        return  # the same code, 15 s more
    assert site.scene.run("backup", "demo").returncode == 0
    with frozen_file_system(site.point):
        start = time.monotonic()
        said = {}
        running = {name: site.scene.start(*name.split()) for name in ("backup demo", "mount latest", "doctor", "list")}
        for name, process in running.items():
            with process:
                out, err = process.communicate(timeout=55)
                said[name] = (process.returncode, out + err)
        assert time.monotonic() - start < probe.ANSWER_S + 20
    assert said.pop("list")[0] == 0
    for name, (code, text) in said.items():
        assert code == 1, (name, text)
        assert "did not answer within" in text, name
    assert site.scene.run("backup", "demo").returncode == 0


def test_a_state_directory_that_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before anything is locked: readers and deleters would wait for a lock that nothing can end."""
    monkeypatch.setattr(probe, "ANSWER_S", 0.5)
    with loop_filesystem("ext4", 64 << 20) as system, ExitStack() as held:
        Catalog(system.point / "state").make()
        with frozen_file_system(str(system.point)):
            with pytest.raises(StorageError, match="did not answer"):
                Catalog(system.point / "state").make()
            for take in (Catalog.job_lock, Catalog.reading, Catalog.deleting):
                with pytest.raises(StorageError, match="did not answer"):
                    held.enter_context(take(Catalog(system.point / "state"), "demo"))
