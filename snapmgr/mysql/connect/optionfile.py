"""Reads option files as the clients and servers of both makers do, and refuses one whose password others can read.

Those programs share one parser, my_default.c in each maker's source; its findings, which `my_print_defaults` prints,
are a table in tests/golden/options.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING

from snapmgr.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

# isspace() of latin1, whatever the file's character set: an unquoted value loses the last byte of "à" in UTF-8.
_SPACE = b" \t\n\v\f\r\xa0"
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"b": b"\b", b"s": b" ", b'"': b'"', b"'": b"'", b"\\": b"\\"}
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
# A longer line, or one with a NUL, is read differently by the two makers.
_LINE_BYTES = 4093
_INCLUDE = re.compile(rb"![\s\xa0]*include(?:dir)?(?:[\s\xa0]|$)")


def read_client_options(path: str) -> dict[str, str]:
    """Return the [client] group of an option file that only we (or root) can read, as `options_in`.

    Raises ConfigError, which never shows the file's text.
    """
    found = _client_options(path)
    # From here on no frame of the error holds the text, which may be the password.
    if isinstance(found, str):
        raise ConfigError(
            f"{path} is not an option file for logins: {found}",
            hint="it should look like: [client], user = …, password = …, a line each",
        )
    return found


def options_in(text: bytes, group: str) -> dict[str, str]:
    """Return the options of one group by name, with "_" for "-"; the last of equal names wins, also by having no value.

    Options without a value are left out. Raises ValueError, which names the line and not its text.
    """
    options: dict[str, str] = {}
    for other, written, value in parse_options(text):
        if other.lower() == group:
            if not written:
                raise ValueError(f"[{group}] has a value without a name")
            name = written.replace("-", "_").removeprefix("loose_")
            options.pop(name, None)
            if value is not None:
                options[name] = value
    return options


def parse_options(text: bytes) -> Iterator[tuple[str, str, str | None]]:
    """Yield group, name and value of each option, as written; the value is None for an option without "=".

    Raises ValueError as `options_in`: where the makers' programs refuse the file or differ, and for an include.
    """
    group: str | None = None
    for number, raw in enumerate(text.split(b"\n"), start=1):
        if len(raw) > _LINE_BYTES or b"\0" in raw:
            raise ValueError(f"line {number} is longer than {_LINE_BYTES} bytes or has a NUL")
        line = raw.lstrip(_SPACE)
        if not line or line.startswith((b"#", b";")):
            continue
        if line.startswith(b"!"):
            # The two makers read a name of a file differently, and each file would need the check of its mode.
            if _INCLUDE.match(line):
                raise ValueError(f"line {number} includes another file; only this one is read")
        elif line.startswith(b"["):
            name, end, _ = line[1:].partition(b"]")
            if not end:
                raise ValueError(f'line {number} has a "[" without its "]"')
            group = _text(name.rstrip(_SPACE))
        elif group is None:
            raise ValueError(f"line {number} is an option before any [group]")
        else:
            name, equals, value = _without_comment(line).partition(b"=")
            yield group, _text(name.rstrip(_SPACE)), _text(_unquoted(value.strip(_SPACE))) if equals else None


def quoted(value: bytes) -> bytes:
    """Return a value as an option file holds it, so that `parse_options` and the programs read it unchanged."""
    return b'"' + value.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'


def _without_comment(line: bytes) -> bytes:
    """Return the line up to the first "#" outside quotes. A backslash escapes only within quotes."""
    quote = escaped = 0
    for at, byte in enumerate(line):
        if byte in b"'\"" and not escaped and quote in (0, byte):
            quote = 0 if quote else byte
        if byte == ord("#") and not quote:
            return line[:at]
        escaped = bool(quote) and byte == ord("\\") and not escaped
    return line


def _unquoted(value: bytes) -> bytes:
    if len(value) > 1 and value[:1] in (b"'", b'"') and value[-1] == value[0]:
        value = value[1:-1]
    # An unknown escape keeps its backslash, as does one at the end.
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[0]), value)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _client_options(path: str) -> dict[str, str] | str:
    """Return the options, or what is wrong with the file. Raises ConfigError if others can read it."""
    try:
        return options_in(_read_private(path), "client")
    except ValueError as error:
        return str(error)


def _read_private(path: str) -> bytes:
    """Return the content of a file that nobody but us (or root) can read. Raises ConfigError."""
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
        return file.read()
