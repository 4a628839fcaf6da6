"""A file system for crash trials that can be put back as it was, or lose its power, within milliseconds.

Its image lies on an XFS, so that a copy of it shares the blocks and is of one instant (FICLONE), also while the file
system is mounted and written to. Such a copy holds what had reached the device: what was written and not synced is
missing, as after a power cut. It shows neither writes that the device had accepted and would lose, nor writes in
another order: whether btrfs, XFS and ext4 flush the device where they must is not ours to test.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import time
from typing import TYPE_CHECKING

from support.storage import unmount_device

if TYPE_CHECKING:
    from pathlib import Path

    from support.storage import LoopFileSystem

_BLKFLSBUF = 0x1261
_PATIENCE_S = 120.0


class Disk:
    """A mounted file system whose image can be copied and exchanged."""

    def __init__(self, system: LoopFileSystem) -> None:
        self.system = system
        self.point = system.point

    def copy(self, name: str) -> None:
        """Keep what has reached the device by now as `name`; the file system may be in use."""
        _share(self.system.image, self.system.image.with_name(name))

    def unmount(self) -> None:
        """Unmount all that is mounted from it; nobody may use it."""
        unmount_device(self.system.device)
        self._forget()

    def _forget(self) -> None:
        """Return when the device is in no use and nothing of it is in memory.

        A mount namespace that was copied meanwhile keeps the file system mounted: mounting would show the old one.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fd = os.open(self.system.device, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
                continue
            try:
                fcntl.ioctl(fd, _BLKFLSBUF)
            finally:
                os.close(fd)
            return

    def mount(self, name: str) -> None:
        """Put the copy `name` in the place of the unmounted file system and mount it."""
        _share(self.system.image.with_name(name), self.system.image)
        self._forget()
        argv = ["mount", "-t", self.system.fs_type, self.system.device, str(self.point)]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


def _share(source: Path, copy: Path) -> None:
    argv = ["cp", "--reflink=always", "--no-preserve=all", str(source), str(copy)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
