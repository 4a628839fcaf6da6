"""Measures a tree."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.tree.entries import walk_folders

if TYPE_CHECKING:
    from collections.abc import Container

_BLOCK_BYTES = 512


class Survey(Struct, frozen=True, kw_only=True):
    """The size of a tree."""

    entries: int
    """Number of folders, files and everything else, without the root."""
    allocated_bytes: int
    """Space of its files on disk, without holes; hard links count once."""

    def __add__(self, other: Survey) -> Survey:
        return Survey(
            entries=self.entries + other.entries, allocated_bytes=self.allocated_bytes + other.allocated_bytes
        )


def survey(root_fd: int, *, skip: Container[str] = ()) -> Survey:
    """Return the size of the tree at `root_fd`; `skip` and errors as for `walk`."""
    count, allocated_bytes = 0, 0
    linked: set[int] = set()
    for step in walk_folders(root_fd, skip=skip):
        if not step.entered:
            continue
        count += len(step.listed)
        for entry in step.listed:
            if not entry.is_file:
                continue
            try:
                info = os.stat(entry.name, dir_fd=step.fd, follow_symlinks=False)
            except OSError as error:
                raise OSError(error.errno, error.strerror, f"{step.path}/{entry.name}".lstrip("/")) from error
            if stat.S_ISREG(info.st_mode) and info.st_ino not in linked:
                allocated_bytes += allocated(info)
                if info.st_nlink > 1:
                    linked.add(info.st_ino)
    return Survey(entries=count, allocated_bytes=allocated_bytes)


def allocated(info: os.stat_result) -> int:
    """Return how many bytes of a file are on disk."""
    return min(info.st_blocks * _BLOCK_BYTES, info.st_size)
