"""Parses one line of a JuiceFS client's log of operations, in the format of any version.

    2026.11.21 08:55:59.630180 [uid:0,gid:0,pid:9445] read (1031,4096,0,45): (286) - OK <0.019611>
    2022.09.22 08:55:21.013121 [uid:0,gid:0,pid:0] read (1481,131072,28668010496): OK (131072) <1.309992>

The first format is `.accesslog` since version 1.4, the second is older `.accesslog` and the Cloud client's `.oplog`.
Names are not quoted, so a name may look like the end of a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(
    rb"(?:(2\d{3})\.(0[1-9]|1[0-2])\.(0[1-9]|[12]\d|3[01]) ([01]\d|2[0-3]):([0-5]\d):([0-5]\d)\.(\d{6}) )?"
    rb"\[uid:\d{1,10},gid:\d{1,10},pid:(\d{1,10})\] ([a-z][a-z0-9_]{0,31}) \((.*) <(\d{1,9})\.(\d{6})>",
    re.DOTALL,
)
# The result of an operation: "OK", or Go's text for an errno. Neither has brackets or colons, which end the arguments.
_STATUS = rb"OK|[a-z][A-Za-z0-9 /.,'_-]{0,99}"
_NEW_END = re.compile(rb"(?s:.*) - (" + _STATUS + rb")")
_OLD_END = re.compile(rb"\): (" + _STATUS + rb")(?: [(\[].*)?$", re.DOTALL)
_INODE = re.compile(rb"(\d{1,19})[],)[]")
_TRANSFER = re.compile(rb"(\d{1,19}),(\d{1,19}),(\d{1,19})(?:,\d{1,19})?\)(?:: (?:OK )?\(?(\d{1,19})\)?)?")
_MODE = rb",[^,]{10}:0\d+(?:,\w+)*"
_ENTRY = rb"\): (?:OK )?\((\d{1,19}),\["
_NAMED = {
    b"lookup": re.compile(rb"(\d{1,19}),(.*)" + _ENTRY, re.DOTALL),
    b"create": re.compile(rb"(\d{1,19}),(.*)" + _MODE + _ENTRY, re.DOTALL),
    b"mkdir": re.compile(rb"(\d{1,19}),(.*)" + _MODE + _ENTRY, re.DOTALL),
    b"mknod": re.compile(rb"(\d{1,19}),(.*)" + _MODE + _ENTRY, re.DOTALL),
    b"symlink": re.compile(rb"(\d{1,19}),([^,]*),.*" + _ENTRY, re.DOTALL),
}
_RENAME = re.compile(rb"(\d{1,19}),(.*),(\d{1,19}),(.*),\d+\)", re.DOTALL)
_THREAD_LIMIT = 1 << 32
_INODE_LIMIT = 1 << 64
_SECOND_US = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The values of one line; numbers as in `Operations`."""

    end_us: int | None
    """None if the line has no time, as in examples of the Cloud client's manual."""
    duration_us: int
    thread: int
    name: bytes
    status: bytes
    inode: int = 0
    size: int = 0
    offset: int = 0
    got: int = 0
    entry: tuple[int, bytes, int] | None = None
    """A name in the line: inode of the folder, name, inode."""
    moved: tuple[int, bytes, int, bytes] | None = None
    """A successful rename: folder's inode and name before and after."""


def time_us(year: int, month: int, day: int, second_of_day: int) -> int:
    """Given a date of the Gregorian calendar, return microseconds since 1970; February 30 is March 2 or 1."""
    # Years begin in March here, so that a leap day is the last day.
    year -= month < 3  # noqa: PLR2004
    era, year_of_era = divmod(year, 400)
    day_of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1  # noqa: PLR2004
    day_of_era = year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year
    return ((era * 146_097 + day_of_era - 719_468) * 86_400 + second_of_day) * _SECOND_US


def read_line(line: bytes) -> Line | None:
    """Parse a line without its newline; None if it is not a line of the log."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    year, month, day, hour, minute, second, micro, thread, name, rest, took_s, took_us = match.groups()
    status = _status(name, rest)
    if status is None or int(thread) >= _THREAD_LIMIT:
        return None
    end_us = None
    if year is not None:
        of_day = int(hour) * 3600 + int(minute) * 60 + int(second)
        end_us = time_us(int(year), int(month), int(day), of_day) + int(micro)
    inode = _INODE.match(rest)
    found = {"inode": int(inode[1]) if inode else 0, "size": 0, "offset": 0, "got": 0}
    if name in {b"read", b"write"} and (transfer := _TRANSFER.match(rest)):
        size = int(transfer[2])
        got = size if name == b"write" else int(transfer[4] or 0)
        found |= {"size": size, "offset": int(transfer[3]), "got": got if status == b"OK" else 0}
    if found["inode"] >= _INODE_LIMIT:
        return None
    return Line(
        end_us=end_us,
        duration_us=int(took_s) * _SECOND_US + int(took_us),
        thread=int(thread),
        name=name,
        status=status,
        entry=_entry(name, rest) if status == b"OK" else None,
        moved=_moved(rest) if name == b"rename" and status == b"OK" else None,
        **found,
    )


def _status(name: bytes, rest: bytes) -> bytes | None:
    if new := _NEW_END.fullmatch(rest):
        return new[1]
    # The target of a link follows the status; all other names precede it.
    if name == b"readlink":
        found = _OLD_END.search(rest)
        return found[1] if found else None
    at = rest.rfind(b"): ")
    while at >= 0:
        if found := _OLD_END.match(rest, at):
            return found[1]
        at = rest.rfind(b"): ", 0, at)
    return None


def _entry(name: bytes, rest: bytes) -> tuple[int, bytes, int] | None:
    if name == b"link":
        found = re.match(rb"(\d{1,19}),(\d{1,19}),(.*?)\)[: ]", rest, re.DOTALL)
        return (int(found[2]), found[3], int(found[1])) if found else None
    pattern = _NAMED.get(name)
    found = pattern.match(rest) if pattern else None
    return (int(found[1]), found[2], int(found[3])) if found else None


def _moved(rest: bytes) -> tuple[int, bytes, int, bytes] | None:
    found = _RENAME.match(rest)
    return (int(found[1]), found[2], int(found[3]), found[4]) if found else None
