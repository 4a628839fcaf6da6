"""Loop devices: made so that the kernel takes them down when nobody has them open, and released by their ioctl."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.api import StorageError, attach_loop

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSFS = Path("/sys")
_LOOP_CLR_FD = 0x4C01


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop device that has a file."""

    path: str
    file: str
    """Path of its file as the kernel has it, without the " (deleted)" of one that is gone."""


@contextmanager
def configured(file_fd: int, name: str) -> Iterator[str]:
    """Yield the path of a fresh loop device on an open file.

    It lives as long as anybody has it open: us in this context, and a device-mapper device that was made on it. So no
    crash leaves one. Direct I/O is used where the file's file system can do it: the data are cached above already.
    `name` is told to people by ``losetup``. Raises MissingRequirementError without the right or loop devices,
    StorageError.
    """
    loop_fd, path = attach_loop(file_fd, name)
    try:
        yield path
    finally:
        os.close(loop_fd)


def on_file(folder: str, name: str) -> tuple[Loop, ...]:
    """Return the loop devices whose file is, or was, `name` in `folder` (a real path)."""
    return tuple(loop for loop in loops() if loop.file == os.path.join(folder, name))


def loops() -> tuple[Loop, ...]:
    """Return all loop devices that have a file."""
    found = []
    for entry in sorted((SYSFS / "block").glob("loop*/loop/backing_file")):
        with suppress(OSError):
            file = os.fsdecode(entry.read_bytes().rstrip(b"\n")).removesuffix(" (deleted)")
            found.append(Loop(path=f"/dev/{entry.parts[-3]}", file=file))
    return tuple(found)


def release(loop: Loop) -> None:
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
