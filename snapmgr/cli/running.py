"""Runs programs and prints each one, for --verbose."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any

from snapmgr.contract.units import format_duration
from snapmgr.system.command import CommandRunner, redact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapmgr.contract.records import Completed


class VerboseRunner(CommandRunner):
    """Prints each program, how long it took and how it ended."""

    def __init__(self, detail: Callable[[str], None]) -> None:
        self._detail = detail

    def run(self, argv: Sequence[str], *, secrets: tuple[str, ...] = (), **options: Any) -> Completed:  # noqa: ANN401
        """Run as `CommandRunner.run` does."""
        start = time.monotonic()
        ended = "failed"
        try:
            completed = super().run(argv, secrets=secrets, **options)
            ended = f"exit code {completed.returncode}"
        finally:
            shown = redact(shlex.join(argv), secrets)
            self._detail(f"ran {shown} ({format_duration(time.monotonic() - start)}, {ended})")
        return completed
