"""Generates a load of blogs with the mix and the scores of blogbench, for machines without that program.

It is a program: ``python -m snapmgr.bench.load.blogengine --folder …`` prints one JSON document. It differs from
blogbench where that program's choice distorts the result: it reads 64 KiB per call (blogbench: 8 bytes), and it writes
data that cannot be compressed (blogbench: zeros). The tree cannot outgrow ``--blogs``: after the last blog the writers
start again with the first one, which keeps the same number of articles and pictures.

The workers are processes, so that Python's lock limits none of them. They share a table of counters with the parent;
each cell has one writer.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import mmap
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROLES = ("writer", "rewriter", "commenter", "reader")
_MOST = 100
"""A blog has 1 to this many articles, pictures and comments."""
_ARTICLE, _PICTURE, _COMMENT = (1 << 10, 32 << 10), (8 << 10, 64 << 10), (2 << 10, 10 << 10)
_WRITE, _READ = 8 << 10, 64 << 10
BLOG_BYTES = _MOST * sum((low + high) // 2 for low, high in (_ARTICLE, _PICTURE, _COMMENT))
"""The largest size of one blog, after all rewrites and comments."""

# A worker's cells in the table.
_BEGUN, _BLOGS, _ARTICLES, _PICTURES, _COMMENTS, _BYTES, _CELLS = range(7)
_NOISE_BYTES = 8 << 20
# Time that a worker may hang in a storage call after the end before the run counts as failed.
_PATIENCE_S = 300.0
_NAP_S = 0.05


class _Table:
    """Memory that the parent and all workers share: whether to stop, and each worker's counters."""

    def __init__(self, workers: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * (1 + workers * _CELLS))).cast("q")

    def stopped(self) -> bool:
        return self._cells[0] != 0

    def stop(self) -> None:
        self._cells[0] = 1

    def row(self, worker: int) -> memoryview:
        start = 1 + worker * _CELLS
        return self._cells[start : start + _CELLS]


@dataclass(frozen=True, kw_only=True)
class BlogLoad:
    """The load to generate."""

    folder: Path
    seconds: float
    window_s: float
    writers: int
    rewriters: int
    commenters: int
    readers: int
    blogs: int
    """Maximum number of blogs in the tree."""
    filled: bool
    """Whether all blogs exist already."""
    fill: bool
    """Only write each blog once, with comments, however long that takes."""
    seed: int
    zeros: bool

    @property
    def crew(self) -> list[str]:
        """Each worker's role."""
        counts = (self.writers, self.rewriters, self.commenters, self.readers)
        return [role for role, count in zip(ROLES, counts, strict=True) for _ in range(count)]


class _Worker:
    """One worker, in its own process."""

    def __init__(self, load: BlogLoad, table: _Table, number: int, noise: memoryview, parent: int) -> None:
        self._load = load
        self._table = table
        self._row = table.row(number)
        self._writer_rows = [table.row(writer) for writer in range(load.writers)]
        self._number = number
        self._noise = noise
        self._random = random.Random(f"{load.seed}-{number}")  # noqa: S311 - a load, no secret
        self._buffers = [bytearray(_READ)]
        # From before the fork: the parent may be killed before this process runs for the first time.
        self._parent = parent

    def run(self, role: str) -> None:
        """Work until the time is up, or the parent is gone."""
        turn: Callable[[], bool] = getattr(self, f"_{role}")
        while not self._stopping():
            if not turn():
                time.sleep(0.001)

    def _stopping(self) -> bool:
        return self._table.stopped() or os.getppid() != self._parent

    def _existing(self) -> int | None:
        """Return a blog that exists or is being written."""
        if self._load.filled:
            return self._random.randrange(self._load.blogs)
        writers = len(self._writer_rows)
        first = self._random.randrange(writers) if writers else 0
        for offset in range(writers):
            writer = (first + offset) % writers
            if begun := self._writer_rows[writer][_BEGUN]:
                return (writer + writers * self._random.randrange(begun)) % self._load.blogs
        return None

    def _writer(self) -> bool:
        turn = self._row[_BEGUN]
        blog = self._number + self._load.writers * turn
        if self._load.fill and blog >= self._load.blogs:
            return False
        blog %= self._load.blogs
        folder = self._folder(blog)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        self._row[_BEGUN] = turn + 1
        own = random.Random(f"{self._load.seed}-blog-{blog}")  # noqa: S311 - a load, no secret
        for kind, suffix, sizes, cell in (
            ("article", "xml", _ARTICLE, _ARTICLES),
            ("picture", "jpg", _PICTURE, _PICTURES),
        ):
            for item in range(own.randint(1, _MOST), 0, -1):
                if self._stopping():
                    return True
                self._write(f"{folder}/{kind}-{item}.{suffix}", sizes, cell)
        if self._load.fill:
            self._comment(folder)
        self._row[_BLOGS] += 1
        return True

    def _rewriter(self) -> bool:
        # Like blogbench: always an article, preceded by a picture in half of the cases.
        if (blog := self._existing()) is None:
            return False
        folder = self._folder(blog)
        if self._random.random() < 0.5:  # noqa: PLR2004 - half of the cases
            self._write(f"{folder}/picture-{self._random.randint(1, _MOST)}.jpg", _PICTURE, _PICTURES)
        self._write(f"{folder}/article-{self._random.randint(1, _MOST)}.xml", _ARTICLE, _ARTICLES)
        return True

    def _commenter(self) -> bool:
        if (blog := self._existing()) is None:
            return False
        self._comment(self._folder(blog))
        return True

    def _comment(self, folder: str) -> None:
        for item in range(self._random.randint(1, _MOST), 0, -1):
            if self._stopping():
                return
            self._write(f"{folder}/comment-{item}.xml", _COMMENT, _COMMENTS)

    def _reader(self) -> bool:
        if (blog := self._existing()) is None:
            return False
        folder = self._folder(blog)
        if self._random.random() < 0.5:  # noqa: PLR2004 - half of the cases
            item = 1
            while not self._stopping() and self._read(f"{folder}/comment-{item}.xml", _COMMENTS):
                item += 1
        item = 1
        while not self._stopping():
            self._read(f"{folder}/picture-{item}.jpg", _PICTURES)
            if not self._read(f"{folder}/article-{item}.xml", _ARTICLES):
                break
            item += 1
        self._row[_BLOGS] += 1
        return True

    def _folder(self, blog: int) -> str:
        return f"{self._load.folder}/blog-{blog}"

    def _write(self, path: str, sizes: tuple[int, int], cell: int) -> None:
        size = self._random.randrange(*sizes)
        start = self._random.randrange(_NOISE_BYTES - size)
        # With the worker's number, two workers that write the same file do not take each other's temporary file.
        temporary = f"{path}.{self._number}.tmp"
        fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            for offset in range(start, start + size, _WRITE):
                chunk = self._noise[offset : min(offset + _WRITE, start + size)]
                while chunk:
                    chunk = chunk[os.write(fd, chunk) :]
        finally:
            os.close(fd)
        os.rename(temporary, path)
        self._row[cell] += 1
        self._row[_BYTES] += size

    def _read(self, path: str, cell: int) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            while count := os.readv(fd, self._buffers):
                self._row[_BYTES] += count
        finally:
            os.close(fd)
        self._row[cell] += 1
        return True


class EngineError(Exception):
    """The load could not continue; the text gives the reason."""


def run(load: BlogLoad) -> dict[str, Any]:
    """Run the workers and return the counts of each window. Raises EngineError; never leaves a worker running."""
    crew = load.crew
    table = _Table(len(crew))
    noise = memoryview(bytes(_NOISE_BYTES) if load.zeros else random.Random(load.seed).randbytes(_NOISE_BYTES))  # noqa: S311 - a load, no secret
    troubles, said = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # All workers begin together: otherwise the first ones would leave the parent no time to start the others.
    gate, barrier = os.pipe2(os.O_CLOEXEC)
    # No garbage collection here: it would copy the memory that workers share with the parent.
    gc.freeze()
    workers: list[int] = []
    parent = os.getpid()
    try:
        for number, role in enumerate(crew):
            pid = os.fork()
            if pid == 0:
                os.close(barrier)
                _work(_Worker(load, table, number, noise, parent), role, table, said, gate)
            workers.append(pid)
        os.close(gate)
        os.close(barrier)
        samples = _watch(load, table, crew)
    finally:
        table.stop()
        hung = _reap(workers)
    os.close(said)
    with open(troubles, "rb", closefd=True) as pipe:
        if trouble := pipe.read():
            raise EngineError(trouble.decode(errors="replace").splitlines()[0])
    if hung:
        raise EngineError(f"{hung} workers hang in a storage call {_PATIENCE_S:.0f} s after the time was up")
    return _document(load, samples)


def _work(worker: _Worker, role: str, table: _Table, said: int, gate: int) -> None:
    """Work until the end of this process; begin when the other end of `gate` is closed."""
    try:
        # The parent handles Ctrl-C at a terminal, and stops the workers.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.read(gate, 1)
        worker.run(role)
    except OSError as error:
        table.stop()
        what = "the disk is full" if error.errno in {errno.ENOSPC, errno.EDQUOT} else "a file could not be used"
        os.write(said, f"{what}: {error}\n".encode())
    except BaseException as error:  # noqa: BLE001 - the parent reports it
        table.stop()
        os.write(said, f"a {role} ended: {error!r}\n".encode())
    finally:
        os._exit(0)


def _watch(load: BlogLoad, table: _Table, crew: Sequence[str]) -> list[tuple[float, dict[str, int]]]:
    """Read the counters at the start, then at the end of each window until the time is up."""
    rows = [table.row(number) for number in range(len(crew))]
    begun = time.monotonic()
    samples = [(0.0, _sums(crew, rows))]
    windows = 0 if load.fill else max(1, round(load.seconds / load.window_s))
    while not table.stopped() and (load.fill or len(samples) <= windows):
        end = begun + len(samples) * load.window_s
        while not table.stopped() and (left := end - time.monotonic()) > 0 and not _full(load, rows):
            time.sleep(min(left, _NAP_S))
        samples.append((time.monotonic() - begun, _sums(crew, rows)))
        if _full(load, rows):
            break
    return samples


def _full(load: BlogLoad, rows: Sequence[memoryview]) -> bool:
    return load.fill and sum(row[_BLOGS] for row in rows) >= load.blogs


_NAMES = {
    "writer": ("blogs_written", "articles_written", "pictures_written", "comments_written", "bytes_written"),
    "rewriter": ("", "articles_rewritten", "pictures_rewritten", "", "bytes_written"),
    "commenter": ("", "", "", "comments_written", "bytes_written"),
    "reader": ("blogs_read", "articles_read", "pictures_read", "comments_read", "bytes_read"),
}
COUNTED = tuple(dict.fromkeys(name for names in _NAMES.values() for name in names if name))


def _sums(crew: Sequence[str], rows: Sequence[memoryview]) -> dict[str, int]:
    sums = dict.fromkeys(COUNTED, 0)
    for role, row in zip(crew, rows, strict=True):
        for name, count in zip(_NAMES[role], row[_BLOGS:], strict=True):
            if name:
                sums[name] += count
    return sums


def _reap(workers: Sequence[int]) -> int:
    """Wait for the workers, and kill those that do not end; return the number of those that remain."""
    left = set(workers)
    deadline = time.monotonic() + _PATIENCE_S
    while left and time.monotonic() < deadline:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG) != (0, 0)}
        time.sleep(0.002 if left else 0)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def _document(load: BlogLoad, samples: Sequence[tuple[float, dict[str, int]]]) -> dict[str, Any]:
    last = samples[-1][1]
    pairs = list(pairwise(samples))
    return {
        "ends_s": [round(at, 3) for at, _ in samples[1:]],
        "counts": {name: [after[name] - before[name] for (_, before), (_, after) in pairs] for name in COUNTED},
        "writes": last["blogs_written"],
        "reads": last["blogs_read"],
        "wrapped": not load.fill and last["blogs_written"] >= load.blogs,
    }


def _parsed(argv: Sequence[str] | None) -> BlogLoad:
    parser = argparse.ArgumentParser(
        prog="python -m snapmgr.bench.load.blogengine", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--window", dest="window_s", type=float, default=1.0)
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--rewriters", type=int, default=1)
    parser.add_argument("--commenters", type=int, default=5)
    parser.add_argument("--readers", type=int, default=100)
    parser.add_argument("--blogs", type=int, required=True, help="how many the tree has at most")
    parser.add_argument("--filled", action="store_true", help="all of them are there already")
    parser.add_argument("--fill", action="store_true", help="only write each of them once, with comments")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--zeros", action="store_true", help="write zeros, as blogbench does")
    given = vars(parser.parse_args(argv))
    if given["fill"]:
        given |= {"rewriters": 0, "commenters": 0, "readers": 0}
    if min(given["writers"], given["blogs"]) < 1 or given["window_s"] <= 0:
        parser.error("there must be a writer, a blog, and time in a window")
    return BlogLoad(**given)


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a program and return its exit status: 1 with a message if it could not continue, 130 if it was ended."""
    load = _parsed(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        document = run(load)
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    json.dump(document, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
