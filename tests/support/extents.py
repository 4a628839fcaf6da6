"""Which bytes of a device files lie on, by FIEMAP: what several share is counted once."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_FIEMAP = 0xC020660B
_SYNC = 0x1
_LAST = 0x1
_NOWHERE = 0x2 | 0x4 | 0x200  # unknown, not yet allocated, inside of the inode
_HEADER = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_AT_ONCE = 500


def file_extents(path: Path) -> list[tuple[int, int]]:
    """Return where a file's data lie on its device: (first byte, byte behind the last)."""
    found: list[tuple[int, int]] = []
    start = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while True:
            buffer = bytearray(_HEADER.size + _AT_ONCE * _EXTENT.size)
            _HEADER.pack_into(buffer, 0, start, (1 << 64) - 1 - start, _SYNC, 0, _AT_ONCE, 0)
            fcntl.ioctl(fd, _FIEMAP, buffer)
            mapped = _HEADER.unpack_from(buffer)[3]
            flags = _LAST
            for number in range(mapped):
                extent = _EXTENT.unpack_from(buffer, _HEADER.size + number * _EXTENT.size)
                logical, physical, length, flags = extent[0], extent[1], extent[2], extent[5]
                if not flags & _NOWHERE:
                    found.append((physical, physical + length))
                start = logical + length
            if flags & _LAST:
                return found
    finally:
        os.close(fd)


def occupied_bytes(files: Iterable[Path]) -> int:
    """Return how many bytes of their device the data of `files` occupy together."""
    extents = sorted(extent for path in files for extent in file_extents(path))
    total = reached = 0
    for start, end in extents:
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total
