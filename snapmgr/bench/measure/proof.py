"""Remembers a scenario's data, to prove later that a snapshot holds the old data and the origin the new."""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.system.kernel import sync_file_system

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TreeFacts:
    """The contents of a folder: all names and sizes, and digests of some files."""

    files: int
    listing: str
    """Digest of all files' names and sizes."""
    contents: Mapping[str, str]
    """Digests of a sample of the files, by name."""

    def differences(self, other: TreeFacts) -> list[str]:
        """Return the differences of `other` in words; empty if no recorded fact differs."""
        said = []
        if self.listing != other.listing:
            said.append(f"names or sizes differ, of {self.files} files then and {other.files} now")
        said += [f"{name} differs" for name, digest in self.contents.items() if other.contents.get(name) != digest]
        return said


def tree_facts(folder: Path, *, seed: int, sample: int, names: Sequence[str] | None = None) -> TreeFacts:
    """Return the contents of a folder, which must not change during the call.

    The contents are those of `names`, or of `sample` files at random. Raises OSError.
    """
    sizes = sorted(
        (os.path.relpath(os.path.join(path, name), folder), os.lstat(os.path.join(path, name)).st_size)
        for path, _, found in os.walk(folder)
        for name in found
    )
    if names is None:
        chosen = random.Random(seed).sample(sizes, min(sample, len(sizes)))  # noqa: S311 - a sample, no secret
        names = [name for name, _ in chosen]
    there = {name for name, _ in sizes}
    contents = {}
    for name in names:
        if name in there:
            with open(folder / name, "rb") as file:
                contents[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return TreeFacts(files=len(sizes), listing=hashlib.sha256(repr(sizes).encode()).hexdigest(), contents=contents)


def flush(folder: Path) -> None:
    """Write all dirty data of a folder's file system. Raises OSError, also for lost writes."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file_system(fd)
    finally:
        os.close(fd)


def block_digests(file: Path, *, seed: int, sample: int, block_bytes: int) -> tuple[str, ...]:
    """Return the digests of `sample` blocks of a file, chosen by `seed` and its size. Raises OSError."""
    with open(file, "rb", buffering=0) as opened:
        blocks = max(1, os.fstat(opened.fileno()).st_size // block_bytes)
        places = random.Random(seed).sample(range(blocks), min(sample, blocks))  # noqa: S311 - a sample, no secret
        found = []
        for place in places:
            data = os.pread(opened.fileno(), block_bytes, place * block_bytes)
            found.append(hashlib.blake2b(data, digest_size=16).hexdigest())
    return tuple(found)
