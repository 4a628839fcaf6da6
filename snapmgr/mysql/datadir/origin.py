"""Determines from a datadir's files which server wrote it, for data whose server could not be queried."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Literal

from msgspec import Struct

from snapmgr.mysql.datadir.plainfile import open_plain
from snapmgr.mysql.datadir.tablespace import DICTIONARY, written_by

Flavor = Literal["mariadb", "mysql"]

# MariaDB's upgrade script writes it, until 10.11 under MySQL's name; MySQL's own did until 5.7.
_UPGRADE_FILES = ("mariadb_upgrade_info", "mysql_upgrade_info")
_UPGRADE_BYTES = 1024
# Only MariaDB has Aria; the tables show it where Aria's control file is in another folder.
_MARIADB_FILES = ("aria_log_control", "mysql/db.MAI", "mysql/global_priv.MAI")


class Origin(Struct, frozen=True, kw_only=True):
    """The server that wrote a datadir."""

    flavor: Flavor
    version: str
    """ "10.11.6-MariaDB", "9.7.4"; "" if the files do not show it."""


def version_number(version: str) -> tuple[int, ...]:
    """Given a version as a server prints it, return its first three numbers; () if it has no such numbers."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in match.groups()) if match else ()


def read_origin(datadir: str | os.PathLike[str]) -> Origin:
    """Return which server wrote the datadir. For MariaDB: the server that last upgraded the system tables."""
    version = written_by(os.path.join(datadir, DICTIONARY))
    if version:
        return Origin(flavor="mysql", version=version)
    version = _upgraded_by(datadir)
    mariadb = "mariadb" in version.lower() or any(
        os.path.lexists(os.path.join(datadir, name)) for name in _MARIADB_FILES
    )
    return Origin(flavor="mariadb" if mariadb else "mysql", version=version)


def _upgraded_by(datadir: str | os.PathLike[str]) -> str:
    for name in _UPGRADE_FILES:
        with suppress(FileNotFoundError), open_plain(os.path.join(datadir, name)) as file:
            found = file.read(_UPGRADE_BYTES).partition(b"\0")[0].decode("utf-8", "replace").strip()
            if version_number(found):
                return found
    return ""
