"""The published random-update script, with what is wrong in it kept: only what stops it is repaired.

    python3 script.py fill|update|read FILE FILE_BYTES UPDATES SEED

Kept, because it is what was measured: all workers share one file offset, since the file is opened once, before they are
forked, so that a worker writes wherever another one has just sought to; the file is opened by "w+b", which empties it;
extents of 4,000 bytes do not fit pages of 4,096; the data are drawn from the kernel's random numbers in the timed loop;
nothing is synced and no cache is dropped. So a fill ends nearly twice as long as it should be, with holes.

Repaired: the number of extents is a whole number; each worker gets a list of extents; and, since a snapshot has to be
taken between them, fill and update are two starts of the program, of which the second does not empty the file. Workers
are forked rather than taken from a pool. Prints {"seconds": …} for its phase.
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
    """Seek to the first extent of a worker's part, and write from the offset, which others may have moved by then."""
    file.seek(extents[0] * EXTENT_SIZE)
    file.writelines(os.urandom(EXTENT_SIZE) for _ in extents)


def update(file: BinaryIO, extents: Sequence[int]) -> None:
    """Seek to each extent and write it; another worker may seek elsewhere in between."""
    for extent in extents:
        file.seek(extent * EXTENT_SIZE)
        file.write(os.urandom(EXTENT_SIZE))


def in_workers(work: Callable[[BinaryIO, Sequence[int]], None], file: BinaryIO, parts: Sequence[Sequence[int]]) -> None:
    """Do the parts in as many processes, which share the file's offset. Ends the program if one of them fails."""
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
