"""Whole processes, beside snapper and btrbk and the bare calls of the kernel.

    ./run measure commands                                  # every row, 15 repeats: half an hour
    ./run measure commands --only '*-10' --only help --repeats 5
    ./run measure commands --check                          # counts and ratios, against the committed ones
    ./run measure commands --renew                          # …which are written anew

A directory on btrfs has 10, 1,000 and 10,000 snapshots; each tool has as many of its own, on a file system of its own.
What is compared takes turns, so that the machine's moods hit all; medians. A tool that is not installed
(apt-get install snapper btrbk) is said so.
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
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import btrfsutil

from snapmgr.access.deletion import delete
from snapmgr.keep.pin import unpin
from support.commandcounts import check
from support.commandscene import JOB, CommandScene, command_scene
from support.cost import SNAPMGR, Cost, run_costed
from support.load import write_load
from support.peers import peers
from support.scene import Scene, btrfs_scene
from support.storage import keep_mounts_private, sweep_dead

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.peers import Peer

_JOBS = 200
_POLICY = ("retention.keep-last = 10", "retention.keep-hourly = 48", "retention.keep-daily = 14")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    snapshots: int
    """As many there are, of each tool."""
    ours: Callable[[CommandScene], Cost]
    peer: str = ""
    """What a peer does beside it; see `support.peers.Peer`."""
    bare: Callable[[CommandScene], Cost] | None = None
    """What no tool can do without: the storage's own time."""
    bare_name: str = "bare call"


def bare_snapshot(scene: CommandScene) -> Cost:
    """The one call."""
    target = scene.top / "bare"
    cost = _in_process(lambda: btrfsutil.create_snapshot(str(scene.origin), str(target), read_only=True))
    btrfsutil.delete_subvolume(str(target))
    return cost


def bare_deletion(count: int) -> Callable[[CommandScene], Cost]:
    """Return what makes as many calls, and one commit."""

    def measure(scene: CommandScene) -> Cost:
        targets = [scene.top / f"bare{number}" for number in range(count)]
        for target in targets:
            btrfsutil.create_snapshot(str(scene.origin), str(target), read_only=True)

        def delete_all() -> None:
            for target in targets:
                btrfsutil.delete_subvolume(str(target))
            btrfsutil.sync(str(scene.top))

        return _in_process(delete_all)

    return measure


def import_click(_scene: CommandScene) -> Cost:
    """What any program pays that stands on click."""
    return run_costed([sys.executable, "-c", "import click"])


def _in_process(action: Callable[[], object]) -> Cost:
    wall, cpu = time.monotonic(), time.thread_time()
    action()
    return Cost(wall_s=time.monotonic() - wall, cpu_s=time.thread_time() - cpu, peak_bytes=0)


def _mount(scene: CommandScene) -> Cost:
    cost = scene.measure("mount", "latest")
    scene.measure("umount", cost.out.strip())
    return cost


def _umount(scene: CommandScene) -> Cost:
    return scene.measure("umount", scene.measure("mount", "latest").out.strip())


def _pin(scene: CommandScene) -> Cost:
    cost = scene.measure("pin", "latest")
    context = scene.scene.context()
    unpin(context, context.resolve("latest").manifest.id)
    return cost


def _dry_run(scene: CommandScene) -> Cost:
    scene.configure(*_POLICY)
    return scene.measure("prune", "--dry-run")


def _prune(count: int, of: int) -> Callable[[CommandScene], Cost]:
    def measure(scene: CommandScene) -> Cost:
        scene.configure(f"retention.keep-last = {of - count}")
        cost = scene.measure("prune")
        scene.fill(of)
        return cost

    return measure


def _many_jobs(scene: CommandScene) -> Cost:
    scene.configure(jobs=_JOBS)
    cost = scene.measure_backup("--all")
    scene.configure()
    return cost


def _loaded_server(stack: ExitStack) -> Callable[[CommandScene], Cost]:
    """Return what backs up a MariaDB that four writers keep busy; the wait for its lock, which is theirs, left out."""

    @cache
    def scene() -> Scene:
        made = stack.enter_context(btrfs_scene(size_bytes=6 << 30))
        stack.enter_context(write_load(str(made.server.socket))).warm_up()
        return made

    def measure(_scene: CommandScene) -> Cost:
        cost = run_costed([str(SNAPMGR), "--config", str(scene().config_file), "--quiet", "backup", JOB])
        manifest = scene().entries()[-1].manifest
        assert manifest.quiesce is not None
        delete(scene().context(), manifest)
        return replace(cost, wall_s=cost.wall_s - manifest.quiesce.waited_s)

    return measure


def _rows(stack: ExitStack) -> tuple[Row, ...]:
    def plain(*arguments: str) -> Callable[[CommandScene], Cost]:
        return lambda scene: scene.measure(*arguments)

    def backup(snapshots: int) -> Row:
        name = f"backup-{snapshots}"
        take = lambda scene: scene.measure_backup(JOB)  # noqa: E731
        return Row(name=name, snapshots=snapshots, ours=take, peer="backup", bare=bare_snapshot)

    return (
        Row(name="help", snapshots=0, ours=plain("--help"), bare=import_click, bare_name="import click"),
        backup(10),
        Row(name=f"jobs-{_JOBS}", snapshots=10, ours=_many_jobs, peer="backup --all"),
        Row(name="backup-mariadb", snapshots=10, ours=_loaded_server(stack)),
        backup(1000),
        Row(name="list-1000", snapshots=1000, ours=plain("list"), peer="list"),
        Row(
            name="prune-10-of-1000",
            snapshots=1000,
            ours=_prune(10, 1000),
            peer="delete 10",
            bare=bare_deletion(10),
        ),
        backup(10_000),
        Row(name="list-10000", snapshots=10_000, ours=plain("list"), peer="list"),
        Row(name="status-10000", snapshots=10_000, ours=plain("status")),
        Row(name="show-10000", snapshots=10_000, ours=plain("show", "latest")),
        Row(name="mount-10000", snapshots=10_000, ours=_mount),
        Row(name="umount-10000", snapshots=10_000, ours=_umount),
        Row(name="pin-10000", snapshots=10_000, ours=_pin),
        Row(name="prune-dry-run-10000", snapshots=10_000, ours=_dry_run, peer="prune --dry-run"),
        Row(name="prune-100-of-10000", snapshots=10_000, ours=_prune(100, 10_000), bare=bare_deletion(100)),
        Row(name="doctor-10000", snapshots=10_000, ours=plain("doctor")),
    )


Samples = dict[tuple[str, str], list[Cost]]


def measure(rows: list[Row], repeats: int, budget_s: float, samples: Samples) -> None:
    """Add to the samples by row and tool."""
    with ExitStack() as stack:
        scene = stack.enter_context(command_scene())
        others = stack.enter_context(peers()) if any(row.peer for row in rows) else {}
        for snapshots in sorted({row.snapshots for row in rows}):
            here = [row for row in rows if row.snapshots == snapshots]
            scene.configure()
            _tell(f"making {snapshots} snapshots")
            if snapshots:
                scene.fill(snapshots)
            for other in others.values():
                if any(row.peer for row in here):
                    other.fill(snapshots)
            _turns(scene, here, others, samples, repeats, budget_s)


def _turns(
    scene: CommandScene, rows: list[Row], others: dict[str, Peer], samples: Samples, repeats: int, budget_s: float
) -> None:
    for turn in range(repeats):
        for row in rows:
            for tool in ("snapmgr", row.bare_name, *others):
                had = samples.setdefault((row.name, tool), [])
                # The slow ones: three at least, and no more once they have had their time.
                if len(had) >= 3 and sum(cost.wall_s for cost in had) > budget_s:
                    continue
                _tell(f"turn {turn + 1} of {repeats}: {row.name} {tool}")
                if tool == "snapmgr":
                    had.append(row.ours(scene))
                elif tool == row.bare_name:
                    had += [row.bare(scene)] if row.bare else []
                elif row.peer and (argv := others[tool].argv(row.peer)) is not None:
                    had.append(run_costed(argv))
                    if row.peer == "delete 10":
                        others[tool].fill(row.snapshots)


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr)


def table(samples: Samples) -> str:
    """Return a Markdown table of medians: milliseconds, MiB, and how often the wall time fits into snapmgr's."""
    lines = [
        "| Row | Tool | n | Wall, ms | from, to | Processor, ms | Peak, MiB | snapmgr ÷ it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (row, tool), costs in samples.items():
        if not costs:
            continue
        wall = [cost.wall_s * 1000 for cost in costs]
        cpu = statistics.median(cost.cpu_s for cost in costs) * 1000
        peak = max(cost.peak_bytes for cost in costs) >> 20
        ours = statistics.median(cost.wall_s for cost in samples[row, "snapmgr"])
        lines.append(
            f"| {row} | {tool} | {len(costs)} | {statistics.median(wall):.1f} | {min(wall):.1f}, {max(wall):.1f} "
            f"| {cpu:.1f} | {peak or '-'} | {1000 * ours / statistics.median(wall):.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="a name or pattern; may be repeated")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--budget", type=float, default=45.0, help="seconds for each tool's row, beyond three repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples there")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and end")
    parser.add_argument("--check", action="store_true", help="compare counts and ratios with the committed ones")
    parser.add_argument("--renew", action="store_true", help="write the counts and ratios that --check compares with")
    arguments = parser.parse_args()
    # So that file systems and loop devices go first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sweep_dead()
    keep_mounts_private()
    if arguments.check or arguments.renew:
        report, good = check(renew=arguments.renew)
        print(report)
        sys.exit(not good)
    samples: Samples = {}
    with ExitStack() as stack:
        every = _rows(stack)
        rows = [row for row in every if any(fnmatchcase(row.name, name) for name in arguments.only or ["*"])]
        if arguments.list or not rows:
            print("\n".join(row.name for row in every))
            sys.exit(not arguments.list)
        try:
            measure(rows, arguments.repeats, arguments.budget, samples)
        except subprocess.CalledProcessError as error:
            sys.exit(f"{' '.join(error.cmd)} ended with {error.returncode}: {error.stderr}")
        finally:  # what was measured until then
            _report(samples, arguments.json)


def _report(samples: Samples, file: Path | None) -> None:
    _tell("")
    print(table(samples))
    for tool in ("snapper", "btrbk"):
        if shutil.which(tool) is None:
            print(f"{tool}: not installed")
    if file is not None:
        kept = [
            {"row": row, "tool": tool, "samples": [asdict(cost) | {"out": ""} for cost in costs]}
            for (row, tool), costs in samples.items()
            if costs
        ]
        file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
