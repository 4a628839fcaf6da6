"""Reading a binary log event by event, in bounded memory, and never trusting it.

A file is a chain of events, each with its length and the position where it ends. Events that say nothing about
transactions and are large (rows) are skipped by seeking; all others are read, and their checksums verified.
"""

from __future__ import annotations

import os
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from snapmgr.errors import SnapmgrError
from snapmgr.mysql.binlog_decode import DECODED, QUERY_PREFIX_BYTES, BodyError, decode, format_description
from snapmgr.mysql.binlog_events import (
    CHECKSUM_BYTES,
    CHECKSUM_CRC32,
    FLAG_IN_USE,
    HEADER,
    MAGIC,
    MYSQL_ENCRYPTED_MAGIC,
    Body,
    EventType,
    StartEncryption,
)
from snapmgr.mysql.plainfile import open_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

_SMALL_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20
# How much of a body is looked at. Of these types the beginning is enough …
_PREFIX_BYTES: dict[int, int] = {EventType.QUERY: QUERY_PREFIX_BYTES, EventType.TRANSACTION_PAYLOAD: 0}
# … and others have no more than that.
_LIMIT_BYTES = 64 << 10
_LIST_LIMIT_BYTES = 32 << 20
_ZEROS_BYTES = 16 << 20
_FLAG_ARTIFICIAL, _FLAG_RELAY_LOG = 0x20, 0x40
_SEES_KEYS = "its position can be had from the server alone: take the snapshot under a lock, not crash-consistent"


class BinlogError(SnapmgrError):
    """A binary log is damaged, or is no binary log that we can read; `file` and `offset` say where."""

    def __init__(self, what: str, *, file: str, offset: int | None = None, hint: str | None = None) -> None:
        where = file if offset is None else f"{file} at {offset}"
        super().__init__(f"binary log {where}: {what}", hint=hint)
        self.file = file
        self.offset = offset


class TruncatedBinlogError(BinlogError):
    """The file ends inside an event that is sound as far as it goes: what a crash (or a snapshot) leaves."""


class EncryptedBinlogError(BinlogError):
    """The file is encrypted; only its server can read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event of a binary log."""

    offset: int
    next_offset: int
    type: int
    """An EventType, or a type that is not decoded."""
    timestamp: int
    """Seconds since the epoch; of its statement's start."""
    server_id: int
    flags: int
    body: Body | None
    """None if the type is not decoded."""


class Reader:
    """An open binary log. Raises BinlogError for whatever is wrong with it."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self.name = name
        self._checksum = CHECKSUM_CRC32
        with self._failures():
            # A live file grows: what comes later is no part of this reading.
            self.size = file.seek(0, os.SEEK_END)

    def events(self, *, thorough: bool = False) -> Iterator[Event]:
        """Return the events from the first on; raises TruncatedBinlogError at a partial one, after all others.

        With `thorough` every event's checksum is verified, else not those of large events that are not decoded.
        """
        with self._failures():
            self._file.seek(0)
            magic = self._file.read(len(MAGIC))
        if magic == MYSQL_ENCRYPTED_MAGIC:
            raise EncryptedBinlogError("it is encrypted (binlog_encryption)", file=self.name, hint=_SEES_KEYS)
        if magic != MAGIC:
            if MAGIC.startswith(magic) or not magic.strip(b"\0"):
                raise TruncatedBinlogError("it is too short to have begun", file=self.name, offset=0)
            raise BinlogError("it is no binary log (its first bytes are others)", file=self.name, offset=0)
        offset = len(MAGIC)
        first = True
        while offset < self.size:
            event = self._event(offset, first=first, thorough=thorough)
            yield event
            offset, first = event.next_offset, False

    def verify(self, start: int, stop: int) -> None:
        """Verify the checksums of all events between two offsets where events begin."""
        while start < stop:
            start = self._event(start, first=False, thorough=True).next_offset

    def damaged(self, what: str, offset: int) -> BinlogError:
        """Return the error that says so."""
        hint = "take another snapshot; if the server's own file has it, too: FLUSH BINARY LOGS begins a new one"
        return BinlogError(f"damaged: {what}", file=self.name, offset=offset, hint=hint)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BinlogError(f"cannot be read: {error.strerror or error}", file=self.name) from error

    def _event(self, offset: int, *, first: bool, thorough: bool) -> Event:
        with self._failures():
            self._file.seek(offset)
            header = self._file.read(HEADER.size)
        if len(header) < HEADER.size:
            self._truncated(offset)
        timestamp, kind, server_id, length, end, flags = HEADER.unpack(header)
        stop = offset + length
        tail = CHECKSUM_BYTES if first or self._checksum == CHECKSUM_CRC32 else 0
        if length < HEADER.size + tail:
            self._check_zeros(offset)
            raise self.damaged(f"an event of {length} bytes cannot be", offset)
        # In a relay log it may be the place in the source's file; MariaDB makes a file of a large transaction's cache
        # (binlog_large_commit_threshold) without filling it in.
        if end != stop & 0xFFFFFFFF and not (end == 0 or flags & (_FLAG_ARTIFICIAL | _FLAG_RELAY_LOG)):
            raise self.damaged(f"an event of {length} bytes that says that it ends at {end}", offset)
        if first != (kind == EventType.FORMAT_DESCRIPTION):
            expected = "does not begin with a Format_description" if first else "has a second Format_description"
            raise self.damaged(f"it {expected}", offset)
        if stop > self.size:
            self._truncated(offset)
        body: Body | None = None
        if first or thorough or kind in DECODED or length <= _SMALL_BYTES:
            if first:
                # The flag is set and cleared without a new checksum.
                header = header[:-2] + (flags & ~FLAG_IN_USE).to_bytes(2, "little")
            body = self._body(kind, self._content(kind, header, offset, length, tail), server_id, flags, offset)
        return Event(
            offset=offset,
            next_offset=stop,
            type=kind,
            timestamp=timestamp,
            server_id=server_id,
            flags=flags,
            body=body,
        )

    def _content(self, kind: int, header: bytes, offset: int, length: int, tail: int) -> bytes:
        """Read an event's body, verify its checksum and return as much of the body as decoding needs."""
        size, wanted = length - HEADER.size - tail, 0
        if kind in _PREFIX_BYTES:
            wanted = _PREFIX_BYTES[kind]
        elif kind in DECODED or kind == EventType.FORMAT_DESCRIPTION:
            wanted = size
            if size > (_LIST_LIMIT_BYTES if kind in {EventType.PREVIOUS_GTIDS, EventType.GTID_LIST} else _LIMIT_BYTES):
                raise self.damaged(f"an event of type {kind} with {length} bytes cannot be", offset)
        with self._failures():
            content = self._file.read(min(size, max(wanted, _SMALL_BYTES)))
            checksum, left = zlib.crc32(content, zlib.crc32(header)), size - len(content)
            while left and tail:
                chunk = self._file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    break
                checksum, left = zlib.crc32(chunk, checksum), left - len(chunk)
            stored = self._file.read(tail)
        if (left and tail) or len(stored) < tail:
            raise self.damaged("the file became shorter while it was read", offset)
        if stored and int.from_bytes(stored, "little") != checksum:
            raise self.damaged(f"the checksum of an event of type {kind} does not fit", offset)
        return content[:wanted]

    def _body(self, kind: int, content: bytes, server_id: int, flags: int, offset: int) -> Body | None:
        try:
            if kind == EventType.FORMAT_DESCRIPTION:
                head = format_description(content, flags)
                self._checksum = head.checksum
                return head
            body = decode(kind, content, server_id)
        except BodyError as error:
            raise self.damaged(f"an event of type {kind}: {error}", offset) from None
        if isinstance(body, StartEncryption):
            raise EncryptedBinlogError(
                "it is encrypted (encrypt_binlog)", file=self.name, offset=offset, hint=_SEES_KEYS
            )
        return body

    def _truncated(self, offset: int) -> None:
        raise TruncatedBinlogError("it ends in the middle of an event", file=self.name, offset=offset)

    def _check_zeros(self, offset: int) -> None:
        """Raise TruncatedBinlogError if the rest is zeros: after a power cut a file may be longer than its content."""
        left = self.size - offset
        if left > _ZEROS_BYTES:
            return
        with self._failures():
            self._file.seek(offset)
            while left:
                chunk = self._file.read(min(left, _CHUNK_BYTES))
                if not chunk or chunk.strip(b"\0"):
                    return
                left -= len(chunk)
        raise TruncatedBinlogError("only zeros follow", file=self.name, offset=offset)


@contextmanager
def open_binlog(file: str | os.PathLike[str] | BinaryIO) -> Iterator[Reader]:
    """Open a binary log of a snapshot, a stranger's file: never through a symlink, never waiting for a FIFO.

    One that is open already must be able to seek, and stays open. Raises BinlogError.
    """
    if not isinstance(file, str | os.PathLike):
        yield Reader(file, str(getattr(file, "name", "(open file)")))
        return
    name = os.fspath(file)
    try:
        opened = open_plain(name)
    except OSError as error:
        raise BinlogError(
            f"cannot be read: {error.strerror or 'it is not there, or is no plain file'}", file=name
        ) from error
    with opened:
        yield Reader(opened, name)


def iterate(file: str | os.PathLike[str] | BinaryIO, *, thorough: bool = False) -> Iterator[Event]:
    """Return the events of a binary log, a path or an open file, from the first on, up to the end that it has now.

    With `thorough` every event's checksum is verified, also of large ones that are not decoded.

    Raises BinlogError where something is wrong: TruncatedBinlogError, after all complete events, if the file ends
    inside one; EncryptedBinlogError.
    """
    with open_binlog(file) as reader:
        yield from reader.events(thorough=thorough)
