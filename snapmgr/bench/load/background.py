"""Runs fio in the background, on an existing file, while something else is measured."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.contract.errors import CommandError
from snapmgr.system.command import Process, running

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BEGIN_S = 30.0
_LOOK_S = 0.02
_STOP_S = 30.0
_STOP_LOOK_S = 0.0005
# Far beyond any sample: the caller ends it.
_RUNTIME_S = 7 * 86400


def command(file: Path, *, block_bytes: int, writes_per_s: int, seed: int) -> tuple[str, ...]:
    """Return fio's command line: random buffered overwrites, an fdatasync after every 32, at most at that rate."""
    return (
        "fio",
        "--name=load",
        # Jobs that are processes have their own sessions: signals that stop or end fio would not reach them.
        "--thread",
        # fio treats a colon as the end of one of several names.
        "--filename=" + str(file).replace(":", r"\:"),
        "--rw=randwrite",
        f"--bs={block_bytes}",
        "--ioengine=psync",
        "--fdatasync=32",
        f"--rate_iops={writes_per_s}",
        "--refill_buffers",
        "--randrepeat=0",
        f"--randseed={seed}",
        "--time_based",
        f"--runtime={_RUNTIME_S}",
        "--eta=never",
    )


class Load:
    """Writes in the background."""

    def __init__(self, process: Process, log: Path) -> None:
        self._process = process
        self._log = log

    def check(self) -> None:
        """Raise CommandError with fio's message if they have ended."""
        if self._process.poll() is not None:
            said = self._log.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
            raise CommandError(f"the writes in the background ended (exit code {self._process.returncode}): {said}")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop them while the context lasts, as a backup does with a server whose files are copied one by one.

        Raises CommandError if they do not pause.
        """
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            self._wait_stopped()
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def _wait_stopped(self) -> None:
        # A process in a system call stops when the call ends.
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError, ProcessLookupError):
                # A thread that has just ended is absent from the next look.
                stats = [path.read_text() for path in Path(f"/proc/{self._process.pid}/task").glob("*/stat")]
                # proc_pid_stat(5): the state follows the name, which is in parentheses.
                if stats and all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats):
                    return
            self.check()
            time.sleep(_STOP_LOOK_S)
        raise CommandError(f"the writes in the background could not be stopped within {_STOP_S:.0f} s")


@contextmanager
def written_to(argv: Sequence[str], file: Path, log: Path) -> Iterator[Load]:
    """Run `command` while the context lasts, which begins after its first write; its output goes to `log`.

    Raises CommandError if it writes nothing, MissingRequirementError without fio. It always ends with the context.
    """
    before = file.stat().st_mtime_ns
    with log.open("wb") as output, running(argv, output=output, grace_s=5.0) as process:
        load = Load(process, log)
        deadline = time.monotonic() + _BEGIN_S
        while file.stat().st_mtime_ns == before:
            load.check()
            if time.monotonic() > deadline:
                raise CommandError(f"fio in the background wrote nothing for {_BEGIN_S:.0f} s")
            time.sleep(_LOOK_S)
        yield load
