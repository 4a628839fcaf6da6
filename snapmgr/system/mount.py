"""Mounts file systems: private mounts for backends, and scratch mounts for users.

A private mount exists only as a descriptor, in no mount table, so it ends with the process, also after SIGKILL. Scratch
mounts are nosuid and nodev, and are placed on exactly the folder that was checked.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import InUseError, NotFoundError, StorageError
from snapmgr.system import mountapi
from snapmgr.system.blockdev import mount_id_of, read_mounts
from snapmgr.system.paths import lies_in
from snapmgr.system.trust import exchangeable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.contract.records import Attachment, Mount

_POINT_MODE = 0o700
_PARENT_MODE = 0o755
_MAX_LINKS = 40
_HOLDERS_SHOWN = 8
_AGAIN_S = 0.05


class DetachedMount(Struct, frozen=True, kw_only=True):
    """A `PrivateMount`: `fd` is open for reading (so that ioctls and syncfs work), `path` is the mount's root."""

    fd: int

    @property
    def path(self) -> str:
        """Valid in this process and in forked children that keep `fd`, but not in programs that we start."""
        return f"/proc/self/fd/{self.fd}"


class KernelMounter:
    """The `Mounter` that backends get; see `snapmgr.api.Mounter` for the contract."""

    def __init__(self) -> None:
        self._sharer: int | None = None
        self._shared: dict[tuple[str, str, tuple[str, ...]], DetachedMount] = {}
        self._mounts = ExitStack()

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Until the context ends, let each private mount stay, for the next one of the same source and options.

        For the steps of one short run: as long as such a mount exists, its file system stays busy. Forked children make
        mounts of their own, as they may have closed our descriptors.
        """
        self._sharer = os.getpid()
        try:
            with self._mounts:
                yield
        finally:
            self._sharer = None
            self._shared.clear()

    @contextmanager
    def private(self, source: str, fs_type: str, options: tuple[str, ...] = ()) -> Iterator[DetachedMount]:
        """Mount `source` detached from the mount tree until the context ends.

        Always nosuid and nodev; noatime, as reading must not write. Raises MissingRequirementError without
        CAP_SYS_ADMIN or where the kernel lacks the file system, StorageError with the kernel's words otherwise.
        """
        key = (source, fs_type, options)
        if self._sharer != os.getpid():
            with self._mounted(*key) as alone:
                yield alone
            return
        if key not in self._shared:
            self._shared[key] = self._mounts.enter_context(self._mounted(*key))
        yield self._shared[key]

    @contextmanager
    def _mounted(self, source: str, fs_type: str, options: tuple[str, ...]) -> Iterator[DetachedMount]:
        with mountapi.new_mount(source, fs_type, options, unseen=True) as mount_fd:
            # fsmount(2) returns an O_PATH descriptor, which does not allow ioctl(2) and syncfs(2).
            fd = os.open(f"/proc/self/fd/{mount_fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield DetachedMount(fd=fd)
            finally:
                os.close(fd)

    def mounts(self) -> tuple[Mount, ...]:
        """Return the current mount table of this process."""
        return read_mounts()


def mount_device(device: str, point: str, *, fs_type: str, options: tuple[str, ...] = ()) -> None:
    """Mount `device` at `point`, nosuid and nodev; it stays until `unmount`.

    A missing `point` is created (0700, its parents 0755). Raises StorageError if it is not an empty folder, is a
    symlink or a mount point, or if the kernel refuses; MissingRequirementError without CAP_SYS_ADMIN.
    """
    with _point(point) as point_fd, mountapi.new_mount(device, fs_type, options) as mount_fd:
        _put(mount_fd, point_fd, f"mount {device} at {point}")


def bind(directory: str, point: str, *, read_only: bool) -> None:
    """Bind-mount `directory` (without mounts below it) at `point`, nosuid and nodev. Errors as `mount_device`."""
    attributes = mountapi.ATTRIBUTES["nosuid"] | mountapi.ATTRIBUTES["nodev"]
    if read_only:
        attributes |= mountapi.ATTRIBUTES["ro"]
    what = f"bind {directory} to {point}"
    with _point(point) as point_fd, mountapi.cloned_tree(directory) as mount_fd:
        try:
            mountapi.set_attributes(mount_fd, attributes)
        except OSError as error:
            raise mountapi.refused(error, what) from None
        _put(mount_fd, point_fd, what)


def mount_attachment(attachment: Attachment, point: str, *, writable: bool) -> None:
    """Mount a backend's attachment at `point`: its device, or its folder as a bind mount. Errors as `mount_device`."""
    if attachment.directory is not None:
        bind(attachment.directory, point, read_only=not writable)
    elif attachment.device is not None:
        options = attachment.options if writable else (*attachment.options, "ro")
        mount_device(attachment.device, point, fs_type=attachment.fs_type or "auto", options=options)
    else:
        raise StorageError("the backend attached neither a folder nor a device")


@contextmanager
def mounted(attachment: Attachment, point: str, *, writable: bool, patience_s: float = 0.0) -> Iterator[Path]:
    """`mount_attachment` until the context ends, which unmounts it and removes the mount point."""
    mount_attachment(attachment, point, writable=writable)
    try:
        yield Path(point)
    finally:
        unmount(point, patience_s=patience_s)
        remove_point(point)


def unmount(point: str, *, mount_id: int | None = None, patience_s: float = 0.0) -> None:
    """Unmount the file system at `point`, never lazily, so that afterwards nobody uses it.

    With `mount_id` only if it is that mount (`Mount.id`), as others may replace folders above that belong to them.
    While it is in use, it is tried again for `patience_s`. Raises InUseError that names who uses it, NotFoundError if
    nothing (or another mount) is there, MissingRequirementError without root, StorageError for another user's symlink
    in the path.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _unmount(point, mount_id)
        except InUseError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_AGAIN_S)


def _unmount(point: str, mount_id: int | None) -> None:
    try:
        # Once the folder above is open, nobody can redirect us: a mount point cannot be renamed or removed.
        parent, name = _open_parent(point, make=False)
        try:
            if mount_id is not None and _mount_id_at(name, parent) != mount_id:
                raise NotFoundError(
                    f"the mount at {point} is not the one that snapmgr made", hint="see: snapmgr mount --list"
                )
            mountapi.take_down(f"/proc/self/fd/{parent}/{name}")
        finally:
            os.close(parent)
    except OSError as error:
        if error.errno == errno.EBUSY:
            who = holders(os.path.realpath(point), read_mounts())
            raise InUseError(
                f"{point} is in use by {', '.join(who)}" if who else f"{point} is in use (by no visible process)",
                hint="end these, or leave the folder, and try again"
                if who
                else "look for processes in other namespaces",
            ) from None
        if error.errno in {errno.EINVAL, errno.ENOENT}:
            raise NotFoundError(f"nothing is mounted at {point}", hint="snapmgr list shows what is mounted") from None
        raise mountapi.refused(error, f"unmount {point}") from None


def _mount_id_at(name: str, parent: int) -> int | None:
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        return mount_id_of(fd)
    finally:
        os.close(fd)


def require_own(folder: Path) -> None:
    """Raise StorageError if others could replace entries of `folder`, as mount points there are used by name later.

    A world-writable folder with the sticky bit, such as /tmp, is accepted. A missing one is created by us later.
    """
    way = exchangeable(folder)
    if way is not None:
        raise StorageError(
            f"others could replace the folder for scratch mounts {folder}: {way}", hint="set another scratch_dir"
        )
    with suppress(FileNotFoundError):
        found = folder.stat()
        loose = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if loose or found.st_uid not in {0, os.geteuid()}:
            raise StorageError(
                f"others could change the folder for scratch mounts {folder} (owner {found.st_uid}, "
                f"mode {stat.S_IMODE(found.st_mode):04o})",
                hint=f"chown {os.geteuid()} {folder} && chmod 0755 {folder}, or set another scratch_dir",
            )


def remove_point(point: str) -> None:
    """Remove the empty folder of a scratch mount; nothing happens if it is gone or not empty."""
    with suppress(OSError, StorageError):
        parent, name = _open_parent(point, make=False)
        try:
            os.rmdir(name, dir_fd=parent)
        finally:
            os.close(parent)


def _put(mount_fd: int, point_fd: int, what: str) -> None:
    try:
        mountapi.put(mount_fd, point_fd)
    except OSError as error:
        raise mountapi.refused(error, what) from None


@contextmanager
def _point(point: str) -> Iterator[int]:
    """Yield a descriptor of the empty folder `point`.

    If it is missing it is created, and removed if the mount fails.
    """
    fd, made = _open_point(point)
    try:
        yield fd
    except BaseException:
        if made:
            remove_point(point)
        raise
    finally:
        os.close(fd)


def _open_point(point: str) -> tuple[int, bool]:
    if not os.path.isabs(point):
        raise StorageError(f"the mount point {point} is not an absolute path", hint="write an absolute path: /mnt/x")
    (parent, name), made = _open_parent(point, make=True), False
    try:
        with suppress(FileExistsError):
            os.mkdir(name, _POINT_MODE, dir_fd=parent)
            made = True
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError as error:
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:
            message = f"{point} is a symlink or not a folder, so nothing was mounted there"
            raise StorageError(message, hint="name a folder that does not exist yet") from None
        raise StorageError(f"cannot use the mount point {point}: {error.strerror}") from None
    finally:
        os.close(parent)
    try:
        _require_unused(fd, point)
    except BaseException:
        os.close(fd)
        raise
    return fd, made


def _require_unused(fd: int, point: str) -> None:
    visible = os.readlink(f"/proc/self/fd/{fd}")
    if any(mount.point == visible for mount in read_mounts()):
        raise StorageError(f"something is already mounted at {point}", hint="unmount it, or name another folder")
    if os.listdir(fd):
        message = f"the folder {point} is not empty, and the mount would hide its contents"
        raise StorageError(message, hint="name an empty folder, or one that does not exist yet")


def _open_parent(point: str, *, make: bool) -> tuple[int, str]:
    """Open the parent folder of `point` step by step; return its descriptor and the point's name in it.

    With `make` missing folders are created, and failures are StorageErrors; else OSErrors. A symlink in the path is
    followed only if it belongs to root or us, as anybody can create one in /tmp.
    """
    *steps, name = os.path.normpath(point).split("/")[1:]
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd, links = os.open("/", flags), 0
    try:
        while steps:
            step = steps.pop(0)
            try:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(step, _PARENT_MODE, dir_fd=fd)
                found = os.stat(step, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISLNK(found.st_mode):
                    links += 1
                    if found.st_uid not in {0, os.geteuid()} or links > _MAX_LINKS:
                        message = f"{step} in the path of {point} is another user's symlink, which is not followed"
                        raise StorageError(message, hint="name a folder by its real path")
                    aim = os.readlink(step, dir_fd=fd)
                    steps = [part for part in aim.split("/") if part not in {"", "."}] + steps
                    following = os.open("/", flags) if aim.startswith("/") else os.dup(fd)
                else:
                    following = os.open(step, flags, dir_fd=fd)
            except OSError as error:
                if not make:
                    raise
                raise StorageError(f"cannot create the folder of {point}, at {step}: {error.strerror}") from None
            os.close(fd)
            fd = following
    except BaseException:
        os.close(fd)
        raise
    return fd, name


def holders(point: str, mounts: tuple[Mount, ...]) -> tuple[str, ...]:
    """Given a resolved mount point, return texts such as "mariadbd (pid 812, open file ibdata1)", at most eight.

    Processes in other mount namespaces may see other paths and are not found then; without root neither are processes
    of other users.
    """
    found: list[str] = []
    found += [f"the mount at {mount.point}" for mount in mounts if mount.point.startswith(point.rstrip("/") + "/")]
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            if lies_in(backing.read_text().strip(), point):
                found.append(f"the loop device /dev/{backing.parts[3]}")
    with suppress(OSError):
        lines = Path("/proc/swaps").read_text().splitlines()[1:]
        found += [f"the swap file {line.split()[0]}" for line in lines if lies_in(line.split()[0], point)]
    for process in Path("/proc").glob("[0-9]*"):
        if len(found) >= _HOLDERS_SHOWN:
            break
        how = next(_uses(process, point), None)
        if how is not None:
            with suppress(OSError):
                found.append(f"{(process / 'comm').read_text().strip()} (pid {process.name}, {how})")
    return tuple(found[:_HOLDERS_SHOWN])


def _uses(process: Path, point: str) -> Iterator[str]:
    # Only readlink: stat through these links could hang on a dead network file system.
    for name, text in (("cwd", "working directory"), ("root", "root directory"), ("exe", "program")):
        with suppress(OSError):
            if lies_in(os.readlink(process / name), point):
                yield text
    with suppress(OSError):
        for number in os.listdir(process / "fd"):
            with suppress(OSError):
                path = os.readlink(process / "fd" / number)
                if lies_in(path, point):
                    yield f"open file {os.path.basename(path)}"
    with suppress(OSError):
        for line in (process / "maps").read_text(errors="replace").splitlines():
            # proc(5): range, rights, offset, device, inode, path.
            for path in line.split(maxsplit=5)[5:]:
                if lies_in(path, point):
                    yield f"mapped file {os.path.basename(path)}"
