"""A loop device for the benchmark's storages, with a pattern behind what they may use, and what is left of a run."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.bench.model import Parameters
from snapmgr.bench.storage import scene
from snapmgr.bench.storage.contributed import all_stacks
from snapmgr.bench.storage.stacks import STACKS
from snapmgr.bench.storage.workbench import StackWorkbench, workbench
from snapmgr.system.blockdev import parse_mountinfo
from snapmgr.system.command import CommandRunner
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

USED_BYTES = 320 << 20
# LVM takes a quarter for snapshots.
USED_DISK_BYTES = 800 << 20
_TAIL = b"the tail of the device " * 1000
_TAIL_BYTES = 8 << 20


@dataclass(kw_only=True)
class BenchDevice:
    """A device of which the first `used_bytes` may be used."""

    device: str
    image: Path
    """The file below a loop device, or the device again."""
    used_bytes: int
    folder: Path
    """For small files; also holds the folder of runs."""

    def bench(self, stack: str, *, memory_bytes: int = 1 << 60) -> AbstractContextManager[StackWorkbench]:
        """Open a workbench on it."""
        parameters = Parameters(
            profile="smoke", variant="", size_bytes=8 << 20, memory_bytes=memory_bytes, seed=1, extra={}
        )
        keep = self.folder / "keep"
        keep.mkdir(exist_ok=True)
        return workbench(
            STACKS[stack],
            parameters,
            device=self.device,
            size_bytes=self.used_bytes,
            folder=keep,
            runner=CommandRunner(),
            tell=lambda _: None,
        )

    def tail_is_untouched(self) -> bool:
        """Whether all that lies behind is as it was."""
        CommandRunner().run(["blockdev", "--flushbufs", self.device])
        with self.image.open("rb") as file:
            file.seek(self.used_bytes)
            return file.read(_TAIL_BYTES) == _tail()

    def left(self) -> list[str]:
        """Return what a run has left: mounts in any namespace, what stands on the device, files of runs."""
        # Killed just after it had written down what it was about to do, a run has done nothing: only the note is left.
        found = [str(path) for path in scene.RUN.glob("*") if path.is_dir() or (scene.RUN / path.stem).exists()]
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                mounts = parse_mountinfo((process / "mountinfo").read_bytes())
                found += [
                    f"process {process.name} has {mount.source} mounted at {mount.point}"
                    for mount in mounts
                    if mount.source == self.device or mount.point.startswith(f"{scene.RUN}/")
                ]
        found += [f"{path.name} on {self.device}" for path in Path("/sys/block", self.device[5:], "holders").glob("*")]
        for folder in Path("/sys/block").glob("loop*/loop"):
            with suppress(OSError):
                if (folder / "backing_file").read_text().strip() == self.device:
                    found.append(f"{folder.parent.name} on {self.device}")
        return found

    def seconds_until_clear(self, *, at_most_s: float) -> float:
        """Wait until nothing is left, and return the seconds. Raises AssertionError that names what is left."""
        start = time.monotonic()
        while left := self.left():
            assert time.monotonic() - start < at_most_s, left
            time.sleep(0.02)
        return time.monotonic() - start

    def records(self) -> list[dict[str, object]]:
        """Return what is written down of runs."""
        return [json.loads(path.read_text()) for path in scene.RUN.glob("*.json")]


def _tail() -> bytes:
    return (_TAIL * (_TAIL_BYTES // len(_TAIL) + 1))[:_TAIL_BYTES]


@contextmanager
def bench_device() -> Iterator[BenchDevice]:
    """Make one, and runs that are written down in a folder of its own; nothing is left of it."""
    with work_folder(Path("/dev/shm")) as folder:
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(USED_BYTES)
            file.seek(USED_BYTES)
            file.write(_tail())
        (folder / "run").mkdir()
        old, scene.RUN = scene.RUN, folder / "run"
        device = CommandRunner().run(["losetup", "--find", "--show", str(image)]).stdout.strip()
        # An error of whoever had this number before, and did not look, would be told to the next who flushes.
        with suppress(OSError), open(device, "rb") as opened:
            os.fsync(opened.fileno())
        try:
            yield BenchDevice(device=device, image=image, used_bytes=USED_BYTES, folder=folder)
        finally:
            scene.RUN = old
            CommandRunner().run(["losetup", "--detach", device])


@contextmanager
def bench_disk(disk: str) -> Iterator[BenchDevice]:
    """Use a disk that may be wiped."""
    with work_folder(Path("/dev/shm")) as folder:
        with open(disk, "r+b") as file:
            file.seek(USED_DISK_BYTES)
            file.write(_tail())
        (folder / "run").mkdir()
        old, scene.RUN = scene.RUN, folder / "run"
        try:
            yield BenchDevice(device=disk, image=Path(disk), used_bytes=USED_DISK_BYTES, folder=folder)
        finally:
            scene.RUN = old


@contextmanager
def scenario_bench(stack: str, parameters: Parameters, size_bytes: int) -> Iterator[StackWorkbench]:
    """Open a workbench with a scenario's parameters on a loop device of its own, in memory; nothing is left of it."""
    runner = CommandRunner()
    # Short: a server's socket lies in it.
    with work_folder(Path("/dev/shm")) as folder:
        (folder / "run").mkdir()
        old, scene.RUN = scene.RUN, folder / "run"
        with (folder / "image").open("wb") as image:
            image.truncate(size_bytes)
        device = runner.run(["losetup", "--find", "--show", str(folder / "image")]).stdout.strip()
        try:
            with workbench(
                all_stacks()[stack],
                parameters,
                device=device,
                size_bytes=size_bytes,
                folder=folder,
                runner=runner,
                tell=lambda _: None,
            ) as made:
                yield made
        finally:
            scene.RUN = old
            runner.run(["losetup", "--detach", device])
