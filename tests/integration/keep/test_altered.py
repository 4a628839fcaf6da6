"""Snapshots that somebody changed by hand: prune leaves them and says so, and only delete --force deletes them."""

from __future__ import annotations

import json
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

if TYPE_CHECKING:
    from support.scene import Scene

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")


def _backed_up(scene: Scene, backend: str) -> list[str]:
    scene.configure(
        text=f'[job.files]\nsource = "directory"\nbackend = "{backend}"\npath = "{scene.file_system.point}/mysql"\n'
        'retention.keep-last = 1\nverify.command = ["true"]\n'
    )
    (Path(scene.file_system.point) / "mysql/file").write_text("as it was")
    for _ in range(3):
        assert scene.run("backup", "files").returncode == 0
    return [entry.manifest.id for entry in scene.entries()]


def _change_subvolume(scene: Scene, snapshot_id: str, *, hide: bool) -> None:
    path = Path(scene.file_system.point, ".snapmgr", snapshot_id)
    subprocess.run(["btrfs", "property", "set", path, "ro", "false"], check=True)
    (path / "work").write_text("somebody's work")
    if hide:
        subprocess.run(["btrfs", "property", "set", path, "ro", "true"], check=True)


@pytest.mark.parametrize("hide", [False, True])
def test_prune_leaves_a_subvolume_that_was_made_writable(files: Scene, hide: bool) -> None:
    first, second, third = _backed_up(files, "btrfs")
    _change_subvolume(files, first, hide=hide)
    planned = files.json("prune", "files", "--dry-run")["jobs"][0]
    assert [one["id"] for one in planned["delete"]] == [second]
    assert {one["id"]: one["reasons"] for one in planned["keep"]}[first] == [
        "changed by hand after it was taken: left to you, see snapmgr doctor"
    ]
    done = files.run("prune", "files")
    assert done.returncode == 0, done.stderr
    assert [entry.manifest.id for entry in files.entries()] == [first, third]
    assert first in files.stored()
    assert f"snapmgr delete --force {first.rsplit('.', 1)[-1]}" in files.run("doctor").stdout
    verified = files.run("verify", first)
    assert verified.returncode == 6
    assert "snapmgr mount" not in verified.stderr
    assert "rely on another snapshot (files@latest)" in verified.stderr
    refused = files.run("delete", first)
    assert (refused.returncode, "it may hold work of theirs" in refused.stderr) == (1, True)
    assert files.run("delete", "--force", "--yes", first).returncode == 0
    assert first not in files.stored()


def test_the_newest_one_that_was_changed_does_not_stand_in_for_an_unchanged_one(files: Scene) -> None:
    first, second, third = _backed_up(files, "btrfs")
    _change_subvolume(files, third, hide=False)
    planned = files.json("prune", "files", "--dry-run")["jobs"][0]
    assert [one["id"] for one in planned["delete"]] == [first]
    assert {one["id"]: one["reasons"][0] for one in planned["keep"]}[second] == "newest READY"


def test_prune_leaves_a_copy_that_was_written_to(files: Scene) -> None:
    first, second, third = _backed_up(files, "reflink")
    (copy,) = Path(files.file_system.point).glob(f".snapmgr-reflink/{first}/data")
    time.sleep(0.02)  # beyond the kernel's tick, the granularity of its file times
    (copy / "work").write_text("somebody's work")
    done = files.run("prune", "files", "--json")
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    assert (job["deleted"], job["kept_altered"]) == ([second], [first])
    assert f"warning: keeping {first}: " in done.stderr
    assert [entry.manifest.id for entry in files.entries()] == [first, third]
    assert (copy / "work").read_text() == "somebody's work"
    assert files.run("delete", "--force", "--yes", first).returncode == 0


def test_the_record_of_a_broken_one_stays_as_long_as_doctor_needs_it(files: Scene) -> None:
    first, *_ = _backed_up(files, "btrfs")
    manifest = files.entries()[0].manifest
    # As a failed run leaves it whose removal was interrupted: the storage is there, the members are not known.
    broken = replace(manifest, members=(), created_at=manifest.created_at - timedelta(days=90))
    files.context().catalog.write(broken.with_state("broken", reason="interrupted before its proof"))
    assert files.run("prune", "files").returncode == 0
    assert first in [entry.manifest.id for entry in files.entries()]
    said = files.run("doctor", "--fix").stdout
    assert "although its manifest says BROKEN" in said
    assert first not in files.stored()
    assert first in [entry.manifest.id for entry in files.entries()]
    assert files.run("prune", "files").returncode == 0
    assert first not in [entry.manifest.id for entry in files.entries()]
