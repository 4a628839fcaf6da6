"""What snapshots cost those who write to their origin: random and sequential writes on a bare volume, with classic
snapshots of several chunk sizes, and on thin volumes; at first touch and again at the same places.

Writes are O_DIRECT|O_DSYNC, one at a time, on the device itself. What the disk below was asked for meanwhile is counted
too (/sys/block/*/stat): that does not depend on the machine's mood, which times do. Boots a guest (`./run guest`) where
there is no device-mapper; else SNAPMGR_TEST_DEV must name a blank disk.

    ./run measure lvm-writes --rounds 3
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.inguest import enter_guest
from support.lvm import run, volume_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from support.lvm import VolumeGroup

_KIB, _MIB = 1 << 10, 1 << 20
_REGION = 192 * _MIB
_SEQUENTIAL = 64 * _MIB
_CHUNKS_KIB = (4, 16, 64, 512)
_SECTOR = 512


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Writes to places in a part of the volume."""

    name: str
    size_bytes: int
    places: tuple[int, ...]
    """Offsets of single writes, in order."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a disk has been asked for."""

    reads: int
    read_bytes: int
    writes: int
    written_bytes: int


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one write, on average."""

    seconds: float
    reads: float
    read_bytes: float
    writes: float
    written_bytes: float


def patterns(count: int, seed: int) -> tuple[Pattern, ...]:
    """Return random writes of 4 and 16 KiB to distinct places, and sequential ones, each in a part of its own."""
    rng = random.Random(seed)

    def scattered(name: str, size: int, begin: int) -> Pattern:
        places = rng.sample(range(_REGION // size), count)
        return Pattern(name=name, size_bytes=size, places=tuple(begin + place * size for place in places))

    return (
        scattered("random 4K", 4 * _KIB, 0),
        scattered("random 16K", 16 * _KIB, _REGION),
        Pattern(
            name="sequential 1M",
            size_bytes=_MIB,
            places=tuple(range(2 * _REGION, 2 * _REGION + _SEQUENTIAL, _MIB)),
        ),
    )


def counts(device: str) -> Counts:
    """Return a disk's counters. Fields: Documentation/block/stat.rst."""
    number = os.stat(device).st_rdev
    fields = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text().split()
    reads, _, sectors_read, _, writes, _, sectors_written = map(int, fields[:7])
    return Counts(
        reads=reads, read_bytes=sectors_read * _SECTOR, writes=writes, written_bytes=sectors_written * _SECTOR
    )


def write(fd: int, pattern: Pattern, disk: str) -> Cost:
    """Write a pattern and return what each write cost."""
    # Aligned to a page, as O_DIRECT wants it.
    with mmap.mmap(-1, pattern.size_bytes) as block:
        block.write(os.urandom(pattern.size_bytes))
        before = counts(disk)
        start = time.monotonic()
        for place in pattern.places:
            os.pwrite(fd, block, place)
        took = time.monotonic() - start
        after = counts(disk)
    number = len(pattern.places)
    return Cost(
        seconds=took / number,
        reads=(after.reads - before.reads) / number,
        read_bytes=(after.read_bytes - before.read_bytes) / number,
        writes=(after.writes - before.writes) / number,
        written_bytes=(after.written_bytes - before.written_bytes) / number,
    )


def fill(fd: int) -> None:
    """Write everything that patterns touch once: what thin volumes take at first is not what is measured."""
    with mmap.mmap(-1, _MIB) as block:
        for offset in range(0, 2 * _REGION + _SEQUENTIAL, _MIB):
            os.pwrite(fd, block, offset)
    os.fsync(fd)


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """Open a device for writing."""
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def classic(group: VolumeGroup, chunk_kib: int, snapshots: int) -> str:
    """Make a volume with so many classic snapshots and return its path."""
    size_mib = (2 * _REGION + _SEQUENTIAL) // _MIB
    run("lvcreate", "--yes", "--size", f"{size_mib}m", "--name", "origin", group.name)
    with opened(group.device("origin"), 0) as fd:
        fill(fd)
    for number in range(snapshots):
        chunk = ("--chunksize", f"{chunk_kib}k")
        size = ("--size", f"{size_mib}m")
        name = ("--name", f"s{number}")
        run("lvcreate", "--yes", "--snapshot", "--permission", "r", *size, *chunk, *name, f"{group.name}/origin")
    return group.device("origin")


def thin(group: VolumeGroup, snapshots: int) -> str:
    """Make a thin volume with so many snapshots and return its path."""
    size_mib = (2 * _REGION + _SEQUENTIAL) // _MIB
    group.pool(data_mib=size_mib * (snapshots + 2), metadata_mib=16)
    run(
        "lvcreate",
        "--yes",
        "--type",
        "thin",
        "--virtualsize",
        f"{size_mib}m",
        "--name",
        "origin",
        "--thinpool",
        "pool",
        group.name,
    )
    with opened(group.device("origin"), 0) as fd:
        fill(fd)
    for number in range(snapshots):
        run("lvcreate", "--yes", "--snapshot", "--name", f"s{number}", f"{group.name}/origin")
    return group.device("origin")


def cases(chunks_kib: Sequence[int]) -> dict[str, Callable[[VolumeGroup], str]]:
    """Return what is measured, by name."""
    found: dict[str, Callable[[VolumeGroup], str]] = {"no snapshot": lambda group: classic(group, 0, 0)}
    for snapshots in (1, 3):
        for chunk in chunks_kib:
            found[f"{snapshots} classic, chunks of {chunk}K"] = (
                lambda group, chunk=chunk, snapshots=snapshots: classic(group, chunk, snapshots)  # type: ignore[misc]
            )
    found["thin, no snapshot"] = lambda group: thin(group, 0)
    for snapshots in (1, 3):
        found[f"thin, {snapshots} snapshots"] = lambda group, snapshots=snapshots: thin(group, snapshots)  # type: ignore[misc]
    return found


def measure(group: VolumeGroup, make: Callable[[VolumeGroup], str], chosen: Sequence[Pattern]) -> dict[str, Cost]:
    """Return the costs by pattern and touch: "random 4K", "random 4K again"."""
    disk = group.devices[0]
    group.clear()
    path = make(group)
    costs: dict[str, Cost] = {}
    with opened(path, os.O_DSYNC) as fd:
        for pattern in chosen:
            for touch in ("", " again"):
                costs[pattern.name + touch] = write(fd, pattern, disk)
    for row in group.lvs("lv_name", "data_percent", "lv_snapshot_invalid"):
        if row["lv_snapshot_invalid"] == "snapshot invalid":
            raise RuntimeError(f"a snapshot overflowed: {row}")
    return costs


def print_table(name: str, rows: dict[str, list[Cost]]) -> None:
    """Print the costs of one pattern: medians of the rounds."""
    heads = f"{'µs':>9}{'reads':>8}{'KiB read':>10}{'writes':>8}{'KiB written':>12}"
    print(f"{name:28}{heads}")
    for case, costs in rows.items():

        def middle(what: str, costs: list[Cost] = costs) -> float:
            return float(statistics.median(getattr(cost, what) for cost in costs))

        print(
            f"  {case:26}{middle('seconds') * 1e6:9.0f}{middle('reads'):8.2f}{middle('read_bytes') / _KIB:10.1f}"
            f"{middle('writes'):8.2f}{middle('written_bytes') / _KIB:12.1f}"
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="over all cases; medians are printed")
    parser.add_argument("--writes", type=int, default=300, help="random writes of each pattern")
    parser.add_argument("--chunks", type=int, nargs="+", default=_CHUNKS_KIB, help="of classic snapshots, KiB")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = arguments.json.absolute() if arguments.json else None
    enter_guest(__file__, result.parent if result else None)
    costs: dict[str, dict[str, list[Cost]]] = {}
    with volume_group() as group:
        for number in range(arguments.rounds):
            chosen = patterns(arguments.writes, seed=number)
            for case, make in cases(arguments.chunks).items():
                for name, cost in measure(group, make, chosen).items():
                    costs.setdefault(name, {}).setdefault(case, []).append(cost)
    print(f"each write: medians of {arguments.rounds} rounds of {arguments.writes} random writes")
    for name, rows in costs.items():
        print_table(name, rows)
    if result is not None:
        plain = {
            name: {case: [vars(cost) for cost in each] for case, each in rows.items()} for name, rows in costs.items()
        }
        result.write_text(json.dumps(plain))


if __name__ == "__main__":
    main()
