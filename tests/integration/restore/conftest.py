"""Snapshots that are restored, and where to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from snapmgr.system.blockdev import read_mounts
from snapmgr.testing import trees
from support.restored import LARGE_BYTES
from support.scene import btrfs_scene
from support.storage import loop_filesystem


@pytest.fixture(name="other", scope="module")
def _other():
    with loop_filesystem("ext4", 640 << 20) as system:
        yield system


@pytest.fixture(name="files", scope="module")
def _files():
    """A scene whose job is of a directory with everything in it, and with one snapshot."""
    with btrfs_scene(server=False) as scene:
        data = Path(scene.file_system.point) / "mysql" / "files"
        data.mkdir()
        trees.plant(data)
        scene.scratch.mkdir()
        scene.configure(text=f'[job.demo]\nsource = "directory"\npath = "{data}"\n')
        assert scene.run("backup", "demo").returncode == 0
        scene.data = data
        yield scene
        for point in [mount.point for mount in read_mounts() if mount.point.startswith(f"{scene.folder}/")]:
            subprocess.run(["umount", point], check=False)


@pytest.fixture(name="large", scope="module")
def _large():
    """The same with one file that takes a while to copy."""
    with btrfs_scene(server=False) as scene:
        data = Path(scene.file_system.point) / "mysql" / "files"
        data.mkdir()
        (data / "a").write_text("first")
        (data / "z").write_bytes(os.urandom(1 << 20) * (LARGE_BYTES >> 20))
        scene.configure(text=f'[job.demo]\nsource = "directory"\npath = "{data}"\n')
        assert scene.run("backup", "demo").returncode == 0
        scene.data = data
        yield scene
