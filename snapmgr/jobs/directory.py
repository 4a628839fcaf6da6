"""What keeps a directory job consistent where the storage copies file by file: proof that nothing changed meanwhile."""

from __future__ import annotations

import hashlib
import os

from snapmgr.errors import NotQuiescedError


def fingerprint(path: str) -> str:
    """Return a digest over all names, types, sizes, inodes, owners, modes and times (ns) below `path`.

    Cheap enough to be taken right before and right after a copy. It does not see a write through an mmap that the
    kernel has not noticed yet, hence a `syncfs` belongs before the first.
    """
    digest = hashlib.blake2b(digest_size=16)
    pending = [os.fsencode(path)]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                digest.update(entry.path)
                digest.update(
                    repr(
                        (
                            status.st_dev,
                            status.st_ino,
                            status.st_mode,
                            status.st_uid,
                            status.st_gid,
                            status.st_size if not entry.is_dir(follow_symlinks=False) else 0,
                            status.st_mtime_ns,
                            status.st_ctime_ns,
                        )
                    ).encode()
                )
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
        except FileNotFoundError:
            raise NotQuiescedError(f"files came and went below {path} while it was being looked at") from None
    return digest.hexdigest()
