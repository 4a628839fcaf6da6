"""A loop device for the benchmark's storages, with a pattern behind what they may use, and what is left of a run."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.bench import scene
from snapmgr.bench.model import Parameters
from snapmgr.bench.stacks import STACKS
from snapmgr.bench.workbench import StackWorkbench, workbench
from snapmgr.blockdev import parse_mountinfo
from snapmgr.command import CommandRunner
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

USED_BYTES = 320 << 20
_TAIL = b"the tail of the device " * 1000
_TAIL_BYTES = 8 << 20


@dataclass(kw_only=True)
class BenchDevice:
    """A loop device of which the first `USED_BYTES` may be used."""

    device: str
    image: Path
    folder: Path
    """For small files; also holds the folder of runs."""

    def bench(self, stack: str, *, memory_bytes: int = 1 << 60) -> AbstractContextManager[StackWorkbench]:
        """Open a workbench on it."""
        parameters = Parameters(
            profile="smoke", reading="", size_bytes=8 << 20, memory_bytes=memory_bytes, seed=1, extra={}
        )
        keep = self.folder / "keep"
        keep.mkdir(exist_ok=True)
        return workbench(
            STACKS[stack],
            parameters,
            device=self.device,
            size_bytes=USED_BYTES,
            folder=keep,
            runner=CommandRunner(),
            tell=lambda _: None,
        )

    def tail_is_untouched(self) -> bool:
        """Whether all that lies behind is as it was."""
        CommandRunner().run(["blockdev", "--flushbufs", self.device])
        with self.image.open("rb") as file:
            file.seek(USED_BYTES)
            return file.read() == _tail()

    def left(self) -> list[str]:
        """Return what a run has left: mounts in any namespace, loop devices on the device, files of runs, groups."""
        found = [str(path) for path in scene.RUN.glob("*")]
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                mounts = parse_mountinfo((process / "mountinfo").read_bytes())
                found += [
                    f"process {process.name} has {mount.source} mounted at {mount.point}"
                    for mount in mounts
                    if mount.source == self.device or mount.point.startswith(f"{scene.RUN}/")
                ]
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
            yield BenchDevice(device=device, image=image, folder=folder)
        finally:
            scene.RUN = old
            CommandRunner().run(["losetup", "--detach", device])
