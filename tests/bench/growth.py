"""How the costs of commands grow: with snapshots, with jobs, and with files.

    ./run measure growth                        # everything: at most 20 minutes on two cores
    ./run measure growth --quick                # a look: without the largest sizes
    ./run measure growth --only files-xfs --largest 500000

Elapsed time, processor time, memory and system calls of whole processes, and for each the slope of cost over work, both
as logarithms: 0 does not grow, 1 grows as the work does. The goals: at most 0.1 for "backup" over snapshots, 1.05 for
everything else.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from support.commandscene import JOB, CommandScene, command_scene, make_files
from support.cost import Cost, run_costed, run_traced
from support.slope import last_step, slope
from support.storage import keep_mounts_private, sweep_dead

if TYPE_CHECKING:
    from collections.abc import Callable

_FLAT = 0.1
_LINEAR = 1.05
_CHECK = 'verify.command = ["/bin/true", "{}"]'
_POLICY = ("retention.keep-last = 10", "retention.keep-hourly = 48", "retention.keep-daily = 14", _CHECK)
# A traced process takes many times as long.
_TRACED_FILES = 10_000


@dataclass(kw_only=True)
class Series:
    """What one command took, by the amount of work."""

    goal: float | None
    """None: it is there for comparison."""
    costs: dict[int, list[Cost]] = field(default_factory=dict)
    calls: dict[int, list[float]] = field(default_factory=dict)

    def values(self, what: str) -> dict[int, list[float]]:
        """Return the samples of "wall_s", "cpu_s", "peak_bytes" or "calls"."""
        if what == "calls":
            return self.calls
        return {work: [getattr(cost, what) for cost in costs] for work, costs in self.costs.items()}


class Growth:
    """The series of all parts, as they are measured."""

    def __init__(self, repeats: int, budget_s: float, limit_s: float) -> None:
        self.series: dict[tuple[str, str], Series] = {}
        self.left_out: list[str] = []
        """What was not begun, because the time was up."""
        self._limit_s = limit_s
        self._repeats = repeats
        self._budget_s = budget_s
        self._began = time.monotonic()

    def has_time(self, what: str) -> bool:
        """Return whether another size may begin; else `what` is left out."""
        if time.monotonic() - self._began < self._limit_s:
            return True
        self.left_out.append(what)
        return False

    def measure(
        self,
        part: str,
        work: int,
        command: str,
        argv: Callable[[], list[str]],
        after: Callable[[str], object] = lambda _out: None,
        *,
        goal: float | None = _LINEAR,
        traced: bool = True,
    ) -> None:
        """Take the samples of one command at one amount of work; `after` gets its stdout and undoes what it did."""
        series = self.series.setdefault((part, command), Series(goal=goal))
        had = series.costs.setdefault(work, [])
        while len(had) < self._repeats and (len(had) < 2 or sum(cost.wall_s for cost in had) < self._budget_s):
            self._tell(f"{part}, {work}: {command}")
            cost = run_costed(argv())
            had.append(cost)
            after(cost.out)
        if traced:
            counts = run_traced(argv())
            series.calls[work] = [float(sum(counts.calls.values()))]
            after(counts.out)

    def _tell(self, line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{time.monotonic() - self._began:4.0f} s  {line}", end="", file=sys.stderr)

    def slopes(self) -> str:
        """Return the Markdown table of slopes."""
        lines = [
            "| Over | Command | Wall | Processor | Memory | Last step: processor | Last step: system calls | Goal | |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for (part, command), series in self.series.items():
            wall, cpu, peak = (slope(series.values(what)) for what in ("wall_s", "cpu_s", "peak_bytes"))
            above = series.goal != _FLAT
            last = last_step(series.values("cpu_s"), above_smallest=above)
            calls = last_step(series.calls, above_smallest=above, exact=True) if series.calls else None
            goal, verdict = "-", ""
            if series.goal is not None:
                goal = f"≤ {series.goal:g}"
                verdicts = [one.verdict(series.goal) for one in (cpu, peak, last, calls) if one]
                verdict = next((word for word in ("missed", "not shown", "held") if word in verdicts), "")
            cells = " | ".join(str(one or "-") for one in (wall, cpu, peak, last, calls))
            lines.append(f"| {part} | {command} | {cells} | {goal} | {verdict} |")
        return "\n".join(lines)

    def costs(self) -> str:
        """Return a Markdown table of medians for each part: wall / processor time, peak of memory, system calls."""
        tables = []
        for part, group in groupby(self.series.items(), key=lambda item: item[0][0]):
            rows = [(command, series) for (_, command), series in group]
            works = sorted({work for _, series in rows for work in series.costs})
            lines = [
                "| " + " | ".join((part, *(f"{work:,}" for work in works))) + " |",
                "|---" * (len(works) + 1) + "|",
            ]
            for command, series in rows:
                cells = [_cell(series, work) if work in series.costs else "-" for work in works]
                lines.append(f"| {command} | {' | '.join(cells)} |")
            tables.append("\n".join(lines))
        return "\n\n".join(tables)

    def document(self) -> list[dict[str, object]]:
        """Return all samples."""
        kinds = ("wall_s", "cpu_s", "peak_bytes", "calls")
        return [
            {"over": part, "command": command, **{what: series.values(what) for what in kinds}}
            for (part, command), series in self.series.items()
        ]


def _cell(series: Series, work: int) -> str:
    costs = series.costs[work]
    wall, cpu = (statistics.median(getattr(cost, what) for cost in costs) * 1000 for what in ("wall_s", "cpu_s"))
    calls = f", {series.calls[work][0]:,.0f}" if work in series.calls else ""
    return f"{wall:,.0f} / {cpu:,.0f} ms, {max(cost.peak_bytes for cost in costs) >> 20} MiB{calls}"


def over_snapshots(growth: Growth, size: int, scene: CommandScene) -> None:
    """One job on btrfs."""
    scene.configure(*_POLICY)
    scene.fill(size)

    def oldest() -> list[str]:
        scene.fill(size)
        return scene.argv("delete", scene.scene.entries()[0].manifest.id)

    growth.measure("snapshots", size, "backup", lambda: scene.argv("backup", JOB), scene.drop_taken, goal=_FLAT)
    for words in (["list"], ["status"], ["prune", "--dry-run"]):
        growth.measure("snapshots", size, " ".join(words), partial(scene.argv, *words))
    growth.measure("snapshots", size, "verify", lambda: scene.argv("verify", "latest"))
    growth.measure("snapshots", size, "delete", oldest)


def over_jobs(growth: Growth, size: int, scene: CommandScene) -> None:
    """Jobs on btrfs, a subvolume and ten snapshots each."""
    scene.configure(*_POLICY, jobs=size)
    names = [path.name for path in scene.subvolumes(size)]
    scene.fill(10, *names)

    def oldest() -> list[str]:
        scene.fill(10, names[0])
        return scene.argv("delete", scene.scene.context().catalog.entries(names[0])[0][0].manifest.id)

    growth.measure("jobs", size, "backup --all", lambda: scene.argv("backup", "--all"), scene.drop_taken)
    for words in (["list"], ["status"], ["prune", "--dry-run"]):
        growth.measure("jobs", size, " ".join(words), partial(scene.argv, *words))
    growth.measure("jobs", size, "verify", lambda: scene.argv("verify", f"{names[0]}@latest"))
    growth.measure("jobs", size, "delete", oldest)


def over_reflinks(growth: Growth, size: int, scene: CommandScene) -> None:
    """One job of a hundred files on XFS, by reflink."""
    scene.configure('backend = "reflink"')
    scene.take(size)

    def oldest() -> list[str]:
        scene.take(size)
        return scene.argv("delete", scene.scene.entries()[0].manifest.id)

    over = "snapshots, reflink"
    growth.measure(over, size, "backup", lambda: scene.argv("backup", JOB), scene.drop_taken, goal=_FLAT)
    growth.measure(over, size, "delete", oldest, goal=_FLAT)


def over_files(growth: Growth, size: int, scene: CommandScene) -> None:
    """A directory of small files: by reflink on XFS, and restored by reflink on btrfs; beside a walk, and cp."""
    source, target, fs_type = scene.origin, scene.top / "target", scene.scene.file_system.fs_type
    scene.configure(_CHECK, *(['backend = "reflink"'] if fs_type == "xfs" else []))
    make_files(source, size)

    def clear(_out: str) -> None:
        shutil.rmtree(target, ignore_errors=True)

    def oldest() -> list[str]:
        scene.take(2)
        return scene.argv("delete", "--wait", scene.scene.entries()[0].manifest.id)

    def measure(
        command: str, argv: Callable[[], list[str]], after: Callable[[str], object], goal: float | None
    ) -> None:
        growth.measure(f"files, {fs_type}", size, command, argv, after, goal=goal, traced=size <= _TRACED_FILES)

    copy = 'cp -a --reflink=always "$0" "$1" && sync -f "$1"'
    measure("walk", lambda: ["find", str(source), "-newermt", "2100-01-01"], clear, None)
    measure("cp -a --reflink, sync -f", lambda: ["sh", "-c", copy, str(source), str(target)], clear, None)
    if fs_type == "xfs":
        measure("backup", lambda: scene.argv("backup", JOB), scene.drop_taken, _LINEAR)
        measure("delete --wait", oldest, clear, _LINEAR)
    scene.take(2)
    measure("restore", lambda: scene.argv("restore", "latest", str(target)), clear, _LINEAR)
    if fs_type == "xfs":
        measure("verify", lambda: scene.argv("verify", "latest"), clear, _LINEAR)


def _in_one_scene(
    one: Callable[[Growth, int, CommandScene], None], fs_type: str = "btrfs"
) -> Callable[[Growth, list[int]], None]:
    def measure(growth: Growth, sizes: list[int]) -> None:
        with command_scene(fs_type) as scene:
            for size in sizes:
                if growth.has_time(f"{one.__name__.removeprefix('over_')} {size:,}"):
                    one(growth, size, scene)

    return measure


def _in_one_each(fs_type: str) -> Callable[[Growth, list[int]], None]:
    def measure(growth: Growth, sizes: list[int]) -> None:
        for size in sizes:
            if growth.has_time(f"files, {fs_type} {size:,}"):
                with command_scene(fs_type, size_bytes=(4 << 30) + size * (32 << 10)) as scene:
                    over_files(growth, size, scene)

    return measure


_PARTS: dict[str, tuple[Callable[[Growth, list[int]], None], list[int]]] = {
    "snapshots": (_in_one_scene(over_snapshots), [10, 100, 1000, 10_000]),
    "jobs": (_in_one_scene(over_jobs), [1, 10, 100]),
    "reflinks": (_in_one_scene(over_reflinks, "xfs"), [10, 100, 1000]),
    "files-xfs": (_in_one_each("xfs"), [100, 1000, 10_000, 100_000]),
    "files-btrfs": (_in_one_each("btrfs"), [100, 1000, 10_000, 100_000]),
}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=_PARTS, help="a part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="without the largest size of each part")
    parser.add_argument("--largest", type=int, metavar="FILES", help="one more size for the parts over files")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=15.0, help="seconds for a command and size, beyond two repeats")
    parser.add_argument("--limit", type=float, default=15.0, help="minutes after which no other size begins")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples there")
    arguments = parser.parse_args()
    # So that file systems and loop devices go first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sweep_dead()
    keep_mounts_private()
    growth = Growth(arguments.repeats, arguments.budget, arguments.limit * 60)
    try:
        for name in arguments.only or _PARTS:
            measure, sizes = _PARTS[name]
            more = [arguments.largest] if arguments.largest and name.startswith("files") else []
            measure(growth, (sizes[:-1] if arguments.quick else sizes) + more)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd)} ended with {error.returncode}: {error.stderr}")
    finally:  # what was measured until then
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
        print(f"{growth.slopes()}\n\n{growth.costs()}")
        if growth.left_out:
            print(f"\nleft out after {arguments.limit:g} minutes (--limit): {'; '.join(growth.left_out)}")
        if arguments.json:
            arguments.json.write_text(json.dumps(growth.document(), indent=1) + "\n")


if __name__ == "__main__":
    main()
