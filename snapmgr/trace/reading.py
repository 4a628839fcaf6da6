"""Reads a recorded log, plain or compressed with gzip, complete or truncated."""

from __future__ import annotations

import sys
import zlib
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO

from snapmgr.contract.errors import NotFoundError, SnapmgrError
from snapmgr.trace.accesslog import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.trace.accesslog import Trace

_BLOCK_BYTES = 1 << 18
_GZIP = b"\x1f\x8b"
_WITH_GZIP_HEADER = 31


def read_trace(path: str) -> Trace:
    """Return the trace in a file, or in stdin for "-"; of a truncated or damaged file its readable part.

    Raises NotFoundError, or SnapmgrError if it cannot be read or has no line of a log.
    """
    reader = Reader()
    truncated: list[str] = []
    with ExitStack() as stack:
        try:
            file = sys.stdin.buffer if path == "-" else stack.enter_context(open(path, "rb"))
            for block in _blocks(file, truncated):
                reader.feed(block)
        except FileNotFoundError:
            raise NotFoundError(f"{path} does not exist") from None
        except OSError as error:
            raise SnapmgrError(f"cannot read {path}: {error.strerror}") from None
    trace = reader.finish()
    if truncated:
        trace.truncated = truncated[0]
    elif trace.header is not None and trace.trailer is None:
        trace.truncated = "cut off"
    if trace.operations.skipped and not trace.operations:
        raise SnapmgrError(
            f"{path} is not a JuiceFS log of operations: none of its {trace.operations.skipped} lines can be parsed",
            hint="record one: snapmgr trace record MOUNT -o FILE",
        )
    return trace


def _blocks(file: BinaryIO, truncated: list[str]) -> Iterator[bytes]:
    """Yield the content in pieces; append to `truncated` if the compressed data is damaged or cut off."""
    data = file.read(_BLOCK_BYTES)
    if not data.startswith(_GZIP):
        while data:
            yield data
            data = file.read(_BLOCK_BYTES)
        return
    # Not the gzip module, which raises for a truncated file instead of returning its last bytes.
    member, begun = zlib.decompressobj(_WITH_GZIP_HEADER), False
    while data:
        try:
            # Limited, as a few bytes can expand to very many.
            plain = member.decompress(data, _BLOCK_BYTES)
        except zlib.error:
            truncated.append("damaged")
            return
        begun = True
        if plain:
            yield plain
        if member.eof:
            data = member.unused_data
            member, begun = zlib.decompressobj(_WITH_GZIP_HEADER), False
        else:
            data = member.unconsumed_tail
        data = data or file.read(_BLOCK_BYTES)
    if begun:
        yield member.flush()
        truncated.append("cut off")
