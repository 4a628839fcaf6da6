"""A directory with a job, and the command lines that are measured on it."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import btrfsutil

from snapmgr.access.deletion import delete
from snapmgr.backup.run import backup
from support.cost import SNAPMGR, run_costed
from support.history import add_history
from support.scene import Scene
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.cost import Cost

JOB = "demo"
_TAKEN = re.compile(r": (\S+) ready")


class CommandScene:
    """The job "demo" of a directory with 100 files, on btrfs a subvolume; or jobs of further subvolumes."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.top = Path(scene.file_system.point)
        self.origin = self.top / "mysql"
        self.configure()

    def configure(self, *lines: str, jobs: int = 0) -> None:
        """Write the configuration: "demo", or `jobs` jobs "many000", … of a subvolume each; with further `lines`."""
        paths = {path.name: path for path in self.subvolumes(jobs)} or {JOB: self.origin}
        text = [
            "\n".join((f"[job.{name}]", 'source = "directory"', f'path = "{path}"', *lines, ""))
            for name, path in paths.items()
        ]
        self.scene.configure(text="".join(text))

    def subvolumes(self, count: int) -> list[Path]:
        """Return `count` subvolumes with a file each; they are made where they are missing."""
        paths = [self.top / "many" / f"many{number:03}" for number in range(count)]
        for path in paths:
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                btrfsutil.create_subvolume(str(path))
                (path / "file").write_text("x")
        return paths

    def argv(self, *arguments: str) -> list[str]:
        """Return a command line of snapmgr."""
        return [str(SNAPMGR), "--config", str(self.scene.config_file), "--quiet", *arguments]

    def fill(self, count: int, *jobs: str) -> None:
        """On btrfs, give each of the jobs ("demo") `count` snapshots, one a minute, at least as many as it has."""
        for job in jobs or (JOB,):
            self.take(1, job)
            if count > 1:
                add_history(self.scene.context().catalog, self.top, job, count)

    def take(self, count: int, job: str = JOB) -> None:
        """Back up until the job has `count` snapshots."""
        context = self.scene.context()
        for _ in range(len(context.catalog.entries(job)[0]), count):
            backup(context, context.config.job(job))

    def measure(self, *arguments: str) -> Cost:
        """Run a command of snapmgr to its successful end."""
        return run_costed(self.argv(*arguments))

    def measure_backup(self, *arguments: str) -> Cost:
        """The same with "backup", whose snapshots are deleted again."""
        cost = self.measure("backup", *arguments)
        self.drop_taken(cost.out)
        return cost

    def drop_taken(self, out: str) -> None:
        """Delete the snapshots that the stdout of "backup" names."""
        context = self.scene.context()
        for name in _TAKEN.findall(out):
            delete(context, context.catalog.load(name).manifest)


def make_files(folder: Path, count: int) -> None:
    """Write `count` files of 4 KiB, a thousand in a folder."""
    for number in range(count):
        inner = folder / f"folder{number // 1000}"
        if number % 1000 == 0:
            inner.mkdir()
        (inner / f"file{number}").write_bytes(b"x" * 4096)


@contextmanager
def command_scene(fs_type: str = "btrfs", *, size_bytes: int = 4 << 30) -> Iterator[CommandScene]:
    """Yield the scene on "btrfs" or "xfs", without snapshots."""
    with ExitStack() as stack:
        file_system = stack.enter_context(loop_filesystem(fs_type, size_bytes))
        folder = stack.enter_context(work_folder())
        origin = Path(file_system.point) / "mysql"
        if fs_type == "btrfs":
            btrfsutil.create_subvolume(str(origin))
        else:
            origin.mkdir()
        for number in range(100):
            (origin / f"file{number}").write_bytes(b"x" * 4096)
        yield CommandScene(Scene(file_system, folder, None))
