"""Compares what commands load and ask of the kernel with committed numbers, which do not vary as times do.

Modules and system calls may be `_SHARE` more. Processes and flushes must be as many: fewer flushes may be
a promise less. Processor time is compared as a ratio to something else on the same machine, with wide bounds.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import btrfsutil

import snapmgr
import snapmgr_btrfs
from snapmgr.access.deletion import delete
from support.commandscene import JOB, command_scene
from support.cost import run_costed, run_traced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.commandscene import CommandScene
    from support.cost import Counts

COMMITTED = Path(__file__).parents[1] / "bench" / "commands.json"
_SNAPSHOTS = 10
_COMMANDS = {"help": ("--help",), "backup": ("backup", JOB), "list": ("list",), "prune": ("prune", "--dry-run")}
_SHARE = 0.15
# For what is few: so much of all system calls of the command, and at least so many.
_MORE_OF_ALL, _MORE = 0.01, 10
_FLUSHES = ("fsync", "fdatasync", "syncfs", "sync", "msync", "sync_file_range")
# A process asks a file system whether it answers, and a quarter of a second later another one: slow runs have more.
_MORE_PROCESSES = 4
# How often one looks again whether something has ended is a matter of time.
_WAITS = frozenset(
    ["clock_nanosleep", "epoll_wait", "futex", "poll", "ppoll", "pselect6", "sched_yield", "select", "wait4", "waitid"]
)
_OWN = (f"{Path(snapmgr.__file__).parent}/", f"{Path(snapmgr_btrfs.__file__).parents[1]}/snapmgr_")
# The processor time of `snapmgr --help` to that of `import click`, of a backup to that of the bare call.
_RATIO_BOUNDS = {"help ÷ import click": 1.5, "backup ÷ bare call": 3.0}

Measured = dict[str, Any]
"""As in the committed file: "interpreter", "commands" (by name the counts) and "ratios"."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One number that is compared."""

    what: str
    committed: float
    now: float
    at_least: float
    at_most: float

    @property
    def good(self) -> bool:
        """Whether it is within its bounds."""
        return self.at_least <= self.now <= self.at_most

    def __str__(self) -> str:
        bound = "exactly" if self.at_least == self.at_most else f"at most {self.at_most:g}"
        return f"{self.what:34}{self.committed:>10g}{self.now:>10g}  {bound:16}{'' if self.good else 'REGRESSION'}"


def counted(counts: Counts) -> dict[str, int]:
    """Return the numbers of one command that are committed: by name of a system call, and "modules", "processes", …"""
    calls = {name: number for name, number in sorted(counts.calls.items()) if name not in _WAITS}
    own = sum(name.startswith(_OWN) for name in counts.modules)
    every = {"modules": len(counts.modules), "modules of snapmgr": own, "processes": counts.processes}
    return every | {"system calls": sum(calls.values())} | calls


def compare(committed: Measured, now: Measured) -> Iterator[Line]:
    """Yield every number that both have, or one of them; of another interpreter only what does not depend on it."""
    same = committed["interpreter"] == now["interpreter"]
    independent = ("modules of snapmgr", "processes", *_FLUSHES)
    for command, numbers in committed["commands"].items():
        measured = now["commands"][command]
        more = max(round(numbers.get("system calls", 0) * _MORE_OF_ALL), _MORE)
        for name in dict.fromkeys((*numbers, *measured)):
            if not same and name not in independent:
                continue
            before = numbers.get(name, 0)
            exact = name in _FLUSHES
            bound = round(before * (1 + _SHARE)) + more * (not name.startswith("modules"))
            yield Line(
                what=f"{command}: {name}",
                committed=before,
                now=measured.get(name, 0),
                at_least=before if exact else 0,
                at_most=before if exact else before + _MORE_PROCESSES if name == "processes" else bound,
            )
    for name, bound in _RATIO_BOUNDS.items():
        before = committed["ratios"][name]
        yield Line(what=name, committed=before, now=now["ratios"][name], at_least=0, at_most=round(before * bound, 2))


def measure() -> Measured:
    """Return the numbers of this checkout on this machine."""
    with command_scene(size_bytes=1 << 30) as scene:
        scene.fill(_SNAPSHOTS)
        # Else a slow flush is followed by another one.
        scene.configure("retention.keep-last = 5", 'sync_target = "1h"')
        commands = {}
        for name, arguments in _COMMANDS.items():
            # So that no module is compiled while it is counted.
            scene.measure(*arguments)
            _drop_new(scene)
            commands[name] = counted(run_traced(scene.argv(*arguments)))
            _drop_new(scene)
        return {
            "interpreter": f"Python {sys.version_info.major}.{sys.version_info.minor}, {platform.machine()}",
            "commands": commands,
            "ratios": {
                "help ÷ import click": _least_cpu_s(scene, "--help") / _click_cpu_s(),
                "backup ÷ bare call": _least_cpu_s(scene, "backup", JOB) / _bare_cpu_s(scene),
            },
        }


def _drop_new(scene: CommandScene) -> None:
    context = scene.scene.context()
    for entry in context.catalog.entries(JOB)[0][_SNAPSHOTS:]:
        delete(context, entry.manifest)


def _least_cpu_s(scene: CommandScene, *arguments: str) -> float:
    taken = []
    for _ in range(3):
        taken.append(scene.measure(*arguments).cpu_s)
        _drop_new(scene)
    return min(taken)


def _click_cpu_s() -> float:
    return min(run_costed([sys.executable, "-c", "import click"]).cpu_s for _ in range(3))


def _bare_cpu_s(scene: CommandScene) -> float:
    taken = []
    for number in range(20):
        target = str(scene.top / f"bare{number}")
        start = time.thread_time()
        btrfsutil.create_snapshot(str(scene.origin), target, read_only=True)
        taken.append(time.thread_time() - start)
        btrfsutil.delete_subvolume(target)
    return statistics.median(taken)


def check(*, renew: bool) -> tuple[str, bool]:
    """Measure; return a table, and whether nothing is worse than committed. With `renew`, commit what is."""
    now = measure()
    lines = list(compare(json.loads(COMMITTED.read_text()), now)) if COMMITTED.exists() else []
    bad = [line for line in lines if not line.good]
    shown = ("modules", "system calls", "processes", *_FLUSHES, "÷")
    chosen = [line for line in lines if line in bad or (line.committed and any(word in line.what for word in shown))]
    table = "\n".join([f"{'':34}{'committed':>10}{'now':>10}  bound", *map(str, chosen)])
    if renew:
        COMMITTED.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n")
        return f"{table}\n\nwritten: {COMMITTED}", True
    if bad:
        table += (
            f"\n\n{len(bad)} beyond their bounds. If they are meant, and no flush is missing that a promise needs: "
            "./run measure commands --renew"
        )
    return table, not bad
