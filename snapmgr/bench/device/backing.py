"""Finds what else uses the file, or the device, behind a loop device.

The kernel lets any number of loop devices, a swap file and a virtual machine share one file, and none of them holds the
others' device. The file is known by its device and inode number: it may have other names, or be seen at another mount.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from snapmgr.contract.records import BlockDevice

# linux/loop.h
_LOOP_GET_STATUS64 = 0x4C05
_INFO_BYTES = 232
_PROCESSES_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Backing:
    """What a loop device lies on."""

    device: int
    """Number of the file system's device, as `os.stat_result.st_dev`."""
    inode: int
    rdevice: int
    """Number of the block device, if it lies on one; otherwise 0."""

    def is_file(self, status: os.stat_result) -> bool:
        """Return whether `status` is that of this file."""
        return stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) == (self.device, self.inode)


def backing(path: str) -> Backing:
    """Return what a loop device lies on. Raises OSError if it has nothing."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = bytearray(_INFO_BYTES)
        fcntl.ioctl(fd, _LOOP_GET_STATUS64, info)
    finally:
        os.close(fd)
    device, inode, rdevice = struct.unpack_from("=3Q", info)
    return Backing(device=_number(device), inode=inode, rdevice=_number(rdevice))


def _number(huge: int) -> int:
    """Undo the kernel's huge_encode_dev: 20 bits of the minor around 12 bits of the major."""
    return os.makedev((huge >> 8) & 0xFFF, (huge & 0xFF) | ((huge >> 12) & 0xFFF00))


def file_uses(
    device: BlockDevice, uses_of: Callable[[str, str, Path, Path], Iterable[str]], *, sysfs: Path, proc: Path
) -> Iterator[str]:
    """Yield what else uses the file of a loop device, or of one below a device.

    `uses_of` returns the uses of a block device, given its number, its path, and where sysfs and proc are.
    """
    for below in device.below:
        yield from file_uses(below, uses_of, sysfs=sysfs, proc=proc)
    own = device.name
    if not (sysfs / "block" / own / "loop").exists():
        return
    try:
        file = backing(device.path)
    except OSError as error:
        yield f"what {device.path} lies on cannot be found out ({error.strerror})"
        return
    for entry in sorted((sysfs / "block").glob("loop*/loop")):
        other = entry.parent.name
        with suppress(OSError):
            if other != own and backing(f"/dev/{other}") == file:
                number = (entry.parent / "dev").read_text().strip()
                more = "; ".join(uses_of(number, f"/dev/{other}", sysfs, proc))
                yield f"/dev/{other} lies on the same file" + (f": {more}" if more else "")
    if file.rdevice:
        yield from _device_uses(file.rdevice, own, uses_of, sysfs, proc)
    else:
        yield from _other_uses(file, sysfs, proc)


def _device_uses(
    rdevice: int, own: str, uses_of: Callable[[str, str, Path, Path], Iterable[str]], sysfs: Path, proc: Path
) -> Iterator[str]:
    number = f"{os.major(rdevice)}:{os.minor(rdevice)}"
    path = f"/dev/{(sysfs / 'dev/block' / number).resolve().name}"
    for use in uses_of(number, path, sysfs, proc):
        if not use.startswith(f"the loop device /dev/{own} "):
            yield f"{path}, on which it lies: {use}"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        yield f"{path}, on which it lies, is not free ({error.strerror})"


def _other_uses(file: Backing, sysfs: Path, proc: Path) -> Iterator[str]:
    """Yield the uses of a file as swap space, for export, and by processes that write to it."""
    with suppress(OSError):
        for line in (proc / "swaps").read_text(errors="replace").splitlines()[1:]:
            path = line.split()[0].encode().decode("unicode_escape")
            if _is(path, file):
                yield f"its file is active swap space ({path})"
    config = sysfs / "kernel/config"
    exports = (*config.glob("nvmet/subsystems/*/namespaces/*/device_path"), *config.glob("target/core/*/*/udev_path"))
    for exported in exports:
        with suppress(OSError):
            path = exported.read_text(errors="replace").strip()
            if path and _is(path, file):
                yield f"its file is exported ({exported.parent})"
    yield from _writers(file, proc)


def _is(path: str, file: Backing) -> bool:
    with suppress(OSError, ValueError):
        return file.is_file(os.stat(path))
    return False


def _writers(file: Backing, proc: Path) -> Iterator[str]:
    """Yield the processes other than ours that have a file open for writing, a virtual machine for example."""
    found = 0
    for process in proc.glob("[0-9]*"):
        if process.name == str(os.getpid()) or found >= _PROCESSES_SHOWN:
            continue
        with suppress(OSError):
            for info in (process / "fdinfo").iterdir():
                with suppress(OSError, StopIteration):
                    # A stat may hang on a dead network file system: only for what has the right inode number.
                    same = _inode(info) in (None, file.inode) and _is(str(process / "fd" / info.name), file)
                    if same and writes(info):
                        name = (process / "comm").read_text().strip()
                        yield f"{name} (pid {process.name}) has its file open for writing"
                        found += 1
                        break


def _inode(info: Path) -> int | None:
    """Return the inode number of an open file; None before Linux 5.14."""
    return next((int(line.split()[1]) for line in info.read_text().splitlines() if line.startswith("ino:")), None)


def writes(info: Path) -> bool:
    """Given a file of ``/proc/PID/fdinfo``, return whether the file is open for writing."""
    flags = next(line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
