"""Drops the caches that would answer reads instead of the storage: the kernel's, and cache folders of clients."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.contract.errors import MissingRequirementError

if TYPE_CHECKING:
    from collections.abc import Sequence

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
# A client writes data to its cache a moment after reading them.
_SETTLED_S = 0.1
# A continuing load fills it again.
_AT_MOST_S = 5.0


def drop_caches(folders: Sequence[str] = ()) -> None:
    """Sync, empty the clients' cache folders, and drop the kernel's caches.

    Raises MissingRequirementError where these cannot be dropped (a container).
    """
    # Sync twice, because the first may miss concurrent writes; all file systems, because a loop device's file is on
    # another one; and first of all, because a client may cache the data that it writes back.
    os.sync()
    os.sync()
    deadline = time.monotonic() + _AT_MOST_S
    empty(folders)
    while folders and time.monotonic() < deadline:
        time.sleep(_SETTLED_S)
        if not empty(folders):
            break
    try:
        _DROP_CACHES.write_text("3\n", encoding="ascii")
    except OSError as error:
        raise MissingRequirementError(
            f"cannot drop the caches ({_DROP_CACHES}: {error.strerror}): no read would be cold",
            hint="run it as root, outside of a container",
        ) from None


def empty(folders: Sequence[str]) -> int:
    """Remove all files below some folders, and return their number. The folders stay; links are not followed."""
    found = 0
    for folder in folders:
        # The client makes it with the first block.
        with suppress(FileNotFoundError):
            for _, _, names, fd in os.fwalk(folder):
                for name in names:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)
                        found += 1
    return found
