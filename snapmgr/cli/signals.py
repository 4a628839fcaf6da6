"""Turns SIGINT, SIGTERM and SIGHUP into an exception, so that every context manager cleans up."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STDERR = 2


class Interrupted(BaseException):
    """A signal asked us to end. Not an Exception (as KeyboardInterrupt): handlers of failures must not catch it."""

    def __init__(self, number: int) -> None:
        self.signal_name = signal.Signals(number).name
        super().__init__(f"interrupted by {self.signal_name}")


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Raise `Interrupted` at the first of these signals while the context lasts.

    A second signal must not interrupt the cleanup that the first one started.
    """
    came: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            raise Interrupted(number)
        # os.write, as a print here could interleave with the interrupted print.
        with suppress(OSError):
            os.write(
                _STDERR, b"snapmgr: cleaning up; if that hangs: kill -9, and the next run (or doctor) finishes it\n"
            )

    with handled(handle):
        yield


@contextmanager
def handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handle` for each of these signals while the context lasts.

    Signals that the caller made us ignore (nohup, a background job of a script) stay ignored.
    """
    old = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in old.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
