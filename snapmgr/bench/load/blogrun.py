"""Describes one run of a blog load, by either engine: files per window, scores, and stalls."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

READ = ("articles_read", "pictures_read", "comments_read")
WRITTEN = ("articles_written", "pictures_written")
REWRITTEN = ("articles_rewritten", "pictures_rewritten")
COMMENTED = ("comments_written",)
"""Names in `BlogRun.counts`; blogbench includes rewritten blogs in `WRITTEN`."""
ALL_WRITTEN = WRITTEN + REWRITTEN + COMMENTED


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Counts of windows without any work."""

    windows: int
    without_write: int
    """Nothing written, rewritten or commented."""
    without_read: int
    without_either: int
    longest_write_s: float
    """Length of the longest run of windows without a write."""
    longest_read_s: float
    longest_either_s: float


@dataclass(frozen=True, kw_only=True)
class BlogRun:
    """The work of a blog load, window by window."""

    ends_s: tuple[float, ...]
    """When each window ended, counted from the beginning."""
    counts: Mapping[str, tuple[int, ...]]
    """Files per window by operation, "blogs_written", "blogs_read"; unknown ones are absent."""
    writes: int
    """Score: blogs written in all."""
    reads: int
    """Score: blogs read in all."""
    bytes_written: int | None = None
    """Bytes written into files; None if unknown."""
    notes: tuple[str, ...] = field(default=())

    def files(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the sum of these counts for each window."""
        columns = [self.counts[name] for name in names if name in self.counts]
        return tuple(map(sum, zip(*columns, strict=True))) if columns else (0,) * len(self.ends_s)

    def intervals(self, names: Sequence[str], windows: int) -> tuple[int, ...]:
        """Return the same for intervals of that many windows, without an incomplete one at the end."""
        each = self.files(names)
        return tuple(sum(each[start : start + windows]) for start in range(0, len(each) - windows + 1, windows))

    def stalls(self) -> Stalls:
        """Return the number and length of windows without writes, without reads, and without any work."""
        no_write = [count == 0 for count in self.files(ALL_WRITTEN)]
        no_read = [count == 0 for count in self.files(READ)]
        neither = [write and read for write, read in zip(no_write, no_read, strict=True)]
        return Stalls(
            windows=len(self.ends_s),
            without_write=sum(no_write),
            without_read=sum(no_read),
            without_either=sum(neither),
            longest_write_s=self._longest(no_write),
            longest_read_s=self._longest(no_read),
            longest_either_s=self._longest(neither),
        )

    def _longest(self, still: Sequence[bool]) -> float:
        starts = (0.0, *self.ends_s)
        runs = [list(run) for stalled, run in groupby(range(len(still)), key=still.__getitem__) if stalled]
        return max((self.ends_s[run[-1]] - starts[run[0]] for run in runs), default=0.0)
