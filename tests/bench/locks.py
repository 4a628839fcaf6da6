"""Snapshots of every server, lock level, set of engines and layout under 8 writers, each checked in full.

Of each snapshot a server is started on a clone: the writers' invariant must hold, nothing acknowledged may be missing,
and the recorded position must be that of the clone: its binary log's end, its GTID, and the writers' counters in the
prefix of the source's binary logs. Of one of each cell the rest of these logs is replayed onto the clone, which must
then equal the source. Cells that snapmgr must refuse are tried once.

Results are appended to a file; a second start goes on with what is missing. Prints what is wrong at once, and ends with
1 if anything was, or failed; the report is made of the file alone.

    ./run measure locks                                   # the whole matrix, some 600 snapshots
    ./run measure locks --cells 'mysql-9/*/innodb/*'
    ./run measure locks --report > table.md
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from support.kinds import cache_folder
from support.matrix import results as results_file
from support.matrix.cells import SERVERS, all_cells, default_snapshots
from support.matrix.report import write_report
from support.matrix.series import missing_tasks, run_site
from support.requirements import lacking
from support.storage import sweep_dead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.matrix.cells import Cell
    from support.matrix.results import Result
    from support.matrix.series import Task

_NEEDS = ("root", "loop", "btrfs", "btrfsutil", "xfs", "ext4")


def _chosen(patterns: Sequence[str]) -> list[Cell]:
    cells = [cell for cell in all_cells() if not patterns or any(_matches(cell.id, one) for one in patterns)]
    for name in SERVERS:
        if reasons := lacking([name]):
            print(f"NOT COVERED: {name}: {'; '.join(reasons)}", file=sys.stderr)
            cells = [cell for cell in cells if cell.server != name]
    return cells


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or pattern in name


def _run(tasks: Sequence[Task], path: Path, limit_s: float) -> int:
    """Run what is missing; return how many results are wrong or failed."""
    wanted, done, bad = sum(task.snapshots for task in tasks), 0, 0
    begun = time.monotonic()
    for site, group in groupby(tasks, key=lambda task: task.cell.site):
        try:
            for result in run_site(list(group), limit_s):
                results_file.append(path, result)
                done += 1
                bad += _tell(result, f"{done}/{wanted} {time.monotonic() - begun:.0f} s")
        except Exception as error:  # noqa: BLE001 - the next site is another one
            bad += 1
            print(f"FAILED {'/'.join(site)}: {type(error).__name__}: {error}", file=sys.stderr)
    return bad


def _tell(result: Result, progress: str) -> bool:
    """Say a result; return whether it is bad."""
    if result.wrong:
        print(f"WRONG {result.cell}: {'; '.join(result.wrong)}", file=sys.stderr)
    elif result.kind == "failed":
        print(f"FAILED {result.cell}: {result.text}", file=sys.stderr)
    else:
        what = f"{result.position}, {result.level}" if result.kind == "snapshot" else f"refused: {result.text[:60]}"
        print(f"[{progress}] {result.cell}: {what}", file=sys.stderr)
    return bool(result.wrong) or result.kind == "failed"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = cache_folder().parent / "bench-locks.jsonl"
    parser.add_argument("--results", type=Path, default=default, help="the file that grows (default: %(default)s)")
    parser.add_argument("--cells", action="append", default=[], help="a pattern or part of SERVER/LEVEL/ENGINES/LAYOUT")
    parser.add_argument("--snapshots", type=int, help="of each cell (default: such that there are 500 in all)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each snapshot of a cell")
    parser.add_argument("--list", action="store_true", help="print the cells and what is there of them, and end")
    parser.add_argument("--report", action="store_true", help="print the tables, and end")
    arguments = parser.parse_args()
    results = results_file.read(arguments.results)
    if arguments.report:
        print(write_report(results))
        sys.exit(any(result.wrong for result in results))
    cells = _chosen(arguments.cells)
    if not cells:
        parser.error("no cell is called so: see --list without --cells")
    snapshots = arguments.snapshots or default_snapshots(cells)
    tasks = missing_tasks(cells, results, snapshots)
    if arguments.list:
        left = {task.cell: task.snapshots for task in tasks}
        for cell in cells:
            what = "refused" if cell.refusal is not None else f"{snapshots} snapshots"
            print(f"{cell.id:58}{what}, {left.get(cell, 0)} missing")
        return
    if absent := lacking(_NEEDS):
        print("; ".join(absent), file=sys.stderr)
        sys.exit(7)
    # So that servers, mounts and loop devices go first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sweep_dead()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    bad = _run(tasks, arguments.results, arguments.limit)
    print(write_report(results_file.read(arguments.results)))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
