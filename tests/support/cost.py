"""Measures whole processes: what a program and all that it starts take, and what they ask of the kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SNAPMGR = Path(sys.executable).with_name("snapmgr")
# As on an installed system: compiled modules are kept from one start to the next.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
# A child's peak of memory begins with that of the process that started it: a small one does.
_STARTER = """
import os, sys, time
report, *argv = sys.argv[1:]
os.set_inheritable(int(report), False)
began = time.monotonic()
pid = os.posix_spawnp(argv[0], argv, os.environ)
status, usage = os.wait4(pid, 0)[1:]
took = time.monotonic() - began
words = took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, os.waitstatus_to_exitcode(status)
os.write(int(report), " ".join(map(str, words)).encode())
"""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one process took, with all that it started and waited for."""

    wall_s: float
    """Start of the process included."""
    cpu_s: float
    """User and system time."""
    peak_bytes: int
    """Largest resident set of one of the processes; 8 MiB at least, those of the process that starts it."""
    out: str = ""
    """Its stdout."""


def run_costed(argv: Sequence[str]) -> Cost:
    """Run a program to its successful end. Raises CalledProcessError with its stderr."""
    reader, writer = os.pipe()
    with open(reader, "rb") as report, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            starter = [sys.executable, "-I", "-S", "-c", _STARTER, str(writer), *argv]
            options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "env": _ENVIRONMENT}
            subprocess.run(starter, check=True, pass_fds=(writer,), **options)  # type: ignore[call-overload]
        finally:
            os.close(writer)
        wall_s, cpu_s, peak_kib, code = report.read().split()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    if int(code):
        raise subprocess.CalledProcessError(int(code), list(argv), *texts)
    return Cost(wall_s=float(wall_s), cpu_s=float(cpu_s), peak_bytes=int(peak_kib) << 10, out=texts[0])


_CALL = re.compile(r"\d+ +(?P<name>\w+)\((?P<rest>.*)")
_PYTHON_FILE = re.compile(r'"(?P<path>[^"]+?)\.(cpython-\w+(-[\w-]+)?\.|abi3\.)?(?P<kind>pyc?|so)"')


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a program and all that it started asked of the kernel."""

    calls: dict[str, int]
    """System calls, by name."""
    modules: frozenset[str]
    """Files of Python modules that were opened, without suffix; what is built in or frozen needs none."""
    out: str = ""
    """The program's stdout."""

    @property
    def processes(self) -> int:
        """How many processes there were."""
        return 1 + sum(self.calls.get(name, 0) for name in ("fork", "vfork", "clone"))


def read_trace(lines: Iterable[str], out: str = "") -> Counts:
    """Given what ``strace -f -o`` wrote, and the program's stdout, return the counts.

    The start of a thread is counted as "thread", not as "clone".
    """
    calls: Counter[str] = Counter()
    modules: set[str] = set()
    for line in lines:
        call = _CALL.match(line)
        if call is None:  # the end of a call that was told before, a signal
            continue
        name, rest = call["name"], call["rest"]
        if name in {"clone", "clone3"}:
            name = "thread" if "CLONE_THREAD" in rest else "clone"
        calls[name] += 1
        if name == "openat" and "ENOENT" not in rest:
            file = _PYTHON_FILE.search(rest)
            if file is not None and (file["kind"] != "so" or file[2]):
                modules.add(file["path"].replace("/__pycache__", ""))
    return Counts(calls=dict(calls), modules=frozenset(modules), out=out)


def run_traced(argv: Sequence[str]) -> Counts:
    """Run a program to its successful end and count. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "trace")
        command = ["strace", "-f", "-qq", "-s", "0", "-o", str(log), *argv]
        done = subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=_ENVIRONMENT
        )
        with log.open(errors="replace") as lines:
            return read_trace(lines, done.stdout)
