"""A file that is as slow as a spinning disk (tests/lab/disk), and what a disk like that does by the formula."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from support.kinds import cache_folder
from support.processes import wait_until
from support.storage import shielded

if TYPE_CHECKING:
    from collections.abc import Iterator

_SOURCE = Path(__file__).parent.parent / "lab" / "disk" / "disk.c"
_COMPILE = ("gcc", "-O2", "-std=gnu17", "-pthread", "-Wall", "-Wextra", "-Werror", "-I/usr/include/fuse3")
_LIBRARIES = ("-lfuse3", "-lm")
_LIMIT_S = 30.0
# Of the square root of the distance between two places that are each evenly distributed: the integral of
# 2 (1 - x) sqrt(x) from 0 to 1.
_MEAN_ROOT = 8 / 15


@dataclass(frozen=True, kw_only=True)
class Model:
    """A disk of 7,200 rotations a minute, as it is used for data that nobody is in a hurry for."""

    seek_first_s: float = 0.8e-3
    """Of the shortest seek."""
    seek_full_s: float = 9.5e-3
    """What a seek over all of the disk takes beyond that; others by the root of their distance."""
    rotation_s: float = 60 / 7200
    bytes_s: float = 150e6

    def random_s(self, block_bytes: int) -> float:
        """Return what a request for a block anywhere takes on average, however many wait beside it."""
        return self.seek_first_s + self.seek_full_s * _MEAN_ROOT + self.rotation_s / 2 + block_bytes / self.bytes_s


@cache
def disk_program() -> Path:
    """Compile it, unless the cache folder has it already, and return its path."""
    digest = hashlib.sha256(repr((_COMPILE, _LIBRARIES)).encode() + _SOURCE.read_bytes()).hexdigest()
    program = cache_folder().parent / "lab" / f"disk-{digest[:16]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as folder:
            made = Path(folder) / "disk"
            command = [*_COMPILE, "-o", str(made), str(_SOURCE), *_LIBRARIES]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
            made.rename(program)
    return program


@contextmanager
def spinning_disk(folder: Path, size_bytes: int, *, model: Model | None = None, seed: int = 1) -> Iterator[Path]:
    """Yield the path of a file of `size_bytes`, all zeros, that is as slow as `model`.

    What is below it lies in `folder`, which is a quick one: memory, best of all. Opened by a User Mode Linux guest as a
    disk without a lock (``ubd0c=``), which FUSE refuses.
    """
    model = model or Model()
    below, point = folder / "platters", folder / "disk"
    point.mkdir()
    with below.open("wb") as file:
        file.truncate(size_bytes)
    numbers = (model.seek_first_s, model.seek_full_s, model.rotation_s, model.bytes_s)
    words = [str(disk_program()), str(below), str(point), *(f"{number:.9f}" for number in numbers), str(seed)]
    with shielded():
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: process.poll() is not None or os.path.ismount(point), _LIMIT_S)
        if process.poll() is not None:
            raise RuntimeError(f"the disk ended with {process.returncode}: see its message above")
        yield point / "disk"
    finally:
        with shielded():
            subprocess.run(["umount", str(point)], check=False, stdin=subprocess.DEVNULL)
            process.terminate()
            process.wait(_LIMIT_S)
            point.rmdir()
            below.unlink()
