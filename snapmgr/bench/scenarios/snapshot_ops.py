"""Measures the operations on snapshots themselves, as their number grows, idle and under load."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from snapmgr.bench.load import background
from snapmgr.bench.measure.proof import block_digests, flush
from snapmgr.bench.model import Check, Needs, Outcome, Scenario, metric
from snapmgr.bench.storage.rawsnapshot import RawWay, raw_ways
from snapmgr.contract.errors import ConfigError
from snapmgr.contract.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from snapmgr.bench.fio import Section
    from snapmgr.bench.load.background import Load
    from snapmgr.bench.model import Parameters, ProfileName, Snapshot, Stack, Workbench

_MIB = 1 << 20
_PROFILES: Mapping[ProfileName, Mapping[str, Any]] = {
    "smoke": {"size_bytes": 32 * _MIB, "levels": (1, 10), "repeats": 3},
    "quick": {"size_bytes": 64 * _MIB, "levels": (1, 10), "repeats": 3},
    "standard": {"size_bytes": 1024 * _MIB, "levels": (1, 10, 100, 1000), "repeats": 12},
    "paper": {"size_bytes": 4096 * _MIB, "levels": (1, 10, 100, 1000), "repeats": 30},
}
_FILES = 15
_LOAD = "load"
_LOAD_SHARE = 16
"""The load writes to a file of this fraction (1/N) of the data."""
_BLOCK = 16 << 10
_LOAD_PER_S = 1000
_COMMON_LEVEL = 10
"""The number of snapshots that figures refer to: every storage can have this many."""
_CLASSIC_LEVEL = 10
"""A classic LVM snapshot costs each write of its origin a copy: more than these are not used in practice."""
_CLASSIC_AT_ONCE = _CLASSIC_LEVEL + 3
"""Includes our measured snapshot, and room for those of the program."""
_LEAST_BYTES = 16 * _MIB
_SAMPLED = 256
# Estimated time of one snapshot with all its operations, on a slow storage (LVM).
_ONE_S = 0.25
_TITLES = {
    "create": "Snapshot call",
    "whole": "Snapshot, from the first check until it is durable",
    "list": "List of all snapshots",
    "attach": "Attach and mount a snapshot",
    "detach": "Unmount and detach it",
    "delete": "Delete a snapshot, until its name is gone",
    "loaded": "Snapshot call while files are being written",
}
_QUANTILES = {"p50": 0.5, "p95": 0.95, "max": 1.0}
_QUANTILE_TITLES = {"p50": "median", "p95": "95th percentile", "max": "longest"}

Times = dict[str, dict[int, list[float]]]
"""Seconds by operation and number of snapshots."""


class SnapshotOps(Scenario):
    """See `snapmgr.bench.model.Scenario`."""

    name = "snapshot-ops"
    title = "What do creating, listing, attaching and deleting a snapshot take, and how long would a lock be held?"
    label = "Snapshot operations"
    programs = ("fio",)
    metrics = (
        *(
            metric(
                f"{name}_s",
                f"{title}, with {_COMMON_LEVEL} snapshots (median)",
                "s",
                "less",
                headline=name in {"create", "loaded"},
            )
            for name, title in _TITLES.items()
        ),
        metric(
            "loaded_max_s",
            f"Longest snapshot call while files are being written, with {_COMMON_LEVEL} snapshots",
            "s",
            "less",
        ),
        metric("create_over_call", "Snapshot call ÷ the storage's bare system call", "", "less"),
        metric("whole_over_program", "Whole snapshot ÷ the storage's own program", "", "less"),
        metric("create_growth", f"Snapshot call: with {_COMMON_LEVEL} snapshots ÷ with one", "", "less"),
    )

    def suits(self, stack: Stack) -> str | None:
        """Refuse a control."""
        return "it has no snapshots" if stack.backend is None else None

    def parameters(self, given: Parameters) -> Parameters:
        """Complete them. Raises ConfigError for less data than files."""
        own = {"files": _FILES, "load_per_s": _LOAD_PER_S, "snapshots": _CLASSIC_AT_ONCE, **_PROFILES[given.profile]}
        size_bytes, extra = given.over(own)
        if size_bytes < _LEAST_BYTES:
            raise ConfigError(
                f"snapshot-ops needs at least {format_size(_LEAST_BYTES)} of data", hint="use a larger --size"
            )
        return replace(given, size_bytes=size_bytes, extra=extra)

    def needs(self, parameters: Parameters) -> Needs:
        """Return the needs of a sample.

        On classic LVM a quarter of the space is divided among all snapshots, and each has to hold all changes by the
        load in its lifetime: its file, made again for each number of snapshots, and some of the file system's own.
        """
        levels, repeats = parameters.extra["levels"], parameters.extra["repeats"]
        snapshots = max(levels) + 3 * repeats * len(levels)
        size = parameters.size_bytes
        changed = 2 * size // _LOAD_SHARE + size // 64 + 8 * _MIB
        return Needs(
            space_bytes=max(int(size * 2.2) + 64 * _MIB + max(levels) * _MIB // 4, 4 * _CLASSIC_AT_ONCE * changed),
            seconds=parameters.size_bytes / 100e6 + snapshots * _ONE_S * 0.4 + 1,
        )

    def run(self, bench: Workbench) -> Outcome:
        """Measure once."""
        _fill(bench)
        seed = bench.parameters.seed
        watch = _Stopwatch(bench)
        levels = _levels(bench)
        kept: list[Snapshot] = []
        old = _digests(bench, bench.path)
        outcome = Outcome()
        argv = background.command(
            bench.path / _LOAD, block_bytes=_BLOCK, writes_per_s=bench.parameters.extra["load_per_s"], seed=seed
        )
        for number, level in enumerate(levels):
            if number:
                # The fragmented file is made again: otherwise fragmentation would affect the next operations too.
                (bench.path / _LOAD).unlink()
                _fill_load(bench, number)
            while len(kept) < level:
                bench.tell(f"snapshot {len(kept) + 1} of {max(levels)}")
                kept.append(bench.snapshot())
            bench.quiet()
            bench.tell(f"operations with {level} snapshots")
            for turn in range(bench.parameters.extra["repeats"]):
                watch.idle(level, turn)
            with background.written_to(argv, bench.path / _LOAD, bench.folder / f"load-{level}.log") as load:
                for turn in range(bench.parameters.extra["repeats"]):
                    watch.loaded(load, level, turn)
                    load.check()
            found = sum(1 for one in bench.inventory() if one.kind == "snapshot")
            name = f"with {level} snapshots the backend finds so many"
            outcome.checks.append(Check(name=name, ok=found == level, detail=f"it finds {found}"))
        outcome.checks += _proof(bench, kept[0], old)
        bench.tell(f"deletes {len(kept)} snapshots")
        for snapshot in kept:
            snapshot.delete(wait="name")
        outcome.metrics = _figures(watch.times, levels)
        for operation, by_level in watch.times.items():
            for name, share in _QUANTILES.items():
                values = [quantile(by_level[level], share) for level in levels]
                title = f"{_title(operation)}, {_QUANTILE_TITLES[name]}"
                outcome.add_curve(f"{operation}_{name}", values, levels, title=title, x_title="snapshots", unit="s")
        outcome.notes = [*_notes(bench, watch.ways, levels), f"the load: {' '.join(argv)}"]
        return outcome


def _levels(bench: Workbench) -> list[int]:
    levels = bench.parameters.extra["levels"]
    return [level for level in levels if not bench.stack.classic_lvm or level <= _CLASSIC_LEVEL]


def _fill(bench: Workbench) -> None:
    count = bench.parameters.extra["files"]
    size = bench.parameters.size_bytes * (_LOAD_SHARE - 1) // _LOAD_SHARE // count // _BLOCK * _BLOCK
    bench.tell("fills the files")
    bench.fio(
        "fill",
        {
            "global": {
                "rw": "write",
                "bs": "1M",
                "ioengine": "psync",
                "end_fsync": 1,
                "randseed": bench.parameters.seed,
            },
            # One job, file after file.
            "fill": {
                "nrfiles": count,
                "filesize": size,
                "file_service_type": "sequential",
                "filename_format": "data.$filenum",
            },
        },
    )
    _fill_load(bench, 0)


def _fill_load(bench: Workbench, turn: int) -> None:
    size = bench.parameters.size_bytes // _LOAD_SHARE // _BLOCK * _BLOCK
    whole: Section = {"rw": "write", "bs": "1M", "ioengine": "psync", "end_fsync": 1}
    whole["randseed"] = bench.parameters.seed + turn
    bench.fio(f"fill-load-{turn}", {"global": whole, "fill": {"filesize": size, "filename": _LOAD}})


class _Stopwatch:
    """Runs operations on snapshots, and records the time of each."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self.ways = raw_ways(bench)
        self.times: Times = defaultdict(lambda: defaultdict(list))

    def idle(self, level: int, turn: int) -> None:
        """Run each operation once, our way and the others', in an order that rotates each time.

        Most storages' snapshot calls first write dirty data. A backup flushes before that, so all ways flush here.
        """
        actions = [partial(self._own, level), *(partial(self._raw, way, level, turn) for way in self.ways)]
        for action in actions if turn % 2 == 0 else reversed(actions):
            flush(self._bench.path)
            action()

    def loaded(self, load: Load, level: int, turn: int) -> None:
        """Take a snapshot during writes, our way and by the storage's first call, each after a flush."""
        actions = [partial(self._own_loaded, load, level)]
        actions += [partial(self._raw_loaded, way, load, f"raw-loaded-{level}-{turn}", level) for way in self.ways[:1]]
        for action in actions if turn % 2 == 0 else reversed(actions):
            flush(self._bench.path)
            action()

    def _own(self, level: int) -> None:
        bench, times = self._bench, self.times
        snapshot = bench.snapshot()
        times["create"][level].append(snapshot.create_s)
        times["whole"][level].append(snapshot.whole_s)
        start = time.monotonic()
        bench.inventory()
        times["list"][level].append(time.monotonic() - start)
        start = time.monotonic()
        with snapshot.opened():
            times["attach"][level].append(time.monotonic() - start)
            start = time.monotonic()
        times["detach"][level].append(time.monotonic() - start)
        times["delete"][level].append(snapshot.delete(wait="name"))

    def _raw(self, way: RawWay, level: int, turn: int) -> None:
        name = f"raw-{way.name}-{level}-{turn}"
        self.times[f"{way.name}_create"][level].append(way.create(name))
        self.times[f"{way.name}_delete"][level].append(way.delete(name))

    def _own_loaded(self, load: Load, level: int) -> None:
        snapshot = self._bench.snapshot(None if self._bench.at_once() else load.frozen())
        self.times["loaded"][level].append(snapshot.create_s)
        snapshot.delete(wait="name")

    def _raw_loaded(self, way: RawWay, load: Load, name: str, level: int) -> None:
        with nullcontext() if self._bench.at_once() else load.frozen():
            self.times[f"{way.name}_loaded"][level].append(way.create(name))
        way.delete(name)


def _digests(bench: Workbench, folder: Path) -> dict[str, tuple[str, ...]]:
    seed = bench.parameters.seed
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {file.name: block_digests(file, seed=seed, sample=_SAMPLED, block_bytes=_BLOCK) for file in files}


def _proof(bench: Workbench, oldest: Snapshot, old: Mapping[str, tuple[str, ...]]) -> list[Check]:
    changed = Check(name="the load changed the origin", ok=_digests(bench, bench.path)[_LOAD] != old[_LOAD])
    name = "the first snapshot holds the old data"
    if not oldest.usage().valid:
        return [changed, Check(name=name, ok=False, detail="the storage lost it: its room ran full under the load")]
    with oldest.opened() as folder:
        then = _digests(bench, folder)
    wrong = sorted(file for file in {*old, *then} if old.get(file) != then.get(file))
    return [
        changed,
        Check(name=name, ok=not wrong, detail=", ".join(wrong) or f"{len(old)} files"),
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile `share` of the values, by nearest rank."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def _figures(times: Times, levels: Sequence[int]) -> dict[str, float]:
    level = max(one for one in levels if one <= _COMMON_LEVEL)
    figures = {f"{name}_s": quantile(times[name][level], 0.5) for name in _TITLES}
    # Compared at a number that all storages reach: otherwise a storage with a thousand snapshots would look slower.
    figures["loaded_max_s"] = max(times["loaded"][level])
    if "call_create" in times:
        figures["create_over_call"] = figures["create_s"] / quantile(times["call_create"][level], 0.5)
    if "program_create" in times:
        figures["whole_over_program"] = figures["whole_s"] / quantile(times["program_create"][level], 0.5)
    few, many = (quantile(times["create"][one], 0.5) for one in (min(levels), level))
    if few > 0:
        figures["create_growth"] = many / few
    return figures


def _title(operation: str) -> str:
    if operation in _TITLES:
        return _TITLES[operation]
    way, _, what = operation.partition("_")
    doing = {"create": "Snapshot", "delete": "Deletion", "loaded": "Snapshot while files are being written"}[what]
    return f"{doing} by the storage's own {'system call' if way == 'call' else 'program'}"


def _notes(bench: Workbench, ways: Sequence[RawWay], levels: Sequence[int]) -> list[str]:
    notes = [f"the storage's own {way.name} is: {way.title}" for way in ways]
    if not ways:
        notes.append("this storage has no snapshot call of its own to compare with")
    if not bench.at_once():
        notes.append("files are copied one by one: the load is stopped during a snapshot call, as a server would be")
    if left_out := [level for level in bench.parameters.extra["levels"] if level not in levels]:
        notes.append(f"not with {', '.join(map(str, left_out))} classic LVM snapshots: each costs every write a copy")
    return notes


scenario = SnapshotOps()
