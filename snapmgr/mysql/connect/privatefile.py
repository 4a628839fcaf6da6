"""Reading files with passwords: only those that are closed to others."""

from __future__ import annotations

import os
import stat

from snapmgr.contract.errors import ConfigError


def read_private(path: str) -> str:
    """Return the text of a defaults file that nobody but us (or root) may read; ConfigError for any other."""
    try:
        # Non-blocking: a FIFO must not hang us.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot read the defaults-file {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        # Of the open file, not of the path: it cannot be exchanged between the check and the reading.
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"the defaults-file {path} is not a regular file")
        if facts.st_mode & 0o077:
            raise ConfigError(
                f"the defaults-file {path} is open to others (mode {stat.S_IMODE(facts.st_mode):04o})",
                hint=f"chmod 600 {path}",
            )
        if facts.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"the defaults-file {path} belongs to user {facts.st_uid}, neither to root nor to us",
                hint=f"chown root: {path}",
            )
        return file.read().decode("utf-8", "surrogateescape")
