"""A directory on btrfs with a job, and the command lines that are measured on it."""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.access.deletion import delete
from snapmgr.backup.run import backup
from support.cost import SNAPMGR, run_costed
from support.history import add_history, unflushed
from support.scene import Scene, btrfs_scene

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.cost import Cost

JOB = "demo"
_TAKEN = re.compile(r": (\S+) ready")


class CommandScene:
    """The job "demo" of a subvolume with 100 files; and, where asked for, jobs of further subvolumes."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.top = Path(scene.file_system.point)
        self.origin = self.top / "mysql"
        self.configure()

    def configure(self, *lines: str, jobs: int = 0) -> None:
        """Write the configuration: "demo" with further `lines`, or `jobs` jobs "many000" to …, one a subvolume."""
        text = f'[job.{JOB}]\nsource = "directory"\npath = "{self.origin}"\n' + "".join(f"{line}\n" for line in lines)
        if jobs:
            text = "".join(
                f'[job.{folder.name}]\nsource = "directory"\npath = "{folder}"\n' for folder in self.subvolumes(jobs)
            )
        self.scene.configure(text=text)

    def subvolumes(self, count: int) -> list[Path]:
        """Return `count` subvolumes with a file each; they are made where they are missing."""
        paths = [self.top / "many" / f"many{number:03}" for number in range(count)]
        paths[0].parent.mkdir(exist_ok=True)
        for path in paths:
            if not path.exists():
                subprocess.run(["btrfs", "-q", "subvolume", "create", path], check=True)
                (path / "file").write_text("x")
        return paths

    def argv(self, *arguments: str) -> list[str]:
        """Return a command line of snapmgr."""
        return [str(SNAPMGR), "--config", str(self.scene.config_file), "--quiet", *arguments]

    def fill(self, count: int, *jobs: str) -> None:
        """Give each of the jobs ("demo") `count` snapshots, one a minute, at least as many as it has."""
        context = self.scene.context()
        for job in jobs or (JOB,):
            if not context.catalog.entries(job)[0]:
                with unflushed(self.top, self.scene.folder):
                    backup(context, context.config.job(job))
            if count > 1:
                add_history(context.catalog, self.top, job, count)

    def measure(self, *arguments: str) -> Cost:
        """Run a command of snapmgr to its successful end."""
        return run_costed(self.argv(*arguments))

    def measure_backup(self, *arguments: str) -> Cost:
        """The same with "backup", whose snapshots are deleted again."""
        cost = self.measure("backup", *arguments)
        context = self.scene.context()
        for name in _TAKEN.findall(cost.out):
            delete(context, name)
        return cost


@contextmanager
def command_scene(*, size_bytes: int = 4 << 30) -> Iterator[CommandScene]:
    """Yield the scene, without snapshots."""
    with ExitStack() as stack:
        scene = stack.enter_context(btrfs_scene(size_bytes=size_bytes, server=False))
        for number in range(100):
            (Path(scene.file_system.point) / "mysql" / f"file{number}").write_bytes(b"x" * 4096)
        yield CommandScene(scene)
