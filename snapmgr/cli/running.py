"""Runs programs and prints each one, for --verbose."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from snapmgr.contract.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapmgr.contract.backend import Held
    from snapmgr.contract.records import Completed


class VerboseRunner:
    """The `Runner` of the command line: prints each program, how long it took and how it ended.

    What starts programs is imported with the first one, as many commands need none.
    """

    def __init__(self, detail: Callable[[str], None]) -> None:
        self._detail = detail

    def run(self, argv: Sequence[str], *, secrets: tuple[str, ...] = (), **options: Any) -> Completed:  # noqa: ANN401
        """Run as `CommandRunner.run` does."""
        import shlex

        from snapmgr.system.command import CommandRunner, redact

        start = time.monotonic()
        ended = "failed"
        try:
            completed = CommandRunner().run(argv, secrets=secrets, **options)
            ended = f"exit code {completed.returncode}"
        finally:
            shown = redact(shlex.join(argv), secrets)
            self._detail(f"ran {shown} ({format_duration(time.monotonic() - start)}, {ended})")
        return completed

    def hold(self, argv: Sequence[str]) -> Held:
        """Hold as `CommandRunner.hold` does."""
        from snapmgr.system.command import CommandRunner

        return CommandRunner().hold(argv)
