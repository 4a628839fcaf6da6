"""``doctor --fix`` rebuilds the state directory from the storage, and believes only what the storage says as well."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from support.btrfs import run
from support.watched import Storage

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "xfs", "btrfsutil")


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


def test_a_snapshot_that_was_moved_away_and_the_state_directory_lost(btrfs: Storage) -> None:
    """Its note is all that still describes it: it stays, so that the snapshot is adopted once it is back."""
    manifest = btrfs.take()
    place, elsewhere = btrfs.folder / manifest.id, btrfs.point / "elsewhere"
    btrfs.move(place, elsewhere)
    shutil.rmtree(btrfs.scene.state)
    (problem,) = btrfs.problems()
    assert "the note of a snapshot that is gone" in problem
    assert btrfs.fix(code=1) == {}
    assert btrfs.names() == {f"{manifest.id}.json"}
    btrfs.move(elsewhere, place)
    assert btrfs.names() == {manifest.id, f"{manifest.id}.json"}
    assert btrfs.fix() == {"adopt": "done"}
    assert [entry.manifest.id for entry in btrfs.scene.entries()] == [manifest.id]


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


def test_two_state_directories_on_onewatched_storage(storage: Storage) -> None:
    theirs = storage.take()
    point = storage.scene.run("mount", theirs.id).stdout.strip()
    run("umount", point)
    storage.configure("ours")
    ours = storage.take()
    names = storage.names()
    assert storage.fix() == {}
    assert storage.names() == names
    assert [entry.manifest.id for entry in storage.scene.entries()] == [ours.id]
    assert any("snapshots of the state directory" in one["what"] for one in storage.doctor()["findings"])
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
    btrfs.catalog().write(replace(entry.manifest, created_at=entry.manifest.created_at - timedelta(days=90)))
    assert btrfs.scene.run("prune", "demo").returncode == 0
    assert first in btrfs.names()
    assert any("is BROKEN, and part of it remains: " in one["what"] for one in btrfs.doctor()["findings"])
    shutil.rmtree(btrfs.scene.state)
    assert btrfs.fix(code=1) == {}
    assert any("it is incomplete" in what for what in btrfs.problems())
    btrfs.move(btrfs.point / "away", btrfs.folder / second)
    assert btrfs.fix() == {"adopt": "done"}
    assert btrfs.manifests() == before
    run("btrfs", "-q", "subvolume", "delete", btrfs.folder / first)
    assert btrfs.fix()["mark-broken"] == "done"
    done = btrfs.scene.run("delete", manifest.id, "--force", "--yes")
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
    assert f"{swapped.id} has the name of" in said
    assert f"{noteless.id} is not in this state directory, and it has no note" in said
    assert "made writable by hand" in said


def test_pool_must_lead_somewhere(btrfs: Storage) -> None:
    for path in ("/proc", "/nowhere", str(btrfs.scene.folder / "snapmgr.toml")):
        done = btrfs.scene.run("doctor", "--fix", "--pool", path)
        assert done.returncode == 2, done.stderr
        assert path in done.stderr
    assert btrfs.scene.run("doctor", "--dry-run").returncode == 2
