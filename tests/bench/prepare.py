"""How long a backup takes to prepare: the published ladder, snapmgr's ways, and what "auto" and "--tune" make of them.

A backup of MariaDB with a redo log of a set size lies on a JuiceFS volume in an object store of a set latency and total
bandwidth. Each sample is a prepare on a fresh clone, through a fresh mount with an empty cache, until the result is
durable; the ways take turns. The first result of each way in a cell is compared with a plain prepare's tables.

Samples are appended to a file; a second start goes on with what is missing. The table is made of the file alone.

    ./run measure prepare --list                                    # cells, ways, missing samples, forecast
    ./run measure prepare                                           # everything: some hours
    ./run measure prepare --cells 10gbit/15ms/data1/redo1 --ways default,scratch,auto --repeats 2
    ./run measure prepare --data 128M --redo 16M --cells data1/redo1 --repeats 1
    ./run measure prepare --report > table.md
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.contract.units import format_duration, parse_duration, parse_size
from support.kinds import cache_folder
from support.preparelab import samples as samples_file
from support.preparelab.cells import BASE_DATA_BYTES, BASE_REDO_BYTES, WAYS, Cell, Way, all_cells, guess_s
from support.preparelab.scene import prepare_lab
from support.requirements import lacking
from support.storage import keep_mounts_private, sweep_dead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.preparelab.samples import Sample

_NEEDS = ("root", "loop", "xfs", "juicefs", "redis", "mariadbd", "mariadb-backup")


class _Plan:
    """What is to be measured, and what of it is missing."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.data_bytes: int = parse_size(arguments.data)
        self.redo_bytes: int = parse_size(arguments.redo)
        self.repeats: int = arguments.repeats
        self.cells = [cell for cell in all_cells() if _chosen(cell.id, arguments.cells)]
        names = arguments.ways.split(",") if arguments.ways else [way.name for way in WAYS]
        self.ways = [way for way in WAYS if way.name in names]
        self.unknown = sorted(set(names) - {way.name for way in WAYS})
        self.done = samples_file.counts(samples_file.read(arguments.results))

    def sizes(self, cell: Cell) -> tuple[int, int]:
        return self.data_bytes * cell.data, self.redo_bytes * cell.redo

    def sizes_mib(self, cell: Cell) -> tuple[int, int]:
        data_bytes, redo_bytes = self.sizes(cell)
        return data_bytes >> 20, redo_bytes >> 20

    def missing(self, cell: Cell, way: Way) -> int:
        return max(self.repeats - self.done.get((cell.id, way.name, *self.sizes_mib(cell)), 0), 0)

    def guess_s(self, cell: Cell) -> float:
        return sum(self.missing(cell, way) * guess_s(cell, way, *self.sizes(cell)) for way in self.ways)


def _chosen(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) or pattern in name for pattern in patterns)


def _measure(plan: _Plan, arguments: argparse.Namespace) -> int:
    """Take the samples that are missing; return how many failed."""
    failed = 0
    wanted = [cell for cell in plan.cells if any(plan.missing(cell, way) for way in plan.ways)]
    left_s = sum(plan.guess_s(cell) for cell in wanted)
    for (data_bytes, redo_bytes), cells in groupby(wanted, key=plan.sizes):
        print(f"a backup of {data_bytes >> 20} MiB and {redo_bytes >> 20} MiB of redo log …", file=sys.stderr)
        reports = arguments.results.parent / "bench-prepare"
        with prepare_lab(
            data_bytes,
            redo_bytes,
            base=arguments.base,
            reports=reports,
            tune_s=parse_duration(arguments.tune_time),
            cache=arguments.cache,
        ) as lab:
            for cell in cells:
                begun = time.monotonic()
                for turn in range(plan.repeats):
                    # Each way comes first once: what the machine does meanwhile hits all of them.
                    start = turn % len(plan.ways)
                    for way in [*plan.ways[start:], *plan.ways[:start]]:
                        if plan.missing(cell, way) < plan.repeats - turn:
                            continue
                        sample = lab.sample(
                            cell,
                            way,
                            sizes_mib=plan.sizes_mib(cell),
                            limit_s=arguments.limit,
                            check=turn == 0 and not arguments.no_check,
                        )
                        samples_file.append(arguments.results, sample)
                        failed += _tell(sample)
                left_s -= plan.guess_s(cell)
                took = format_duration(time.monotonic() - begun)
                print(f"{cell.id} took {took}; about {format_duration(max(left_s, 0.0))} to go", file=sys.stderr)
    return failed


def _tell(sample: Sample) -> bool:
    if sample.seconds is None:
        print(f"FAILED {sample.cell} {sample.way}: {sample.failure}", file=sys.stderr)
        return True
    chosen = f" ({sample.facts['way']})" if "way" in sample.facts else ""
    checked = ", tables equal" if sample.checked else ""
    print(f"{sample.cell} {sample.way}{chosen}: {sample.seconds:.1f} s{checked}", file=sys.stderr)
    return False


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = cache_folder().parent / "bench-prepare.jsonl"
    parser.add_argument("--results", type=Path, default=default, help="the file that grows (default: %(default)s)")
    parser.add_argument("--cells", action="append", default=[], help="a pattern or part of TOTAL/LATENCY/DATA/REDO")
    parser.add_argument("--ways", help=f"some of {','.join(way.name for way in WAYS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", default=f"{BASE_DATA_BYTES >> 20}M", help="what data1 is (default: %(default)s)")
    parser.add_argument("--redo", default=f"{BASE_REDO_BYTES >> 20}M", help="what redo1 is (default: %(default)s)")
    parser.add_argument(
        "--base", type=Path, default=Path("/var/tmp"), help="folder for the disk of objects, caches and scratch"
    )
    parser.add_argument("--cache", type=Path, help="folder in which backups are kept (default: beside the servers)")
    parser.add_argument("--tune-time", default="15m", help="how long --tune may search (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each sample")
    parser.add_argument("--no-check", action="store_true", help="do not compare tables")
    parser.add_argument("--json", type=Path, help="write medians, spreads and ratios there")
    parser.add_argument(
        "--list", action="store_true", help="print cells, what is missing and how long it takes, and end"
    )
    parser.add_argument("--report", action="store_true", help="print the table, and end")
    arguments = parser.parse_args()
    plan = _Plan(arguments)
    if plan.unknown or not plan.cells:
        parser.error(
            f"there is no way {', '.join(plan.unknown)}" if plan.unknown else "no cell is called so: see --list"
        )
    if arguments.list:
        for cell in plan.cells:
            left = {way.name: missing for way in plan.ways if (missing := plan.missing(cell, way))}
            what = ", ".join(f"{name} {missing}" for name, missing in left.items()) or "nothing"
            print(f"{cell.id:28} missing: {what}; about {format_duration(plan.guess_s(cell))}")
        return
    failed = 0
    if not arguments.report:
        if absent := lacking(_NEEDS):
            print("; ".join(absent), file=sys.stderr)
            sys.exit(7)
        # So that mounts, servers and the store go first.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        sweep_dead()
        keep_mounts_private()
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        print(f"about {format_duration(sum(map(plan.guess_s, plan.cells)))} in all", file=sys.stderr)
        failed = _measure(plan, arguments)
    samples = samples_file.read(arguments.results)
    print(samples_file.table(samples))
    if arguments.json:
        arguments.json.write_text(json.dumps(samples_file.summary(samples), indent=1) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
