"""Runs the program blogbench and parses its output into a `BlogRun`.

The comments about its behaviour come from its source (https://github.com/jedisct1/Blogbench).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from snapmgr.bench.load.blogrun import BlogRun
from snapmgr.contract.errors import CommandError, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PROGRAM = "blogbench"
_COLUMNS = (
    "articles_read",
    "articles_written",
    "pictures_read",
    "pictures_written",
    "comments_read",
    "comments_written",
)
# Its error messages have no end of line, so a row may follow one on the same line.
_ROW = re.compile(r"(\d+)[ \t]+(\d+)[ \t]+(\d+)[ \t]+(\d+)[ \t]+(\d+)[ \t]+(\d+)[ \t]+(\d+)[ \t]*$", re.MULTILINE)
_SCORE = re.compile(r"^Final score for (writes|reads) ?:\s*(\d+)\s*$", re.MULTILINE)
_TROUBLE = re.compile(r"(?:write|read|open|close|mkdir)\((?:\"[^\"]*\")?\): ([^:\d\n]+)")
_FULL = "No space left on device"


def command(folder: Path, crew: Mapping[str, int], *, window_s: int, windows: int) -> tuple[str, ...]:
    """Return its command line; `crew` is the number of "writers", "rewriters", "commenters" and "readers"."""
    # Its --rewriters takes no number, though its usage says so (version 1.1 and later): -W does.
    numbers = {"w": "writers", "W": "rewriters", "c": "commenters", "r": "readers"}
    return (
        *(PROGRAM, "-d", str(folder)),
        *(word for letter, role in numbers.items() for word in (f"-{letter}", str(crew[role]))),
        *("-s", str(window_s), "-i", str(windows)),
    )


def parse(text: str, *, window_s: float) -> BlogRun:
    """Parse its output, which has a row every `window_s` seconds.

    After a failed write it prints a line, pauses for a second and continues: a full disk looks like a stall. Raises
    StorageError if the disk was full, CommandError if the text is truncated or not a table: for arguments that it does
    not know it prints its usage, and ends with exit code 0.
    """
    if _FULL in text:
        raise StorageError(
            "the disk was full while blogbench ran: what it counted afterwards are its pauses",
            hint="give it a larger device or less time",
        )
    rows = [tuple(map(int, match.groups())) for match in _ROW.finditer(text)]
    scores = {name: int(value) for name, value in _SCORE.findall(text)}
    if not rows or set(scores) != {"writes", "reads"}:
        raise CommandError(
            f"blogbench printed {len(rows)} rows and {len(scores)} of its 2 scores",
            hint="it was ended, or its output is one that snapmgr does not know: " + (text.strip()[-200:] or "nothing"),
        )
    totals = [row[0] for row in rows]
    counts = {name: tuple(row[place] for row in rows) for place, name in enumerate(_COLUMNS, start=1)}
    counts["blogs_written"] = tuple(now - before for before, now in zip([0, *totals], totals, strict=False))
    troubles = sorted({match.strip() for match in _TROUBLE.findall(text)})
    return BlogRun(
        ends_s=tuple(window_s * number for number in range(1, len(rows) + 1)),
        counts=counts,
        writes=scores["writes"],
        reads=scores["reads"],
        notes=tuple(f"blogbench told of errors and went on: {trouble}" for trouble in troubles),
    )
