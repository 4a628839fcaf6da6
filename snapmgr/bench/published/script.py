"""Repeats the published random-update script with its errors; only those that stop it are repaired.

    python3 script.py fill|update|read FILE FILE_BYTES UPDATES SEED

These errors are kept because the published figures include them. All workers share one file offset, because the file is
opened once before they are forked; so a worker writes wherever another one has just moved the offset, and a filled file
is nearly twice as long as it should be, with holes. The file is opened with "w+b", which empties it. Extents of 4,000
bytes do not fit pages of 4,096. The data come from the kernel's random numbers in the timed loop. Nothing is synced and
no cache is dropped.

These are repaired: the number of extents is a whole number; each worker gets a list of extents; fill and update are two
starts of the program, because a snapshot is taken between them, and the second start does not empty the file. Workers
are forked, not taken from a pool. Prints {"seconds": …} for its phase.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import BinaryIO

EXTENT_SIZE = 4000
THREADS = 8
READ_SIZE = 1 << 20


def fill(file: BinaryIO, extents: Sequence[int]) -> None:
    """Seek to the first extent of a worker's part, then write at the offset, which others may have moved by then."""
    file.seek(extents[0] * EXTENT_SIZE)
    file.writelines(os.urandom(EXTENT_SIZE) for _ in extents)


def update(file: BinaryIO, extents: Sequence[int]) -> None:
    """Seek to each extent and write it; another worker may seek elsewhere in between."""
    for extent in extents:
        file.seek(extent * EXTENT_SIZE)
        file.write(os.urandom(EXTENT_SIZE))


def in_workers(work: Callable[[BinaryIO, Sequence[int]], None], file: BinaryIO, parts: Sequence[Sequence[int]]) -> None:
    """Run each part in its own process; all share the file's offset. Ends the program if one of them fails."""
    children = []
    for part in parts:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(file, part)
                file.flush()
                code = 0
            except OSError as error:
                sys.stderr.write(f"{file.name}: {error.strerror}\n")
                sys.stderr.flush()
            finally:
                os._exit(code)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):  # noqa: C419 - all are waited for
        sys.exit(1)


def main() -> None:
    """Run one phase."""
    phase, name, file_size, updates, seed = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    total = file_size // EXTENT_SIZE
    start = time.monotonic()
    if phase == "fill":
        ends = [total * number // THREADS for number in range(THREADS + 1)]
        with open(name, "w+b") as file:
            in_workers(fill, file, [range(*pair) for pair in zip(ends, ends[1:])])  # noqa: B905, RUF007 - as any Python
    elif phase == "update":
        chosen = random.Random(seed).sample(range(total), updates)  # noqa: S311 - a load, no secret
        with open(name, "r+b") as file:
            in_workers(update, file, [chosen[number::THREADS] for number in range(THREADS)])
    else:
        with open(name, "rb", buffering=0) as file:
            while file.read(READ_SIZE):
                pass
    sys.stdout.write(json.dumps({"seconds": time.monotonic() - start}) + "\n")


if __name__ == "__main__":
    main()
