"""Shares the pieces of large files among threads."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_TICK_S = 0.2
# Each piece has its own reader, because the client of a storage reads ahead for each open file.
_PIECE_BYTES = 32 << 20


class Piece(Struct, frozen=True):
    """A part of a file."""

    path: str
    offset: int
    length: int


def pieces(sizes: dict[str, int]) -> list[Piece]:
    """Return all files in pieces, the largest files first, so that the last piece is a small one."""
    return [
        Piece(path, offset, min(_PIECE_BYTES, size - offset))
        for path, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
        for offset in range(0, size, _PIECE_BYTES)
    ]


class StoppedError(Exception):
    """Another thread failed, or a signal came."""


class Crew:
    """Some threads, and the number of bytes they have finished together."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._failures: list[BaseException] = []
        self.done_bytes = 0

    def count(self, size_bytes: int) -> None:
        """Add finished bytes; called by the threads. Raises StoppedError in a thread that must end."""
        if self._ended.is_set():
            raise StoppedError
        with self._lock:
            self.done_bytes += size_bytes

    def work(
        self, work: Iterable[Piece], act: Callable[[Piece], None], *, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Call `act` for each piece, in threads. The first failure ends all threads, and is then raised.

        `tick` is called regularly by this thread. The exception of a signal ends all threads, too.
        """
        for piece in work:
            self._waiting.put(piece)
        crew: list[threading.Thread] = []
        try:
            for _ in range(min(self._threads, self._waiting.qsize())):
                thread = threading.Thread(target=self._run, args=(act,), name="copy", daemon=True)
                thread.start()
                crew.append(thread)
            for thread in crew:
                while thread.is_alive():
                    thread.join(_TICK_S)
                    tick()
        finally:
            self._ended.set()
            for thread in crew:
                thread.join()
        if self._failures:
            raise self._failures[0]

    def _run(self, act: Callable[[Piece], None]) -> None:
        while not self._ended.is_set():
            try:
                act(self._waiting.get_nowait())
            except queue.Empty:
                return
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                self._failures.append(error)
                self._ended.set()
