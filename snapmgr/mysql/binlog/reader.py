"""Reads a binary log event by event, in bounded memory, and checks everything.

A file is a chain of events, each with its length and the position where it ends. Large events without information about
transactions (rows) are skipped by seeking; all others are read, and their checksums verified.
"""

from __future__ import annotations

import os
import re
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, NoReturn

from snapmgr.contract.errors import SnapmgrError
from snapmgr.mysql.binlog.decode import DECODED, QUERY_PREFIX_BYTES, BodyError, decode, format_description
from snapmgr.mysql.binlog.events import (
    CHECKSUM_BYTES,
    CHECKSUM_CRC32,
    FLAG_IN_USE,
    HEADER,
    MAGIC,
    MYSQL_ENCRYPTED_MAGIC,
    Body,
    EventType,
    FormatDescription,
    StartEncryption,
)
from snapmgr.mysql.datadir.plainfile import open_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

_SMALL_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20
# Decoded types whose beginning is enough …
_PREFIX_BYTES: dict[int, int] = {EventType.QUERY: QUERY_PREFIX_BYTES, EventType.TRANSACTION_PAYLOAD: 0}
# … and types that may be long. All others are small.
_LISTS: frozenset[int] = frozenset({EventType.PREVIOUS_GTIDS, EventType.GTID_LIST})
_LIST_LIMIT_BYTES = 32 << 20
_ZEROS_BYTES = 16 << 20
_FORMAT_DESCRIPTION = int(EventType.FORMAT_DESCRIPTION)
_U32 = 0xFFFFFFFF
# The time takes the four bytes before the type. Matches Query, Xid, XA_prepare and MariaDB's GTID of less than 64 KiB;
# the groups are the length and the end.
_MAYBE_HEADER = re.compile(rb"(?s)(?=.{4}[\x02\x10\x26\xa2].{4}(..\0\0)(.{4}))")
_SEES_KEYS = "only the server can tell its position: take the snapshot under a lock, not crash-consistent"


class BinlogError(SnapmgrError):
    """A binary log is damaged, or not readable for us; `file` and `offset` give the place."""

    def __init__(self, what: str, *, file: str, offset: int | None = None, hint: str | None = None) -> None:
        where = file if offset is None else f"{file} at {offset}"
        super().__init__(f"binary log {where}: {what}", hint=hint)
        self.file = file
        self.offset = offset


class TruncatedBinlogError(BinlogError):
    """The file ends inside an event that is valid so far, as after a crash (or in a snapshot)."""


class EncryptedBinlogError(BinlogError):
    """The file is encrypted; only its server can read it."""


class Event(NamedTuple):
    """One event of a binary log. A tuple: there are millions of them."""

    offset: int
    next_offset: int
    type: int
    """An EventType, or a type that we do not decode."""
    timestamp: int
    """When its statement began: seconds since the epoch."""
    server_id: int
    flags: int
    body: Body | None
    """None if we do not decode the type."""


class BinlogReader:
    """An open binary log. Raises BinlogError for any problem with it."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self.name = name
        self._checksum = CHECKSUM_CRC32
        with self._failures():
            # A live file grows: later events are not part of this reading.
            self.size = file.seek(0, os.SEEK_END)

    def events(self) -> Iterator[Event]:
        """Yield the events from the first on; raises TruncatedBinlogError at a partial one, after all others.

        Verifies all checksums except those of large events that it skips; for those see `verify`.
        """
        with self._failures():
            self._file.seek(0)
            self._check_magic(self._file.read(len(MAGIC)))
            offset, first = len(MAGIC), True
            while offset < self.size:
                event = self._event(offset, first=first, thorough=False)
                yield event
                offset, first = event.next_offset, False

    def _check_magic(self, magic: bytes) -> None:
        if magic == MYSQL_ENCRYPTED_MAGIC:
            raise EncryptedBinlogError("it is encrypted (binlog_encryption)", file=self.name, hint=_SEES_KEYS)
        if magic != MAGIC:
            if MAGIC.startswith(magic) or not magic.strip(b"\0"):
                raise TruncatedBinlogError("it is too short to have a beginning", file=self.name, offset=0)
            raise BinlogError("it is not a binary log (its first bytes differ)", file=self.name, offset=0)

    def verify(self, start: int, stop: int) -> None:
        """Verify the checksums of all events between two offsets where events begin, without the file's first event."""
        with self._failures():
            while start < stop:
                start = self._event(start, first=False, thorough=True).next_offset

    def damaged(self, what: str, offset: int) -> BinlogError:
        """Return the error for damage at `offset`."""
        hint = "take another snapshot; if the server's own file is damaged too: FLUSH BINARY LOGS begins a new one"
        return BinlogError(f"damaged: {what}", file=self.name, offset=offset, hint=hint)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BinlogError(f"cannot read it: {error.strerror or error}", file=self.name) from error

    def _event(self, offset: int, *, first: bool, thorough: bool) -> Event:
        file = self._file
        file.seek(offset)
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            self._truncated(offset)
        timestamp, kind, server_id, length, end, flags = HEADER.unpack(header)
        stop = offset + length
        tail = CHECKSUM_BYTES if first or self._checksum == CHECKSUM_CRC32 else 0
        if length < HEADER.size + tail:
            self._check_zeros(offset)
            raise self.damaged(f"an event of {length} bytes is impossible", offset)
        # MariaDB 11.8 leaves the end 0 in events inside a transaction.
        if end not in {stop & _U32, 0}:
            raise self.damaged(f"an event of {length} bytes claims to end at {end}", offset)
        if first is not (kind == _FORMAT_DESCRIPTION):
            expected = "does not begin with a Format_description" if first else "has a second Format_description"
            raise self.damaged(f"it {expected}", offset)
        if stop > self.size:
            if not end:
                self._refuse_valid_event_behind(offset)
            self._truncated(offset)
        body: Body | None = None
        if first:
            # The server sets and clears the flag without a new checksum.
            header = header[:-2] + (flags & ~FLAG_IN_USE).to_bytes(2, "little")
            body = self._head(self._content(kind, header, offset, length, tail), flags, offset)
        elif kind in DECODED:
            body = self._body(kind, self._content(kind, header, offset, length, tail), server_id, offset)
        elif thorough or length <= _SMALL_BYTES:
            self._content(kind, header, offset, length, tail)
        return Event(offset, stop, kind, timestamp, server_id, flags, body)

    def _content(self, kind: int, header: bytes, offset: int, length: int, tail: int) -> bytes:
        """Read an event's body, verify its checksum and return the part of the body that decoding needs."""
        size = length - HEADER.size
        if size <= _SMALL_BYTES:
            content = self._file.read(size)
            size, stored = size - tail, content[size - tail :]
            content = content[:size]
            checksum, left = zlib.crc32(content, zlib.crc32(header)), size - len(content)
        else:
            size -= tail
            wanted = size if kind in DECODED else 0
            if kind in _PREFIX_BYTES:
                wanted = min(_PREFIX_BYTES[kind], size)
            elif wanted > _LIST_LIMIT_BYTES or (wanted and kind not in _LISTS):
                raise self.damaged(f"an event of type {kind} with {length} bytes is impossible", offset)
            content = self._file.read(wanted)
            checksum, left = zlib.crc32(content, zlib.crc32(header)), size - len(content)
            while left and tail and (chunk := self._file.read(min(left, _CHUNK_BYTES))):
                checksum, left = zlib.crc32(chunk, checksum), left - len(chunk)
            stored = self._file.read(tail)
        if tail:
            if left or len(stored) < tail:
                raise self.damaged("the file shrank while it was read", offset)
            if int.from_bytes(stored, "little") != checksum:
                raise self.damaged(f"the checksum of an event of type {kind} does not match", offset)
        return content

    def _head(self, content: bytes, flags: int, offset: int) -> FormatDescription:
        try:
            head = format_description(content, flags)
        except BodyError as error:
            raise self.damaged(f"its Format_description: {error}", offset) from None
        self._checksum = head.checksum
        return head

    def _body(self, kind: int, content: bytes, server_id: int, offset: int) -> Body | None:
        try:
            body = decode(kind, content, server_id)
        except BodyError as error:
            raise self.damaged(f"an event of type {kind}: {error}", offset) from None
        if isinstance(body, StartEncryption):
            what = "it is encrypted (encrypt_binlog)"
            raise EncryptedBinlogError(what, file=self.name, offset=offset, hint=_SEES_KEYS)
        return body

    def _truncated(self, offset: int) -> NoReturn:
        raise TruncatedBinlogError("it ends in the middle of an event", file=self.name, offset=offset)

    def _rest(self, offset: int, overlap: int) -> Iterator[tuple[int, bytes]]:
        """Yield pieces of the file from an offset on, each with its own offset."""
        while offset < self.size:
            self._file.seek(offset)
            piece = self._file.read(min(self.size - offset, _CHUNK_BYTES))
            if len(piece) <= overlap:
                return
            yield offset, piece
            offset += len(piece) - overlap

    def _check_zeros(self, offset: int) -> None:
        """Raise TruncatedBinlogError if only zeros follow: after a power cut a file may be longer than its content."""
        if self.size - offset > _ZEROS_BYTES or any(piece.strip(b"\0") for _, piece in self._rest(offset, 0)):
            return
        raise TruncatedBinlogError("only zeros follow", file=self.name, offset=offset)

    def _refuse_valid_event_behind(self, offset: int) -> None:
        """Raise BinlogError if an event that reaches beyond the file's end contains events: its length is damaged.

        For an event without its own end position. All events that begin or end a transaction have one.
        """
        for start, piece in self._rest(offset + HEADER.size, HEADER.size):
            for match in _MAYBE_HEADER.finditer(piece):
                begin = start + match.start()
                length = int.from_bytes(match[1], "little")
                stop = begin + length
                if int.from_bytes(match[2], "little") != stop & _U32 or not HEADER.size < length <= self.size - begin:
                    continue
                if self._is_valid(begin, length):
                    raise self.damaged(
                        f"an event reaches beyond the file's end, but there is another one at {begin}", offset
                    )

    def _is_valid(self, offset: int, length: int) -> bool:
        if self._checksum != CHECKSUM_CRC32:
            return True
        self._file.seek(offset)
        event = self._file.read(length)
        return zlib.crc32(event[:-CHECKSUM_BYTES]) == int.from_bytes(event[-CHECKSUM_BYTES:], "little")


@contextmanager
def open_binlog(file: str | os.PathLike[str] | BinaryIO) -> Iterator[BinlogReader]:
    """Open a binary log of a snapshot, an untrusted file: never follow a symlink, never wait for a FIFO.

    An open file must be able to seek, and stays open. Raises BinlogError.
    """
    if not isinstance(file, str | os.PathLike):
        yield BinlogReader(file, str(getattr(file, "name", "(open file)")))
        return
    name = os.fspath(file)
    try:
        opened = open_plain(name)
    except OSError as error:
        raise BinlogError(
            f"cannot read it: {error.strerror or 'it does not exist, or is not a regular file'}", file=name
        ) from error
    with opened:
        yield BinlogReader(opened, name)
