"""The scene that most tests of the main job share."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.scene import Scene, btrfs_scene

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def shared() -> Iterator[Scene]:
    """One scene for the tests that leave no server option or file behind."""
    with btrfs_scene("--general-log=0") as scene:
        yield scene


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    """The shared scene with a fresh state directory and no snapshots."""
    shared.state = shared.folder / f"state-{time.monotonic_ns()}"
    shared.configure()
    shared.server.query("DROP DATABASE IF EXISTS load_test")
    shared.lines.clear()
    yield shared
    _delete_snapshots(shared)


@pytest.fixture(scope="module")
def shared_files() -> Iterator[Scene]:
    """One scene without a server."""
    with btrfs_scene(server=False, size_bytes=256 << 20) as scene:
        yield scene


@pytest.fixture
def files(shared_files: Scene) -> Iterator[Scene]:
    """The scene without a server, with a fresh state directory and no snapshots; not configured."""
    shared_files.state = shared_files.folder / f"state-{time.monotonic_ns()}"
    shared_files.lines.clear()
    yield shared_files
    _delete_snapshots(shared_files)


def _delete_snapshots(scene: Scene) -> None:
    """Delete what a test has left, with the notes: `doctor` takes them for those of snapshots that were moved."""
    for path in scene.snapshot_paths():
        subprocess.run(["btrfs", "-q", "subvolume", "delete", path], check=False)
    for note in Path(scene.file_system.point, ".snapmgr").glob("*.json"):
        note.unlink()
