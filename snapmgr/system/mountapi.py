"""Wraps the kernel's mount system calls: fsopen, fsconfig, fsmount, open_tree, move_mount, mount_setattr.

They need Linux 5.2 (`set_attributes`: 5.12), and Debian 12's C library has no wrapper for them. They return
descriptors: a mount that is not attached anywhere ends with its last descriptor, even after SIGKILL.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.contract.errors import MissingRequirementError, SnapmgrError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

# The same on all architectures except Alpha: include/uapi/asm-generic/unistd.h.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
_FSOPEN_CLOEXEC = 1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_FSMOUNT_CLOEXEC = 1
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 0x04, 0x40
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_UMOUNT_NOFOLLOW = 8
_CAP_SYS_ADMIN = 21
_LOG_LINES = 20

ATTRIBUTES = {
    "ro": 0x01,
    "nosuid": 0x02,
    "nodev": 0x04,
    "noexec": 0x08,
    "noatime": 0x10,
    "nodiratime": 0x80,
}
"""Mount options that belong to one mount, not to the file system: MOUNT_ATTR_* of linux/mount.h."""
_NEUTRAL = frozenset({"rw", "defaults", "relatime"})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _call(number: int, *arguments: int | bytes | ctypes._Pointer[_MountAttr] | None) -> int:
    # syscall(2) is variadic: a bare Python int would be passed as a 32-bit int.
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def may_mount() -> bool:
    """Return whether this process has an effective CAP_SYS_ADMIN."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def refused(error: OSError, what: str, *, log: str = "") -> SnapmgrError:
    """Given the OSError of a mount call and "mount X at Y", return the error to raise.

    MissingRequirementError without CAP_SYS_ADMIN or where the kernel lacks the call, else StorageError with the
    kernel's words.
    """
    said = f"{error.strerror or error}" + (f" ({log})" if log else "")
    if isinstance(error, PermissionError) and not may_mount():
        return MissingRequirementError(
            f"cannot {what}: this needs root (CAP_SYS_ADMIN)",
            hint="run it as root; in a container, give it the capability SYS_ADMIN",
        )
    match error.errno:
        case errno.ENOSYS:
            return MissingRequirementError(
                f"cannot {what}: the kernel lacks the mount system calls", hint="it needs Linux 5.12 or newer"
            )
        case errno.ENODEV:
            return MissingRequirementError(
                f"cannot {what}: the kernel does not know this file system", hint="load its module (modprobe)"
            )
        case errno.ENOENT:
            hint = "the device, folder or subvolume does not exist; lsblk lists the devices"
        case errno.EINVAL:
            hint = "wrong type of file system, an invalid option or a damaged superblock; see the kernel log (dmesg)"
        case errno.EBUSY:
            hint = "the device is in use in another way: mounted with other options, or held by LVM, md or swap"
        case errno.EROFS:
            hint = "the device is write-protected"
        case _:
            hint = "see the kernel log (dmesg)"
    return StorageError(f"cannot {what}: {said}", hint=hint)


def _context_log(fd: int) -> str:
    """Read the file system's messages: one per read, each with a prefix of severity ("e ", "w ", "i ")."""
    lines: list[str] = []
    while len(lines) < _LOG_LINES:
        try:
            message = os.read(fd, 1024)
        except OSError:  # ENODATA: no more
            break
        text = message.decode("utf-8", "replace").strip()
        lines.append(text[2:] if text[1:2] == " " else text)
    return "; ".join(line for line in lines if line)


@contextmanager
def new_mount(source: str, fs_type: str, options: tuple[str, ...], *, unseen: bool = False) -> Iterator[int]:
    """Mount `source` detached and yield its descriptor (O_PATH, close-on-exec): nosuid, nodev, `unseen` also noatime.

    `options` are as for mount(8): "ro" makes both this mount and, if it is the first one, the file system read-only.
    """
    what = f"mount {source} as {fs_type}" + (f" ({','.join(options)})" if options else "")
    attributes = ATTRIBUTES["nosuid"] | ATTRIBUTES["nodev"] | (ATTRIBUTES["noatime"] if unseen else 0)
    try:
        context = _call(_FSOPEN, fs_type.encode(), _FSOPEN_CLOEXEC)
    except OSError as error:
        raise refused(error, what) from None
    try:
        try:
            _call(_FSCONFIG, context, _FSCONFIG_SET_STRING, b"source", os.fsencode(source), 0)
            for option in options:
                key, equals, value = option.partition("=")
                attributes |= ATTRIBUTES.get(option, 0)
                if equals:
                    _call(_FSCONFIG, context, _FSCONFIG_SET_STRING, key.encode(), os.fsencode(value), 0)
                elif option == "ro" or option not in ATTRIBUTES.keys() | _NEUTRAL:
                    _call(_FSCONFIG, context, _FSCONFIG_SET_FLAG, key.encode(), None, 0)
            _call(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
            fd = _call(_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)
        except OSError as error:
            raise refused(error, what, log=_context_log(context)) from None
    finally:
        os.close(context)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def cloned_tree(directory: str) -> Iterator[int]:
    """Yield a descriptor of a detached bind mount of `directory` (without mounts below it)."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    try:
        fd = _call(_OPEN_TREE, _AT_FDCWD, os.fsencode(directory), flags)
    except OSError as error:
        raise refused(error, f"bind {directory}") from None
    try:
        yield fd
    finally:
        os.close(fd)


def set_attributes(fd: int, attributes: int) -> None:
    """Set MOUNT_ATTR_* flags (a sum of `ATTRIBUTES`) on a mount's descriptor. Raises OSError."""
    wanted = _MountAttr(attr_set=attributes)
    _call(_MOUNT_SETATTR, fd, b"", _AT_EMPTY_PATH, ctypes.pointer(wanted), ctypes.sizeof(wanted))


def put(mount_fd: int, point_fd: int) -> None:
    """Attach a detached mount to the folder of `point_fd`. Raises OSError."""
    _call(_MOVE_MOUNT, mount_fd, b"", point_fd, b"", _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH)


def take_down(point: str) -> None:
    """umount2(2) without following a symlink; never lazy. Raises OSError."""
    if _libc.umount2(os.fsencode(point), _UMOUNT_NOFOLLOW) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), point)
