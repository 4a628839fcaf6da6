"""Opens a recorded log, plain or gzip, cut off or whole."""

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
    """Given a file's path, or "-" for stdin, return what it says; a file that is cut off or damaged as far as it goes.

    Raises NotFoundError, or SnapmgrError if it cannot be read or holds no line of a log.
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
            f"{path} is no log of operations of JuiceFS: none of its {trace.operations.skipped} lines is understood",
            hint="record one: snapmgr trace record MOUNT -o FILE",
        )
    return trace


def _blocks(file: BinaryIO, truncated: list[str]) -> Iterator[bytes]:
    """Yield the content in pieces; what is wrong with the compression is put into `truncated`."""
    data = file.read(_BLOCK_BYTES)
    if not data.startswith(_GZIP):
        while data:
            yield data
            data = file.read(_BLOCK_BYTES)
        return
    # Not the gzip module: where a file is cut off it raises instead of giving the last bytes.
    member, begun = zlib.decompressobj(_WITH_GZIP_HEADER), False
    while data:
        try:
            # With a limit: a few bytes can become very many.
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
