"""Types of the names and paths in records on disk: a record with one that leads elsewhere is refused at its decoding.

Manifests, leases and notes are read after crashes, and from disks of other machines; commands join, mount and delete
what they name. So the types check it, in one place, before any command acts on it.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import asdict

_PART = r"(?!\.{1,2}(?:/|\Z))[^/]+"
# Also after a colon: some pools are a UUID and a path.
_NO_PARENT = r"(?s)\A(?!(?:.*[/:])?\.\.(?:/|\Z))"

Name = Annotated[str, Meta(pattern=rf"\A{_PART}\Z")]
"""The name of a file or folder: neither empty nor "." or "..", without "/"."""
NameOrNone = Annotated[str, Meta(pattern=rf"\A(?:{_PART})?\Z")]
"""As `Name`, or "" for none."""
Inner = Annotated[str, Meta(pattern=rf"\A{_PART}(?:/{_PART})*\Z")]
"""A path from a folder to something inside it: relative and normal."""
InnerOrSelf = Annotated[str, Meta(pattern=rf"\A(?:{_PART}(?:/{_PART})*)?\Z")]
"""As `Inner`, or "" for the folder itself."""
Absolute = Annotated[str, Meta(pattern=rf"{_NO_PARENT}/")]
"""An absolute path without ".."."""
AbsoluteOrNone = Annotated[str, Meta(pattern=rf"{_NO_PARENT}(?:/|\Z)")]
"""As `Absolute`, or "" for none."""
PoolId = Annotated[str, Meta(pattern=_NO_PARENT)]
"""A storage's own id, or a path, without ".."."""
Token = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
"""16 hex digits: part of the names of what one run creates."""

_FIRST_YEAR, _LAST_YEAR = 1970, 9000
_REFUSED = r"(?s)Expected `str` matching regex .* - at `(?:key` in `)?\$\.?(?P<place>.*)`"


def problem_of(error: Exception) -> str:
    """Return why a record cannot be decoded; for a name or path that its type refuses, the key instead of a pattern."""
    match = re.fullmatch(_REFUSED, str(error))
    return f"{match['place']} is not a name or path that may be there" if match else str(error)


def require_usable(record: Struct, data: bytes) -> None:
    """Raise ValueError for a text or time that the type allows but system calls do not."""
    # JSON can write NUL only in this way; checking each text would take longer than reading a thousand manifests.
    if b"\\u0000" in data and _holds_nul(record):
        raise ValueError("a text in it contains a NUL character")
    for value in asdict(record).values():
        if isinstance(value, datetime) and (value.tzinfo is None or not _FIRST_YEAR <= value.year <= _LAST_YEAR):
            raise ValueError(f"{value.isoformat()} has no time zone, or is not between {_FIRST_YEAR} and {_LAST_YEAR}")


def _holds_nul(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_nul, (*value, *value.values())))
    if isinstance(value, Struct):
        return any(map(_holds_nul, asdict(value).values()))
    return any(map(_holds_nul, value)) if isinstance(value, tuple) else isinstance(value, str) and "\0" in value
