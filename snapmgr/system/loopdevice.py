"""Attaches loop devices to open files by ioctls (linux/loop.h); a device ends when nobody has it open any more."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from snapmgr.contract.errors import MissingRequirementError, StorageError

SYSFS = Path("/sys")
_CONTROL = "/dev/loop-control"
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CLR_FD = 0x4C01
_LOOP_CONFIGURE = 0x4C0A  # since Linux 5.8
_AUTOCLEAR = 4
_DIRECT_IO = 16
# linux/fs.h
_BLKROSET = 0x125D
# struct loop_config: file, block size, struct loop_info64 (device, inode, rdevice, offset, size limit; number, three
# fields of encryption, of which the last is lo_flags; file name, encryption's name and key, init[2]), reserved[8].
_CONFIG = struct.Struct("=II5Q4I64s64s32s2Q8Q")
_NAME_BYTES = 63
_TRIES = 20


class Loop(Struct, frozen=True, kw_only=True):
    """A loop device that has a file."""

    path: str
    file: str
    """Path of its file as the kernel has it, without the " (deleted)" of a file that was removed."""


def loops() -> tuple[Loop, ...]:
    """Return all loop devices that have a file."""
    found = []
    for entry in sorted((SYSFS / "block").glob("loop*/loop/backing_file")):
        with suppress(OSError):
            file = os.fsdecode(entry.read_bytes().rstrip(b"\n")).removesuffix(" (deleted)")
            found.append(Loop(path=f"/dev/{entry.parts[-3]}", file=file))
    return tuple(found)


def release_loop(loop: Loop) -> None:
    """Take the file from a loop device, now or when its last user closes it; idempotent. Raises StorageError."""
    try:
        fd = os.open(loop.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _LOOP_CLR_FD)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ENOENT):  # it has none any more
            raise StorageError(f"cannot release {loop.path} ({loop.file}): {error.strerror}") from None


def attach_loop(file_fd: int, name: str, *, block_bytes: int = 0) -> tuple[int, str]:
    """Return a descriptor, open for writing, and the path of a fresh loop device on an open file.

    It lives as long as anybody has it open: us, who mounted it, a device-mapper device that was made on it. Direct I/O
    is used where the file's file system can do it in blocks of `block_bytes` (0: of 512). ``losetup``
    prints `name`. Raises MissingRequirementError without the privilege or loop devices, StorageError.
    """
    try:
        return _attached(file_fd, name, block_bytes)
    except (PermissionError, FileNotFoundError) as error:
        raise MissingRequirementError(
            f"cannot create a loop device: {error.strerror} ({error.filename or _CONTROL})",
            hint="modprobe loop; run as root",
        ) from None
    except OSError as error:
        raise StorageError(f"cannot create a loop device: {error.strerror}", hint="see: losetup, dmesg") from None


def _attached(file_fd: int, name: str, block_bytes: int) -> tuple[int, str]:
    flags = (0, 0, 0, _AUTOCLEAR | _DIRECT_IO)
    label = name.encode()[:_NAME_BYTES]
    config = _CONFIG.pack(file_fd, block_bytes, *(0,) * 5, *flags, label, b"", b"", *(0,) * 2, *(0,) * 8)
    control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            loop_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop_fd, _LOOP_CONFIGURE, config)
                # Its last user may have left it read-only ("blockdev --setro"): that outlives its file.
                fcntl.ioctl(loop_fd, _BLKROSET, struct.pack("=i", 0))
                return loop_fd, path
            except BaseException as error:
                os.close(loop_fd)
                # Another process took it first.
                if not (isinstance(error, OSError) and error.errno == errno.EBUSY):
                    raise
    finally:
        os.close(control)
    raise StorageError(f"other processes took every free loop device, {_TRIES} times", hint="try again")
