"""Which server wrote a datadir, as far as its files tell: for data whose server could not be asked."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from snapmgr.mysql.plainfile import open_plain

if TYPE_CHECKING:
    from pathlib import Path

Flavor = Literal["mariadb", "mysql"]

# MariaDB's upgrade script leaves it, until 10.11 by MySQL's name; MySQL's own until 5.7.
_UPGRADE_FILES = ("mariadb_upgrade_info", "mysql_upgrade_info")
_UPGRADE_BYTES = 1024
# FIL_PAGE_SRV_VERSION of a tablespace's first page (MySQL's fil0types.h): 90704 is 9.7.4.
_VERSION_OFFSET = 8
_OLDEST_WITH_VERSION = 8_00_00
# Aria is MariaDB's alone; the second one where its control file is in a folder of its own.
_MARIADB_FILES = ("aria_log_control", "mysql/db.MAI", "mysql/global_priv.MAI")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The server that wrote a datadir."""

    flavor: Flavor
    version: str
    """ "10.11.6-MariaDB", "9.7.4"; "" if the files do not tell."""


def version_number(version: str) -> tuple[int, ...]:
    """Given a version as a server prints it, return its first three numbers; () if it is none."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in match.groups()) if match else ()


def read_origin(datadir: str | os.PathLike[str]) -> Origin:
    """Return which server wrote the datadir. Of MariaDB it is the one that last upgraded the system tables."""
    version = _dictionary_version(os.path.join(datadir, "mysql.ibd"))
    if version:
        return Origin(flavor="mysql", version=version)
    version = _upgraded_by(datadir)
    mariadb = "mariadb" in version.lower() or any(
        os.path.lexists(os.path.join(datadir, name)) for name in _MARIADB_FILES
    )
    return Origin(flavor="mariadb" if mariadb else "mysql", version=version)


def flavor_of(data: Path) -> Flavor:
    """Return the flavor of data that were taken from a stopped server."""
    return read_origin(data).flavor


def _dictionary_version(path: str) -> str:
    with suppress(FileNotFoundError), open_plain(path) as file:
        file.seek(_VERSION_OFFSET)
        number = int.from_bytes(file.read(4), "big")
        if number >= _OLDEST_WITH_VERSION:
            return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return ""


def _upgraded_by(datadir: str | os.PathLike[str]) -> str:
    for name in _UPGRADE_FILES:
        with suppress(FileNotFoundError), open_plain(os.path.join(datadir, name)) as file:
            found = file.read(_UPGRADE_BYTES).partition(b"\0")[0].decode("utf-8", "replace").strip()
            if version_number(found):
                return found
    return ""
