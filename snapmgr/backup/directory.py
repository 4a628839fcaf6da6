"""What keeps a directory job consistent where the storage copies file by file: proof that nothing changed meanwhile."""

from __future__ import annotations

import hashlib
import os
import stat

from snapmgr.contract.errors import NotQuiescedError, StorageError
from snapmgr.tree.facts import facts_of


def fingerprint(path: str) -> str:
    """Return a digest over all names, types, sizes, inodes, owners, modes and times (ns) below `path`.

    Cheap enough to be taken right before and right after a copy. It does not see a write through an mmap that the
    kernel has not noticed yet, hence a `syncfs` belongs before the first.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _add_folder(digest, fd, os.fstat(fd).st_dev)
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError):
        raise NotQuiescedError(f"files came and went below {path} while it was being looked at") from None
    except OSError as error:
        raise StorageError(f"cannot look through {path}: {error.strerror}") from None
    return digest.hexdigest()


def _add_folder(digest: hashlib.blake2b, fd: int, device: int) -> None:
    """Add a folder by its descriptor: a path may be longer than the kernel takes. Other mounts are not entered."""
    with os.scandir(fd) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        status = entry.stat(follow_symlinks=False)
        is_folder = stat.S_ISDIR(status.st_mode)
        facts = (os.fsencode(entry.name), status.st_dev, *facts_of(status))
        digest.update(repr(facts).encode())
        if is_folder and status.st_dev == device:
            child = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                _add_folder(digest, child, device)
            finally:
                os.close(child)
    digest.update(b"end")
