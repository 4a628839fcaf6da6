"""Holds a client's operations as columns; a million operations take some 50 MB."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from itertools import compress

_COLUMNS = ("end_us", "duration_us", "thread", "name", "inode", "size", "offset", "got", "status")


@dataclass(kw_only=True)
class Operations:
    """All columns have the same length, one row for each operation, in the order of the log."""

    end_us: array[int] = field(default_factory=lambda: array("Q"))
    """When it ended: microseconds since 1970, in the clock and zone of the log."""
    duration_us: array[int] = field(default_factory=lambda: array("Q"))
    thread: array[int] = field(default_factory=lambda: array("I"))
    """The log's "pid": the id of the thread that requested it."""
    name: array[int] = field(default_factory=lambda: array("B"))
    """Index into `names`."""
    inode: array[int] = field(default_factory=lambda: array("Q"))
    """First argument of the operations on a file or folder; 0 for others."""
    size: array[int] = field(default_factory=lambda: array("Q"))
    """Bytes requested by a read or a write; 0 for others."""
    offset: array[int] = field(default_factory=lambda: array("Q"))
    """In the file, of a read or a write; 0 for others."""
    got: array[int] = field(default_factory=lambda: array("Q"))
    """Bytes that a read returned or a write wrote; 0 for others."""
    status: array[int] = field(default_factory=lambda: array("B"))
    """Index into `statuses`."""
    names: list[str] = field(default_factory=list)
    """Names of the operations that occur: "read", "fsync"."""
    statuses: list[str] = field(default_factory=lambda: ["OK"])
    """"OK" first, then the errors that occur."""
    paths: dict[int, str] = field(default_factory=dict)
    """File names that the log has (lookup, create, rename): inode to name, with its folder's path if known."""
    threads: dict[int, str] = field(default_factory=dict)
    """Names of threads that have one: in a comparison, that of the recording and the number."""
    skipped: int = 0
    """Lines that are damaged, cut off, or not from this log."""
    untimed: int = 0
    """Lines without a time: their operations are assumed to follow one another."""

    def selected(self, keep: Iterable[bool]) -> Operations:
        """Return the operations for whose row `keep` is true; names, paths and counts of lines stay."""
        chosen, kept = list(keep), copy(self)
        for name in _COLUMNS:
            column: array[int] = getattr(self, name)
            setattr(kept, name, array(column.typecode, compress(column, chosen)))
        return kept

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self.end_us)
