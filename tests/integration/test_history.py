"""The long history that benchmarks and tests stand on is one that snapmgr could have taken itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapmgr.catalog.store import Catalog
from support.history import add_history
from support.scene import btrfs_scene

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")


def test_a_made_up_history_is_whole_and_can_be_deleted():
    with btrfs_scene(server=False) as scene:
        top = Path(scene.file_system.point)
        scene.configure(
            text=f'[job.demo]\nsource = "directory"\npath = "{top}/mysql"\nretention.keep-last = 2\n',
        )
        assert scene.run("backup", "demo").returncode == 0
        newest = scene.entries()[0].manifest.id
        assert len(add_history(Catalog(scene.state), top, "demo", 5)) == 4
        # From the oldest on, not over what is there.
        assert len(add_history(Catalog(scene.state), top, "demo", 7)) == 2
        snapshots = scene.json("list")["snapshots"]
        assert len({snapshot["taken_at"] for snapshot in snapshots}) == 7
        assert snapshots[-1]["id"] == newest
        assert "nobarrier" not in next(
            line for line in Path("/proc/mounts").read_text().splitlines() if str(top) in line
        )
        doctor = scene.run("doctor")
        assert doctor.returncode == 0, doctor.stdout
        assert "snapshots in it: 7; none is missing" in doctor.stdout
        # Rebuilt from the notes beside the storage, they are the same.
        for entry in scene.entries()[:3]:
            (scene.state / "snapshots" / entry.manifest.id / "manifest.json").unlink()
        assert scene.run("doctor", "--fix").returncode == 0
        assert scene.states() == ["ready"] * 7
        assert scene.run("prune", "demo").returncode == 0
        assert len(scene.stored()) == 2
        assert scene.entries()[-1].manifest.id == newest
