"""A loaded MariaDB on logical volumes, by the real command line: backup, verify, mount, look, umount, prune."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.access.attach import attached, data_path
from support.exactness import check_copy
from support.lvmscene import lvm_scene, take_by_command
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from support.exactness import Taken
    from support.lvmscene import Kind, LvmScene

pytestmark = pytest.mark.needs("root", "mariadbd")
# `./run measure lvm` showed 20 of each; CI repeats a few. The contract suite has thin with XFS, classic with ext4.
MANY = 10 if CAMPAIGN else 4
FEW = 2
PLACES = (("thin", "ext4", MANY), ("classic", "xfs", FEW))
MORE_PLACES = (("thin", "xfs", MANY), ("classic", "ext4", FEW)) if CAMPAIGN else ()


def options_of(point: str) -> tuple[str, set[str]]:
    """Return type and options of the file system that is mounted at `point`, as the kernel says."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[4] == point:
            fs_type, _, options = right.split()
            return fs_type, set(options.split(","))
    raise AssertionError(f"nothing is mounted at {point}")


def look(scene: LvmScene, one: Taken, fs_type: str) -> None:
    """Mount a snapshot by the command line, start a server on it, and unmount it."""
    mounted = scene.json("mount", one.manifest.id)["mount"]
    found, options = options_of(mounted["point"])
    assert found == fs_type
    assert ("nouuid" in options) == (fs_type == "xfs")
    check_copy(Path(mounted["data_path"]), one, scene.server.kind)
    done = scene.run("umount", mounted["point"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("kind", "fs_type", "count"), [*PLACES, *MORE_PLACES])
def test_snapshots_of_a_loaded_server_are_exact_and_go_when_they_are_pruned(vg, kind: Kind, fs_type: str, count: int):
    with lvm_scene(vg, kind, fs_type) as scene:
        scene.configure("retention.keep-last = 1")
        taken = take_by_command(scene, count)
        newest = taken[-1].manifest
        done = scene.run("verify", newest.id)
        assert done.returncode == 0, done.stderr
        for one in taken[:FEW]:
            look(scene, one, fs_type)
        ctx = scene.context()
        for one in taken[FEW:]:
            with attached(ctx, ctx.catalog.load(one.manifest.id)) as lease:
                check_copy(data_path(lease), one, scene.server.kind)
        # The server went on, and has all of it.
        assert scene.server.query("SELECT COUNT(*) FROM load_test.ledger")[0][0] > 0
        assert scene.run("prune", "demo").returncode == 0
        assert [entry.manifest.id for entry in scene.entries()] == [newest.id]
        assert scene.stored() == [newest.members[0].ref.name]
        cow = scene.folder / "cow"
        assert not cow.exists() or os.listdir(cow) == []
