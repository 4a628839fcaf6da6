"""Records a digest of each piece of a file, to show later which pieces have changed and which have not."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_DIGEST_BYTES = 8
_READ_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class UnitDigests:
    """Digests of a file's pieces of `unit_bytes`; the last may be shorter. Eight bytes of memory for each."""

    unit_bytes: int
    digests: array[int]

    def changed(self, file: Path) -> int:
        """Return how many pieces of `file` have changed, missing and additional ones included."""
        return sum(1 for then, now in zip_longest(self.digests, _digests(file, self.unit_bytes)) if then != now)


def digest_units(file: Path, unit_bytes: int) -> UnitDigests:
    """Read a whole file, which must not change during the call. Raises OSError."""
    return UnitDigests(unit_bytes=unit_bytes, digests=array("Q", _digests(file, unit_bytes)))


def _digests(file: Path, unit_bytes: int) -> Iterator[int]:
    read_bytes = max(_READ_BYTES // unit_bytes, 1) * unit_bytes
    # Buffered: `readinto` then returns less than requested only at the file's end.
    with open(file, "rb") as opened:
        buffer = memoryview(bytearray(read_bytes))
        while filled := opened.readinto(buffer):
            for start in range(0, filled, unit_bytes):
                piece = buffer[start : min(start + unit_bytes, filled)]
                yield int.from_bytes(hashlib.blake2b(piece, digest_size=_DIGEST_BYTES).digest(), "little")
