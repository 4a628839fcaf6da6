"""What is not ours, or not ours any more: refused or survived, with a message that says what, where and what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from snapmgr.backup.run import backup
from snapmgr.keep.prune import prune
from snapmgr.system.boot import lasting_machine_id
from support.btrfs import run
from support.scene import Scene, btrfs_scene
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs")

_CHECK = '[job.demo.verify]\ncommand = ["/bin/cat", "{}/file"]\n'
OTHER_MACHINE = "0123456789abcdef0123456789abcdef"


class Storage:
    """A directory job on one storage; its snapshots are folders or subvolumes below `store`."""

    def __init__(self, scene: Scene, kind: str) -> None:
        self.scene = scene
        self.kind = kind
        self.source = Path(scene.file_system.point) / "mysql"
        self.store = Path(scene.file_system.point) / (".snapmgr" if kind == "btrfs" else ".snapmgr-reflink")

    def configure(self, more: str = "") -> None:
        self.scene.configure(text=f'[job.demo]\nsource = "directory"\npath = "{self.source}"\n{_CHECK}{more}')

    def take(self, content: str = "content") -> str:
        (self.source / "file").write_text(content)
        done = self.scene.run("backup", "demo")
        assert done.returncode == 0, done.stderr
        return self.scene.entries()[-1].manifest.id

    def data(self, name: str) -> Path:
        """The folder that holds a snapshot's files."""
        return self.store / name if self.kind == "btrfs" else self.store / name / "data"

    def make_foreign(self, path: Path) -> None:
        """Somebody's own subvolume or folder, with a file in it."""
        if self.kind == "btrfs":
            run("btrfs", "-q", "subvolume", "create", path)
        else:
            path.mkdir()
        (path / "theirs").write_text("precious")

    def move(self, path: Path, to: Path) -> None:
        """As somebody would by hand: btrfs moves no read-only subvolume to another folder."""
        if self.kind == "btrfs":
            run("btrfs", "property", "set", path, "ro", "false")
        path.rename(to)
        if self.kind == "btrfs":
            run("btrfs", "property", "set", to, "ro", "true")

    def refused(self, *arguments: str) -> str:
        """Run a command that must fail in words, and return them."""
        done = self.scene.run(*arguments)
        said = done.stdout + done.stderr
        assert done.returncode in range(1, 8), said
        assert "Traceback" not in said
        assert "bug in snapmgr" not in said
        return said


@pytest.fixture(scope="module", params=["btrfs", "xfs"])
def shared(request: pytest.FixtureRequest) -> Iterator[Storage]:
    if request.param == "btrfs":
        with btrfs_scene(server=False) as scene:
            yield Storage(scene, "btrfs")
    else:
        with loop_filesystem("xfs", 400 << 20) as file_system, work_folder() as folder:
            (file_system.point / "mysql").mkdir()
            yield Storage(Scene(file_system, folder, None), "xfs")


@pytest.fixture
def storage(shared: Storage) -> Iterator[Storage]:
    """The shared storage without snapshots, with a fresh state directory."""
    shared.scene.state = shared.scene.folder / f"state-{time.monotonic_ns()}"
    shared.configure()
    yield shared
    for path in sorted(shared.store.glob("*")):
        if path.is_dir() and path.stat().st_ino == 256 and shared.kind == "btrfs":
            run("btrfs", "-q", "subvolume", "delete", path)
        elif path.is_dir():
            shutil.rmtree(path)
        elif path.suffix != ".json" or shared.kind == "btrfs":
            path.unlink()


# ---------------------------------------------------------------------------------------- under our name, or elsewhere


@pytest.mark.parametrize("original", ["moved", "deleted"])
def test_something_foreign_under_our_name_is_neither_used_nor_touched(storage: Storage, original: str) -> None:
    first = storage.take()
    place, kept = storage.store / first, Path(storage.scene.file_system.point) / f"kept-{first}"
    if original == "moved":
        storage.move(place, kept)
    elif storage.kind == "btrfs":
        run("btrfs", "-q", "subvolume", "delete", place)
    else:
        shutil.rmtree(place)
    storage.make_foreign(place)
    second = storage.take("newer")
    storage.configure("[job.demo.retention]\nkeep-last = 1\n")
    for command in (("mount", first), ("verify", first), ("prune", "demo"), ("doctor",)):
        assert first in storage.refused(*command), command
    assert storage.scene.run("verify", second).returncode == 0
    assert (place / "theirs").read_text() == "precious"
    assert storage.scene.run("show", first).returncode == 0
    if original == "moved":
        copy = kept if storage.kind == "btrfs" else kept / "data"
        assert (copy / "file").read_text() == "content"
        run("btrfs", "-q", "subvolume", "delete", kept) if storage.kind == "btrfs" else shutil.rmtree(kept)


def test_a_snapshot_that_was_moved_is_gone_for_us_and_is_back_when_it_is_moved_back(storage: Storage) -> None:
    first = storage.take()
    place, kept = storage.store / first, Path(storage.scene.file_system.point) / "kept"
    storage.move(place, kept)
    assert first in storage.refused("doctor")
    assert first in storage.refused("mount", first)
    storage.move(kept, place)
    assert storage.scene.run("verify", first).returncode == 0


def test_a_snapshot_that_was_changed_by_hand_is_noticed_and_stays(storage: Storage) -> None:
    first = storage.take()
    assert storage.scene.run("verify", first).returncode == 0
    data = storage.data(first)
    if storage.kind == "btrfs":
        run("btrfs", "property", "set", data, "ro", "false")
    time.sleep(0.02)
    (data / "file").write_text("changed!")
    assert "not" in storage.refused("mount", first)
    if storage.kind == "btrfs":
        assert "writable" in storage.refused("doctor")
        run("btrfs", "property", "set", data, "ro", "true")
        assert "made read-only again" in storage.refused("doctor")
    assert "no longer holds what was taken" in storage.refused("mount", first)
    done = storage.scene.run("verify", first)
    assert done.returncode == 6, done.stderr
    assert "no longer holds what was taken" in done.stderr
    # It is VERIFIED no more, and does not count as the newest.
    (entry,) = storage.scene.entries()
    assert entry.verification is not None
    assert entry.verification.result == "failed"
    assert (data / "file").read_text() == "changed!"


def test_a_copy_of_ours_is_somebody_elses(storage: Storage) -> None:
    """By btrfs send and receive, or by cp: under another name, and under the same after ours is gone."""
    first = storage.take()
    folder = Path(storage.scene.file_system.point) / "received"
    if storage.kind == "btrfs":
        folder.mkdir()
        stream = storage.scene.folder / "stream"
        run("btrfs", "-q", "send", "-f", stream, storage.store / first)
        run("btrfs", "-q", "receive", "-f", stream, folder)
        run("btrfs", "-q", "subvolume", "delete", storage.store / first)
        run("btrfs", "-q", "receive", "-f", stream, storage.store)
        run("btrfs", "-q", "subvolume", "delete", folder / first)
    else:
        run("cp", "-a", storage.store / first, folder)
        shutil.rmtree(storage.store / first)
        run("cp", "-a", folder, storage.store / first)
        shutil.rmtree(folder)
    for command in (("mount", first), ("verify", first), ("doctor",)):
        assert first in storage.refused(*command)
    storage.take("newer")
    storage.configure("[job.demo.retention]\nkeep-last = 1\n")
    storage.refused("prune", "demo")
    assert (storage.data(first) / "file").read_text() == "content"


# -------------------------------------------------------------------------------------------------------------- mounts


@contextmanager
def _mounted(*arguments: str | Path) -> Iterator[None]:
    run("mount", *arguments)
    try:
        yield
    finally:
        run("umount", arguments[-1])


def test_somebodys_mount_in_a_snapshot_and_over_it_keeps_it(storage: Storage) -> None:
    (storage.source / "inner").mkdir(exist_ok=True)
    first = storage.take()
    storage.take("newer")
    storage.configure("[job.demo.retention]\nkeep-last = 1\n")
    for place in (storage.data(first) / "inner", storage.data(first)):
        with _mounted("-t", "tmpfs", "tmpfs", place):
            (place / "theirs").write_text("precious")
            pruned = storage.scene.run("prune", "demo")
            assert str(place) in pruned.stderr or first in pruned.stderr
            assert (place / "theirs").exists()
            assert first in {entry.manifest.id for entry in storage.scene.entries()}
    assert storage.scene.run("prune", "demo").returncode == 0
    assert storage.scene.states() == ["ready"]


def test_a_mount_over_the_folder_of_snapshots_deletes_nothing_and_is_named(storage: Storage) -> None:
    first = storage.take()
    with _mounted("-t", "tmpfs", "-o", "mode=700", "tmpfs", storage.store):
        done = storage.scene.run("doctor")
        assert "Traceback" not in done.stderr
        if storage.kind == "xfs":
            # btrfs looks through its own mount of the top level.
            assert done.returncode == 1
            assert "is not a store of copies" in storage.refused("mount", first)
    assert storage.scene.run("verify", first).returncode == 0


@pytest.mark.parametrize("name", ["snapshots", "leases", "locks"])
def test_a_mount_over_a_folder_of_the_state_directory_is_refused(storage: Storage, name: str) -> None:
    first = storage.take()
    place = storage.scene.state / name
    with _mounted("-t", "tmpfs", "-o", "mode=700", "tmpfs", place):
        for command in (("list",), ("backup", "demo"), ("prune", "demo"), ("doctor",), ("mount", first)):
            said = storage.refused(*command)
            assert f"something is mounted at {place}" in said
            assert f"umount {place}" in said
        assert list(place.iterdir()) == []
    assert storage.scene.states() == ["ready"]


# --------------------------------------------------------------------------------------------------------------- clock


def test_a_clock_that_was_set_back_a_year(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = storage.scene
    storage.configure("[job.demo.retention]\nkeep-last = 2\n")
    older = [storage.take(f"{number}") for number in range(2)]
    back = timedelta(days=365)

    late = SimpleNamespace(now=lambda zone: datetime.now(zone) - back)
    with monkeypatch.context() as patched:
        for module in ("backup.run", "keep.prune", "access.attach", "verify.run"):
            patched.setattr(f"snapmgr.{module}.datetime", late)
        ctx = scene.context()
        (storage.source / "file").write_text("taken last")
        last = backup(ctx, ctx.config.job("demo"))
        assert last.taken_at is not None
        assert last.taken_at < datetime.now(UTC) - timedelta(days=364)
        # All others lie in the future by now.
        assert prune(ctx, ctx.config.job("demo")).deleted == ()
    assert scene.entries()[-1].manifest.id == last.id
    assert scene.json("show", "latest")["snapshot"]["id"] == last.id
    assert scene.run("verify", "latest").returncode == 0
    # The clock is right again.
    pruned = scene.json("prune", "demo")
    assert last.id not in {one["id"] for job in pruned["jobs"] for one in job["delete"]}
    assert older[-1] in {entry.manifest.id for entry in scene.entries()}
    newest = storage.take("newest")
    assert len({*older, last.id, newest}) == 4
    assert scene.json("show", "latest")["snapshot"]["id"] == newest
    assert scene.run("verify", "latest").returncode == 0
    assert scene.run("prune", "demo").returncode == 0
    assert {newest, last.id} == {entry.manifest.id for entry in scene.entries()}


# ------------------------------------------------------------------------------------------------------------ machines


def _on_another_machine(scene: Scene, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line where /etc/machine-id is another's: in a mount namespace of its own."""
    other = scene.folder / "machine-id"
    other.write_text(f"{OTHER_MACHINE}\n")
    script = 'mount --bind "$1" /etc/machine-id && shift && exec "$@"'
    command = (sys.executable, "-m", "snapmgr", "--config", str(scene.config_file), *arguments)
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(other), *command],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def test_another_machine_in_our_state_directory_is_refused_and_touches_nothing(storage: Storage) -> None:
    scene = storage.scene
    first = storage.take()
    point = scene.run("mount", first).stdout.strip()
    before = {path: path.read_bytes() for path in scene.state.rglob("*") if path.is_file()}
    commands = ("backup", "demo"), ("prune", "demo"), ("umount", "--all"), ("verify", first), ("doctor",), ("list",)
    for command in commands:
        refused = _on_another_machine(scene, *command)
        assert refused.returncode == 1, refused.stderr
        said = refused.stdout + refused.stderr
        assert "belongs to another machine" in said
        assert f"{os.uname().nodename} (machine id {lasting_machine_id()}" in said
        assert OTHER_MACHINE in said
        assert "a state_dir of its own" in said
    assert {path: path.read_bytes() for path in scene.state.rglob("*") if path.is_file()} == before
    assert (Path(point) / "file").exists()
    assert scene.run("umount", "--all").returncode == 0
    # As the hint says, where that machine is gone for good.
    (scene.state / "machine").unlink()
    assert _on_another_machine(scene, "backup", "demo").returncode == 0
    assert "belongs to another machine" in scene.run("list").stderr


def test_a_machine_without_an_id_claims_nothing(storage: Storage) -> None:
    scene = storage.scene
    empty = scene.folder / "no-id"
    empty.touch()
    script = (
        'mount --bind "$1" /etc/machine-id; [ ! -e /var/lib/dbus/machine-id ] || '
        'mount --bind "$1" /var/lib/dbus/machine-id; shift; exec "$@"'
    )
    command = (sys.executable, "-m", "snapmgr", "--config", str(scene.config_file), "backup", "demo")
    (storage.source / "file").write_text("content")
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(empty), *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not (scene.state / "machine").exists()
    assert scene.run("list").returncode == 0
