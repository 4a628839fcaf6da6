"""Finds the exact position at the end of a snapshot's binary logs: after the last complete transaction.

A server that is started on the snapshot continues there. Crash recovery commits transactions that are complete in the
binary log and prepared in the engines, and rolls back all others. MySQL cuts an incomplete transaction off the file
(`Log_sanitizer`); MariaDB leaves its bytes and does not count it (`TC_LOG_BINLOG::recover`). Then both begin a new one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.catalog.manifest import Position
from snapmgr.mysql.binlog.events import (
    EventType,
    Flavor,
    FormatDescription,
    GtidList,
    MariadbTransaction,
    MysqlTransaction,
    PreviousGtids,
    Query,
    TransactionPayload,
    XaPrepare,
    Xid,
)
from snapmgr.mysql.binlog.gtid import GtidError, MariadbGtidPosition, MysqlGtidSet
from snapmgr.mysql.binlog.reader import BinlogError, BinlogReader, Event, TruncatedBinlogError, open_binlog
from snapmgr.mysql.datadir.plainfile import open_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

_INDEX_BYTES = 64 << 20
# These events belong to the statement after them.
_BEFORE_STATEMENT = {
    EventType.INTVAR,
    EventType.RAND,
    EventType.USER_VAR,
    EventType.TABLE_MAP,
    EventType.ROWS_QUERY,
    EventType.ANNOTATE_ROWS,
}
# These events occur between transactions.
_BETWEEN = {
    EventType.FORMAT_DESCRIPTION,
    EventType.PREVIOUS_GTIDS,
    EventType.GTID_LIST,
    EventType.BINLOG_CHECKPOINT,
    EventType.ROTATE,
    EventType.STOP,
    EventType.HEARTBEAT,
    EventType.HEARTBEAT_V2,
    EventType.IGNORABLE,
}


class Tail(Struct, frozen=True, kw_only=True):
    """The end of a binary log, or of a server's binary logs."""

    position: Position | None
    """After the last complete transaction, with all GTIDs up to there (MySQL: the set; MariaDB: the last one of each
    domain); None if the file is too young to have its GTIDs, or the server has written none."""
    flavor: Flavor | None = None
    server_version: str = ""
    transactions: int = 0
    """Number of complete ones in this file."""
    truncated: bool = False
    """Whether an incomplete transaction follows the position: crash recovery drops it."""
    in_use: bool = False
    """Whether the server had the file open."""
    rotated: bool = False
    """Whether the file ends with a Rotate: another file follows."""


class _Groups:
    """Follows the events of one file, and tracks the end of the last complete transaction."""

    def __init__(self, reader: BinlogReader) -> None:
        self._reader = reader
        self.head: FormatDescription | None = None
        self.gtids = MysqlGtidSet()
        self.last_gtids = MariadbGtidPosition()
        self.knows_earlier = False
        """Whether we saw the event with the GTIDs of earlier files."""
        self.transactions = 0
        self.end = 0
        self.rotated = False
        self._begun: MysqlTransaction | MariadbTransaction | None = None
        self._open = False
        self._in_transaction = False

    @property
    def incomplete(self) -> bool:
        return self._open

    def follow(self, event: Event) -> None:
        """Take the next event. Raises BinlogError for an impossible sequence of events."""
        body = event.body
        if event.type in _BETWEEN:
            self._between(event)
        elif body is None and self._in_transaction:
            # The most frequent case by far.
            return
        elif isinstance(body, MysqlTransaction | MariadbTransaction):
            if self._open:
                self._fail(event, "a transaction begins before the previous one has ended")
            self._begun, self._open = body, True
            self._in_transaction = isinstance(body, MariadbTransaction) and not body.standalone
        elif isinstance(body, Query) and body.kind in {"begin", "xa-start"}:
            if self._in_transaction:
                # On MariaDB the GTID's flags alone begin a transaction.
                self._fail(event, "a transaction begins inside another one")
            self._open = self._in_transaction = True
        elif self._ends(event):
            self._finish(event)
        elif event.type in _BEFORE_STATEMENT:
            self._open = True
        elif not self._open:
            self.end = event.next_offset

    def _ends(self, event: Event) -> bool:
        """Return whether a transaction ends with this event."""
        body = event.body
        if isinstance(body, Xid | XaPrepare | TransactionPayload):
            return True
        if isinstance(body, Query) and body.kind in {"commit", "rollback"}:
            return True
        if self._in_transaction or event.type in _BEFORE_STATEMENT:
            return False
        # A single statement: DDL, and the like.
        return (
            isinstance(body, Query) or event.type == EventType.INCIDENT or isinstance(self._begun, MariadbTransaction)
        )

    def _between(self, event: Event) -> None:
        body = event.body
        if self._open:
            self._fail(event, f"an event of type {event.type} is inside a transaction")
        if isinstance(body, FormatDescription):
            self.head = body
        elif isinstance(body, PreviousGtids):
            self._earlier(event)
            self.gtids = body.gtids.copy()
        elif isinstance(body, GtidList):
            self._earlier(event)
            for gtid in body.gtids:
                self.last_gtids.advance(gtid)
        self.rotated = event.type == EventType.ROTATE
        self.end = event.next_offset

    def _earlier(self, event: Event) -> None:
        if self.knows_earlier or self.transactions:
            self._fail(event, "the GTIDs of earlier files come after the file's beginning")
        self.knows_earlier = True

    def _finish(self, event: Event) -> None:
        begun, self._begun = self._begun, None
        if isinstance(begun, MariadbTransaction):
            self.last_gtids.advance(begun.gtid)
        elif begun is not None and begun.uuid:
            try:
                self.gtids.add(begun.uuid, begun.number, tag=begun.tag)
            except GtidError as error:
                self._fail(event, error.message)
        self._open = self._in_transaction = False
        self.transactions += 1
        self.end = event.next_offset

    def _fail(self, event: Event, what: str) -> NoReturn:
        raise self._reader.damaged(what, event.offset)


def _follow(reader: BinlogReader) -> Tail:
    groups, ended_at = _Groups(reader), 0
    truncated = False
    events = reader.events()
    try:
        for event in events:
            groups.follow(event)
            ended_at = event.next_offset
    except TruncatedBinlogError:
        truncated = True
    if groups.incomplete:
        # A skipped large event could be the one that completes it, with a damaged type.
        reader.verify(groups.end, ended_at)
    if groups.head is None:
        return Tail(position=None, truncated=truncated)
    gtid = str(groups.gtids if groups.head.flavor == "mysql" else groups.last_gtids)
    known = groups.knows_earlier or groups.transactions
    return Tail(
        position=Position(file=os.path.basename(reader.name), offset=groups.end, gtid=gtid) if known else None,
        flavor=groups.head.flavor,
        server_version=groups.head.server_version,
        transactions=groups.transactions,
        truncated=truncated or groups.incomplete,
        in_use=groups.head.in_use,
        rotated=groups.rotated,
    )


def tail(file: str | Path | BinaryIO) -> Tail:
    """Return the current end of one binary log, a path or an open file.

    A partial event or transaction at the end is legal and left out (`truncated`). Any other problem raises BinlogError,
    and an encrypted file EncryptedBinlogError.
    """
    with open_binlog(file) as reader:
        return _follow(reader)


def read_tail(base: str | Path, *, index: str | Path | None = None, gtid_purged: str = "") -> Tail:
    """Return the end of the binary logs in a snapshot.

    Args:
        base: path and base name of the logs in the snapshot: ``/snap/data/binlog`` for ``/snap/data/binlog.000001``.
        index: the file that lists them; default ``BASE.index``. Only the names in it count, not their folders. Without
            such a file the logs' numbers decide.
        gtid_purged: MySQL's @@gtid_purged, read before the snapshot. GTIDs that were never in the logs (SET
            gtid_purged, as after a restore) are part of @@gtid_executed but not in the logs.

    The result's position is None without logs, or with only one that is too young to have its GTIDs.
    Raises BinlogError if they are damaged or do not belong together.
    """
    found = _last(base, index)
    if not gtid_purged or found.position is None or found.flavor != "mysql":
        return found
    gtids = MysqlGtidSet.parse(found.position.gtid) | MysqlGtidSet.parse(gtid_purged)
    return replace(found, position=replace(found.position, gtid=str(gtids)))


def _last(base: str | Path, index: str | Path | None) -> Tail:
    folder, name = os.path.split(os.fspath(base))
    numbers = _numbers(folder or ".", name)
    named = _read_index(f"{os.fspath(base)}.index" if index is None else os.fspath(index))
    if named is not None:
        _refuse_beyond(folder, numbers, named)
        if not named:
            return Tail(position=None)
        path = os.path.join(folder, named[-1])
        if named[-1] not in numbers:
            raise BinlogError("the index names it, but it does not exist", file=path)
        found = tail(path)
        if found.position is None:
            # A server writes the beginning, then the index. MariaDB does not start on such a file, or forgets GTIDs.
            raise BinlogError("damaged: the index names it, but its beginning is incomplete", file=path)
        return found
    # After 999999 the numbers have more than six digits.
    for file in sorted(numbers, key=numbers.__getitem__, reverse=True)[:2]:
        found = tail(os.path.join(folder, file))
        if found.position is not None:
            if found.truncated and numbers[file] < max(numbers.values()):
                raise BinlogError("damaged: another one follows, but it has no end", file=os.path.join(folder, file))
            return found
        # A rotation was in progress: the new file does not hold GTIDs or transactions, and the index does not name it.
        # The previous file is complete, and its end is the position; a starting server continues there.
    return Tail(position=None)


def _refuse_beyond(folder: str, numbers: dict[str, int], named: Sequence[str]) -> None:
    """Raise BinlogError if a file with transactions is newer than all files in the index.

    A server writes a new file's beginning, then its name into the index, then transactions. At its start it trusts the
    index and ignores other files. So a file with transactions that is not in the index is from another instant.
    """
    last = max((numbers[file] for file in named if file in numbers), default=0)
    for file in (file for file, number in numbers.items() if number > last):
        if tail(os.path.join(folder, file)).transactions:
            raise BinlogError(
                "it has transactions, but the index does not name it",
                file=os.path.join(folder, file),
                hint="are the logs and their index from one instant?",
            )


def _numbers(folder: str, name: str) -> dict[str, int]:
    """Return the files of this base name and their numbers."""
    pattern = re.compile(re.escape(name) + r"\.(\d{6,18})", re.ASCII)
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise BinlogError(f"cannot read its folder: {error.strerror}", file=os.path.join(folder, name)) from error
    numbers = {entry: int(match[1]) for entry in names if (match := pattern.fullmatch(entry))}
    inside_engine = [entry for entry in names if re.fullmatch(r"binlog-\d{6,}\.ibb", entry, re.ASCII)]
    if inside_engine and not numbers:
        raise BinlogError(
            "InnoDB keeps it (binlog_storage_engine), in a format that snapmgr does not know",
            file=os.path.join(folder, inside_engine[0]),
            hint="only the server can tell its position: take the snapshot under a lock",
        )
    return numbers


def _read_index(path: str) -> list[str] | None:
    """Return the names in an index, in its order; None without an index."""
    # While MySQL replaces the index, only the new one exists, under this name.
    for file_name in (path, f"{os.path.splitext(path)[0]}.index_crash_safe"):
        try:
            if not os.path.lexists(file_name):
                continue
            with open_plain(file_name) as file:
                text = file.read(_INDEX_BYTES + 1)
                if len(text) > _INDEX_BYTES:
                    raise BinlogError("the index of binary logs is too large", file=file_name)
                # The server is still writing a line without its end.
                lines = text.split(b"\n")[:-1]
                return [os.path.basename(os.fsdecode(line.strip())) for line in lines if line.strip()]
        except OSError as error:
            raise BinlogError(
                f"cannot read the index: {error.strerror or 'not a regular file'}", file=file_name
            ) from error
    return None
