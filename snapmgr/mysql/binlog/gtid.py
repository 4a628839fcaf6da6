"""Models global transaction ids: MySQL's sets of them, and MariaDB's positions, one GTID per replication domain.

Pure. Both print in the servers' own normal form, on one line.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Iterator

LAST_NUMBER = (1 << 63) - 2
"""MySQL's highest transaction number (GNO_END is one more)."""
_UUID = re.compile(r"([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})", re.ASCII)
_TAG = re.compile(r"[a-z_][a-z0-9_]{0,31}", re.ASCII)
_NUMBERS = re.compile(r"(\d{1,19})(?:\s*-\s*(\d{1,19}))?", re.ASCII)


class GtidError(SnapmgrError):
    """A text is not a GTID set, or a number is out of range."""


def uuid_text(raw: bytes) -> str:
    """Given 16 bytes, return the UUID as MySQL prints it: lower case, with hyphens."""
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class MysqlGtidSet:
    """A set of MySQL GTIDs, each a server's UUID, a tag ("" for none; MySQL 8.3 and newer) and a number from 1.

    Mutable. Stores sorted bounds: start, end, start, end, … of half-open ranges that neither overlap nor touch. So an
    index in the list is odd exactly where a range is open.
    """

    def __init__(self) -> None:
        self._bounds: dict[tuple[str, str], list[int]] = {}

    @classmethod
    def parse(cls, text: str) -> MysqlGtidSet:
        """Return the set in a text, `uuid:1-5:7:tag:1-3,uuid:4`; ignores white space and empty parts.

        Raises GtidError. As on the server, a range whose end is before its start is empty.
        """
        parsed = cls()
        for part in filter(None, (part.strip().lower() for part in text.split(","))):
            fields = [field.strip() for field in part.split(":")]
            uuid = _UUID.fullmatch(fields[0])
            if uuid is None or len(fields) == 1:
                raise GtidError(f"{_shown(part)} is not a MySQL GTID set: a part is a UUID, a colon and numbers")
            name, tag = "-".join(uuid.groups()), ""
            for index, field in enumerate(fields[1:], start=1):
                numbers = _NUMBERS.fullmatch(field)
                if numbers is not None:
                    first = int(numbers[1])
                    parsed.add(name, first, int(numbers[2] or first), tag=tag)
                elif _TAG.fullmatch(field) and index < len(fields) - 1 and _NUMBERS.fullmatch(fields[index + 1]):
                    tag = field
                else:
                    raise GtidError(
                        f"{_shown(part)} is not a MySQL GTID set: {_shown(field)} is neither number nor tag"
                    )
        return parsed

    def add(self, uuid: str, first: int, last: int | None = None, *, tag: str = "") -> None:
        """Add the numbers `first` to `last` (inclusive; default: only `first`) of a UUID as MySQL prints it.

        Raises GtidError for numbers that MySQL does not use.
        """
        last = first if last is None else last
        if not 1 <= first <= LAST_NUMBER or not 0 <= last <= LAST_NUMBER:
            raise GtidError(f"{uuid}:{first}-{last}: the numbers of a MySQL GTID are 1 to {LAST_NUMBER}")
        if last < first:
            return
        bounds, stop = self._bounds.setdefault((uuid, tag), []), last + 1
        # The most frequent case in a log by far: the next number.
        if bounds and bounds[-1] == first:
            bounds[-1] = stop
            return
        low, high = bisect_left(bounds, first), bisect_right(bounds, stop)
        bounds[low:high] = ([] if low % 2 else [first]) + ([] if high % 2 else [stop])

    def ranges(self) -> Iterator[tuple[str, str, int, int]]:
        """Return (uuid, tag, first, last) of each range, sorted: by UUID, then tag (none before any), then number."""
        for uuid, tag in sorted(self._bounds):
            bounds = self._bounds[uuid, tag]
            for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
                yield uuid, tag, start, stop - 1

    def copy(self) -> MysqlGtidSet:
        """Return an independent copy."""
        other = MysqlGtidSet()
        other._bounds = {key: list(bounds) for key, bounds in self._bounds.items()}
        return other

    def __or__(self, other: MysqlGtidSet) -> MysqlGtidSet:
        """Return the union."""
        union = self.copy()
        for uuid, tag, first, last in other.ranges():
            union.add(uuid, first, last, tag=tag)
        return union

    def __eq__(self, other: object) -> bool:
        return self._bounds == other._bounds if isinstance(other, MysqlGtidSet) else NotImplemented

    __hash__ = None  # type: ignore[assignment] # mutable

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


class MariadbGtid(Struct, frozen=True, order=True):
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

    def advance(self, gtid: MariadbGtid) -> None:
        """Make this GTID the last one of its domain, as a server does after writing it."""
        self._last[gtid.domain] = gtid

    def __iter__(self) -> Iterator[MariadbGtid]:
        return iter(sorted(self._last.values()))

    def __str__(self) -> str:
        """Return it as @@gtid_binlog_pos shows it: in the order of domains."""
        return ",".join(str(gtid) for gtid in self)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "…")  # noqa: PLR2004 - a line's length
