"""Whether a started copy is at the position that was recorded, as far as its binary logs and its server can tell."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.access.attach import place_of
from snapmgr.mysql.binlog.events import MYSQL_ENCRYPTED_MAGIC
from snapmgr.mysql.binlog.gtid import GtidError, MysqlGtidSet
from snapmgr.mysql.datadir.plainfile import open_plain
from snapmgr.mysql.lock.position import read_gtid
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.mysql.connect.client import Connection

# MySQL's encrypted logs begin with a header of their own, which positions do not count (rpl_log_encryption.h).
_ENCRYPTED_HEADER_BYTES = 512


class BinlogFindings:
    """What was found right and what was found wrong, one sentence each."""

    def __init__(self) -> None:
        self.checks: list[str] = []
        self.failures: list[str] = []


def check_binlog(manifest: Manifest, there: Mapping[str, Path], found: BinlogFindings) -> None:
    """Look where the snapshot's last binary log ends.

    Under a lock nothing is written, so that it is exactly the recorded offset. Without one it may hold more: the
    beginning of a group that was being written, which the server cuts off.
    """
    position, server = manifest.position, manifest.server
    if position is None or server is None or not server.log_bin:
        return
    if logs_absent(manifest):
        found.checks.append("the end of its binary logs was not compared: they are not in it")
        return
    path = place_of(os.path.join(server.datadir, os.path.dirname(server.log_bin), position.file), there)
    size = _size(path) if path is not None else None
    unlocked = manifest.quiesce is not None and manifest.quiesce.level == "crash-consistent"
    if size is None:
        found.failures.append(f"the recorded binlog {position.file} is not in it")
    elif size == position.offset:
        found.checks.append(f"its binlog ends at the recorded position ({position.file}:{position.offset})")
    elif unlocked and size > position.offset:
        rest = size - position.offset
        found.checks.append(
            f"its binlog holds the recorded position ({position.file}:{position.offset}), and {rest} bytes of what was "
            "not finished"
        )
    else:
        found.failures.append(
            f"its binlog {position.file} has {size} bytes, the recorded position is {position.offset}"
        )


def compare_gtid(manifest: Manifest, connection: Connection, found: BinlogFindings) -> None:
    """Ask the started server for its GTIDs. Raises MysqlError."""
    position, server = manifest.position, manifest.server
    if position is None or server is None or not position.gtid:
        return
    if server.flavor == "mariadb" and logs_absent(manifest):
        # MariaDB reads it from the logs alone; MySQL keeps it in its tables as well.
        found.checks.append("its GTID was not compared: its binary logs are not in it")
        return
    gtid = read_gtid(connection, server.flavor)
    if gtid == position.gtid or (server.flavor == "mysql" and _same_set(gtid, position.gtid)):
        found.checks.append(f"its GTID is the recorded one ({gtid})")
    else:
        found.failures.append(f"its GTID is {gtid or 'empty'}, the recorded one is {position.gtid}")


def logs_absent(manifest: Manifest) -> bool:
    """Return whether the binary logs of the server are not in the snapshot."""
    if manifest.physical is not None:
        return True
    server = manifest.server
    if server is None or not server.log_bin:
        return False
    folder = os.path.normpath(os.path.join(server.datadir, os.path.dirname(server.log_bin)))
    return lies_in(folder, *manifest.absent)


def _same_set(one: str, other: str) -> bool:
    try:
        return MysqlGtidSet.parse(one) == MysqlGtidSet.parse(other)
    except GtidError:
        return False


def _size(path: Path) -> int | None:
    """Return how long a binary log is, by the count of its positions; None if there is none."""
    try:
        with open_plain(str(path)) as file:
            encrypted = file.read(len(MYSQL_ENCRYPTED_MAGIC)) == MYSQL_ENCRYPTED_MAGIC
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    # MariaDB's encrypted logs bear no such header.
    return size - _ENCRYPTED_HEADER_BYTES if encrypted else size
