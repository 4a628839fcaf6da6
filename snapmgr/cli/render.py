"""Draws tables and progress bars with rich; imported only for a terminal."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

_STYLES = {
    "ready": "green",
    "pending": "yellow",
    "deleting": "yellow",
    "broken": "red",
    "ok": "green",
    "note": "blue",
    "problem": "red",
    "missing": "yellow",
    "keep": "green",
    "delete": "red",
    "done": "green",
    "failed": "red",
    "left": "yellow",
}


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of safe texts to stdout, with words such as "ready" and cells that begin with "FAILED" in colour.

    Nothing is folded or cut off, as ids and times are copied from it: a narrow terminal wraps the lines itself.
    """
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    styled = [[(head, "bold") for head in heads], *([(cell, _style(cell)) for cell in row] for row in rows)]
    for cells in styled:
        line = Text("  ").join(
            Text(cell.ljust(width), style) for (cell, style), width in zip(cells, widths, strict=True)
        )
        line.rstrip()
        _print(line)


def print_line(word: str, rest: str) -> None:
    """Print one line of safe texts to stdout, its first word in colour; the terminal wraps it."""
    _print(Text.assemble((word, _style(word)), rest))


@cache
def _console() -> Console:
    return Console(highlight=False, emoji=False, markup=False)


def _print(line: Text) -> None:
    _console().print(line, soft_wrap=True)


def _style(cell: str) -> str:
    return "bold red" if cell.startswith("FAILED") else _STYLES.get(cell, "")


class Bar:
    """One progress bar on stderr."""

    def __init__(self) -> None:
        # No refresh thread: this process forks helpers, and forking a process with threads may deadlock.
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=None)
        self._progress.start()

    def show(self, what: str, done: int, total: int) -> None:
        """Draw `done` of `total`."""
        self._progress.update(self._task, description=what, completed=done, total=total)
        self._progress.refresh()

    def close(self) -> None:
        """Remove it from the screen."""
        self._progress.stop()
