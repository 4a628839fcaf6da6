"""``doctor --fix`` on real storage: every kind of debris is made for real, mended once, and what is foreign stays."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.system.boot import boot_id
from snapmgr_btrfs import BtrfsBackend
from support.btrfs import run
from support.faults import Faults
from support.storage import processes_of
from support.watched import DEAD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.watched import Storage

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "xfs", "btrfsutil")


# ------------------------------------------------------------------------------------------------- what dead runs left


def test_runs_that_were_killed(storage: Storage) -> None:
    """PENDING with and without proof, DELETING, and BROKEN whose storage is there; what is foreign is not touched."""
    ready, proven, unproven, deleting, broken = (storage.take() for _ in range(5))
    foreign = storage.folder / "demo.not-ours"
    foreign.mkdir()
    (foreign / "precious").touch()
    if storage.kind == "btrfs":
        run("btrfs", "-q", "subvolume", "create", storage.folder / "demo.20200101T000000Z.aaaaaaaa")
    storage.catalog().write(replace(proven, state="pending"))
    storage.catalog().write(replace(unproven, state="pending", proved_at=None, taken_at=None, members=()))
    storage.catalog().write(replace(deleting, state="deleting"))
    storage.catalog().write(replace(broken, state="broken", reason="interrupted before its proof"))
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


def test_interrupted_deletions_are_finished_together_and_one_that_fails_stops_no_other(
    btrfs: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    *deleting, ready = (btrfs.take() for _ in range(4))
    for one in deleting:
        btrfs.catalog().write(replace(one, state="deleting"))
    batches = []
    delete_batch = BtrfsBackend.delete_batch
    monkeypatch.setattr(
        BtrfsBackend,
        "delete_batch",
        lambda self, refs, **how: batches.append(len(refs)) or delete_batch(self, refs, **how),
    )
    read = deleting[1].id
    with btrfs.catalog().reading(read):
        actions = {action["subject"]: action for action in btrfs.doctor("--fix")["actions"]}
    assert {subject: action["result"] for subject, action in actions.items()} == {
        one.id: "failed" if one.id == read else "done" for one in deleting
    }
    assert "is being read" in actions[read]["error"]["message"]
    assert batches == [2]
    assert btrfs.names() == {one for kept in (ready.id, read) for one in (kept, f"{kept}.json")}

    def fail(*_: object) -> Iterator[None]:
        raise OSError(errno.EIO, "a disk fails")
        yield

    # Then each is tried alone.
    monkeypatch.setattr("snapmgr.doctor.fix.delete_all", fail)
    assert btrfs.fix() == {"finish-deletion": "done"}
    assert btrfs.scene.states() == ["ready"]


def test_a_backup_that_was_really_killed(storage: Storage) -> None:
    """With doctor --fix alone, without the next run's help; while its helper lives it is left."""
    ready = storage.take()
    mark = storage.scene.folder / "mark"
    with storage.scene.start("backup", "demo", faults_=Faults(delay_s=0.5, delay_mark=mark)) as process:
        while process.poll() is None and not mark.exists():
            time.sleep(0.005)
        process.kill()
    deadline = time.monotonic() + 60
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
    before = storage.manifests()
    # btrfs is found by its id as long as its device is there: so that goes.
    with storage.scene.file_system.unplugged():
        actions = storage.doctor("--fix")
        assert actions["actions"] == []
        assert actions["exit_code"] == 1
        assert storage.manifests() == before
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
    catalog.write_lease(replace(leases[killed], why="verify", holder=replace(DEAD, boot_id=boot_id())))
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
    assert "past its time limit" in problem


def test_a_mount_in_use_is_left_and_said(storage: Storage) -> None:
    manifest = storage.take()
    point = Path(storage.scene.run("mount", manifest.id).stdout.strip())
    (lease,) = storage.catalog().leases()[0]
    storage.catalog().write_lease(replace(lease, why="prepare", holder=replace(DEAD, boot_id=boot_id())))
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
    (state / "snapshots" / manifest.id / f".manifest.json.{DEAD.pid}").write_text("{")
    (state / "leases" / f".0123456789abcdef.json.{DEAD.pid}").write_text("{")
    living = state / "leases" / f".0123456789abcdef.json.{os.getpid()}"
    living.write_text("{")
    (state / "snapshots" / "demo.20200101T000000Z.bbbbbbbb").mkdir()
    (storage.scene.scratch / f"v{DEAD.pid}-abcdefgh" / "deep").mkdir(parents=True)
    for name in ("3f9a2c1b-0123aa", "3f9a2c1b-0123ab"):
        (storage.scene.scratch / name).mkdir()
    os.utime(storage.scene.scratch / "3f9a2c1b-0123ab", (0, 0))
    kept = storage.scene.scratch / "3f9a2c1b-0123ac"
    kept.mkdir()
    (kept / "precious").touch()
    if storage.kind == "btrfs":
        (storage.folder / f".{manifest.id}.{DEAD.pid}.tmp").write_text("{")
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
    btrfs.catalog().write(replace(manifest, state="deleting"))
    with btrfs.catalog().job_lock("demo"):
        document = json.loads(btrfs.scene.run("doctor", "--fix", "--json").stdout)
        assert document["actions"] == []
        (said,) = [one["what"] for one in document["findings"] if "skipped: " in one["what"]]
        assert f"a run of its job is active (pid {os.getpid()})" in said
    assert btrfs.fix("demo") == {"finish-deletion": "done"}


def test_only_what_concerns_the_job_that_is_named(btrfs: Storage) -> None:
    manifest = btrfs.take()
    btrfs.catalog().write(replace(manifest, state="deleting"))
    other = replace(manifest, id="other.20260101T000000Z.cccccccc", job="other", state="deleting", members=())
    btrfs.catalog().write(other)
    assert btrfs.fix("demo") == {"finish-deletion": "done"}
    assert [entry.manifest.id for entry in btrfs.scene.entries()] == [other.id]


# -------------------------------------------------------------------------------------------------------------- servers


def test_a_server_that_was_left_frozen_goes_on(btrfs: Storage) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        btrfs.take()
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        frozen = btrfs.scene.state / "frozen"
        frozen.mkdir(exist_ok=True)
        record = frozen / str(process.pid)
        record.write_text(f"{process.pid} {ticks} {boot_id()}\n{DEAD.pid} 1 {boot_id()}\n0.0\n")
        assert btrfs.scene.run("doctor", "--fix").returncode == 0
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        process.kill()
    assert state == "S"
    assert not record.exists()
