"""Measures a storage and a scratch folder in about a second: small cold reads, many readers, writes."""

from __future__ import annotations

import os
import secrets
import statistics
import threading
import time
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

from snapmgr.physical.prepare.forecast import COPY_THREADS, Speeds
from snapmgr.physical.tools.opened import open_file
from snapmgr.tree.walk import FOLDER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SMALL_BYTES = 16 << 10
_SPAN_BYTES = 4 << 20
"""What the client of a storage fetches at most for one read: no two probes read in the same one."""
_LATENCY_S, _STREAM_S, _TOTAL_S, _WRITE_S = 0.25, 0.2, 0.4, 0.2
_SMALL_READS, _STREAM_SPANS, _WRITES = 8, 8, 2
_SCRATCH_BYTES = 16 << 20
_STEP_BYTES = 1 << 20
# Where nothing can be measured: a small backup, whose way hardly matters.
_FALLBACK = Speeds(
    read_latency_s=0.001, write_latency_s=0.002, stream_bytes_s=200e6, total_bytes_s=400e6, scratch_bytes_s=300e6
)
_WRITE_OF_READ = 1.7


def measure(
    folder: str,
    sizes: dict[str, int],
    *,
    storage_work: str | None = None,
    scratch_work: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Speeds:
    """Return how quick a storage and the scratch space are.

    Args:
        folder: the backup, in the storage; it is only read.
        sizes: of its files.
        storage_work: a folder of ours on the same storage to write a little to; without it writing is guessed.
        scratch_work: the same on scratch.
        clock: seconds.

    What the client of the storage has in its own cache is quick, and will be when the backup is prepared. Never raises:
    what cannot be read is told by who needs it.
    """
    spans = _spans(sizes)
    root_fd = os.open(folder, FOLDER_FLAGS)
    try:
        latency_s = _latency(root_fd, spans, clock)
        stream = _stream(root_fd, spans, clock)
        total = _total(root_fd, spans, clock)
    finally:
        os.close(root_fd)
    read_latency_s = latency_s or _FALLBACK.read_latency_s
    stream_bytes_s = stream or _FALLBACK.stream_bytes_s
    written_s = _write_latency(storage_work, clock) if storage_work else None
    scratch = _write_rate(scratch_work, clock) if scratch_work else None
    return Speeds(
        read_latency_s=read_latency_s,
        write_latency_s=written_s or _WRITE_OF_READ * read_latency_s,
        stream_bytes_s=stream_bytes_s,
        total_bytes_s=max(total or 0.0, stream_bytes_s),
        scratch_bytes_s=scratch or _FALLBACK.scratch_bytes_s,
    )


def _spans(sizes: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield places to read at, each once, in random order."""
    every = [
        (path, offset, min(_SPAN_BYTES, size - offset))
        for path, size in sizes.items()
        if size >= _SMALL_BYTES
        for offset in range(0, size, _SPAN_BYTES)
    ]
    Random().shuffle(every)  # noqa: S311 - only to meet no pattern
    return iter(every)


def _read(root_fd: int, span: tuple[str, int, int], length: int, *, ahead: bool) -> int:
    path, offset, _ = span
    fd = open_file(root_fd, path, os.O_RDONLY)
    try:
        with suppress(OSError):
            # Out of the page cache, which would tell of memory and not of the storage.
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
            if not ahead:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        done = 0
        while done < length:
            data = os.pread(fd, min(_STEP_BYTES, length - done), offset + done)
            if not data:
                break
            done += len(data)
        return done
    finally:
        os.close(fd)


def _latency(root_fd: int, spans: Iterator[tuple[str, int, int]], clock: Callable[[], float]) -> float | None:
    took: list[float] = []
    deadline = clock() + _LATENCY_S
    for span in spans:
        start = clock()
        with suppress(OSError):
            _read(root_fd, span, min(_SMALL_BYTES, span[2]), ahead=False)
            took.append(clock() - start)
        if len(took) >= _SMALL_READS or clock() > deadline:
            break
    return statistics.median(took) if took else None


def _stream(root_fd: int, spans: Iterator[tuple[str, int, int]], clock: Callable[[], float]) -> float | None:
    start, done = clock(), 0
    for count, span in enumerate(spans, start=1):
        with suppress(OSError):
            done += _read(root_fd, span, span[2], ahead=True)
        if count >= _STREAM_SPANS or clock() > start + _STREAM_S:
            break
    return _rate(done, clock() - start)


def _total(root_fd: int, spans: Iterator[tuple[str, int, int]], clock: Callable[[], float]) -> float | None:
    lock = threading.Lock()
    done: list[int] = []
    start = clock()

    def run() -> None:
        while clock() < start + _TOTAL_S:
            with lock:
                span = next(spans, None)
            if span is None:
                return
            with suppress(OSError):
                done.append(_read(root_fd, span, span[2], ahead=True))

    crew = [threading.Thread(target=run, daemon=True) for _ in range(COPY_THREADS)]
    for one in crew:
        one.start()
    for one in crew:
        one.join()
    return _rate(sum(done), clock() - start)


def _rate(size_bytes: int, seconds: float) -> float | None:
    # Less says more about the clock than about the storage.
    return size_bytes / max(seconds, 1e-6) if size_bytes >= _STEP_BYTES else None


def _write_latency(folder: str, clock: Callable[[], float]) -> float | None:
    took: list[float] = []
    deadline = clock() + _WRITE_S
    for _ in range(_WRITES):
        start = clock()
        if _written(folder, _SMALL_BYTES):
            took.append(clock() - start)
        if clock() > deadline:
            break
    return statistics.median(took) if took else None


def _write_rate(folder: str, clock: Callable[[], float]) -> float | None:
    start = clock()
    return _rate(_SCRATCH_BYTES, clock() - start) if _written(folder, _SCRATCH_BYTES) else None


def _written(folder: str, size_bytes: int) -> bool:
    path = os.path.join(folder, f"probe-{secrets.token_hex(4)}")
    # Random: some storages compress.
    block = secrets.token_bytes(min(size_bytes, _STEP_BYTES))
    try:
        with open(path, "xb", buffering=0) as file:
            file.writelines(block for _ in range(size_bytes // len(block)))
            os.fsync(file.fileno())
        return True
    except OSError:
        return False
    finally:
        with suppress(OSError):
            os.unlink(path)
