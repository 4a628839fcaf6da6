"""Checks that the server continues the last backup's history; otherwise an increment applies but corrupts the data.

A page records only when it was last changed (its LSN). After a datadir was restored, its LSN soon passes the backup's,
and an increment misses the pages that only the old history had changed. A server that has run since the backup has one
history. For a restarted server the binary log decides: in the same history the bytes before its end at the time of the
backup are unchanged.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from snapmgr.catalog.physical import BinlogMark
from snapmgr.mysql.connect.client import connect
from snapmgr.system.boot import boot_id
from snapmgr.system.kernel import generation

if TYPE_CHECKING:
    from snapmgr.catalog.physical import PhysicalRecord
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.source.server import LiveServer

# Enough for many events with their times and server id, which differ between two histories.
_TAIL_BYTES = 64 << 10
# The first event alone holds the time at which the file was created.
_LEAST_BYTES = 128
_FLAGS = slice(21, 23)


def identity(live: LiveServer) -> str:
    """Return a text that identifies a datadir of a server in its present series."""
    who = live.identity
    series = ".".join(who.version.split(".")[:2])
    # A restore creates these files anew, and may leave the binary logs as they are.
    inodes = ":".join(_inode(os.path.join(who.datadir, name)) for name in ("", "ibdata1", "mysql"))
    return f"{who.flavor} {series} {who.server_uuid or who.server_id} {who.datadir} {inodes}"


def _inode(path: str) -> str:
    """Return a file's inode number and generation, because file systems reuse inode numbers."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return f"{os.fstat(fd).st_ino}.{generation(fd)}"
    finally:
        os.close(fd)


def run_of(live: LiveServer) -> str:
    """Return a text that stays the same until the server is started again."""
    return f"{live.identity.pid} {live.identity.start_ticks} {boot_id()}"


def mark(live: LiveServer) -> BinlogMark | None:
    """Return the present end of the server's binary log, with a digest of its last bytes; None if it is not readable.

    Also returns None for a log on another file system, because the data may be restored without it. Call it after a
    backup: a history that includes this position includes the backup.
    """
    if not live.layout.log_bin_basename or not _beside_data(live):
        return None
    with connect(live.credentials) as connection:
        rows = connection.rows(live.abilities.binlog_status)
    if not rows:
        return None
    file, offset = str(rows[0]["File"]), int(str(rows[0]["Position"]))
    digest = _digest(live, file, offset)
    return BinlogMark(file=file, offset=offset, digest=digest) if digest else None


def _log_files(live: LiveServer, connection: Connection) -> set[str]:
    if not live.layout.log_bin_basename:
        return set()
    return {str(row["Log_name"]) for row in connection.rows("SHOW BINARY LOGS")}


def _log_folder(live: LiveServer) -> str:
    base = live.layout.settings.get("log_bin_basename", "")
    return os.path.dirname(os.path.join(live.identity.datadir, base))


def _beside_data(live: LiveServer) -> bool:
    try:
        return os.stat(_log_folder(live)).st_dev == os.stat(live.identity.datadir).st_dev
    except OSError:
        return False


def _digest(live: LiveServer, name: str, end: int) -> str:
    """Return a digest of a binary log's last bytes before `end`; "" if they cannot be read."""
    folder = _log_folder(live)
    begin = max(end - _TAIL_BYTES, 0)
    try:
        with open(os.path.join(folder, os.path.basename(name)), "rb") as file:
            file.seek(begin)
            tail = file.read(end - begin)
    except OSError:
        return ""
    if len(tail) < max(end - begin, _LEAST_BYTES):
        return ""
    if begin == 0:
        # The first event's flags show whether the file is in use.
        tail = tail[: _FLAGS.start] + tail[_FLAGS.stop :]
    return hashlib.blake2b(tail, digest_size=16).hexdigest()


def break_since(live: LiveServer, record: PhysicalRecord) -> str | None:
    """Return why an increment since a backup would not fit it; None if it fits. Changes nothing."""
    if record.identity != identity(live):
        return "the server, its series or its datadir is another one, or its data were put back"
    passed = record.binlog
    with connect(live.credentials) as connection:
        # A file that the server does not know may be a leftover of a history that was overwritten.
        known = passed is not None and passed.file in _log_files(live, connection)
        lsn = connection.status("Innodb_lsn_current").get("Innodb_lsn_current", "")
    if lsn.isdigit() and int(lsn) < record.to_lsn:
        return f"the server's LSN {lsn} is before the last backup's ({record.to_lsn}): its data were put back"
    if record.run == run_of(live):
        return None
    if passed is None:
        return "the server was started again since, and no binary log shows that its data were not put back"
    if not known or not _beside_data(live) or _digest(live, passed.file, passed.offset) != passed.digest:
        return "the server was started again since, and its binary log does not show where it was at the last backup"
    return None
