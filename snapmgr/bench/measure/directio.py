"""Checks whether O_DIRECT writes bypass the page cache of a file system."""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path

_PROBE_BYTES = 4 << 20
_TRIES = 5
_VMSTAT = Path("/proc/vmstat")


def buffers_direct_writes(folder: Path) -> bool | None:
    """Return whether direct writes in a folder are buffered; None if O_DIRECT is refused.

    btrfs buffers them for files with checksums since Linux 6.15, because the page might change while its checksum is
    computed. It drops the pages afterwards, so only the kernel's count of pages that became dirty shows it (vmstat's
    nr_dirtied, of the whole machine: hence the least of some tries). Raises OSError for anything but a refusal.
    """
    path = folder / f".probe-{secrets.token_hex(4)}"
    pages = _PROBE_BYTES // mmap.PAGESIZE
    try:
        return min(_dirtied(path) for _ in range(_TRIES)) >= pages / 2
    except _RefusedError:
        return None
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


class _RefusedError(Exception):
    """The file system does not support O_DIRECT."""


def _dirtied(path: Path) -> int:
    """Return the number of pages on the machine that became dirty while the probe was written."""
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _RefusedError from error
    try:
        # Anonymous maps are aligned as O_DIRECT requires.
        with mmap.mmap(-1, _PROBE_BYTES) as data:
            # Absent pages make btrfs give up direct I/O for any file.
            data.write(os.urandom(_PROBE_BYTES))
            before = _counted()
            os.pwrite(fd, data, 0)
            return _counted() - before
    finally:
        os.close(fd)


def _counted() -> int:
    for line in _VMSTAT.read_text(encoding="ascii").splitlines():
        if line.startswith("nr_dirtied "):
            return int(line.split()[1])
    return 0
