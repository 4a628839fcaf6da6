"""Runs the real command line and kills it at a chosen system call (see tracer.c, which says what counts)."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@cache
def program() -> Path:
    """Compile tracer.c once a test run."""
    folder = Path(tempfile.mkdtemp(prefix="snapmgr-tracer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tracer = folder / "tracer"
    source = Path(__file__).with_name("tracer.c")
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-o", tracer, source], check=True, stdin=subprocess.DEVNULL)
    return tracer


@dataclass(frozen=True, kw_only=True)
class Call:
    """One system call that changes something, as the tracer counts it."""

    role: int
    """0 is the command itself, 1 the first process that it forked, and so on."""
    number: int
    """Counts within the role, from 1."""
    name: str
    """ "renameat", "ioctl-btrfs-snapshot", "send", …"""
    detail: str
    """The path, the statement, the signal."""

    def __str__(self) -> str:
        return (
            f"{'command' if self.role == 0 else f'child {self.role}'}, call {self.number} ({self.name} {self.detail})"
        )


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL at a call."""

    call: Call
    after: bool = False
    victim: int | None = None
    """The role of who is killed; None: the command and all that it forked, at once."""
    signal: int = signal.SIGKILL
    """Or SIGSTOP: who is killed is stopped instead."""

    def __str__(self) -> str:
        who = {None: "all at once", 0: "the command"}.get(self.victim, f"child {self.victim}")
        return f"{who} {'after' if self.after else 'before'} {self.call}"

    @property
    def argument(self) -> str:
        """As the tracer wants it."""
        who = "all" if self.victim is None else self.victim
        return f"{self.call.role}:{self.call.number}:{'after' if self.after else 'before'}:{who}:{int(self.signal)}"


def run(
    config: Path,
    *arguments: str,
    kill: Kill | None = None,
    log: Path | None = None,
    environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    module: str = "snapmgr",
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``PREFIX… TRACER snapmgr --config CONFIG ARGUMENTS…``, until it and all that it forked have ended.

    A negative `returncode` is the signal that ended it. With `log` what it called is written there: see `read_log`.
    """
    command = [sys.executable, "-m", module, "--config", str(config), *arguments]
    argv = [*prefix, str(program()), str(log or "-"), kill.argument if kill else "-", *command]
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What the interpreter writes to speed up the next run is no step of ours.
        env=os.environ | (environment or {}) | {"PYTHONDONTWRITEBYTECODE": "1"},
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()  # and with the tracer all that it traces (PTRACE_O_EXITKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a whole run did: its calls that changed something (none that failed), and its children.

    Children that became other programs are left out.
    """

    calls: tuple[Call, ...]
    beside: dict[int, tuple[Call, ...]]
    """By a child's role: the command's own calls while that child lived."""


def read_log(log: Path) -> Trace:
    """Return what the tracer wrote down."""
    calls: list[Call] = []
    programs: set[int] = set()
    ended: set[int] = set()
    beside: dict[int, list[Call]] = {}
    for line in log.read_text(errors="replace").splitlines():
        role, number, error, name, detail = (*line.split(" ", 4), "")[:5]
        call = Call(role=int(role), number=int(number), name=name, detail=detail)
        if call.role:
            beside.setdefault(call.role, [])
        if call.number == 0:
            (programs if name == "exec" else ended).add(call.role)
        elif error == "0":
            calls.append(call)
            for child in beside.keys() - ended if call.role == 0 else ():
                beside[child].append(call)
    return Trace(
        calls=tuple(call for call in calls if call.role not in programs),
        beside={role: tuple(during) for role, during in beside.items() if role not in programs},
    )
