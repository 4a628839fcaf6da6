"""Checks that a started copy is at the recorded position, according to its binary logs and its server."""

from __future__ import annotations

import os
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from snapmgr.access.attach import place_of
from snapmgr.mysql.binlog.events import MYSQL_ENCRYPTED_MAGIC
from snapmgr.mysql.binlog.gtid import GtidError, MysqlGtidSet
from snapmgr.mysql.binlog.reader import BinlogError, BinlogReader, EncryptedBinlogError
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
    """Passed checks, remarks about what is not checked, and failures, one sentence each."""

    def __init__(self) -> None:
        self.checks: list[str] = []
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.encrypted = False
        """Whether the last binary log is encrypted."""


def check_binlog(manifest: Manifest, folders: Mapping[str, Path], found: BinlogFindings) -> None:
    """Compare the end of the snapshot's last binary log with the recorded position.

    Under a lock nothing is written, so that the log ends exactly at the recorded offset. Without a lock it may be
    longer by the beginning of a group that was being written; the server truncates that.
    """
    position, server = manifest.position, manifest.server
    if position is None or server is None or not server.log_bin:
        return
    if logs_absent(manifest):
        found.notes.append("the end of its binary logs was not compared: the snapshot does not contain them")
        return
    path = place_of(os.path.join(server.datadir, os.path.dirname(server.log_bin), position.file), folders)
    size, found.encrypted = _size(path) if path is not None else (None, False)
    unlocked = manifest.quiesce is not None and manifest.quiesce.level == "crash-consistent"
    if size is None:
        found.failures.append(f"the recorded binlog {position.file} is missing")
    elif size == position.offset:
        found.checks.append(f"its binlog ends at the recorded position ({position.file}:{position.offset})")
    elif unlocked and size > position.offset:
        rest = size - position.offset
        found.checks.append(
            f"its binlog contains the recorded position ({position.file}:{position.offset}), followed by {rest} bytes "
            "of an unfinished group"
        )
    else:
        found.failures.append(
            f"its binlog {position.file} has {size} bytes, the recorded position is {position.offset}"
        )


def compare_gtid(manifest: Manifest, connection: Connection, found: BinlogFindings) -> None:
    """Compare the GTIDs of the started server with the recorded ones. Raises MysqlError."""
    position, server = manifest.position, manifest.server
    if position is None or server is None or not position.gtid:
        return
    if server.flavor == "mariadb" and logs_absent(manifest):
        # MariaDB reads it from the logs alone; MySQL keeps it in its tables as well.
        found.notes.append("its GTID was not compared: the snapshot does not contain its binary logs")
        return
    gtid = read_gtid(connection, server.flavor)
    if gtid == position.gtid or (server.flavor == "mysql" and _same_set(gtid, position.gtid)):
        found.checks.append(f"its GTID is the recorded one ({gtid})")
    else:
        found.failures.append(f"its GTID is {gtid or 'empty'}, the recorded one is {position.gtid}")


def logs_absent(manifest: Manifest) -> bool:
    """Return whether the snapshot was made without the binary logs of the server."""
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


def _size(path: Path) -> tuple[int | None, bool]:
    """Return the length of a binary log, counted as its positions are, and whether it is encrypted.

    The length is None if the file is missing.
    """
    try:
        with open_plain(str(path)) as file:
            headed = file.read(len(MYSQL_ENCRYPTED_MAGIC)) == MYSQL_ENCRYPTED_MAGIC
            size = os.fstat(file.fileno()).st_size
            encrypted = _is_encrypted(BinlogReader(file, path.name))
    except FileNotFoundError:
        return None, False
    # MariaDB's encrypted logs have no such header.
    return (size - _ENCRYPTED_HEADER_BYTES if headed else size), encrypted


def _is_encrypted(reader: BinlogReader) -> bool:
    try:
        # MariaDB says so in the event after the format's description.
        deque(islice(reader.events(), 2), maxlen=0)
    except EncryptedBinlogError:
        return True
    except BinlogError:
        return False
    return False
