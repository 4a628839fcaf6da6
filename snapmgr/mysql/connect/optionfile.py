"""Reads option files that hold passwords. Refuses a file that other users can read."""

from __future__ import annotations

import os
import stat

from snapmgr.contract.errors import ConfigError


def read_client_options(path: str) -> dict[str, str]:
    """Return the [client] group of an option file that only we (or root) can read. Raises ConfigError."""
    from configparser import Error  # noqa: PLC0415 - with the parser

    from pymysql.optionfile import Parser  # noqa: PLC0415 - slow

    text = _read_private(path)
    # MySQL takes the last of repeated options; the parser's strict mode would refuse them.
    parser = Parser(strict=False)
    try:
        parser.read_string(text)
        given = parser.items("client") if parser.has_section("client") else []
        # Its get() removes quotes, but fails on an option without a value.
        return {name: parser.get("client", name) for name, value in given if value}
    except Error:
        pass
    # Outside the handler and without the parser's text: it quotes the line, which may be the password's.
    raise ConfigError(f"{path} is not an option file", hint="it should look like: [client], user = …, password = …")


def _read_private(path: str) -> str:
    """Return the text of a file that nobody but us (or root) can read. Raises ConfigError."""
    try:
        # Non-blocking: a FIFO must not hang us.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot read the defaults-file {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        # Check the open file, not the path: it cannot be exchanged between the check and the read.
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
