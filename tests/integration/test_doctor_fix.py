"""``doctor --fix`` on real storage: every kind of debris is made for real, mended once, and what is foreign stays."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from snapmgr.catalog import Catalog
from snapmgr.cli.main import main
from snapmgr.host import boot_id
from snapmgr.manifest import Process
from support.btrfs import run
from support.faults import Faults
from support.scene import Scene
from support.storage import loop_filesystem, processes_of, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.manifest import Manifest
    from support.storage import LoopFileSystem

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "xfs", "btrfsutil")

_DEAD = Process(pid=99_999_999, start_ticks=1, boot_id="another")


class Storage:
    """One storage with a directory job, seen from outside: what lies in snapmgr's folder on it."""

    def __init__(self, file_system: LoopFileSystem, folder: Path) -> None:
        self.scene = Scene(file_system, folder, None)
        self.kind = file_system.fs_type
        self.point = Path(file_system.point)
        self.source = self.point / "source"
        self.folder = self.point / (".snapmgr" if self.kind == "btrfs" else ".snapmgr-reflink")
        if self.kind == "btrfs":
            run("btrfs", "-q", "subvolume", "create", self.source)
        else:
            self.source.mkdir()
        (self.source / "file").write_text("content")
        self.configure("state")

    def configure(self, state: str) -> None:
        """Let the job be of the state directory `state`."""
        self.scene.state = self.scene.folder / state
        check = '\n[job.demo.verify]\ncommand = ["grep", "content", "{}/file"]\n'
        self.scene.configure(text=f'[job.demo]\nsource = "directory"\npath = "{self.source}"{check}')

    def take(self, *options: str) -> Manifest:
        """Take a snapshot."""
        done = self.scene.run("backup", "demo", *options)
        assert done.returncode == 0, done.stderr
        return self.scene.entries()[-1].manifest

    def fix(self, *options: str, code: int = 0) -> dict[str, str]:
        """Run ``doctor --fix`` and again, which must change nothing; return what became of each kind of action."""
        planned = self.doctor("--fix", "--dry-run", *options)
        before = self.fingerprint()
        assert {action["result"] for action in planned["actions"]} <= {"would"}
        first = self.doctor("--fix", *options)
        assert first["exit_code"] == code, first
        if planned["actions"]:
            assert self.fingerprint() != before or code
        after = self.fingerprint()
        again = self.doctor("--fix", *options)
        assert [action for action in again["actions"] if action["result"] == "done"] == []
        assert again["exit_code"] == code
        assert self.fingerprint() == after
        return {action["kind"]: action["result"] for action in first["actions"]}

    def doctor(self, *options: str) -> Any:
        """Run doctor, in this process, and return its document."""
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            main(["--config", str(self.scene.config_file), "doctor", "--json", *options])
        assert "bug" not in err.getvalue(), err.getvalue()
        return json.loads(out.getvalue())

    def problems(self, *options: str) -> list[str]:
        """Return what plain doctor complains of."""
        return [one["what"] for one in self.doctor(*options)["findings"] if one["level"] == "problem"]

    def fingerprint(self) -> dict[str, bytes | None]:
        """Return everything that is in the state directory, in snapmgr's folder and in the scratch directory."""
        seen: dict[str, bytes | None] = {}
        for top in (self.scene.state, self.folder, self.scene.scratch):
            for base, folders, files in os.walk(top):
                seen |= {os.path.join(base, name): None for name in folders}
                names = [os.path.join(base, name) for name in files if "locks" not in base]
                seen |= {name: Path(name).read_bytes() for name in names}
        return seen

    def manifests(self) -> dict[str, bytes]:
        """Return the manifests and verifications, as they are on disk."""
        files = sorted((self.scene.state / "snapshots").glob("*/*"))
        return {str(path.relative_to(self.scene.state)): path.read_bytes() for path in files}

    def catalog(self) -> Catalog:
        """Return the state directory."""
        return Catalog(self.scene.state)

    def remove(self, manifest: Manifest) -> None:
        """Delete a snapshot by hand."""
        path = self.folder / manifest.members[0].ref.name
        if self.kind == "btrfs":
            run("btrfs", "-q", "subvolume", "delete", path)
        else:
            shutil.rmtree(path)

    def move(self, path: Path, to: Path) -> None:
        """Move a snapshot by hand."""
        if self.kind == "btrfs":
            run("btrfs", "property", "set", path, "ro", "false")
        path.rename(to)
        if self.kind == "btrfs":
            run("btrfs", "property", "set", to, "ro", "true")

    def names(self) -> set[str]:
        """Return the names in snapmgr's folder."""
        return {path.name for path in self.folder.iterdir()} - {"snapmgr-reflink-store.json"}


@contextmanager
def _storage(kind: str) -> Iterator[Storage]:
    with loop_filesystem(kind, 400 << 20) as file_system, work_folder() as folder:
        storage = Storage(file_system, folder)
        try:
            yield storage
        finally:
            storage.scene.run("umount", "--all")


@pytest.fixture(params=["btrfs", "xfs"])
def storage(request: pytest.FixtureRequest) -> Iterator[Storage]:
    with _storage(request.param) as made:
        yield made


@pytest.fixture
def btrfs() -> Iterator[Storage]:
    with _storage("btrfs") as made:
        yield made


def _alter(storage: Storage, manifest: Manifest) -> None:
    storage.catalog().write(manifest)


# ------------------------------------------------------------------------------------------------- what dead runs left


def test_runs_that_were_killed(storage: Storage) -> None:
    """PENDING with and without proof, DELETING, and BROKEN whose storage is there; what is foreign is not touched."""
    ready, proven, unproven, deleting, broken = (storage.take() for _ in range(5))
    foreign = storage.folder / "demo.not-ours"
    foreign.mkdir()
    (foreign / "precious").touch()
    if storage.kind == "btrfs":
        run("btrfs", "-q", "subvolume", "create", storage.folder / "demo.20200101T000000Z.aaaaaaaa")
    _alter(storage, replace(proven, state="pending"))
    _alter(storage, replace(unproven, state="pending", proved_at=None, taken_at=None, members=()))
    _alter(storage, replace(deleting, state="deleting"))
    _alter(storage, replace(broken, state="broken", reason="interrupted before its proof"))
    assert len(storage.problems()) == 4
    names = storage.names()
    assert storage.fix() == {"finish-pending": "done", "finish-deletion": "done", "remove-remains": "done"}
    states = {entry.manifest.id: entry.manifest.state for entry in storage.scene.entries()}
    assert states == {ready.id: "ready", proven.id: "ready", unproven.id: "broken", broken.id: "broken"}
    gone = {one.id for one in (unproven, deleting, broken)}
    assert storage.names() == names - gone - {f"{name}.json" for name in gone}
    assert (foreign / "precious").exists()
    assert storage.scene.run("verify", ready.id).returncode == 0
    assert storage.scene.run("verify", proven.id).returncode == 0


def test_a_backup_that_was_really_killed(storage: Storage) -> None:
    """With doctor --fix alone, without the next run's help; while its helper lives it is left."""
    ready = storage.take()
    mark = storage.scene.folder / "mark"
    with storage.scene.start("backup", "demo", faults_=Faults(delay_s=0.5, delay_mark=mark)) as process:
        while process.poll() is None and not mark.exists():
            time.sleep(0.005)
        process.kill()
    deadline = time.monotonic() + 10
    while processes_of(storage.scene.config_file):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert set(storage.fix()) <= {"finish-pending", "repair"}
    assert storage.names() == {ready.id} | ({f"{ready.id}.json"} if storage.kind == "btrfs" else set())
    assert set(storage.scene.states()) <= {"ready", "broken"}


def test_the_storage_is_gone_and_comes_back(storage: Storage) -> None:
    lost, kept = storage.take("--verify"), storage.take()
    before = storage.manifests()
    place = storage.folder / lost.id
    away = storage.point / "away"
    storage.move(place, away)
    actions = storage.fix()
    assert actions.pop("mark-broken") == "done"
    assert set(actions) <= {"repair"}  # the note, where it lay beside
    (broken,) = [entry.manifest for entry in storage.scene.entries() if entry.manifest.state == "broken"]
    assert (broken.id, broken.reason) == (lost.id, "its storage is gone")
    storage.move(away, place)
    assert storage.fix() == {"mark-ready": "done"}
    assert storage.manifests() == before
    assert storage.scene.run("verify", lost.id).returncode == 0
    assert kept.id in storage.names()


def test_a_storage_that_does_not_answer_is_not_gone(storage: Storage) -> None:
    storage.take()
    device = storage.scene.file_system.device
    before = storage.manifests()
    run("umount", storage.point)
    other = storage.scene.folder / "hidden"
    if storage.kind == "btrfs":
        # Found by its id as long as its device is there: so that goes.
        run("losetup", "--detach", device)
    try:
        actions = storage.doctor("--fix")
        assert actions["actions"] == []
        assert actions["exit_code"] == 1
        assert storage.manifests() == before
    finally:
        if storage.kind == "btrfs":
            run("losetup", device, storage.scene.file_system.image)
        run("mount", device, storage.point)
    assert not other.exists()
    assert storage.fix() == {}


# ----------------------------------------------------------------------------------------------------- leases, clones


def test_leases_of_the_dead_end_and_those_of_the_living_do_not(storage: Storage) -> None:
    manifest = storage.take()
    (mounted, unmounted, overdue) = (storage.scene.run("mount", manifest.id).stdout.strip() for _ in range(3))
    catalog = storage.catalog()
    leases = {lease.point: lease for lease in catalog.leases()[0]}
    run("umount", unmounted)
    catalog.write_lease(replace(leases[overdue], until=leases[overdue].created_at))
    # One that a verification left when it was killed, and one of before the last boot.
    killed, booted = (storage.scene.run("mount", manifest.id).stdout.strip() for _ in range(2))
    leases = {lease.point: lease for lease in catalog.leases()[0]}
    catalog.write_lease(replace(leases[killed], why="verify", holder=replace(_DEAD, boot_id=boot_id())))
    run("umount", booted)
    parts = tuple(
        replace(part, record=replace(part.record, boot_id="another"), mounted=None) for part in leases[booted].parts
    )
    catalog.write_lease(replace(leases[booted], parts=parts))
    (Path(mounted) / "work").touch()
    assert storage.fix(code=1) == {"release": "done"}
    assert {lease.point for lease in catalog.leases()[0]} == {mounted, overdue}
    assert (Path(mounted) / "work").exists()
    assert sum(name.startswith("attach") for name in storage.names()) == 2
    (problem,) = storage.problems()
    assert "longer than until" in problem


def test_a_mount_in_use_is_left_and_said(storage: Storage) -> None:
    manifest = storage.take()
    point = Path(storage.scene.run("mount", manifest.id).stdout.strip())
    (lease,) = storage.catalog().leases()[0]
    storage.catalog().write_lease(replace(lease, why="prepare", holder=replace(_DEAD, boot_id=boot_id())))
    with (point / "file").open():
        assert storage.fix(code=1) == {"release": "failed"}
        assert point.is_mount()
    assert storage.fix() == {"release": "done"}


def test_clones_without_a_lease(storage: Storage) -> None:
    """Of ours it goes, unless it is mounted; a damaged lease is kept aside."""
    manifest = storage.take()
    first, second = (storage.scene.run("mount", manifest.id).stdout.strip() for _ in range(2))
    leases = {lease.point: lease.id for lease in storage.catalog().leases()[0]}
    path = storage.scene.state / "leases" / f"{leases[first]}.json"
    path.write_bytes(path.read_bytes()[:100])
    run("umount", second)
    (storage.scene.state / "leases" / f"{leases[second]}.json").unlink()
    actions = storage.fix(code=1)
    assert actions == {"set-aside": "done", "remove-clone": "done"}
    assert (storage.scene.state / "damaged" / f"{leases[first]}.json").stat().st_size == 100
    assert any("it is mounted" in what for what in storage.problems())
    run("umount", first)
    assert storage.fix() == {"remove-clone": "done"}
    assert not any(name.startswith("attach") for name in storage.names())


# --------------------------------------------------------------------------------------------------- files, debris


def test_debris_of_every_kind(storage: Storage) -> None:
    manifest = storage.take()
    state = storage.scene.state
    storage.scene.scratch.mkdir(exist_ok=True)
    (state / "snapshots" / manifest.id / f".manifest.json.{_DEAD.pid}").write_text("{")
    (state / "leases" / f".0123456789abcdef.json.{_DEAD.pid}").write_text("{")
    living = state / "leases" / f".0123456789abcdef.json.{os.getpid()}"
    living.write_text("{")
    (state / "snapshots" / "demo.20200101T000000Z.bbbbbbbb").mkdir()
    (storage.scene.scratch / f"v{_DEAD.pid}-abcdefgh" / "deep").mkdir(parents=True)
    for name in ("3f9a2c1b-0123aa", "3f9a2c1b-0123ab"):
        (storage.scene.scratch / name).mkdir()
    os.utime(storage.scene.scratch / "3f9a2c1b-0123ab", (0, 0))
    kept = storage.scene.scratch / "3f9a2c1b-0123ac"
    kept.mkdir()
    (kept / "precious").touch()
    if storage.kind == "btrfs":
        (storage.folder / f".{manifest.id}.{_DEAD.pid}.tmp").write_text("{")
    else:
        begun = storage.folder / "begun@0123456789abcdef"
        begun.mkdir(mode=0o700)
        (begun / "begun.json.01234567~").write_text("{")
        (storage.folder / "deleting@fedcba9876543210").mkdir(mode=0o700)
    actions = storage.fix()
    assert actions == dict.fromkeys(["remove-file", "remove-folder", "remove-tree", "repair"], "done")
    assert living.exists()
    assert sorted(os.listdir(storage.scene.scratch)) == ["3f9a2c1b-0123aa", "3f9a2c1b-0123ac"]
    assert (kept / "precious").exists()
    assert storage.names() == {manifest.id} | ({f"{manifest.id}.json"} if storage.kind == "btrfs" else set())


def test_damaged_files(storage: Storage) -> None:
    """Manifests and verifications come back from the notes; what was damaged is kept aside."""
    first, second = storage.take("--verify"), storage.take("--verify")
    before = storage.manifests()
    folder = storage.scene.state / "snapshots"
    (folder / first.id / "manifest.json").write_text("")
    (folder / second.id / "verified.json").write_bytes(b"{\xff")
    assert storage.fix() == dict.fromkeys(["restore-manifest", "set-aside", "restore-verification"], "done")
    assert storage.manifests() == before
    kept = {path.name for path in (storage.scene.state / "damaged").iterdir()}
    assert kept == {f"{first.id}.manifest.json", f"{second.id}.verified.json"}
    (folder / first.id / "manifest.json").unlink()
    assert storage.fix() == {"restore-manifest": "done"}
    assert storage.manifests() == before


def test_a_manifest_of_a_newer_snapmgr_is_left_alone(storage: Storage) -> None:
    manifest = storage.take()
    path = storage.scene.state / "snapshots" / manifest.id / "manifest.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    text = path.read_text()
    assert storage.fix(code=1) == {}
    assert path.read_text() == text


def test_an_active_job_is_left_alone(btrfs: Storage) -> None:
    manifest = btrfs.take()
    _alter(btrfs, replace(manifest, state="deleting"))
    with btrfs.catalog().job_lock("demo"):
        document = json.loads(btrfs.scene.run("doctor", "--fix", "--json").stdout)
        assert document["actions"] == []
        (said,) = [one["what"] for one in document["findings"] if "left alone" in one["what"]]
        assert f"a run of its job is active (pid {os.getpid()})" in said
    assert btrfs.fix("demo") == {"finish-deletion": "done"}


def test_only_what_concerns_the_job_that_is_named(btrfs: Storage) -> None:
    manifest = btrfs.take()
    _alter(btrfs, replace(manifest, state="deleting"))
    other = replace(manifest, id="other.20260101T000000Z.cccccccc", job="other", state="deleting", members=())
    _alter(btrfs, other)
    assert btrfs.fix("demo") == {"finish-deletion": "done"}
    assert [entry.manifest.id for entry in btrfs.scene.entries()] == [other.id]


# ------------------------------------------------------------------------------------------------------------- rebuild


def test_a_lost_state_directory_is_rebuilt(storage: Storage) -> None:
    first, second = storage.take("--verify"), storage.take()
    assert storage.scene.run("pin", first.id, "--reason", "before the migration").returncode == 0
    before = storage.manifests()
    shutil.rmtree(storage.scene.state)
    assert len(storage.problems()) == 2
    assert not storage.scene.state.exists()
    assert storage.fix() == {"adopt": "done"}
    assert storage.manifests() == before
    assert any(b'"pinned": true' in text for text in before.values())
    for one in (first, second):
        assert storage.scene.run("verify", one.id).returncode == 0


def test_the_disk_in_another_machine(storage: Storage) -> None:
    """Another state directory, another mount point, no source, another machine's id."""
    manifest = storage.take("--verify")
    note = storage.folder / (f"{manifest.id}.json" if storage.kind == "btrfs" else f"{manifest.id}/note")
    note.write_text(note.read_text().replace(manifest.machine_id, "0123456789abcdef0123456789abcdef"))
    shutil.rmtree(storage.scene.state)
    storage.configure("new-state")
    storage.scene.configure(text="# no job\n")
    moved = storage.scene.folder / "moved"
    moved.mkdir()
    run("mount", "--bind", storage.point, moved)
    run("umount", storage.point)
    try:
        if storage.kind == "btrfs":
            run("btrfs", "-q", "subvolume", "delete", moved / "source")
        else:
            shutil.rmtree(moved / "source")
        storage.folder = moved / storage.folder.name
        document = storage.doctor("--fix", "--dry-run", "--pool", str(storage.folder))
        (action,) = document["actions"]
        assert "taken on another machine" in action["what"]
        assert "taken for the state directory" in action["what"]
        assert storage.fix("--pool", str(storage.folder)) == {"adopt": "done"}
        (entry,) = storage.scene.entries()
        assert entry.verified
        assert entry.manifest.state_dir == str(storage.scene.state)
        alike = replace(entry.manifest, state_dir=manifest.state_dir, machine_id=manifest.machine_id)
        if storage.kind == "xfs":
            assert entry.manifest.members[0].ref.pool.id == str(storage.folder)
            alike = replace(alike, members=manifest.members, intents=manifest.intents)
        assert alike == manifest
        point = storage.scene.run("mount", manifest.id).stdout.strip()
        assert (Path(point) / "file").read_text() == "content"
        assert storage.scene.run("umount", "--all").returncode == 0
        # Nothing names its storage any more but the manifest.
        assert storage.fix() == {}
    finally:
        run("mount", "--bind", moved, storage.point)
        run("umount", moved)


def test_a_disk_that_can_only_be_read(btrfs: Storage) -> None:
    """What is on it is taken over all the same; its note goes on naming the state directory of before."""
    manifest = btrfs.take()
    shutil.rmtree(btrfs.scene.state)
    btrfs.configure("new-state")
    note = (btrfs.folder / f"{manifest.id}.json").read_bytes()
    run("mount", "-o", "remount,ro", btrfs.point)
    try:
        assert btrfs.fix() == {"adopt": "done"}
        assert btrfs.scene.states() == ["ready"]
        assert (btrfs.folder / f"{manifest.id}.json").read_bytes() == note
    finally:
        run("mount", "-o", "remount,rw", btrfs.point)


def test_two_state_directories_on_one_storage(storage: Storage) -> None:
    theirs = storage.take()
    point = storage.scene.run("mount", theirs.id).stdout.strip()
    run("umount", point)
    storage.configure("ours")
    ours = storage.take()
    names = storage.names()
    assert storage.fix() == {}
    assert storage.names() == names
    assert [entry.manifest.id for entry in storage.scene.entries()] == [ours.id]
    assert any("belongs to the state directory" in one["what"] for one in storage.doctor()["findings"])
    storage.configure("state")
    assert storage.fix() == {"release": "done"}
    assert [entry.manifest.id for entry in storage.scene.entries()] == [theirs.id]


def test_a_set_that_lost_a_member(btrfs: Storage) -> None:
    """BROKEN, but what is left stays, until the member is back or somebody forces its deletion."""
    run("btrfs", "-q", "subvolume", "create", btrfs.point / "other")
    (btrfs.point / "other" / "shop").mkdir()
    for name in ("ibdata1", "ib_logfile0"):
        (btrfs.source / name).touch()
    (btrfs.source / "shop").symlink_to(btrfs.point / "other" / "shop")
    job = f'[job.demo]\nsource = "mysql"\ndatadir = "{btrfs.source}"\nquiesce = "stopped"\n'
    btrfs.scene.configure(text=job)
    manifest = btrfs.take()
    assert len(manifest.members) == 2
    before = btrfs.manifests()
    shutil.rmtree(btrfs.scene.state)
    assert btrfs.fix() == {"adopt": "done"}
    assert btrfs.manifests() == before
    first, second = (member.ref.name for member in manifest.members)
    btrfs.move(btrfs.folder / second, btrfs.point / "away")
    assert btrfs.fix()["mark-broken"] == "done"
    # Nor does prune forget it, however old it is.
    (entry,) = btrfs.scene.entries()
    _alter(btrfs, replace(entry.manifest, created_at=entry.manifest.created_at - timedelta(days=90)))
    assert btrfs.scene.run("prune", "demo").returncode == 0
    assert first in btrfs.names()
    assert any("is what is left of" in one["what"] for one in btrfs.doctor()["findings"])
    shutil.rmtree(btrfs.scene.state)
    assert btrfs.fix(code=1) == {}
    assert any("it is not whole" in what for what in btrfs.problems())
    btrfs.move(btrfs.point / "away", btrfs.folder / second)
    assert btrfs.fix() == {"adopt": "done"}
    assert btrfs.manifests() == before
    run("btrfs", "-q", "subvolume", "delete", btrfs.folder / first)
    assert btrfs.fix()["mark-broken"] == "done"
    done = btrfs.scene.run("delete", manifest.id, "--force")
    assert done.returncode == 0, done.stderr
    assert btrfs.names() == set()
    assert btrfs.fix() == {}


_LIES = [
    ('"schema": 1', '"schema": 2'),
    ('"state": "ready"', '"state": "pending"'),
    ('"job": "demo"', '"job": "../../etc"'),
    ('"subpath": ""', '"subpath": "../../etc"'),
    ('"native_id": "', '"native_id": "x'),
    ('"snapshot_id": "demo', '"snapshot_id": "/etc'),
    ('"id": "demo.', '"id": "../../demo.'),
    ("{", ""),
]


def test_notes_that_cannot_be_believed(btrfs: Storage) -> None:
    manifest = btrfs.take()
    shutil.rmtree(btrfs.scene.state)
    note = btrfs.folder / f"{manifest.id}.json"
    written = note.read_text()
    for text, other in _LIES:
        assert text in written
        note.write_text(written.replace(text, other))
        before = btrfs.fingerprint()
        assert btrfs.fix(code=1) == {}, (text, other)
        assert btrfs.fingerprint() == before
        assert not btrfs.scene.state.exists()


def test_what_is_foreign_is_named_and_stays(btrfs: Storage) -> None:
    """A subvolume under our snapshot's name, a snapshot without a note, one made writable: nothing is deleted."""
    swapped, noteless, writable = (btrfs.take() for _ in range(3))
    run("btrfs", "-q", "subvolume", "delete", btrfs.folder / swapped.id)
    run("btrfs", "-q", "subvolume", "snapshot", "-r", btrfs.source, btrfs.folder / swapped.id)
    run("btrfs", "property", "set", btrfs.folder / writable.id, "ro", "false")
    (btrfs.folder / f"{noteless.id}.json").unlink()
    shutil.rmtree(btrfs.scene.state / "snapshots" / noteless.id)
    names = btrfs.names()
    assert btrfs.fix(code=1) == {"mark-broken": "done"}
    assert btrfs.names() == names
    said = "\n".join(btrfs.problems())
    assert f"{swapped.id} bears the name of" in said
    assert f"{noteless.id} is not in this state directory, and it has no note" in said
    assert "made writable by hand" in said


def test_pool_must_lead_somewhere(btrfs: Storage) -> None:
    for path in ("/proc", "/nowhere", str(btrfs.scene.folder / "snapmgr.toml")):
        done = btrfs.scene.run("doctor", "--fix", "--pool", path)
        assert done.returncode == 2, done.stderr
        assert path in done.stderr
    assert btrfs.scene.run("doctor", "--dry-run").returncode == 2


def test_a_server_that_was_left_frozen_goes_on(btrfs: Storage) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        btrfs.take()
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        frozen = btrfs.scene.state / "frozen"
        frozen.mkdir(exist_ok=True)
        record = frozen / str(process.pid)
        record.write_text(f"{process.pid} {ticks} {boot_id()}\n{_DEAD.pid} 1 {boot_id()}\n0.0\n")
        assert btrfs.scene.run("doctor", "--fix").returncode == 0
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        process.kill()
    assert state == "S"
    assert not record.exists()
