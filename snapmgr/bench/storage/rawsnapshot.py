"""Takes a snapshot by the storage's own call, without a backend, for comparison with the backend's snapshot.

For btrfs and reflinks it uses the system call itself and the usual program; for LVM there is only the program. These
snapshots lie beside the volume, have no mark of ours, and are removed by the same call.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import time
from typing import TYPE_CHECKING, Protocol

from snapmgr.contract.errors import StorageError
from snapmgr.system.blockdev import find_target
from snapmgr.system.kernel import clone_file

if TYPE_CHECKING:
    from pathlib import Path

    from snapmgr.bench.model import Workbench

# linux/btrfs.h: BTRFS_IOC_SNAP_CREATE_V2 with BTRFS_SUBVOL_RDONLY, and BTRFS_IOC_SNAP_DESTROY.
_SNAP_CREATE_V2 = 0x50009417
_SNAP_DESTROY = 0x5000940F
_READ_ONLY = 1 << 1
_CREATE = struct.Struct("=qQQ32x4040s")
_DESTROY = struct.Struct("=q4088s")
_TIMEOUT_S = 600.0


class RawWay(Protocol):
    """One way to take a snapshot of a workbench's volume."""

    name: str
    """"call" or "program"."""
    title: str
    """The name of the call, for the report: "btrfs subvolume snapshot"."""

    def create(self, name: str) -> float:
        """Take one; return the seconds. Raises OSError or CommandError."""

    def delete(self, name: str) -> float:
        """Remove it; return the seconds until its name is gone."""


def raw_ways(bench: Workbench) -> tuple[RawWay, ...]:
    """Return the ways that the volume's storage offers; empty if it offers nothing to compare with."""
    match bench.stack.backend:
        case "btrfs":
            return _BtrfsCall(bench), _BtrfsProgram(bench)
        case "reflink":
            return _ReflinkCall(bench), _ReflinkProgram(bench)
        case "lvm":
            return (_LvmProgram(bench),)
    return ()


class _Beside:
    """The name of the copy, in the volume's parent folder."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._path = bench.path
        self._folder = bench.path.parent

    def _to(self, name: str) -> Path:
        return self._folder / name


class _BtrfsCall(_Beside):
    name = "call"
    title = "ioctl BTRFS_IOC_SNAP_CREATE_V2"

    def create(self, name: str) -> float:
        source = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # A bytearray: immutable buffers are limited to 1,024 bytes.
            arguments = bytearray(_CREATE.pack(source, 0, _READ_ONLY, os.fsencode(name)))
            start = time.monotonic()
            fcntl.ioctl(folder, _SNAP_CREATE_V2, arguments)
            return time.monotonic() - start
        finally:
            os.close(folder)
            os.close(source)

    def delete(self, name: str) -> float:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            arguments = bytearray(_DESTROY.pack(0, os.fsencode(name)))
            start = time.monotonic()
            fcntl.ioctl(folder, _SNAP_DESTROY, arguments)
            return time.monotonic() - start
        finally:
            os.close(folder)


class _BtrfsProgram(_Beside):
    name = "program"
    title = "btrfs subvolume snapshot -r"

    def create(self, name: str) -> float:
        return _timed(self._bench, "btrfs", "subvolume", "snapshot", "-r", str(self._path), str(self._to(name)))

    def delete(self, name: str) -> float:
        return _timed(self._bench, "btrfs", "subvolume", "delete", str(self._to(name)))


class _ReflinkCall(_Beside):
    name = "call"
    title = "ioctl FICLONE for each file"

    def create(self, name: str) -> float:
        start = time.monotonic()
        os.mkdir(self._to(name))
        for path, folders, files in os.walk(self._path):
            copy = self._to(name) / os.path.relpath(path, self._path)
            for folder in folders:
                os.mkdir(copy / folder)
            for file in files:
                with open(os.path.join(path, file), "rb") as old, open(copy / file, "xb") as new:
                    clone_file(old.fileno(), new.fileno())
        return time.monotonic() - start

    def delete(self, name: str) -> float:
        start = time.monotonic()
        shutil.rmtree(self._to(name))
        return time.monotonic() - start


class _ReflinkProgram(_Beside):
    name = "program"
    title = "cp --archive --reflink=always"

    def create(self, name: str) -> float:
        return _timed(self._bench, "cp", "--archive", "--reflink=always", str(self._path), str(self._to(name)))

    def delete(self, name: str) -> float:
        return _timed(self._bench, "rm", "--recursive", str(self._to(name)))


class _LvmProgram:
    name = "program"
    title = "lvcreate --snapshot"

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        found = find_target(str(bench.path)).devices[0]
        # LVM's programs take a volume by this name, but not by that of its node ("/dev/dm-3").
        device = f"/dev/mapper/{found.dm_name}" if found.dm_name else found.path
        self._group, volume, pool = read_names(
            bench.run(("lvs", "--noheadings", "--separator", "|", "-o", "vg_name,lv_name,pool_lv", device)).stdout
        )
        self._origin = f"{self._group}/{volume}"
        # A classic snapshot needs its own space for all writes while it exists.
        self._room = () if pool else ("--extents", "3%ORIGIN")

    def create(self, name: str) -> float:
        return _timed(self._bench, "lvcreate", "--yes", "--snapshot", *self._room, "--name", name, self._origin)

    def delete(self, name: str) -> float:
        return _timed(self._bench, "lvremove", "--yes", f"{self._group}/{name}")


def read_names(printed: str) -> tuple[str, str, str]:
    """Given the output of lvs, return group, volume and pool ("" if the volume is not thin). Raises StorageError."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    names = lines[0].split("|") if len(lines) == 1 else []
    if len(names) != 3 or not all(names[:2]):  # noqa: PLR2004 - the columns asked for
        raise StorageError(f"lvs does not list the measured volume: {printed.strip() or 'no line'}")
    return names[0], names[1], names[2]


def _timed(bench: Workbench, *argv: str) -> float:
    start = time.monotonic()
    bench.run(argv, timeout_s=_TIMEOUT_S)
    return time.monotonic() - start
