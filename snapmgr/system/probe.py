"""Checks that a file system answers and takes a file: on a frozen or hung one every change hangs.

No signal reaches a hanging process. Therefore a child tries a change, and the parent waits with a timeout. The child
holds no lock, no socket and no folder; a hanging child ends by itself when the file system recovers.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.contract.errors import StorageError
from snapmgr.contract.units import format_duration, format_size
from snapmgr.system.blockdev import mount_id_of, read_mounts
from snapmgr.system.files import space_hint
from snapmgr.system.host import ends_by, keep_only, signals_held

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapmgr.contract.records import Mount, Pool

# btrfs blocks all changes while it commits much dirty data: seconds on a slow disk.
ANSWER_S = 15.0
# More than the manifest of a run needs, and more inodes than its folder, records and temporary files.
_RUN_BYTES = 64 << 10
_RUN_INODES = 16
# A run asks before each step that changes something, and many jobs may have one file system.
_ASK_AGAIN_S = 0.25
_answered: dict[str, float] = {}
"""When each file system answered last (time.monotonic())."""
_hanging: dict[str, int] = {}
"""The hanging child of each file system; one is enough."""


def require_answer(path: str) -> None:
    """Raise StorageError if a small change on the file system of the folder `path` does not return in `ANSWER_S`.

    One that has just answered this process (0.25 s) is not asked again.

    The child opens an unnamed file there, which leaves nothing. For FUSE, which cannot be frozen, it only asks for the
    size, as JuiceFS would create and remove a named file, which changes the folder's times. Any answer is good, also
    "read-only": the call that needs the storage reports its errors.
    """
    try:
        file_system, fuse = _file_system(path)
    except OSError:
        return
    if time.monotonic() < _answered.get(file_system, float("-inf")) + _ASK_AGAIN_S:
        return
    pid, deadline = _hanging.pop(file_system, None), time.monotonic()
    if pid is None:
        pid = _start(path, changing=not fuse)
        deadline += ANSWER_S
    if not ends_by(pid, deadline):
        _hanging[file_system] = pid
        raise StorageError(
            f"the file system at {path} did not answer within {format_duration(ANSWER_S)}: "
            f"a small change there hangs (process {pid})",
            hint=f"if it is frozen: fsfreeze -u {path}; else see /proc/{pid}/stack and the kernel log",
        )
    _answered[file_system] = time.monotonic()


def _file_system(path: str) -> tuple[str, bool]:
    """Return what tells the file system that holds a folder from others, and whether it is one of FUSE."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        device = os.fstat(fd).st_dev
        mount_id = mount_id_of(fd)
    finally:
        os.close(fd)
    mount = next((one for one in read_mounts() if one.id == mount_id), None)
    if mount is not None and mount.fs_type == "btrfs":
        return mount.source, False  # each subvolume has a device number of its own
    return str(device), mount is not None and mount.fs_type.startswith("fuse.")


def require_pools_answer(pools: Iterable[Pool], mounts: tuple[Mount, ...]) -> None:
    """Do the same for each pool in `pools` that is mounted, given the mount table; others cannot be frozen."""
    for pool in dict.fromkeys(pools):
        path = _folder_of(pool, mounts)
        if path is not None:
            require_answer(path)


def require_writable(path: Path) -> None:
    """Raise StorageError if the records of a run could not be written in `path`; a missing folder is still to be made.

    It tries that with an unnamed file, which leaves nothing. Without the right to write it reads how much is free.
    Raises StorageError also as `require_answer`.
    """
    folder = path.absolute()
    while not os.path.isdir(folder):
        folder = folder.parent
    require_answer(str(folder))
    try:
        permitted = _try_writing(folder)
        room = os.statvfs(folder)
    except OSError as error:
        why = f"{error.strerror}"
        hint = f"see lsattr -d {folder}, and the kernel log"
        if space_hint(error) is not None:
            why += _free(folder)
            hint = "make room on its file system" + (", or raise the quota" if error.errno == errno.EDQUOT else "")
        elif error.errno == errno.EROFS:
            hint = "mount its file system writable; the kernel log says whether an error made it read-only"
        raise StorageError(f"cannot write to {folder}: {why}", hint=hint) from None
    # btrfs has no fixed number of inodes, and reports 0 of 0.
    few = bool(room.f_files) and room.f_ffree < _RUN_INODES
    if few or (not permitted and room.f_blocks and room.f_bfree * room.f_frsize < _RUN_BYTES):
        what = f"too little is free in {folder} for the records of a run{_free(folder)}"
        raise StorageError(what, hint="make room on its file system")


def _try_writing(folder: Path) -> bool:
    """Write and drop as much as a run needs; return False without the right to. Raises OSError."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        try:
            fd = os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            # NFS and most of FUSE. After a kill before the unlink, doctor takes the name for an unfinished file.
            named = folder / f".room.{os.getpid()}"
            fd = os.open(named, flags | os.O_CREAT | os.O_EXCL, 0o600)
            named.unlink()
    except PermissionError:
        if os.geteuid() == 0:
            raise
        return False
    with os.fdopen(fd, "wb") as file:
        os.posix_fallocate(fd, 0, _RUN_BYTES)
        file.write(bytes(_RUN_BYTES))
    return True


def _free(folder: Path) -> str:
    with suppress(OSError):
        room = os.statvfs(folder)
        inodes = f" and {room.f_ffree} inodes" if room.f_files else ""
        return f" (free: {format_size(room.f_bfree * room.f_frsize)}{inodes})"
    return ""


def _folder_of(pool: Pool, mounts: tuple[Mount, ...]) -> str | None:
    """Return a folder in the pool: itself, where it was last seen, or where its device is mounted."""
    for place in (pool.id, pool.hint):
        with suppress(OSError):
            if not place.startswith("/"):
                continue
            found = os.stat(place)
            if stat.S_ISDIR(found.st_mode):
                return place
            if stat.S_ISBLK(found.st_mode):
                device = os.path.realpath(place)
                return next((one.point for one in mounts if os.path.realpath(one.source) == device), None)
    return None


def _start(path: str, *, changing: bool) -> int:
    with signals_held():
        pid = os.fork()
        if pid == 0:
            try:
                # Keep no mount busy.
                os.chdir("/")
                keep_only(set())
                if changing:
                    os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                else:
                    os.statvfs(path)
            finally:
                os._exit(0)
    return pid
