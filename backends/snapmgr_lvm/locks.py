"""Finds the holders of LVM's locks: its programs wait without a limit, so a hanging one often waits for another.

Its file locking (lvm2: lib/locking/file_locking.c) is flock(2) on ``V_GROUP`` in its locking_dir, held from reading the
metadata to the end of the change.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path("/run/lock/lvm")
PROC = Path("/proc")
_STATES = {"T": "stopped", "t": "stopped", "D": "hangs in the kernel"}


def holders() -> tuple[str, ...]:
    """Return the present holders of LVM's locks: "lvcreate (pid 1234, stopped) holds the lock of vg0"."""
    return tuple(sorted(set(_holders())))


def _holders() -> Iterator[str]:
    files: dict[str, Path] = {}
    with suppress(OSError):
        files = {str(path.stat().st_ino): path for path in FOLDER.iterdir()}
    lines: list[str] = []
    with suppress(OSError):
        lines = (PROC / "locks").read_text(encoding="ascii", errors="replace").splitlines()
    for line in lines:
        # proc_locks(5): "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF".
        # A waiting process has "->" in place of the kind.
        _, kind, *_, pid, file, _, _ = line.split()
        path = files.get(file.rpartition(":")[2])
        if kind == "FLOCK" and path is not None and pid.isdecimal() and _has_open(pid, path):
            what = path.name.removeprefix("V_") if path.name.startswith("V_") else path.name
            yield f"{_describe(pid)} holds the lock of {what}"


def _has_open(pid: str, path: Path) -> bool:
    """Whether the process has exactly that file open: inode numbers repeat on other file systems."""
    with suppress(OSError):
        for entry in (PROC / pid / "fd").iterdir():
            with suppress(OSError):
                if os.path.samefile(entry, path):
                    return True
    return False


def _describe(pid: str) -> str:
    name, how = "a process", ""
    with suppress(OSError):
        # proc_pid_stat(5): the name in parentheses may hold any characters; the state follows.
        text = (PROC / pid / "stat").read_text(errors="replace")
        name, state = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2]
        how = f", {_STATES[state]}" if state in _STATES else ""
    return f"{name} (pid {pid}{how})"
