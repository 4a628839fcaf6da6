"""Measures the cost of retained snapshots as their number grows: each day changes some data, then a snapshot."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from snapmgr.bench.load.write_pass import BATCH, BATCHED, WritePass, linear_read, settle, write_pass
from snapmgr.bench.measure.directio import buffers_direct_writes
from snapmgr.bench.measure.proof import block_digests, flush
from snapmgr.bench.model import Check, Needs, Outcome, Scenario, metric
from snapmgr.contract.errors import ConfigError, StorageError
from snapmgr.contract.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from snapmgr.bench.fio import FioRun, Section
    from snapmgr.bench.model import Better, MetricInfo, Parameters, ProfileName, Snapshot, Workbench

_MIB = 1 << 20
_PAGE = 16 << 10
_DATA = "data"
_CHURN = 0.02
_SAMPLED = 1024
_COMMON = 8
"""Limit of classic LVM snapshots, each of which costs every write a copy; comparisons use this number."""
_PROFILES: Mapping[ProfileName, Mapping[str, Any]] = {
    "smoke": {"size_bytes": 48 * _MIB, "levels": (0, 1), "churn": 0.1},
    "quick": {"size_bytes": 256 * _MIB, "levels": (0, 1, 2, 4)},
    "standard": {"size_bytes": 2048 * _MIB, "levels": (0, 1, 2, 4, 8, 16)},
    "paper": {"size_bytes": 16384 * _MIB, "levels": (0, 1, 2, 4, 8, 16, 32)},
}
_MOMENTS = {"none": "with no snapshot", "many": "with many snapshots"}
_DAILY: Mapping[str, tuple[str, str, Better]] = {
    "write_s": ("A day's random updates, until durable", "s", "less"),
    "per_write_s": ("Time for each write", "s", "less"),
    "write_p99_s": ("A write, p99", "s", "less"),
    "written_per_byte": ("Device bytes written per byte", "", "less"),
    "read_per_byte": ("Device bytes read per byte written", "", "less"),
}
_LOOKED: Mapping[str, tuple[str, str, Better]] = {
    "read_bytes_s": ("Linear read, cold", "B/s", "more"),
    "gaps_per_gib": ("Physical jumps per GiB", "", "less"),
    "free_bytes": ("Free space of the file system", "B", "more"),
    "oldest_bytes": ("Space that the oldest snapshot takes", "B", "less"),
}
_HEADLINES = {"write_s_many", "read_bytes_s_many"}


def _metrics() -> tuple[MetricInfo, ...]:
    figures = [
        metric(f"{name}_{moment}", f"{title}, {when}", unit, better, headline=f"{name}_{moment}" in _HEADLINES)
        for name, (title, unit, better) in {**_DAILY, **_LOOKED}.items()
        for moment, when in _MOMENTS.items()
        if (name, moment) != ("oldest_bytes", "none")
    ]
    return (
        *figures,
        metric("write_growth", "A day's updates: with many snapshots ÷ with none", "", "less"),
        metric("read_kept", "Linear read: with many snapshots ÷ with none", "", "more"),
        metric("snapshots_bytes", "Space that all snapshots take, each alone", "B", "less"),
        metric("delete_s", "Delete all snapshots, until their names are gone", "s", "less"),
        metric("space_back_s", "Delete all snapshots, until the space is free", "s", "less"),
        metric("missing_bytes", "Free space before the first day − after all are deleted", "B", "less"),
    )


@dataclass(kw_only=True)
class _Kept:
    """A retained snapshot, and the contents of the file when it was taken."""

    snapshot: Snapshot
    digests: tuple[str, ...]


@dataclass(kw_only=True)
class _Found(Outcome):
    figures: dict[str, dict[int, float]] = field(default_factory=lambda: {name: {} for name in {**_DAILY, **_LOOKED}})
    """By their names and the number of snapshots."""


class Aging(Scenario):
    """See `snapmgr.bench.model.Scenario`. On a control the days pass without snapshots: the effect of updates alone."""

    name = "aging"
    title = "What do retained snapshots cost, in writes, reads and space, as they grow in number?"
    label = "Many retained snapshots"
    metrics = _metrics()
    programs = ("fio",)

    def parameters(self, given: Parameters) -> Parameters:
        """Complete them. Raises ConfigError for data of which a day would change next to nothing."""
        size_bytes, extra = given.over({"churn": _CHURN, **_PROFILES[given.profile]})
        # What classic LVM's room is divided by.
        extra["snapshots"] = min(max(extra["levels"]), _COMMON)
        # fio fills whole MiB only.
        data_bytes = size_bytes // _MIB * _MIB
        if data_bytes * extra["churn"] < BATCH // 4 * _PAGE:
            raise ConfigError(
                f"{extra['churn']:.0%} of {format_size(size_bytes)} a day are too few to be measured",
                hint=f"use a --size of at least {format_size(int(BATCH // 4 * _PAGE / extra['churn']) + _MIB)}",
            )
        return replace(given, size_bytes=data_bytes, extra=extra)

    def needs(self, parameters: Parameters) -> Needs:
        """Return the needs of a sample.

        On classic LVM a quarter of the space is divided evenly among all snapshots, and the oldest has to keep the
        changes of all days. Of the other storages btrfs needs most: a snapshot pins whole extents.
        """
        extra, size = parameters.extra, parameters.size_bytes
        most, classic = max(extra["levels"]), extra["snapshots"]
        changed = size * extra["churn"]
        shared_out = 4 * classic * (classic * changed * 1.1 + 16 * _MIB)
        space = max(2.2 * size + most * changed, shared_out)
        days = most + 1
        seconds = size / 100e6 * (1 + len(extra["levels"])) + days * (changed / _PAGE / 1000 + 1.5)
        return Needs(space_bytes=int(space) + 64 * _MIB, seconds=seconds)

    def run(self, bench: Workbench) -> Outcome:
        """Measure once."""
        found = _Found()
        direct = buffers_direct_writes(bench.path)
        if direct is None:
            found.notes.append(f"{bench.stack.name} has no O_DIRECT: all reads and writes were buffered")
        elif direct:
            found.notes.append(f"{bench.stack.name} wrote buffered although O_DIRECT was asked for")
        data = bench.path / _DATA
        levels = _levels(bench)
        bench.tell("aging: fills")
        load = _Load(bench, data, direct=direct is not None)
        load.fill()
        flush(bench.path)
        bench.quiet()
        free_bytes = _free_bytes(bench)
        first = _digests(bench, data)
        kept: list[_Kept] = []
        for day in range(levels[-1] + 1):
            bench.tell(f"aging: day {day} of {levels[-1]}")
            if day in levels:
                bench.quiet()
                _look(bench, load, found, day, kept)
            # Otherwise the first day, and days after a read of the file, would find more in the caches.
            settle(bench)
            _write(load, found, day)
            if day < levels[-1] and bench.stack.backend is not None:
                digests = _digests(bench, data)
                kept.append(_Kept(snapshot=bench.snapshot(), digests=digests))
        found.checks.append(Check(name="the updates changed the origin", ok=_digests(bench, data) != first))
        found.checks += [_check(bench, number, one) for number, one in enumerate(kept, start=1)]
        found.metrics = _figures(found, levels)
        if kept:
            found.metrics |= _space(bench, found, kept, free_bytes)
            found.notes.append(f"figures with many snapshots are those with {_common(levels)}")
        else:
            found.notes.append("a control: no snapshot was taken, so the days show what the updates alone do")
        if levels[-1] < max(bench.parameters.extra["levels"]):
            found.notes.append(f"not more than {_COMMON} classic LVM snapshots: each costs every write a copy")
        for name, values in found.figures.items():
            if values:
                title, unit, _ = {**_DAILY, **_LOOKED}[name]
                found.add_curve(name, [*values.values()], [*values], title=title, x_title="snapshots", unit=unit)
        return found


class _Load:
    """The load that fio puts on the file."""

    def __init__(self, bench: Workbench, data: Path, *, direct: bool) -> None:
        self.bench = bench
        self.data = data
        self.direct = direct

    def fill(self) -> None:
        """Write the whole file in order."""
        # Not preallocated: on btrfs the first write to a preallocated extent is not copy-on-write.
        self._fio("fill", {"rw": "write", "bs": "1M", "ioengine": "psync", "fallocate": "none", "end_fsync": 1}, day=0)

    def churn(self, day: int) -> WritePass:
        """Write a day's share of the file, each page at most once."""
        extra = self.bench.parameters.extra
        pages = int(self.bench.parameters.size_bytes * extra["churn"]) // _PAGE
        job: Section = {
            "rw": "randwrite",
            "bs": _PAGE,
            "io_size": pages * _PAGE,
            **BATCHED,
        }
        return write_pass(self.bench, self.data, lambda: self._fio(f"day-{day}", job, day=day + 1))

    def _fio(self, name: str, job: Section, *, day: int) -> FioRun:
        whole: Section = {
            "filename": _DATA,
            "size": self.bench.parameters.size_bytes,
            "direct": int(self.direct),
            # Each day changes other pages.
            "randseed": self.bench.parameters.seed * 1000 + day,
        }
        return self.bench.fio(name, {"global": whole, "job": job})


def _levels(bench: Workbench) -> list[int]:
    return [level for level in bench.parameters.extra["levels"] if not bench.stack.classic_lvm or level <= _COMMON]


def _common(levels: Sequence[int]) -> int:
    return max(level for level in levels if level <= _COMMON)


def _free_bytes(bench: Workbench) -> int:
    room = os.statvfs(bench.path)
    return room.f_bavail * room.f_frsize


def _digests(bench: Workbench, file: Path) -> tuple[str, ...]:
    return block_digests(file, seed=bench.parameters.seed, sample=_SAMPLED, block_bytes=_PAGE)


def _look(bench: Workbench, load: _Load, found: _Found, day: int, kept: Sequence[_Kept]) -> None:
    """Read the file in order, and record its layout and the space of the oldest snapshot."""
    found.figures["free_bytes"][day] = _free_bytes(bench)
    seconds = linear_read(bench, f"read-{day}", load.data, direct=load.direct)
    found.figures["read_bytes_s"][day] = bench.parameters.size_bytes / max(seconds, 0.001)
    try:
        layout = bench.layout(load.data)
    except StorageError as error:
        if not day:
            found.notes.append(f"no layout: {error.message}")
    else:
        found.layouts[f"day {day}"] = layout.document()
        found.figures["gaps_per_gib"][day] = layout.gaps_per_gib
    if kept and (taken := kept[0].snapshot.usage().exclusive_bytes) is not None:
        found.figures["oldest_bytes"][day] = taken


def _write(load: _Load, found: _Found, day: int) -> None:
    done = load.churn(day)
    found.figures["write_s"][day] = done.durable_s
    found.figures["per_write_s"][day] = done.durable_s / (done.asked_bytes / _PAGE)
    if "p99" in done.latencies_s:
        found.figures["write_p99_s"][day] = done.latencies_s["p99"]
    # 0: the storage has no own device here.
    if done.spent.written_bytes:
        found.figures["written_per_byte"][day] = done.spent.written_bytes / done.asked_bytes
        found.figures["read_per_byte"][day] = done.spent.read_bytes / done.asked_bytes


def _check(bench: Workbench, number: int, kept: _Kept) -> Check:
    name = f"snapshot {number} holds its day's data"
    if not kept.snapshot.usage().valid:
        return Check(name=name, ok=False, detail="the storage lost the snapshot: its room ran full under the updates")
    with kept.snapshot.opened() as folder:
        then = _digests(bench, folder / _DATA)
    wrong = sum(one != other for one, other in zip(kept.digests, then, strict=True))
    return Check(name=name, ok=not wrong, detail=f"{wrong} of {len(then)} pages looked at differ")


def _figures(found: _Found, levels: Sequence[int]) -> dict[str, float]:
    at = {"none": levels[0], "many": _common(levels)}
    names = {info.name for info in Aging.metrics}
    figures = {
        f"{name}_{moment}": float(values[day])
        for name, values in found.figures.items()
        for moment, day in at.items()
        if day in values and f"{name}_{moment}" in names
    }
    figures["write_growth"] = figures["write_s_many"] / max(figures["write_s_none"], 0.001)
    figures["read_kept"] = figures["read_bytes_s_many"] / figures["read_bytes_s_none"]
    return figures


def _space(bench: Workbench, found: _Found, kept: Sequence[_Kept], free_bytes: int) -> dict[str, float]:
    """Record the space of the snapshots, delete them all, and wait for their space."""
    figures = {}
    taken = [one.snapshot.usage().exclusive_bytes for one in kept]
    known = [one for one in taken if one is not None]
    if len(known) == len(kept):
        figures["snapshots_bytes"] = float(sum(known))
    else:
        found.notes.append("what a snapshot takes is not known cheaply on this storage")
    bench.tell(f"aging: deletes {len(kept)} snapshots")
    settle(bench)
    start = time.monotonic()
    for one in kept:
        one.snapshot.delete(wait="name")
    figures["delete_s"] = time.monotonic() - start
    bench.quiet()
    figures["space_back_s"] = time.monotonic() - start
    figures["missing_bytes"] = float(free_bytes - _free_bytes(bench))
    return figures


scenario = Aging()
