"""Texts of option files as nobody would write them, and what a maker's own program makes of them."""

from __future__ import annotations

import os
import random
import subprocess
from typing import TYPE_CHECKING

from support.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_GROUPS = (
    *("[client]", " [client]", "[CLIENT ]  # x", "[client]]", "[client\t]", "[client\xa0]", "[mysqld]", "[ client]"),
    *("[]", "[client"),
)
_DIRECTIVES = ("!x", "!included /etc/passwd", "!", "; a = b", " # c", "", "a = b")
_PIECES = (
    *("password", "a", "=", "==", " ", '"', "'", "\\", "\\\\", '\\"', "\\'", "#", ";", "\t", "\r", "\x0b", "\x1c"),
    *("\xa0", "\xc3\xa0", "\xff", "\x85", "n", "t", "s", "b", "r", "q", "[", "]", "!", "x-y"),
)


def texts(seed: int, count: int) -> Iterator[bytes]:
    """Yield random option files, most with a [client] group; none has an include, a NUL, or an option without a name.

    For a name that is missing the programs print what their buffer holds before it.
    """
    choose = random.Random(seed)
    for _ in range(count):
        lines = ["[client]"] * (choose.random() < 0.9) + [_line(choose) for _ in range(choose.randint(1, 4))]
        yield ("\n".join(lines) + "\n" * (choose.random() < 0.8)).encode("latin-1")


def _line(choose: random.Random) -> str:
    kind = choose.random()
    if kind < 0.15:
        return choose.choice(_GROUPS)
    if kind < 0.2:
        return choose.choice(_DIRECTIVES)
    pieces = [choose.choice(_PIECES) for _ in range(choose.randint(0, 9))]
    return choose.choice(("name=", "name = ", "na", "name # ", '"', "'")) + "".join(pieces)


def printed(kind: str, text: bytes, folder: Path) -> bytes | None:
    """Return what that server's `my_print_defaults` prints of a text's group [client]; None if it refuses the file."""
    path = folder / "options.cnf"
    path.write_bytes(text)
    path.chmod(0o600)
    # MySQL's hides passwords otherwise.
    show = ["--show"] if KINDS[kind].flavor == "mysql" else []
    argv = [KINDS[kind].program("my_print_defaults"), f"--defaults-file={path}", *show, "client"]
    done = subprocess.run(argv, capture_output=True, check=False, env={**os.environ, "HOME": "/nonexistent"})
    return done.stdout if done.returncode == 0 else None
