"""Turns a file into a block device, for machines without a spare disk; it disappears with this process.

The file has no name while it holds data: it is opened without one, or loses it while it is empty. So the kernel frees
it when the last descriptor is closed. The loop device detaches itself ("autoclear") at the same moment.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snapmgr.bench.device.backing import backing
from snapmgr.contract.errors import ConfigError, MissingRequirementError, StorageError
from snapmgr.contract.units import format_size
from snapmgr.system.blockdev import find_target
from snapmgr.system.loopdevice import attach_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.contract.backend import Runner

MIB = 1 << 20
_NAME = "snapmgr-bench"
# linux/fs.h
_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_SETFLAGS = 0x40086602
_FS_NOCOW_FL = 0x00800000
_FALLOC_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
_MARGIN_BYTES = 256 * MIB
_MARGIN_SHARE = 20
_CHUNK_BYTES = 8 * MIB
_FLUSH_BYTES = 256 * MIB
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class LoopTarget:
    """A loop device of our own on a file without a name; made by `loop_target`."""

    kind: Literal["loop", "device"] = "loop"
    discard: bool = False

    def __init__(self, *, device: str, folder: Path, file_fd: int, facts: dict[str, Any], runner: Runner) -> None:
        self.device = device
        self.size_bytes: int = facts["size_bytes"]
        self.title = f"{device}, a file of {format_size(self.size_bytes)} in {folder}"
        self._file_fd = file_fd
        self._facts = facts
        self._runner = runner

    def check(self) -> None:
        """Fill holes that a discard made. Raises StorageError unless the loop device still has our file."""
        own = os.fstat(self._file_fd)
        try:
            found = backing(self.device)
        except OSError as error:
            raise StorageError(
                f"{self.device} is detached from its file: {error.strerror}", hint="see: losetup, dmesg"
            ) from None
        if (found.device, found.inode) != (own.st_dev, own.st_ino):
            raise StorageError(
                f"{self.device} is attached to another file than the run's own: nothing was formatted",
                hint="it was detached by somebody else; start the run again",
            )
        _reserve(self._file_fd, self.size_bytes)

    def blank(self) -> None:
        """Remove all signatures. Discards nothing: the file keeps its blocks, so all samples find the same ones."""
        self.check()
        self._runner.run(["wipefs", "--quiet", "--all", self.device])

    def made(self) -> None:
        """Do nothing: the file disappears with this process."""

    def facts(self) -> dict[str, Any]:
        """Return its description for the samples: see `docs/reference/benchmark-devices.md`."""
        return self._facts | {"allocated_bytes": os.fstat(self._file_fd).st_blocks * 512}


@contextmanager
def loop_target(
    folder: Path, size_bytes: int, *, runner: Runner, written: bool, tell: Callable[[str], None]
) -> Iterator[LoopTarget]:
    """Yield a loop device of `size_bytes` on a preallocated file in `folder`; both go with the context or the process.

    `written`: write the file's blocks once. Otherwise the file system below would convert each at its first use, which
    costs storage that writes elsewhere (copy-on-write) more than storage that writes in place. Raises ConfigError
    without room, MissingRequirementError without permission or loop devices, StorageError.
    """
    fs_type = require_room(folder, size_bytes)
    file_fd = _nameless(folder)
    try:
        nocow = _without_cow(file_fd)
        try:
            os.ftruncate(file_fd, size_bytes)
            preallocated = _reserve(file_fd, size_bytes)
            if written or not preallocated:
                tell(f"writing the {format_size(size_bytes)} of the loop device's file once")
                _write_once(file_fd, size_bytes)
        except OSError as error:
            raise StorageError(
                f"cannot make a file of {format_size(size_bytes)} in {folder}: {error.strerror}",
                hint="choose a smaller SIZE or another FOLDER: --on loop:SIZE:FOLDER",
            ) from None
        loop_fd, device = _attached(file_fd)
        try:
            queue = Path("/sys/block", os.path.basename(device))
            facts: dict[str, Any] = {
                "kind": "loop",
                "size_bytes": size_bytes,
                "file_system": fs_type,
                "direct_io": (queue / "loop/dio").read_text().strip() == "1",
                "block_bytes": int((queue / "queue/logical_block_size").read_text()),
                "nocow": nocow,
                "written": written or not preallocated,
            }
            yield LoopTarget(device=device, folder=folder, file_fd=file_fd, facts=facts, runner=runner)
        finally:
            os.close(loop_fd)
    finally:
        os.close(file_fd)


def require_room(folder: Path, size_bytes: int) -> str:
    """Return the type of the folder's file system. Raises ConfigError unless a file fits there with a margin."""
    fs_type = find_target(str(folder)).mount.fs_type
    margin = max(_MARGIN_BYTES, size_bytes // _MARGIN_SHARE)
    free = os.statvfs(folder)
    places = [(free.f_bavail * free.f_frsize, f"are free in {folder}")]
    if fs_type in _IN_MEMORY:
        places.append((_available_memory(), f"of memory are available, in which {folder} lies ({fs_type})"))
    room, where = min(places)
    if room < size_bytes + margin:
        raise ConfigError(
            f"there is no space for a file of {format_size(size_bytes)}: {format_size(room)} {where}, "
            f"and {format_size(margin)} must stay free",
            hint="choose a smaller SIZE or another FOLDER: --on loop:SIZE:FOLDER",
        )
    return fs_type


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except PermissionError:
        raise MissingRequirementError(
            f"permission denied: cannot make a file in {folder}", hint="run as root, or name another FOLDER"
        ) from None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise ConfigError(
                f"cannot make a file in {folder}: {error.strerror}", hint="name another FOLDER: --on loop:SIZE:FOLDER"
            ) from None
    # On a file system without O_TMPFILE (NFS, some FUSE) the file has a name while it is empty.
    try:
        fd, name = tempfile.mkstemp(prefix=".snapmgr-bench-", dir=folder)
    except OSError as error:
        raise ConfigError(
            f"cannot make a file in {folder}: {error.strerror}", hint="name another FOLDER: --on loop:SIZE:FOLDER"
        ) from None
    os.unlink(name)
    return fd


def _without_cow(fd: int) -> bool:
    """Make btrfs write the file in place; otherwise a run would measure the file system below."""
    flags = bytearray(8)
    with suppress(OSError):
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
        (before,) = struct.unpack_from("=I", flags)
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("=Q", before | _FS_NOCOW_FL))
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
        return bool(struct.unpack_from("=I", flags)[0] & _FS_NOCOW_FL)
    return False


def _reserve(fd: int, size_bytes: int) -> bool:
    """Allocate all blocks of a file; False if the file system cannot. Raises OSError if the space is not enough.

    `os.posix_fallocate` is unsuitable: if the file system cannot allocate, it writes each block, over data.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while libc.fallocate(fd, 0, 0, size_bytes) != 0:
        number = ctypes.get_errno()
        if number in _FALLOC_UNSUPPORTED:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def _write_once(fd: int, size_bytes: int) -> None:
    zeros = memoryview(bytes(_CHUNK_BYTES))
    for start in range(0, size_bytes, _CHUNK_BYTES):
        end = min(start + _CHUNK_BYTES, size_bytes)
        at = start
        while at < end:
            at += os.pwrite(fd, zeros[: end - at], at)
        # This limits dirty data and the cache.
        if end % _FLUSH_BYTES == 0 or end == size_bytes:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, end, os.POSIX_FADV_DONTNEED)


def _attached(file_fd: int) -> tuple[int, str]:
    """Return a read-only descriptor of a fresh loop device on a file, which keeps it alive, and its path."""
    with ExitStack() as opened:
        loop_fd, device = attach_loop(file_fd, _NAME)
        opened.callback(os.close, loop_fd)
        try:
            # The disk below has blocks of 4,096 bytes: direct I/O needs blocks of that size.
            if Path(f"/sys/block/{os.path.basename(device)}/loop/dio").read_text().strip() != "1":
                opened.close()
                loop_fd, device = attach_loop(file_fd, _NAME, block_bytes=4096)
                opened.callback(os.close, loop_fd)
            # Not kept open for writing: a kernel may refuse to mount a device that is open for writing.
            return os.open(device, os.O_RDONLY | os.O_CLOEXEC), device
        except OSError as error:
            raise StorageError(f"{device} has disappeared: {error.strerror}", hint="see: losetup, dmesg") from None
