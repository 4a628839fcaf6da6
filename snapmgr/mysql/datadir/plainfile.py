"""Opens files of a datadir safely: the server's user owns it and may have put symlinks and FIFOs there."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import BinaryIO

_PATH_BYTES = 64 << 10


def open_plain(path: str, *, write: bool = False) -> BinaryIO:
    """Open a regular file; never follow a symlink of its name, never wait for a FIFO's other end.

    With `write` for reading and writing, without truncating it. Raises FileNotFoundError if it is gone or not a regular
    file (a server makes no others); other OSErrors unchanged.
    """
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise FileNotFoundError(path)
    fd = os.open(path, flags)
    # It may have been replaced in between.
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(path)
    return os.fdopen(fd, "r+b" if write else "rb")


def read_isl(path: str) -> str:
    """Return the path in an .isl file (the tablespace of a table with DATA DIRECTORY); "" without the file."""
    with suppress(FileNotFoundError), open_plain(path) as file:
        # Like the server, stop at a NUL.
        return file.read(_PATH_BYTES).partition(b"\0")[0].decode("utf-8", "surrogateescape").strip()
    return ""
