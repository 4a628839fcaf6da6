"""The published question about ext4: MariaDB under sysbench with 1 to 512 clients, O_DIRECT and O_DSYNC.

File systems without snapshots are beside btrfs with one.

Each sample is on disk at once: the same command goes on where it was stopped.

    ./run measure threads --on /dev/sdx                     # on a blank disk; without --on on a loop device
    ./run measure threads --only direct --keep FOLDER
    ./run measure threads --pack tests/golden/bench/threads.tar.xz      # the samples, as they are committed
    ./run measure threads --report tests/golden/bench/threads.tar.xz    # the tables of
    docs/explanation/file-systems-and-threads.md

O_DSYNC reads through the page cache: its data (--size) must be larger than the memory, or the memory limited
(--memory).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.published import pack, unpacked
from snapmgr.bench.report import document
from snapmgr.bench.scenarios import oltp_threads
from snapmgr.bench.statistics.comparison import groups
from snapmgr.contract.units import format_quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROOT = Path(__file__).parents[2]
_KEEP = Path("/var/tmp/snapmgr-bench-threads")
# The file system that was asked about first: the others are compared with it.
_STACKS = ("ext4-dioread-lock", "ext4-dioread-nolock", "xfs", "btrfs")
_SESSION = "40m"


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """One flush method."""

    name: str
    variant: str
    seed: int = 1

    def command(self, arguments: argparse.Namespace) -> list[str]:
        """Return the benchmark's command."""
        given = [("--on", arguments.on), ("--size", arguments.size), ("--memory", arguments.memory)]
        return [
            *(str(_ROOT / ".venv/bin/snapmgr"), "bench", "run", oltp_threads.scenario.name, "--variant", self.variant),
            *("--profile", arguments.profile, "--threads", arguments.threads, "--stacks", ",".join(_STACKS)),
            *("--repeats", str(arguments.repeats), "--budget", arguments.budget, "--seed", str(self.seed)),
            *(word for option, value in given if value for word in (option, value)),
            *("-o", str(arguments.keep / self.name)),
        ]


REPETITIONS = (
    Repetition(name="direct", variant="o_direct"),
    # Once more, with other rows: on a noisy machine six pairs leave wide intervals.
    Repetition(name="direct-again", variant="o_direct", seed=2),
    Repetition(name="dsync", variant="o_dsync"),
)


def report(samples: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tables in Markdown: transactions a second by number of clients, and the ratios with their verdicts."""
    lines = []
    found = document(samples, made_at=datetime.now(UTC))
    for group, scenario in zip(groups(samples), found["scenarios"], strict=True):
        clients = [int(count) for count in group.counted[0]["axes"]["tps_by_threads"]["x"]]
        heads = ("", *(f"{count} client{'' if count == 1 else 's'}" for count in clients))
        lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        for stack in scenario["stacks"]:
            series = [one["series"]["tps_by_threads"] for one in group.counted if one["stack"] == stack]
            cells = [format_quantity(median(column), "1/s") for column in zip(*series, strict=True)]
            lines.append(f"| {found['labels'][stack]} | {' | '.join(cells)} |")
        lines += ["", "| Figure | Storages | Ratio (95 %) | Pairs | Shown |", "|---|---|---|---|---|"]
        for row in scenario["ratios"]:
            pair = f"{found['labels'][row['stack']]} ÷ {found['labels'][row['against']]}"
            lines.append(f"| {row['title']} | {pair} | {row['text']} | {row['n']} | {row['words']} |")
        for metric in dict.fromkeys(row["title"] for row in scenario["ratios"]):
            noise = next(row["noise"] for row in scenario["ratios"] if row["title"] == metric)
            lines.append(f"| {metric} | A/A: the same twice | {noise['text'] if noise else 'not known'} | | |")
    return lines


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="./run measure threads", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ",".join(one.name for one in REPETITIONS)
    parser.add_argument("--keep", type=Path, default=_KEEP, help=f"folder of results (default: {_KEEP})")
    parser.add_argument("--only", default=names, help=f"default: {names}")
    parser.add_argument("--on", help="the device; default: a loop device")
    parser.add_argument("--profile", default="quick", help="default: quick")
    parser.add_argument("--size", help="size of the data; default: the profile's")
    parser.add_argument("--memory", help="limit of the memory")
    parser.add_argument("--threads", default="1,8,64,512", help="default: 1,8,64,512")
    parser.add_argument("--repeats", type=int, default=6, help="blocks of each (default: 6)")
    parser.add_argument("--budget", default=_SESSION, help=f"time for each flush method (default: {_SESSION})")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write the samples into an archive, measure nothing")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the tables of an archive, measure nothing")
    arguments = parser.parse_args()
    if arguments.report:
        print("\n".join(report(unpacked(arguments.report))))
        return 0
    chosen = [one for one in REPETITIONS if one.name in arguments.only.split(",")]
    if not chosen:
        parser.error(f"there is no {arguments.only}; there are {names}")
    if arguments.pack:
        pack(chosen, arguments.keep, arguments.pack)
        return 0
    arguments.keep.mkdir(parents=True, exist_ok=True)
    codes = [subprocess.run(one.command(arguments), check=False).returncode for one in chosen]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
