"""Decodes the events of a binary log from bytes to records. Pure.

Layouts: MySQL's `libs/mysql/binlog/event` and the readme of its serialization library (for the tagged GTID); MariaDB's
documentation of the replication protocol. All integers are little-endian.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.mysql.binlog.events import (
    CHECKSUM_CRC32,
    CHECKSUM_NONE,
    FLAG_COMMIT_ID,
    FLAG_IN_USE,
    HEADER,
    Body,
    EventType,
    FormatDescription,
    GtidList,
    MariadbTransaction,
    MysqlTransaction,
    PreviousGtids,
    Query,
    Rotate,
    StartEncryption,
    TransactionPayload,
    XaPrepare,
    Xid,
)
from snapmgr.mysql.binlog.gtid import LAST_NUMBER, MariadbGtid, MysqlGtidSet, uuid_text

if TYPE_CHECKING:
    from collections.abc import Callable

_MARIADB_FIRST_TYPE = 160
_HEAD_BYTES = 57
_QUERY_BYTES = 64
QUERY_PREFIX_BYTES = 13 + 0xFFFF + 0xFF + 1 + _QUERY_BYTES
"""The part of a Query that we read: its post-header, the longest status variables and database, the text's start."""


class BodyError(ValueError):
    """An event's body does not fit its type."""


class _Cursor:
    """Reads a body from its beginning; raises BodyError if it ends too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise BodyError(f"its body ends {count - self.left} bytes too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def varlen(self) -> int:
        """Read MySQL's variable-length unsigned integer: the first byte's low one bits count the bytes that follow."""
        first = self.integer(1)
        more = (~first & (first + 1)).bit_length() - 1
        high = self.integer(more)
        # With eight one bits the first byte does not hold any bit of the number.
        return high if more >= 8 else (first >> (more + 1)) | high << (7 - more)  # noqa: PLR2004 - bits of a byte

    def varlen_signed(self) -> int:
        number = self.varlen()
        return -(number >> 1) - 1 if number & 1 else number >> 1


def format_description(body: bytes, flags: int) -> FormatDescription:
    """Decode a Format_description's body, whose last byte is the checksum algorithm. Raises BodyError."""
    if len(body) <= _HEAD_BYTES:
        raise BodyError("its body is too short")
    version, text, created, header_bytes = struct.unpack_from("<H50sIB", body)
    if version != 4 or header_bytes != HEADER.size:  # noqa: PLR2004 - version 4 since MySQL 5.0
        raise BodyError(f"the format (version {version}, headers of {header_bytes} bytes) is unknown")
    checksum = body[-1]
    if checksum not in {CHECKSUM_NONE, CHECKSUM_CRC32}:
        raise BodyError(f"the checksum algorithm {checksum} is unknown")
    post_header_bytes = body[_HEAD_BYTES:-1]
    return FormatDescription(
        server_version=text.split(b"\0")[0].decode("ascii", "replace"),
        # An option can set the version's text; only MariaDB has event types of its own.
        flavor="mariadb" if len(post_header_bytes) > _MARIADB_FIRST_TYPE else "mysql",
        created=created,
        checksum=checksum,
        post_header_bytes=post_header_bytes,
        in_use=bool(flags & FLAG_IN_USE),
    )


def _rotate(body: _Cursor, _server_id: int) -> Rotate:
    position = body.integer(8)
    return Rotate(next_file=body.take(body.left).decode("utf-8", "surrogateescape"), position=position)


def _previous_gtids(body: _Cursor, _server_id: int) -> PreviousGtids:
    gtids = MysqlGtidSet()
    if not body.left:
        return PreviousGtids(gtids=gtids)
    # The highest byte holds the format. The format with tags repeats it in the lowest byte, with the count between.
    head = body.integer(8)
    tagged = head >> 56 == 1
    if head >> 56 not in {0, 1}:
        raise BodyError(f"its GTID set's format {head >> 56} is unknown")
    for _ in range((head >> 8) & 0xFFFFFFFFFFFF if tagged else head):
        uuid = uuid_text(body.take(16))
        tag = _tag(body.take(body.varlen())) if tagged else ""
        for _ in range(body.integer(8)):
            start, stop = body.integer(8), body.integer(8)
            if not 0 < start < stop <= LAST_NUMBER + 1:
                raise BodyError(f"it has the empty or impossible range {start} to {stop}")
            gtids.add(uuid, start, stop - 1, tag=tag)
    return PreviousGtids(gtids=gtids)


def _tag(raw: bytes) -> str:
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError:
        raise BodyError("a GTID's tag is not ASCII text") from None


def _mysql_transaction(body: _Cursor, _server_id: int) -> MysqlTransaction:
    body.take(1)
    uuid, number = uuid_text(body.take(16)), body.integer(8)
    clock: tuple[int | None, int | None] = (None, None)
    committed = originally = None
    # Since MySQL 5.7, the times since 8. The body may end before each part.
    if body.left >= 17 and body.integer(1) == 2:  # noqa: PLR2004 - the type of the two numbers that follow
        clock = body.integer(8), body.integer(8)
        if body.left >= 7:  # noqa: PLR2004 - a time's bytes
            committed = originally = body.integer(7)
            if committed >> 55:
                committed &= (1 << 55) - 1
                originally = body.integer(7)
    return MysqlTransaction(
        uuid=uuid,
        number=number,
        last_committed=clock[0],
        sequence_number=clock[1],
        committed_us=committed,
        originally_committed_us=originally,
    )


def _anonymous(body: _Cursor, server_id: int) -> MysqlTransaction:
    return replace(_mysql_transaction(body, server_id), uuid="", number=0)


def _tagged_transaction(body: _Cursor, _server_id: int) -> MysqlTransaction:
    """Decode a message of the serialization library: version, size, last field that a reader must know, then fields.

    Fields: 0 flags, 1 UUID, 2 number, 3 tag, 4 last_committed, 5 sequence_number, 6 committed here, 7 at its origin,
    8 length, 9 and 10 server versions, 11 ticket.
    """
    if body.varlen() != 1:
        raise BodyError("its serialization format is unknown")
    size, left = body.varlen(), body.left
    # The size includes the bytes of the version and of itself.
    if not 0 <= size - left <= 10 or body.varlen() > 11:  # noqa: PLR2004 - 11: commit_group_ticket
        raise BodyError("it has unknown fields that a reader must not ignore")
    uuid, tag, numbers = b"", "", dict[int, int]()
    while body.left:
        match body.varlen():
            case 1:
                # Each of the sixteen bytes is an integer of variable length.
                uuid = bytes(min(body.varlen(), 0xFF) for _ in range(16))
            case 3:
                tag = _tag(body.take(body.varlen()))
            case (2 | 4 | 5) as field:
                numbers[field] = body.varlen_signed()
            case field if field <= 11:  # noqa: PLR2004
                numbers[field] = body.varlen()
            case _:
                break  # a newer server's fields: a reader may ignore them, and they come last
    number = numbers.get(2, 0)
    if len(uuid) != 16 or number < 1:  # noqa: PLR2004 - a UUID's bytes
        raise BodyError("it has no GTID")
    committed = numbers.get(6)
    return MysqlTransaction(
        uuid=uuid_text(uuid),
        number=number,
        tag=tag,
        last_committed=numbers.get(4),
        sequence_number=numbers.get(5),
        committed_us=committed,
        # Left out if it is the same.
        originally_committed_us=numbers.get(7, committed),
    )


def _mariadb_transaction(body: _Cursor, server_id: int) -> MariadbTransaction:
    number, domain, flags = body.integer(8), body.integer(4), body.integer(1)
    commit_id = body.integer(8) if flags & FLAG_COMMIT_ID else None
    gtid = MariadbGtid(domain, server_id, number)
    return MariadbTransaction(gtid=gtid, flags=flags, commit_id=commit_id)


def _gtid_list(body: _Cursor, _server_id: int) -> GtidList:
    # The highest four bits are flags.
    count = body.integer(4) & 0x0FFFFFFF
    if body.left < 16 * count:
        raise BodyError(f"it has no room for {count} GTIDs")
    return GtidList(gtids=tuple(MariadbGtid(body.integer(4), body.integer(4), body.integer(8)) for _ in range(count)))


def _query(body: _Cursor, _server_id: int) -> Query:
    _thread, _seconds, database_bytes, _error, variables_bytes = struct.unpack("<IIBHH", body.take(13))
    body.take(variables_bytes + database_bytes + 1)
    text = body.take(min(body.left, _QUERY_BYTES)).upper()
    if text == b"BEGIN":
        return Query(kind="begin")
    if text == b"COMMIT":
        return Query(kind="commit")
    if text == b"ROLLBACK":
        return Query(kind="rollback")
    return Query(kind="xa-start" if text.startswith(b"XA START ") else "other")


def _xid(body: _Cursor, _server_id: int) -> Xid:
    xid = body.integer(8)
    if body.left:
        raise BodyError("its body is too long")
    return Xid(xid=xid)


def _xa_prepare(body: _Cursor, _server_id: int) -> XaPrepare:
    return XaPrepare(one_phase=body.integer(1) != 0)


def _start_encryption(body: _Cursor, _server_id: int) -> StartEncryption:
    return StartEncryption(scheme=body.integer(1), key_version=body.integer(4))


_DECODERS: dict[int, Callable[[_Cursor, int], Body]] = {
    EventType.QUERY: _query,
    EventType.ROTATE: _rotate,
    EventType.XID: _xid,
    EventType.MYSQL_GTID: _mysql_transaction,
    EventType.ANONYMOUS_GTID: _anonymous,
    EventType.PREVIOUS_GTIDS: _previous_gtids,
    EventType.XA_PREPARE: _xa_prepare,
    EventType.TRANSACTION_PAYLOAD: lambda _body, _server_id: TransactionPayload(),
    EventType.MYSQL_TAGGED_GTID: _tagged_transaction,
    EventType.MARIADB_GTID: _mariadb_transaction,
    EventType.GTID_LIST: _gtid_list,
    EventType.START_ENCRYPTION: _start_encryption,
}
DECODED = frozenset(_DECODERS)
"""The types that `decode` knows; Format_description is separate."""


def decode(kind: int, body: bytes, server_id: int) -> Body | None:
    """Return an event's record, given its type, body (without header and checksum) and server id; None if unknown.

    For a Query and a Transaction_payload the beginning is enough. Raises BodyError.
    """
    decoder = _DECODERS.get(kind)
    return None if decoder is None else decoder(_Cursor(body), server_id)
