"""Reads logs of JuiceFS clients that tests hold in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.trace.accesslog import Reader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapmgr.trace.accesslog import Trace


def read_blocks(blocks: Iterable[bytes]) -> Trace:
    """Return the trace in a log's bytes, given in pieces."""
    reader = Reader()
    for block in blocks:
        reader.feed(block)
    return reader.finish()
