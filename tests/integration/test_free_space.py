"""A pool that runs full: `status`, `doctor` and `backup` say so, and a backup prunes first or refuses."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.scene import Scene
from support.storage import fill, loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs")
MIB = 1 << 20


@contextmanager
def _scene(
    kind: str, size_mib: int = 400, jobs: tuple[str, ...] = ("demo",), more: str = "", mkfs: tuple[str, ...] = ()
) -> Iterator[Scene]:
    with loop_filesystem(kind, size_mib * MIB, mkfs) as system, work_folder() as folder:
        scene = Scene(system, folder, None)
        text = ""
        for job in jobs:
            data = Path(system.point) / job
            if kind == "btrfs":
                subprocess.run(["btrfs", "-q", "subvolume", "create", data], check=True)
            else:
                data.mkdir()
            (data / "file").write_bytes(os.urandom(8 * MIB))
            text += f'[job.{job}]\nsource = "directory"\npath = "{data}"\nretention.keep-last = 1\n{more}\n'
        scene.configure(text=text)
        yield scene


def _free(scene: Scene) -> tuple[int, int]:
    """Return free and whole bytes as df(1) reports them to others than root."""
    room = os.statvfs(scene.file_system.point)
    return room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize


def _fill_to(scene: Scene, share: float) -> None:
    """Fill the file system to a share of its size, or to its end if that is earlier."""
    # btrfs ends earlier: df(1) counts the empty part of its metadata as free.
    with suppress(OSError), (Path(scene.file_system.point) / "filler").open("ab") as file:
        while True:
            free_bytes, whole_bytes = _free(scene)
            over = free_bytes - int((1 - share) * whole_bytes)
            if over < MIB:
                return
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, min(over, 16 * MIB))
            os.fsync(file.fileno())


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_a_pool_at_94_percent_is_reported_and_one_without_room_refuses_a_backup(kind: str) -> None:
    with _scene(kind, 2000, more='free_min = "1%"') as scene:
        assert scene.run("backup", "demo").returncode == 0
        _fill_to(scene, 0.94)

        status = scene.run("status", "--json")
        assert status.returncode == 1
        (job,) = json.loads(status.stdout)["jobs"]
        assert [problem["kind"] for problem in job["problems"]] == ["capacity"]
        assert "the database itself cannot write" in job["problems"][0]["what"]
        spaces = [one for one in job["capacity"] if one["when_full"] == "origin_errors"]
        fullest = max(one["used_bytes"] / one["size_bytes"] for one in spaces)
        assert 0.9 < fullest < 0.99
        assert str(scene.file_system.point) in job["capacity"][0]["name"]
        assert scene.run("doctor", "demo").returncode == 1

        done = scene.run("backup", "demo")
        assert done.returncode == 0
        assert done.stderr.count("the database itself cannot write") == 1

        _fill_to(scene, 0.992)
        before = scene.states()
        refused = scene.run("backup", "demo", "--json")
        assert refused.returncode == 1
        error = json.loads(refused.stdout)["jobs"][0]["error"]
        assert "free_min = 1%" in error["message"]
        assert "snapshots there: 2 of job demo" in error["message"]
        assert "snapmgr prune demo" in error["hint"]
        assert scene.states() == before
        assert "next backup refuses" in scene.run("doctor", "demo").stdout
        assert "too little space" in scene.run("backup", "demo", "--dry-run").stderr


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_a_backup_prunes_its_own_job_first_and_goes_on_when_that_was_enough(kind: str) -> None:
    with _scene(kind, jobs=("demo", "other"), more='free_min = "20%"') as scene:
        held = Path(scene.file_system.point) / "demo" / "held"
        assert scene.run("backup", "other").returncode == 0
        held.write_bytes(os.urandom(120 * MIB))
        assert scene.run("backup", "demo").returncode == 0
        held.unlink()
        assert scene.run("backup", "demo", "other").returncode == 0
        _fill_to(scene, 0.84)
        refused = scene.run("backup", "demo")
        assert refused.returncode == 1
        assert "2 of job demo, 2 of job other" in refused.stderr
        done = scene.run("backup", "demo", "--prune", "--json")
        assert done.returncode == 0, done.stderr
        assert "pruning first" in done.stderr
        document = json.loads(done.stdout)["jobs"][0]
        assert len(document["pruned"]["deleted"]) == 2, "one before the backup, one after it"
        assert [entry.manifest.job for entry in scene.entries()] == ["other", "other", "demo"]


def test_metadata_nearly_full_is_seen_although_data_are_free() -> None:
    with _scene("btrfs", 256, more='free_min = "30%"', mkfs=("--metadata", "single", "--data", "single")) as scene:
        data = Path(scene.file_system.point) / "demo"
        # Data take all that is unallocated, and give it back only inside their own block groups.
        fill(data)
        os.truncate(data / "filler", 60 * MIB)
        subprocess.run(["sync", "-f", data], check=True)
        # Three quarters of the data are free, and no file can be made any more.
        with pytest.raises(OSError, match="No space"):
            (data / "small").write_bytes(b"x")
        refused = scene.run("backup", "demo")
        assert refused.returncode == 1
        assert "metadata of the btrfs file system" in refused.stderr
        assert "; data of" not in refused.stderr
