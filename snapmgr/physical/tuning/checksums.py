"""Takes the checksums of all tables of prepared data with a throwaway server."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.contract.errors import VerificationError
from snapmgr.mysql.connect.client import quote
from snapmgr.mysql.connect.optionfile import options_in
from snapmgr.mysql.datadir.origin import Flavor
from snapmgr.mysql.datadir.plainfile import open_plain
from snapmgr.mysql.server.program import find_server
from snapmgr.mysql.server.throwaway import copy_server

if TYPE_CHECKING:
    from snapmgr.mysql.connect.client import Connection

_MEMORY_BYTES = 256 << 20
_QUERY_S = 3600.0
_OPTIONS_FILE = "backup-my.cnf"
_OPTIONS_BYTES = 64 << 10
# Without these a server misreads the data, or creates files that exist already.
_NEEDED = ("innodb_data_file_path", "innodb_page_size", "innodb_undo_tablespaces", "innodb_checksum_algorithm")
# The server writes to its own tables when it starts, so they do not show the work of the prepare.
_OWN = ("information_schema", "performance_schema", "sys", "mysql")


def table_checksums(
    datadir: str, *, flavor: Flavor, version: str, scratch_dir: str, time_limit_s: float
) -> dict[str, str]:
    """Start a server on prepared data (the server changes it) and return each table's checksum by its name.

    Args:
        datadir: the data, on a clone that is thrown away afterwards.
        flavor: of the server that wrote them.
        version: of that server; "" if unknown.
        scratch_dir: for the server's socket and temporary files.
        time_limit_s: until the server answers.

    Raises MissingRequirementError without a server program, or if this machine cannot run it; VerificationError if it
    does not start on the data.
    """
    with (
        copy_server(
            datadir,
            binary=find_server(flavor, wrote=version or None),
            memory_bytes=_MEMORY_BYTES,
            options=needed_options(datadir),
            scratch_dir=scratch_dir,
            time_limit_s=time_limit_s,
        ) as server,
        server.connect() as connection,
    ):
        connection.set_read_timeout(_QUERY_S)
        return {name: _checksum(connection, name) for name in _tables(connection)}


def needed_options(datadir: str) -> tuple[str, ...]:
    """Return the options for a server on a backup: the live server's settings that the tool recorded.

    Raises VerificationError if the tool's file of them is damaged.
    """
    path = os.path.join(datadir, _OPTIONS_FILE)
    found: dict[str, str] = {}
    try:
        with suppress(FileNotFoundError), open_plain(path) as file:
            found = options_in(file.read(_OPTIONS_BYTES), "mysqld")
    except ValueError as error:
        raise VerificationError(f"{path} is not the tool's option file: {error}") from None
    return tuple(f"--{name.replace('_', '-')}={value}" for name, value in found.items() if name in _NEEDED)


def _tables(connection: Connection) -> list[str]:
    rows = connection.rows(
        "SELECT TABLE_SCHEMA AS s, TABLE_NAME AS t FROM information_schema.TABLES WHERE TABLE_TYPE = 'BASE TABLE' "
        "ORDER BY 1, 2"
    )
    return [f"{quote(str(row['s']))}.{quote(str(row['t']))}" for row in rows if row["s"] not in _OWN]


def _checksum(connection: Connection, name: str) -> str:
    # EXTENDED: some engines keep a checksum of their own that is not read from the rows.
    (row,) = connection.rows(f"CHECKSUM TABLE {name} EXTENDED")
    return str(row["Checksum"])
