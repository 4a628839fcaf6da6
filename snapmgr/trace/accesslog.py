"""Reads a stream of log lines into columns, at some hundred thousand lines a second.

Reads and writes, nearly all lines of a busy log, are matched together by one regular expression over a block of lines;
`line.read_line` reads all other lines.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from operator import add
from typing import TYPE_CHECKING, Any

from snapmgr.trace.line import Line, read_line, time_us
from snapmgr.trace.operations import Operations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HEADER = b"#snapmgr-trace "
TRAILER = b"#snapmgr-end "
_FRONT = (
    rb"^(?:(2\d{3}\.(?:0[1-9]|1[0-2])\.(?:0[1-9]|[12]\d|3[01]) (?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d)\.(\d{6}) "
    rb"\[uid:\d{1,10},gid:\d{1,10},pid:(\d{1,9})\] (read|write) \((\d{1,19}),(\d{1,19}),(\d{1,19})(?:,\d{1,19})?\)"
)
_BACK = rb" <(\d{1,9})\.(\d{6})>\r?|([^\n]*))\n"
_NEW = re.compile(_FRONT + rb"(?:: \((\d{1,19})\))? - OK" + _BACK, re.MULTILINE)
_OLD = re.compile(_FRONT + rb": OK(?: \((\d{1,19})\))?" + _BACK, re.MULTILINE)
_NEW_MARK = b" - OK <"
_IDLE = b"#"
"""The line of a second in which no operation ended."""
_LONGEST_LINE_BYTES = 1 << 16
"""Names have up to 255 bytes and link targets up to 4 KiB; an escaped byte takes four characters."""
_MOST_KINDS = 254
"""An index is one byte; read and write must always fit."""
_LATEST_US = 1 << 63
_PLAIN_ROW = (b"", b"0", b"0", b"read", b"0", b"0", b"0", b"", b"0", b"0", b"")
_ROOT = 1
# Inodes of the virtual files in the root folder of a mount.
_INTERNAL = 0x7FFF_FFFF_0000_0000
_INTERNAL_NAMES = {1: ".accesslog", 2: ".control", 3: ".stats", 4: ".config"}
_DEEPEST = 64


@dataclass(kw_only=True)
class Trace:
    """A log, with the header and trailer that its recorder wrote."""

    operations: Operations = field(default_factory=Operations)
    header: dict[str, Any] | None = None
    """Written by `record` before the first line; None for a log of another origin."""
    trailer: dict[str, Any] | None = None
    """Written by `record` after the last line; None if it was interrupted."""
    idle: Counter[int] = field(default_factory=Counter)
    """Number of lines "#" that stand before a row of `operations`: one for each second in which no operation ended."""
    truncated: str | None = None
    """Why only part of the file could be read: "cut off", "damaged"; None if all was read."""

    @cached_property
    def recorded(self) -> Operations:
        """The operations without those of the recorder itself, which reads the mount's counters."""
        operations, header = self.operations, self.header or {}
        inode = header.get("stats_inode")
        threads = {header.get("thread"), (self.trailer or {}).get("sampler")}
        if inode is None:
            return operations
        rows = zip(operations.inode, operations.thread, strict=True)
        return operations.selected(at != inode and thread not in threads for at, thread in rows)


class _Known(dict[bytes, int]):
    """The numbers of texts that occur often; 0 for no text. At most `limit`: a log of years must not exhaust memory."""

    def __init__(self, read: Callable[[bytes], int], limit: int) -> None:
        super().__init__({b"": 0})
        self._read = read
        self._limit = limit

    def __missing__(self, text: bytes) -> int:
        value = self._read(text)
        if len(self) > self._limit:
            self.clear()
            self[b""] = 0
        self[text] = value
        return value


def _second_us(text: bytes) -> int:
    """Given a second as "2026.11.21 08:55:59", return microseconds since 1970."""
    of_day = int(text[11:13]) * 3600 + int(text[14:16]) * 60 + int(text[17:19])
    return time_us(int(text[:4]), int(text[5:7]), int(text[8:10]), of_day)


class Reader:
    """Parses a log incrementally; `trace` holds the result so far."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._rest = b""
        self._overlong = False
        # Those of an hour.
        self._seconds = _Known(_second_us, 3600)
        # Threads, inodes, sizes.
        self._numbers = _Known(int, 100_000)
        self._names: dict[bytes, int] = {}
        self._statuses: dict[bytes, int] = {b"OK": 0}
        self._places: dict[int, tuple[int, bytes]] = {}
        self._inodes: dict[tuple[int, bytes], int] = {}

    def feed(self, data: bytes) -> None:
        """Parse the next bytes; they may end anywhere."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._keep(self._rest + data)
            return
        block = self._rest + data[:end]
        self._rest = b""
        if self._overlong:
            # The rest of an overlong line.
            block = block[block.index(b"\n") + 1 :]
            self._overlong = False
        self._take(block)
        self._keep(data[end:])

    def finish(self) -> Trace:
        """Return the whole trace. A last line without a newline counts if it is complete."""
        if self._rest:
            self._take(self._rest + b"\n")
            self._rest = b""
        self.trace.operations.paths.update(self._paths())
        return self.trace

    def _keep(self, rest: bytes) -> None:
        if len(rest) > _LONGEST_LINE_BYTES:
            if not self._overlong:
                self.trace.operations.skipped += 1
            self._overlong = True
        self._rest = b"" if self._overlong else rest

    def _take(self, block: bytes) -> None:
        pattern = _NEW if _NEW_MARK in block else _OLD
        rows = pattern.findall(block)
        # A line that the pattern knows has a name; any other line is matched as a whole.
        odd = [(at, row[10]) for at, row in enumerate(rows) if not row[3]]
        known: list[tuple[int, Line]] = []
        dropped: list[int] = []
        base = len(self.trace.operations)
        for at, text in odd:
            line = None
            if text.removesuffix(b"\r") == _IDLE:
                self.trace.idle[base + at - len(dropped)] += 1
            else:
                line = self._read_odd(text)
            if line is None:
                dropped.append(at)
            else:
                rows[at] = _PLAIN_ROW
                known.append((at, line))
        if dropped:
            gone = set(dropped)
            kept = [at for at in range(len(rows)) if at not in gone]
            new = {old: at for at, old in enumerate(kept)}
            rows = [rows[at] for at in kept]
            known = [(new[at], line) for at, line in known]
        if rows:
            self._append(rows, known)

    def _read_odd(self, text: bytes) -> Line | None:
        text = text.removesuffix(b"\r")
        line = read_line(text)
        if line is None or not self._known(line):
            self._read_mark(text)
            return None
        return line

    def _read_mark(self, text: bytes) -> None:
        """Read a line that is not an operation: our own, or a damaged one."""
        for mark, which in ((HEADER, "header"), (TRAILER, "trailer")):
            if text.startswith(mark):
                try:
                    document = json.loads(text.removeprefix(mark))
                except ValueError:
                    document = None
                if isinstance(document, dict):
                    setattr(self.trace, which, document)
                    return
        if text:
            self.trace.operations.skipped += 1

    def _known(self, line: Line) -> bool:
        """Number the line's name and status; False if there are more kinds than any client has."""
        operations = self.trace.operations
        if line.name not in self._names:
            if len(self._names) >= _MOST_KINDS:
                return False
            self._names[line.name] = len(self._names)
            operations.names.append(line.name.decode("ascii"))
        if line.status not in self._statuses:
            if len(self._statuses) >= _MOST_KINDS:
                return False
            self._statuses[line.status] = len(self._statuses)
            operations.statuses.append(line.status.decode("ascii"))
        return True

    def _append(self, rows: list[tuple[bytes, ...]], known: list[tuple[int, Line]]) -> None:
        operations = self.trace.operations
        for name in (b"read", b"write"):
            if name not in self._names and any(row[3] == name for row in rows):
                self._names[name] = len(self._names)
                operations.names.append(name.decode("ascii"))
        seconds, micros, threads, names, inodes, sizes, offsets, gots, took_s, took_us, _ = zip(*rows, strict=True)
        base = len(operations)
        is_write = [name == b"write" for name in names]
        size = list(map(self._numbers.__getitem__, sizes))
        operations.end_us.extend(map(add, map(self._seconds.__getitem__, seconds), map(int, micros)))
        durations = list(map(int, took_us))
        if took_s.count(b"0") < len(took_s):
            durations = [micro + int(whole) * 1_000_000 for whole, micro in zip(took_s, durations, strict=True)]
        operations.duration_us.extend(durations)
        operations.thread.extend(map(self._numbers.__getitem__, threads))
        operations.name.extend(map(self._names.get, names, [0] * len(names)))
        operations.inode.extend(map(self._numbers.__getitem__, inodes))
        operations.size.extend(size)
        operations.offset.extend(map(int, offsets))
        operations.got.extend(
            asked if write else got
            for write, asked, got in zip(is_write, size, map(self._numbers.__getitem__, gots), strict=True)
        )
        operations.status.frombytes(bytes(len(rows)))
        for at, line in known:
            self._correct(base + at, line)

    def _correct(self, at: int, line: Line) -> None:
        """Copy the values of a line that the pattern did not know into its row."""
        operations = self.trace.operations
        if line.end_us is None:
            # Without a time, assume that the operations followed one another.
            operations.untimed += 1
            before_us = operations.end_us[at - 1] if at else 0
            operations.end_us[at] = min(before_us + line.duration_us, _LATEST_US)
        else:
            operations.end_us[at] = line.end_us
        operations.duration_us[at] = line.duration_us
        operations.thread[at] = line.thread
        operations.name[at] = self._names[line.name]
        operations.inode[at] = line.inode
        operations.size[at] = line.size
        operations.offset[at] = line.offset
        operations.got[at] = line.got
        operations.status[at] = self._statuses[line.status]
        # A second name of a file (link) does not replace its first.
        if line.entry is not None and (line.name != b"link" or line.entry[2] not in self._places):
            self._learn(*line.entry)
        if line.moved is not None:
            folder, name, new_folder, new_name = line.moved
            inode = self._inodes.pop((folder, name), None)
            if inode is not None:
                self._learn(new_folder, new_name, inode)

    def _learn(self, folder: int, name: bytes, inode: int) -> None:
        self._inodes[folder, name] = inode
        self._places[inode] = (folder, name)

    def _paths(self) -> Mapping[int, str]:
        paths = {inode: self._path(inode) for inode in self._places}
        named = {_ROOT: "/"} | {_INTERNAL + number: name for number, name in _INTERNAL_NAMES.items()}
        return paths | {inode: name for inode, name in named.items() if inode in self.trace.operations.inode}

    def _path(self, inode: int) -> str:
        parts: list[str] = []
        # Reused inode numbers can form a cycle, so the depth is limited.
        while inode in self._places and len(parts) < _DEEPEST:
            inode, name = self._places[inode]
            parts.append(name.decode("utf-8", "backslashreplace"))
        return "/".join(reversed(parts))
