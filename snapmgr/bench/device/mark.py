"""Reads and writes our mark on a device: a small record behind the file system, for the next run after a kill.

The mark names its owner by the identity and size of the device, so that a copy on another disk is not accepted. It
lists our data on the device: the file systems that we made, by UUID, or, after a run that ended, a digest of the
contents that we left. Anybody who uses the device later changes one of these, and the mark is no longer valid.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass, replace

import msgspec

from snapmgr.contract.units import format_size

MIB = 1 << 20
MARK_BYTES = 4096
_MAGIC = b"snapmgr bench 1\n"
_HEAD = struct.Struct(f"<{len(_MAGIC)}sI")
_DIGEST_BYTES = 32
_PIECE_BYTES = 64 << 10
_PIECES = 64
_ENDS_BYTES = MIB

Signature = tuple[str, str]
"""Type and UUID ("" if it has none) of a signature that blkid or wipefs found."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The record of a run of the benchmark about a device."""

    identity: str
    size_bytes: int
    signatures: tuple[Signature, ...] = ()
    """The signatures that we made and have not removed yet."""
    content: str = ""
    """`digest` of the device as the last run left it; "" during a run."""


def usable_bytes(size_bytes: int) -> int:
    """Return the number of bytes that may be formatted; the mark follows directly. 0: nothing."""
    return max(size_bytes // MIB - 1, 0) * MIB


def pack(mark: Mark) -> bytes:
    """Return the record, `MARK_BYTES` long."""
    # A device has a handful; those that do not fit are not recognised as ours, which is safe.
    body = msgspec.json.encode(replace(mark, signatures=mark.signatures[:16]))
    head = _HEAD.pack(_MAGIC, len(body))
    return (head + body + hashlib.sha256(head + body).digest()).ljust(MARK_BYTES, b"\0")


def unpack(data: bytes) -> Mark | None:
    """Return the mark in a record; None if it is missing or damaged."""
    try:
        magic, length = _HEAD.unpack_from(data)
        end = _HEAD.size + length
        if magic != _MAGIC or data[end : end + _DIGEST_BYTES] != hashlib.sha256(data[:end]).digest():
            return None
        return msgspec.json.decode(data[_HEAD.size : end], type=Mark)
    except (struct.error, msgspec.DecodeError):
        return None


def read_mark(fd: int, size_bytes: int) -> Mark | None:
    """Return the mark on an open device. Raises OSError."""
    at = usable_bytes(size_bytes)
    return unpack(os.pread(fd, MARK_BYTES, at)) if at > 0 else None


def write_mark(path: str, mark: Mark) -> None:
    """Write the mark of the device at `path`, durably. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, pack(mark), usable_bytes(mark.size_bytes))
        os.fsync(fd)
    finally:
        os.close(fd)


def ours(mark: Mark | None, *, identity: str, size_bytes: int, found: tuple[Signature, ...], content: str) -> bool:
    """Return whether we left everything that was `found` on a device.

    `content` is its current `digest`. Signatures without a UUID cannot be distinguished from somebody else's.
    """
    if mark is None or not identity or (mark.identity, mark.size_bytes) != (identity, size_bytes):
        return False
    if found:
        return all(uuid and (kind, uuid) in mark.signatures for kind, uuid in found)
    return bool(mark.content) and mark.content == content


@dataclass(frozen=True, kw_only=True)
class Content:
    """The result of sampling a device: its beginning, its end, and pieces all over it."""

    digest: str
    data_at: int | None
    """Place of the first byte that is neither 0x00 nor 0xFF (the value of erased flash); None: it looks empty."""

    @property
    def shown(self) -> str:
        """Describe it for a refusal; "" if it looks empty."""
        if self.data_at is None:
            return ""
        return (
            f"data without a signature, from {format_size(self.data_at)} on (encrypted without a header, a raw volume "
            "of a database or a virtual machine, or rests of what was there once)"
        )


def read_content(fd: int, size_bytes: int) -> Content:
    """Read samples of an open device, our mark left out. Raises OSError (a disk that cannot be read)."""
    sums, data_at = hashlib.sha256(), None
    mark_at = usable_bytes(size_bytes)
    for start, length in _pieces(size_bytes):
        data = os.pread(fd, length, start)
        if mark_at > 0 and start <= mark_at < start + length:
            inside = mark_at - start
            data = data[:inside] + bytes(MARK_BYTES) + data[inside + MARK_BYTES :]
        sums.update(data)
        if data_at is None and not (_uniform(data, b"\0") or _uniform(data, b"\xff")):
            data_at = start
    return Content(digest=sums.hexdigest(), data_at=data_at)


def _uniform(data: bytes, byte: bytes) -> bool:
    return data.count(byte) == len(data)


def _pieces(size_bytes: int) -> list[tuple[int, int]]:
    ends = min(_ENDS_BYTES, size_bytes)
    step = max(size_bytes // _PIECES // _PIECE_BYTES, 1) * _PIECE_BYTES
    middle = [(at, _PIECE_BYTES) for at in range(ends, size_bytes - 2 * ends, step)]
    # The last piece includes everything behind the mark, which begins up to 2 MiB before the end.
    tail = max(size_bytes - 2 * ends, 0)
    return [(0, ends), *middle, (tail, size_bytes - tail)]
