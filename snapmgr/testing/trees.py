"""Creates directories with files of every kind, and compares them."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import socket
import stat
import struct
from typing import TYPE_CHECKING

from snapmgr.system.kernel import sync_file_system

if TYPE_CHECKING:
    from pathlib import Path

_OLD_NS = 981_173_106_123_456_789
_ACL_HEADER = struct.pack("<I", 2)
_ACL_ENTRY = struct.Struct("<HHI")
_NOBODY_ID = 0xFFFFFFFF
_PARTS = ("mode", "owner", "mtime_ns", "device", "first name", "content", "extended attributes")
_SHOWN = 20
HOLE_BYTES = 8 << 20
"""Size of the file ``sparse``, which is nearly all hole."""
_CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")


def _acl(default_for: int) -> bytes:
    # user::rwx, user:default_for:r-x, group::r-x, mask::r-x, other::---, as the kernel stores them.
    entries = ((1, 7, _NOBODY_ID), (2, 5, default_for), (4, 5, _NOBODY_ID), (16, 5, _NOBODY_ID), (32, 0, _NOBODY_ID))
    return _ACL_HEADER + b"".join(_ACL_ENTRY.pack(*entry) for entry in entries)


def _set_xattr(path: bytes, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise


def plant(folder: Path) -> None:
    """Fill a folder with files of every kind: names that are not UTF-8, links, holes, attributes, ACLs, special files.

    Owners, devices and file capabilities only as root; attributes and ACLs where the file system has them.
    """
    root = os.fsencode(folder)
    noise = random.Random(7)  # noqa: S311

    def at(name: bytes) -> bytes:
        return os.path.join(root, name)

    def write(name: bytes, content: bytes) -> bytes:
        with open(at(name), "wb") as file:
            file.write(content)
        return at(name)

    for name in (
        b"folder",
        b"folder/deeper",
        b"folder/deeper/\xe9\xff",
        b"empty-folder",
        b"closed-folder",
        b"acl-folder",
    ):
        os.mkdir(at(name))
    write(b"plain", noise.randbytes(300_001))
    write(b"empty", b"")
    write(b"n" * 255, b"a long name")
    write(b"-rf", b"a name like an option")
    write(b"line\nbreak \xff\xfe \xc3\xa4 $(x) '\"", b"a nasty name")
    write(b"folder/deeper/\xe9\xff/leaf", noise.randbytes(5_000))
    write(b"closed-folder/inside", b"in a folder that cannot be written to")
    with open(at(b"sparse"), "wb") as file:
        file.seek(HOLE_BYTES // 2)
        file.write(noise.randbytes(4096))
        file.truncate(HOLE_BYTES)
    os.chmod(write(b"set-user-id", b"#!"), 0o4755)
    os.chmod(write(b"read-only", b"attributes on a file that cannot be written to"), 0o444)
    os.link(at(b"plain"), at(b"folder/second-name"))
    os.link(at(b"plain"), at(b"folder/deeper/third-name"))
    for name, aim in ((b"link", b"plain"), (b"dangling", b"no/\xff/such"), (b"up", b"/"), (b"folder/link", b"deeper")):
        os.symlink(aim, at(name))
    os.link(at(b"link"), at(b"folder/link-again"), follow_symlinks=False)
    os.mkfifo(at(b"fifo"), 0o640)
    os.mknod(at(b"socket"), stat.S_IFSOCK | 0o600)
    for name in (b"read-only", b"folder", b"plain"):
        os.chmod(at(name), os.stat(at(name)).st_mode | 0o200)
        _set_xattr(at(name), "user.snapmgr-test", bytes(range(256)))
    os.chmod(at(b"read-only"), 0o444)
    _set_xattr(write(b"acl", b"for a friend"), "system.posix_acl_access", _acl(12345))
    _set_xattr(at(b"acl-folder"), "system.posix_acl_default", _acl(12345))
    write(b"acl-folder/heir", b"an ACL of its folder")
    _set_xattr(write(b"acl-folder/none", b"without"), "system.posix_acl_access", _acl(54321))
    if os.geteuid() == 0:
        for name in (b"folder", b"folder/deeper/\xe9\xff/leaf", b"dangling", b"fifo"):
            os.chown(at(name), 12345, 54321, follow_symlinks=False)
        os.mknod(at(b"null"), stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.chmod(write(b"closed", b"for root alone"), 0)
        _set_xattr(write(b"capable", b"x"), "security.capability", _CAPABILITY)
    os.chmod(at(b"closed-folder"), 0o555)
    os.chmod(at(b"empty-folder"), 0o1777)
    for name in (b"plain", b"dangling", b"fifo", b"folder/deeper", b"empty-folder", b""):
        os.utime(at(name), ns=(_OLD_NS, _OLD_NS), follow_symlinks=False)


def fingerprint(folder: Path) -> dict[bytes, tuple[object, ...]]:
    """Return, for every entry below `folder` by its relative name, everything that a snapshot has to preserve.

    Kind and mode, owner, modification time, size and content, aim, device, extended attributes, and for hard links the
    first of the file's names. Access times and sizes of folders are not included.
    """
    root = os.fsencode(folder)
    result: dict[bytes, tuple[object, ...]] = {}
    first_names: dict[tuple[int, int], bytes] = {}
    for base, folders, files in os.walk(root):
        folders.sort()
        for name in (b"", *sorted(files + [name for name in folders if os.path.islink(os.path.join(base, name))])):
            path = os.path.join(base, name) if name else base
            relative = os.path.relpath(path, root)
            info = os.lstat(path)
            linked = info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode)
            first = first_names.setdefault((info.st_dev, info.st_ino), relative) if linked else b""
            owner = (info.st_uid, info.st_gid)
            what = (info.st_mode, owner, info.st_mtime_ns, info.st_rdev, first)
            result[relative] = (*what, _content(path, info), _xattrs(path))
    return result


def _content(path: bytes, info: os.stat_result) -> object:
    if stat.S_ISLNK(info.st_mode):
        return os.readlink(path)
    if not stat.S_ISREG(info.st_mode):
        return None
    with open(path, "rb") as file:
        return info.st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _xattrs(path: bytes) -> tuple[tuple[str, bytes], ...]:
    try:
        names = sorted(os.listxattr(path, follow_symlinks=False))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return ()
        raise
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in names)


def same(left: dict[bytes, tuple[object, ...]], right: dict[bytes, tuple[object, ...]]) -> None:
    """Raise AssertionError with the differences of two fingerprints, if there are any."""
    lines = [f"missing: {name!r}" for name in sorted(left.keys() - right.keys())]
    lines += [f"not expected: {name!r}" for name in sorted(right.keys() - left.keys())]
    for name in sorted(left.keys() & right.keys()):
        lines += [
            f"{name!r}: {what} was {before!r} and is {after!r}"
            for what, before, after in zip(_PARTS, left[name], right[name], strict=True)
            if before != after
        ]
    if lines:
        raise AssertionError("the trees differ:\n" + "\n".join(lines[:_SHOWN]))


def overwrite(folder: Path) -> None:
    """Change a planted folder in every way: in place, appended, truncated, removed, renamed, new, attributes."""
    root = os.fsencode(folder)

    def at(name: bytes) -> bytes:
        return os.path.join(root, name)

    with open(at(b"plain"), "r+b") as file:
        file.write(b"overwritten in place")
    with open(at(b"empty"), "ab") as appended:
        appended.write(b"no longer")
    os.truncate(at(b"sparse"), 1000)
    os.unlink(at(b"link"))
    os.rename(at(b"folder/deeper/\xe9\xff/leaf"), at(b"moved"))
    with open(at(b"new"), "wb") as new:
        new.write(b"came later")
    os.chmod(at(b"set-user-id"), 0o600)
    with socket.socket(socket.AF_UNIX) as server:
        os.unlink(at(b"socket"))
        # The path of a socket is limited to 107 bytes, so only its name is used.
        here = os.open(".", os.O_RDONLY)
        try:
            os.chdir(root)
            server.bind("socket")
        finally:
            os.fchdir(here)
            os.close(here)


def flush(path: str | os.PathLike[str]) -> None:
    """Write all dirty data of the file system of `path`, but of no other one, which may be frozen."""
    fd = os.open(path, os.O_RDONLY)
    try:
        sync_file_system(fd)
    finally:
        os.close(fd)
