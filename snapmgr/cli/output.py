"""Prints: results to stdout, everything else to stderr.

A failed write never ends a run: if the reader of a pipe has gone, the work goes on and keeps its own exit code.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from snapmgr.contract.errors import EXIT_OK, ConfigError, SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.cli.render import Bar

# C0 and C1 controls, line and paragraph separators, marks of writing direction, lone surrogates: a file name must not
# move the cursor, colour the terminal or look like another name.
_UNSAFE = "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_PLAIN_EVERY_S = 10.0


def clean(text: str) -> str:
    r"""Return `text` safe for a terminal: control characters become visible, as in "\x1b"."""
    if text.isprintable():  # the usual case, which needs no regular expression
        return text
    import re

    return re.sub(_UNSAFE, lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def prepare_streams() -> None:
    """Open closed standard descriptors (else the next opened file becomes "stdout") and accept any encoding."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
    # Python sets a closed stream to None.
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open until we exit
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def write_result(text: str) -> None:
    """Write to stdout and flush. A reader that has gone is ignored; a full disk raises SnapmgrError."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)
    except OSError as error:
        _silence(sys.stdout)
        raise SnapmgrError(f"cannot write the result to stdout: {error.strerror}") from None


def flush_results() -> None:
    """Flush stdout, so that Python does not flush it at exit and complain about a reader that has gone."""
    try:
        sys.stdout.flush()
    except OSError:
        _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    """Discard the buffered output: Python flushes once more at exit and would complain."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, stream.fileno())
        os.close(null)


def print_lines(lines: Sequence[str]) -> None:
    """Write lines to stdout, with control characters made visible."""
    write_result("".join(f"{clean(line)}\n" for line in lines))


def print_document(command: str, exit_code: int, error: SnapmgrError | None, fields: dict[str, Any]) -> None:
    """Write the one JSON document of a run to stdout (docs/reference/json.md); keys without a value are empty."""
    import json

    from snapmgr.cli.schema import SCHEMA_VERSION, blank

    document = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "exit_code": exit_code,
        "error": error_document(error),
        **blank(command),
        **fields,
    }
    # ASCII only, so that no name can hold a control character for the terminal.
    write_result(json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def error_document(error: SnapmgrError | None) -> dict[str, Any] | None:
    """Return an error as part of a document."""
    if error is None:
        return None
    return {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}


def end_document(error: SnapmgrError | None) -> dict[str, Any]:
    """Return how one of several items ended, as part of its document."""
    return {"exit_code": error.exit_code if error else EXIT_OK, "error": error_document(error)}


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines, the heads first. Control characters are made visible before cells are measured."""
    # One test and one format for a row: a list may have ten thousand.
    table = [heads, *(row if "".join(row).isprintable() else [clean(cell) for cell in row] for row in rows)]
    form = "  ".join(f"%-{max(map(len, column))}s" for column in zip(*table, strict=True))
    return [(form % tuple(row)).rstrip() for row in table]


def ask_for_word(word: str, *, to: str, why: str, nothing: str, option: str = "--yes") -> None:
    """Ask the user to type a word. Raises ConfigError without a terminal, SnapmgrError for another answer.

    Args:
        word: the requested one.
        to: what it starts, as in "Type WORD to …".
        why: why the user is asked.
        nothing: what was not done after another answer, as in "nothing was …".
        option: the option that answers.
    """
    import click

    if not sys.stdin.isatty():
        raise ConfigError(f"{why}, and there is no terminal to ask", hint=f"add {option}")
    if click.prompt(f"Type {word} to {to}", default="", show_default=False, err=True).strip() != word:
        raise SnapmgrError(f"nothing was {nothing}: the answer was not the requested word")


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can do more than print lines."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Console:
    """Prints messages and the progress of long steps on stderr.

    Args:
        quiet: print only warnings and errors.
        verbose: print details, and the time of day before each line.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._quiet = quiet
        self._verbose = verbose
        self._bar: Bar | None = None
        self._step = ""
        self._next_plain_s = 0.0

    def tell(self, line: str) -> None:
        """Print a message."""
        if not self._quiet or line.startswith("warning"):
            self._write(line)

    def detail(self, line: str) -> None:
        """Print a message only with --verbose."""
        if self._verbose and not self._quiet:
            self._write(line)

    def warn(self, line: str) -> None:
        """Print a warning."""
        self._write(f"snapmgr: warning: {line}")

    def fail(self, error: SnapmgrError) -> None:
        """Print an error and its hint."""
        self._write(f"snapmgr: error: {error.message}")
        if error.hint:
            self._write(f"hint: {error.hint}")

    def progress(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` are done: as a bar on a terminal, else as an occasional line."""
        if self._quiet:
            return
        if is_terminal(sys.stderr):
            self._show_bar(what, done, total)
        elif what != self._step or done >= total or time.monotonic() >= self._next_plain_s:
            self._next_plain_s = time.monotonic() + _PLAIN_EVERY_S
            self._write(f"{what}: {done} of {total}")
        self._step = what if done < total else ""

    def _show_bar(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            from snapmgr.cli.render import Bar

            self._bar = Bar()
        self._bar.show(clean(what), done, total)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Remove the bar, if there is one."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _write(self, text: str) -> None:
        self.close()
        stamp = time.strftime("%H:%M:%S ") if self._verbose else ""
        first, *more = (clean(line) for line in text.split("\n"))
        lines = [f"{stamp}{first}", *(f"  {line}" for line in more)]
        # A closed stderr must not stop the work.
        with suppress(OSError, ValueError):
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()
