"""Global transaction ids: MySQL's sets of them, and MariaDB's positions, one per replication domain.

Pure. Both are read from text as the servers print it, and printed in the servers' own normal form on one line.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.contract.errors import SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Iterator

LAST_NUMBER = (1 << 63) - 2
"""MySQL's highest transaction number (GNO_END is one more)."""
_UUID = re.compile(r"([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})", re.ASCII)
_TAG = re.compile(r"[a-z_][a-z0-9_]{0,31}", re.ASCII)
_NUMBERS = re.compile(r"(\d{1,19})(?:\s*-\s*(\d{1,19}))?", re.ASCII)
_MARIADB = re.compile(r"(\d{1,10})-(\d{1,10})-(\d{1,20})", re.ASCII)
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1


class GtidError(SnapmgrError):
    """A text is no GTID set, or a number is out of its range."""


def uuid_text(raw: bytes) -> str:
    """Given 16 bytes, return the UUID as MySQL prints it: lower case, with hyphens."""
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class MysqlGtidSet:
    """A set of MySQL GTIDs, each a server's UUID, a tag ("" for none; MySQL 8.3 and newer) and a number from 1.

    Mutable. Kept as sorted bounds: start, end, start, end, … of half-open ranges that neither overlap nor touch; so a
    position in the list is odd just where a range is open.
    """

    def __init__(self) -> None:
        self._bounds: dict[tuple[str, str], list[int]] = {}

    @classmethod
    def parse(cls, text: str) -> MysqlGtidSet:
        """Return the set that a text names, `uuid:1-5:7:tag:1-3,uuid:4`; white space and empty parts do not matter.

        Raises GtidError. As on the server a range whose end is before its start is empty.
        """
        parsed = cls()
        for part in filter(None, (part.strip().lower() for part in text.split(","))):
            fields = [field.strip() for field in part.split(":")]
            uuid = _UUID.fullmatch(fields[0])
            if uuid is None or len(fields) == 1:
                raise GtidError(f"{_shown(part)} is no MySQL GTID set: a part is a UUID, a colon and numbers")
            name, tag = "-".join(uuid.groups()), ""
            for index, field in enumerate(fields[1:], start=1):
                numbers = _NUMBERS.fullmatch(field)
                if numbers is not None:
                    first = int(numbers[1])
                    parsed.add(name, first, int(numbers[2] or first), tag=tag)
                elif _TAG.fullmatch(field) and index < len(fields) - 1 and _NUMBERS.fullmatch(fields[index + 1]):
                    tag = field
                else:
                    raise GtidError(f"{_shown(part)} is no MySQL GTID set: {_shown(field)} is neither number nor tag")
        return parsed

    def add(self, uuid: str, first: int, last: int | None = None, *, tag: str = "") -> None:
        """Add the numbers `first` to `last` (both in it; default: `first` alone) of a UUID as MySQL prints it.

        Raises GtidError for numbers that MySQL does not give.
        """
        last = first if last is None else last
        if not 1 <= first <= LAST_NUMBER or not 0 <= last <= LAST_NUMBER:
            raise GtidError(f"{uuid}:{first}-{last}: the numbers of a MySQL GTID are 1 to {LAST_NUMBER}")
        if last < first:
            return
        bounds, stop = self._bounds.setdefault((uuid, tag), []), last + 1
        # By far the most frequent case in a log: the next number.
        if bounds and bounds[-1] == first:
            bounds[-1] = stop
            return
        low, high = bisect_left(bounds, first), bisect_right(bounds, stop)
        bounds[low:high] = ([] if low % 2 else [first]) + ([] if high % 2 else [stop])

    def _remove(self, key: tuple[str, str], start: int, stop: int) -> None:
        bounds = self._bounds.get(key, [])
        low, high = bisect_left(bounds, start), bisect_right(bounds, stop)
        bounds[low:high] = ([start] if low % 2 else []) + ([stop] if high % 2 else [])
        if not bounds:
            self._bounds.pop(key, None)

    def ranges(self) -> Iterator[tuple[str, str, int, int]]:
        """Return (uuid, tag, first, last) of each range, sorted: by UUID, then tag (none before any), then number."""
        for uuid, tag in sorted(self._bounds):
            bounds = self._bounds[uuid, tag]
            for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
                yield uuid, tag, start, stop - 1

    def copy(self) -> MysqlGtidSet:
        """Return a set of its own."""
        other = MysqlGtidSet()
        other._bounds = {key: list(bounds) for key, bounds in self._bounds.items()}
        return other

    def __or__(self, other: MysqlGtidSet) -> MysqlGtidSet:
        """Return the union."""
        union = self.copy()
        for uuid, tag, first, last in other.ranges():
            union.add(uuid, first, last, tag=tag)
        return union

    def __sub__(self, other: MysqlGtidSet) -> MysqlGtidSet:
        """Return what is in this set and not in the other."""
        rest = self.copy()
        for uuid, tag, first, last in other.ranges():
            rest._remove((uuid, tag), first, last + 1)
        return rest

    def __ge__(self, other: MysqlGtidSet) -> bool:
        """Return whether the other set is a part of this one (or the same)."""
        for uuid, tag, first, last in other.ranges():
            bounds = self._bounds.get((uuid, tag), [])
            place = bisect_right(bounds, first)
            if place % 2 == 0 or bounds[place] <= last:
                return False
        return True

    def __eq__(self, other: object) -> bool:
        return self._bounds == other._bounds if isinstance(other, MysqlGtidSet) else NotImplemented

    __hash__ = None  # type: ignore[assignment] # mutable

    def __bool__(self) -> bool:
        return bool(self._bounds)

    def __str__(self) -> str:
        """Return it as @@gtid_executed shows it, but on one line: a UUID once, its tags after its plain numbers."""
        text: list[str] = []
        last_uuid = last_tag = ""
        for uuid, tag, first, last in self.ranges():
            if uuid != last_uuid:
                text.append(f",{uuid}")
                last_tag = ""
            if tag != last_tag:
                text.append(f":{tag}")
            text.append(f":{first}" if first == last else f":{first}-{last}")
            last_uuid, last_tag = uuid, tag
        return "".join(text)[1:]

    def __repr__(self) -> str:
        return f"MysqlGtidSet({str(self)!r})"


@dataclass(frozen=True, order=True)
class MariadbGtid:
    """One MariaDB GTID; `str` prints it as the server does."""

    domain: int
    server_id: int
    number: int

    def __str__(self) -> str:
        return f"{self.domain}-{self.server_id}-{self.number}"


class MariadbGtidPosition:
    """The last GTID of each MariaDB replication domain. Mutable."""

    def __init__(self) -> None:
        self._last: dict[int, MariadbGtid] = {}

    @classmethod
    def parse(cls, text: str) -> MariadbGtidPosition:
        """Return the position that a text names, `0-1-7,1-2-3`. Raises GtidError, also if a domain is there twice."""
        parsed = cls()
        for part in filter(None, (part.strip() for part in text.split(","))):
            match = _MARIADB.fullmatch(part)
            if match is None:
                raise GtidError(f"{_shown(part)} is no MariaDB GTID: they are DOMAIN-SERVER-NUMBER")
            domain, server_id, number = (int(group) for group in match.groups())
            if domain > _U32 or server_id > _U32 or number > _U64:
                raise GtidError(f"{part} is no MariaDB GTID: a number is too large")
            if domain in parsed._last:
                raise GtidError(f"{_shown(text)} is no MariaDB GTID position: domain {domain} is there twice")
            parsed.advance(MariadbGtid(domain, server_id, number))
        return parsed

    def advance(self, gtid: MariadbGtid) -> None:
        """Make it the last one of its domain, as a server does that has just written it."""
        self._last[gtid.domain] = gtid

    def __iter__(self) -> Iterator[MariadbGtid]:
        return iter(sorted(self._last.values()))

    def __or__(self, other: MariadbGtidPosition) -> MariadbGtidPosition:
        """Return the position that is, in each domain, the further of the two."""
        union = MariadbGtidPosition()
        union._last = dict(self._last)
        for gtid in other - self:
            union.advance(gtid)
        return union

    def __sub__(self, other: MariadbGtidPosition) -> MariadbGtidPosition:
        """Return those of its GTIDs that lie behind what the other has reached."""
        rest = MariadbGtidPosition()
        rest._last = {domain: gtid for domain, gtid in self._last.items() if not other._reached(gtid)}
        return rest

    def _reached(self, gtid: MariadbGtid) -> bool:
        last = self._last.get(gtid.domain)
        return last is not None and last.number >= gtid.number

    def __ge__(self, other: MariadbGtidPosition) -> bool:
        """Return whether it has reached the other in each of the other's domains."""
        return not other - self

    def __eq__(self, other: object) -> bool:
        return self._last == other._last if isinstance(other, MariadbGtidPosition) else NotImplemented

    __hash__ = None  # type: ignore[assignment] # mutable

    def __bool__(self) -> bool:
        return bool(self._last)

    def __str__(self) -> str:
        """Return it as @@gtid_binlog_pos shows it: in the order of domains."""
        return ",".join(str(gtid) for gtid in self)

    def __repr__(self) -> str:
        return f"MariadbGtidPosition({str(self)!r})"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "…")  # noqa: PLR2004 - a line's length
