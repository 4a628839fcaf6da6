"""What the benchmark's own measuring takes from what it measures: fio as the benchmark runs it beside fio run by hand.

Both run the same load on a target that waits for nothing but the processor, interleaved (by hand, ours, ours, by hand):
a file in memory, or fio's engine that does nothing. Ours has all samplers on: device and processor counters of all
devices, the bandwidth log, bins of latencies, and the document's parsing. By hand is a job file with the load alone.
Compared are what fio did per second, the processor time that an operation took with all that belongs to it (ours: our
own process, too; neighbours hardly change it), and the time of whole runs, fio's start and end included. Ends with 1 if
an interval's upper end is above --most.

    PYTHONPATH=tests .venv/bin/python tests/bench/fio_overhead.py --pairs 12 --seconds 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.bench.fio import parse_document, run_fio
from snapmgr.bench.measure.counters import Counters
from snapmgr.bench.statistics.ratio import paired_ratio
from snapmgr.system.command import CommandRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.bench.statistics.ratio import Ratio

_LOADS = {
    "memory": {"ioengine": "psync", "filename": "file", "size": "64M", "rw": "randrw", "bs": "4k"},
    "null": {"ioengine": "null", "size": "1G", "rw": "randrw", "bs": "16k"},
}
_RUNNER = CommandRunner()

Figures = tuple[float, float, float]
"""Operations per second, processor seconds an operation, seconds of the whole run."""


def _load(target: str, seconds: float) -> dict[str, str | int | None]:
    how_long = {"time_based": None, "runtime": f"{round(seconds * 1000)}ms"}
    # What both write is the same: data that cannot be compressed are part of the load, not of the measuring.
    return {**_LOADS[target], **how_long, "refill_buffers": 1, "norandommap": 1, "randseed": 1}


def devices() -> list[str]:
    """Return all block devices that have a node here: more than any storage has."""
    names = [line.split()[2] for line in Path("/proc/diskstats").read_text(encoding="ascii").splitlines()]
    return [f"/dev/{name}" for name in names if Path(f"/dev/{name}").is_block_device()]


def _cpu_s() -> float:
    """Return the processor time of this process and of all that it has started and reaped."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system


def ours(target: str, seconds: float, data: Path, keep: Path, number: int) -> Figures:
    """Run it as the benchmark does."""
    start, cpu_s = time.monotonic(), _cpu_s()
    with Counters(devices()).measured():
        run = run_fio(f"run{number}", {"job": _load(target, seconds)}, directory=data, keep=keep, runner=_RUNNER)
        run.latencies_s("read"), run.latencies_s("write")
    count = run.ios("read") + run.ios("write")
    return (count / run.seconds(), (_cpu_s() - cpu_s) / count, time.monotonic() - start)


def by_hand(target: str, seconds: float, data: Path, keep: Path, number: int) -> Figures:
    """Run a job file with the load alone."""
    lines = [name if value is None else f"{name}={value}" for name, value in _load(target, seconds).items()]
    path = keep / f"hand{number}.fio"
    path.write_text("\n".join(["[job]", f"directory={data}", *lines, ""]))
    start, cpu_s = time.monotonic(), _cpu_s()
    command = ["fio", "--output-format=json", "--eta=never", path.name]
    printed = subprocess.run(command, cwd=keep, check=True, capture_output=True, text=True).stdout
    took, cpu_s = time.monotonic() - start, _cpu_s() - cpu_s
    (report,) = parse_document(printed)["jobs"]
    count = sum(report[way]["total_ios"] for way in ("read", "write"))
    return (count / (max(report[way]["runtime"] for way in ("read", "write")) / 1000), cpu_s / count, took)


def measure(target: str, *, pairs: int, seconds: float) -> list[dict[str, Figures]]:
    """Return {"hand", "ours"} of each pair."""
    found: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as data, tempfile.TemporaryDirectory() as keep:
        for number in range(pairs):
            order = (("hand", by_hand), ("ours", ours))
            done = {
                name: run(target, seconds, Path(data), Path(keep), number)
                for name, run in (order if number % 2 == 0 else order[::-1])
            }
            found.append(done)
            shown = ", ".join(
                f"{name} {rate:,.0f}/s, {cpu_s * 1e6:.2f} µs" for name, (rate, cpu_s, _) in sorted(done.items())
            )
            print(f"{target} {number + 1}/{pairs}: {shown}", file=sys.stderr, flush=True)
    return found


def compare(samples: Sequence[dict[str, Figures]], *, seed: int = 1) -> dict[str, Ratio]:
    """Return how many times dearer ours is, in each respect."""
    rates = [(one["hand"][0], one["ours"][0]) for one in samples]
    costs = [(one["ours"][1], one["hand"][1]) for one in samples]
    times = [(one["ours"][2], one["hand"][2]) for one in samples]
    named = {"rate": rates, "processor": costs, "whole run": times}
    return {name: paired_ratio(pairs, seed=seed) for name, pairs in named.items()}


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="of runs for each target (12)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run (5)")
    parser.add_argument("--targets", default="memory,null", help="of memory and null (both)")
    parser.add_argument("--most", type=float, default=1.05, help="upper end of an interval that is let pass (1.05)")
    parser.add_argument("--json", type=Path, help="file for the samples")
    arguments = parser.parse_args()
    samples = {
        target: measure(target, pairs=arguments.pairs, seconds=arguments.seconds)
        for target in arguments.targets.split(",")
    }
    ratios = {target: compare(found) for target, found in samples.items()}
    if arguments.json:
        made = {target: {name: asdict(one) for name, one in found.items()} for target, found in ratios.items()}
        arguments.json.write_text(json.dumps({"samples": samples, "ratios": made}, indent=1))
    worst = 0.0
    for target, found in ratios.items():
        for name, ratio in found.items():
            print(f"{target:8} {name:10} {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}, {ratio.n} pairs)")
            worst = max(worst, ratio.high)
    return 0 if worst <= arguments.most else 1


if __name__ == "__main__":
    sys.exit(main())
