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

_FOLDER = Path(__file__).parent.parent / "lab" / "disk"
_COMPILE = ("gcc", "-O2", "-std=gnu17", "-pthread", "-Wall", "-Wextra", "-Werror")
_FUSE = ("-I/usr/include/fuse3", "-lfuse3")
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

    def numbers(self, seed: int) -> str:
        """Return them as the programs in tests/lab/disk take them."""
        return " ".join(
            [*(f"{one:.9f}" for one in (self.seek_first_s, self.seek_full_s, self.rotation_s, self.bytes_s)), str(seed)]
        )


@cache
def disk_program() -> Path:
    """Compile it, unless the cache folder has it already, and return its path."""
    return _compiled("disk.c", *_FUSE)


@cache
def disk_library() -> Path:
    """Compile what is preloaded, unless the cache folder has it already, and return its path."""
    return _compiled("preload.c", "-shared", "-fPIC", "-ldl")


def preloading(file: Path, *, model: Model | None = None, seed: int = 1) -> dict[str, str]:
    """Return the environment in which a program finds `file` as slow as `model`, with `disk_library` preloaded."""
    return {"SNAPMGR_LAB_DISK_FILE": str(file.resolve()), "SNAPMGR_LAB_DISK": (model or Model()).numbers(seed)}


def _compiled(name: str, *options: str) -> Path:
    source = _FOLDER / name
    told = repr((_COMPILE, name, options)).encode() + source.read_bytes() + (_FOLDER / "arm.h").read_bytes()
    program = cache_folder().parent / "lab" / f"{source.stem}-{hashlib.sha256(told).hexdigest()[:16]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as folder:
            made = Path(folder) / "made"
            command = [*_COMPILE, "-o", str(made), str(source), *options, "-lm"]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
            made.rename(program)
    return program


@contextmanager
def spinning_disk(folder: Path, size_bytes: int, *, model: Model | None = None, seed: int = 1) -> Iterator[Path]:
    """Yield the path of a file of `size_bytes`, all zeros, that is as slow as `model`.

    What is below it lies in `folder`, which is a quick one: memory, best of all. For a guest, see `disk_library`.
    """
    model = model or Model()
    below, point = folder / "platters", folder / "disk"
    point.mkdir()
    with below.open("wb") as file:
        file.truncate(size_bytes)
    words = [str(disk_program()), str(below), str(point), model.numbers(seed)]
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
