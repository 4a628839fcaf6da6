"""What the file of MySQL's data dictionary tells while no server runs: nothing in the datadir else names folders."""

from __future__ import annotations

import mmap
import os
import re
from contextlib import suppress

from snapmgr.errors import NotQuiescedError
from snapmgr.mysql.copy import dictionary_paths
from snapmgr.mysql.plainfile import open_plain

_FILE = "mysql.ibd"
_RELATIVE = re.compile(rb"\.\./[^\0-\x1f]{1,500}?\.ib[du]")
# FSP_SPACE_FLAGS at byte 54, FSP_FLAGS_POS_ENCRYPTION (fsp0types.h).
_FLAGS_OFFSET = 54
_ENCRYPTED = 1 << 13


def tablespaces_elsewhere(datadir: str) -> frozenset[str]:
    """Return the tablespaces outside of a stopped MySQL's datadir (resolved); none for a MariaDB, which leaves links.

    What was dropped may still be named in the dictionary: only files that exist are returned. Raises NotQuiescedError
    if the dictionary is encrypted.
    """
    path = os.path.join(datadir, _FILE)
    relative: set[str] = set()
    with suppress(FileNotFoundError, ValueError), open_plain(path) as file:  # ValueError: it is empty
        file.seek(_FLAGS_OFFSET)
        if int.from_bytes(file.read(4), "big") & _ENCRYPTED:
            raise NotQuiescedError(
                f"MySQL's data dictionary {path} is encrypted, and only a running server could say where tables lie",
                hint='start the server and give the job its socket and quiesce = "auto"',
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            relative = {os.fsdecode(match[0]) for match in _RELATIVE.finditer(data)}
    named = (os.path.realpath(os.path.join(datadir, name)) for name in {*dictionary_paths(path), *relative})
    return frozenset(name for name in named if os.path.isfile(name) and not name.startswith(datadir + "/"))
