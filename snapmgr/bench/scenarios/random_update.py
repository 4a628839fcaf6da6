"""Measures random updates after a snapshot, and later sequential reads: the published experiment 1."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.bench.load.write_pass import (
    BATCHED,
    add_write_curve,
    linear_read,
    settle,
    timed_pass,
    write_figures,
    write_infos,
    write_pass,
)
from snapmgr.bench.measure.digests import digest_units
from snapmgr.bench.measure.directio import buffers_direct_writes
from snapmgr.bench.model import Check, Needs, Outcome, Scenario, metric
from snapmgr.bench.published import script
from snapmgr.contract.errors import ConfigError, StorageError
from snapmgr.contract.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from snapmgr.bench.fio import FioRun, Section
    from snapmgr.bench.load.write_pass import WritePass
    from snapmgr.bench.measure.digests import UnitDigests
    from snapmgr.bench.model import MetricInfo, Parameters, ProfileName, Snapshot, Workbench

_MIB = 1 << 20
_PAGE = 16 << 10
_SIZES: Mapping[ProfileName, int] = {
    "smoke": 64 * _MIB,
    "quick": 64 * _MIB,
    "standard": 4096 * _MIB,
    "paper": 100_000_000_000,
}
# Two of them must not fit into limited memory.
_BUFFERED_SMOKE = 192 * _MIB
_PUBLISHED_UPDATES = 250_000
_LEAST_UNITS = 256
_DATA, _CONTROL = "data", "control"
_TITLES = {
    "update_none": "Random update with no snapshot there",
    "update_first": "Random update, first pass after the snapshot",
    "update_second": "Random update, second pass",
}


def _metrics() -> Iterator[MetricInfo]:
    yield metric("fill_s", "Fill, until durable", "s", "less")
    yield metric("fill_unsynced_s", "Fill, without the last sync", "s", "less")
    for name, title in _TITLES.items():
        yield from write_infos(name, title, headline=name == "update_first")
    yield metric("update_cost", "First pass after the snapshot ÷ pass with no snapshot there", "", "less")
    for moment, when in (("before", "before the update"), ("after", "after it")):
        yield metric(
            f"read_{moment}_bytes_s", f"Linear read, cold, O_DIRECT, {when}", "B/s", "more", headline=moment == "after"
        )
        yield metric(f"read_{moment}_buffered_s", f"Linear read, cold, buffered, {when}", "s", "less")
        yield metric(f"extents_{moment}", f"Extents {when}", "", "less")
        yield metric(f"gaps_per_gib_{moment}", f"Physical jumps per GiB {when}", "", "less")
    yield metric("create_s", "Snapshot call", "s", "less")
    yield metric("whole_s", "Whole snapshot, from preparation to completion", "s", "less")
    yield metric("snapshot_bytes", "Space that the snapshot takes afterwards", "B", "less")
    yield metric("grown_bytes", "Room of the file system taken since the snapshot", "B", "less")
    yield metric("background_s", "Waiting for background work", "s", "less")
    yield metric("delete_s", "Delete, until its space is free", "s", "less")


class RandomUpdate(Scenario):
    """See `snapmgr.bench.model.Scenario`.

    Variants: "database": pages of 16 KiB in InnoDB's way (O_DIRECT, asynchronous, in batches with an fsync after each,
    by one thread, like the page cleaner), each updated once in a pass; the second pass updates the same ones. Half of
    the data is a second file, updated before the snapshot: it shows the cost of the same pass without a snapshot.
    "repaired": the intention of the published script: 4,000-byte extents, 8 workers, buffered, one pass. "printed":
    that script, see `snapmgr.bench.published.script`.
    """

    name = "random-update"
    title = "What do random updates cost after a snapshot, and what do they do to reading the file in order?"
    label = "Random updates after a snapshot"
    variants = ("database", "repaired", "printed")
    metrics = tuple(_metrics())
    programs = ("fio",)

    def parameters(self, given: Parameters) -> Parameters:
        """Complete them: {"data_bytes", "unit_bytes", "updates", "workers"}.

        Raises ConfigError for an unknown variant, for too little data, and for a buffered variant with data that fit
        into the page cache.
        """
        variant = given.variant or self.variants[0]
        if variant not in self.variants:
            raise ConfigError(f"random-update has no variant {variant!r}", hint=f"it has {', '.join(self.variants)}")
        database = variant == "database"
        size_bytes = given.size_bytes or _SIZES[given.profile]
        if not given.size_bytes and not database:
            size_bytes = max(size_bytes, _BUFFERED_SMOKE)
        unit_bytes, workers = (_PAGE, 1) if database else (script.EXTENT_SIZE, script.THREADS)
        # All workers have the same number of whole units, and so have all files. fio fills whole MiB only.
        grain = _MIB // unit_bytes if database else workers
        units = size_bytes // ((2 if database else 1) * unit_bytes * grain) * grain
        share = 4 if database else 100
        extra = {"updates": min(max(units // share, 1), _PUBLISHED_UPDATES), **given.extra}
        extra |= {"unit_bytes": unit_bytes, "workers": workers, "data_bytes": units * unit_bytes}
        extra["updates"] = max(extra["updates"] // workers, 1) * workers
        if units < _LEAST_UNITS:
            raise ConfigError(
                f"{format_size(size_bytes)} of data are too few for random updates",
                hint=f"use a --size of at least {format_size(2 * _LEAST_UNITS * _PAGE)}",
            )
        if extra["updates"] > units:
            raise ConfigError(f"{extra['updates']} updates are more than the {units} pieces that the file has")
        if not database and size_bytes <= given.memory_bytes:
            raise ConfigError(
                f"the variant {variant!r} is buffered, and {format_size(size_bytes)} of data fit into memory"
                f" ({format_size(given.memory_bytes)}): it would measure the page cache",
                hint="use a --size larger than the memory, limit the memory (--memory), or use the variant 'database'",
            )
        return replace(given, variant=variant, size_bytes=size_bytes, extra=extra)

    def needs(self, parameters: Parameters) -> Needs:
        """Return the needs of a sample: twice the data, because a snapshot pins the old ones (btrfs: whole extents)."""
        extra = parameters.extra
        passes = 3 if parameters.variant == "database" else 1
        buffered = _reads_buffered(parameters)
        moved = parameters.size_bytes + (7 if buffered else 5) * extra["data_bytes"]
        return Needs(
            space_bytes=int(parameters.size_bytes * 2.2) + passes * extra["updates"] * extra["unit_bytes"] + 64 * _MIB,
            # The rest is mostly fio's start, which takes 0.3 s each time.
            seconds=moved / 100e6 + passes * extra["updates"] / 1000 + (3 if buffered else 2.3),
        )

    def run(self, bench: Workbench) -> Outcome:
        """Measure once."""
        found, database = Outcome(), bench.parameters.variant == "database"
        data = bench.path / _DATA
        buffers = buffers_direct_writes(bench.path)
        direct = buffers is not None
        if not direct:
            found.notes.append(f"{bench.stack.name} has no O_DIRECT: all reads and writes were buffered")
        elif buffers and database:
            found.notes.append(f"{bench.stack.name} wrote buffered although O_DIRECT was asked for")
        printed_load = bench.parameters.variant == "printed"
        load = _Printed(bench) if printed_load else _Fio(bench, direct=direct)
        bench.tell("random-update: fills")
        filled = load.fill(data)
        found.metrics |= {"fill_s": filled.durable_s, "fill_unsynced_s": filled.seconds}
        before = digest_units(data, bench.parameters.extra["unit_bytes"])
        if database:
            bench.tell("random-update: the same with no snapshot there")
            load.fill(bench.path / _CONTROL)
            settle(bench)
            _add_pass(found, "update_none", load.update(bench.path / _CONTROL, "update-none"))
        background_s = bench.quiet()
        _look(bench, found, data, "before", direct=direct)
        settle(bench)
        used_bytes = _used_bytes(bench.path)
        bench.tell("random-update: snapshot and update")
        snapshot = bench.snapshot() if bench.stack.backend is not None else None
        _add_pass(found, "update_first", load.update(data, "update-first"))
        first = _check_origin(found, before, data, bench.parameters)
        if database:
            # Background work of the first pass would be charged to the second.
            background_s += settle(bench)
            _add_pass(found, "update_second", load.update(data, "update-second"))
        found.metrics["background_s"] = background_s + bench.quiet()
        # This exceeds the written bytes if the file system cannot free parts of an extent (btrfs).
        found.metrics["grown_bytes"] = float(_used_bytes(bench.path) - used_bytes)
        _look(bench, found, data, "after", direct=direct)
        if database:
            # The second pass has touched the same pages and no others.
            _check_origin(found, before, data, bench.parameters, expected=first)
        if snapshot is None:
            found.notes.append("a control: no snapshot was taken, both passes show what it costs without one")
        else:
            _judge(found, snapshot, before)
        if none_s := found.metrics.get("update_none_s"):
            found.metrics["update_cost"] = found.metrics["update_first_s"] / none_s
        return found


class _Fio:
    """The variants that fio runs."""

    def __init__(self, bench: Workbench, *, direct: bool) -> None:
        self._bench = bench
        self._direct = int(direct)
        self._extra = bench.parameters.extra
        self._seed = bench.parameters.seed

    def fill(self, file: Path) -> WritePass:
        """Write the file in order."""
        data_bytes = self._extra["data_bytes"]
        if self._bench.parameters.variant == "database":
            job: Section = {"bs": "1M", "direct": self._direct, "size": data_bytes}
        else:
            job = self._shares()
        # Not preallocated: on btrfs the first write to a preallocated extent is not copy-on-write.
        job |= {"rw": "write", "fallocate": "none"}
        return self._pass(file, f"fill-{file.name}", job, seed=self._seed)

    def update(self, file: Path, name: str) -> WritePass:
        """Write the requested number of units, each at most once, at random places that depend only on the seed."""
        unit_bytes, workers = self._extra["unit_bytes"], self._extra["workers"]
        each = self._extra["updates"] // workers * unit_bytes
        if self._bench.parameters.variant == "database":
            job: Section = {
                "bs": unit_bytes,
                "size": self._extra["data_bytes"],
                "direct": self._direct,
                **BATCHED,
            }
        else:
            job = self._shares()
        job |= {"rw": "randwrite", "io_size": each}
        return self._pass(file, name, job, seed=self._seed + 1)

    def _shares(self) -> Section:
        # Each fio job has its own map of written blocks, so each gets its own part of the file.
        share = self._extra["data_bytes"] // self._extra["workers"]
        return {
            "bs": self._extra["unit_bytes"],
            "size": share,
            "offset_increment": share,
            "numjobs": self._extra["workers"],
            "ioengine": "psync",
        }

    def _pass(self, file: Path, name: str, job: Section, *, seed: int) -> WritePass:
        def run() -> FioRun:
            whole: Section = {"filename": file.name, "randseed": seed}
            return self._bench.fio(name, {"global": whole, "job": job})

        return write_pass(self._bench, file, run)


class _Printed:
    """The published script; the sample's commands contain its text."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._text = Path(script.__file__).read_text(encoding="utf-8")

    def fill(self, file: Path) -> WritePass:
        """Write the file as the script does."""
        extra = self._bench.parameters.extra
        return timed_pass(self._bench, file, lambda: (self._run("fill", file), extra["data_bytes"]))

    def update(self, file: Path, name: str) -> WritePass:  # noqa: ARG002 - as _Fio has it
        """Update the file as the script does."""
        asked_bytes = self._bench.parameters.extra["updates"] * self._bench.parameters.extra["unit_bytes"]
        return timed_pass(self._bench, file, lambda: (self._run("update", file), asked_bytes))

    def _run(self, phase: str, file: Path) -> float:
        parameters = self._bench.parameters
        numbers = (parameters.extra["data_bytes"], parameters.extra["updates"], parameters.seed)
        done = self._bench.run((sys.executable, "-I", "-c", self._text, phase, str(file), *map(str, numbers)))
        return float(json.loads(done.stdout)["seconds"])


def _look(bench: Workbench, found: Outcome, data: Path, moment: str, *, direct: bool) -> None:
    """Read the file in order, cold, and see where it is."""
    bench.tell(f"random-update: reads in order, {moment} the update")
    if direct and (bench.parameters.variant == "database" or bench.parameters.profile != "smoke"):
        seconds = linear_read(bench, f"read-{moment}", data, direct=True)
        found.metrics[f"read_{moment}_bytes_s"] = data.stat().st_size / max(seconds, 0.001)
    if not direct or _reads_buffered(bench.parameters):
        found.metrics[f"read_{moment}_buffered_s"] = linear_read(bench, f"read-{moment}-buffered", data, direct=False)
    try:
        layout = bench.layout(data)
    except StorageError as error:
        found.notes.append(f"no layout: {error.message}")
        return
    found.layouts[moment] = layout.document()
    found.metrics[f"extents_{moment}"] = float(layout.extents)
    found.metrics[f"gaps_per_gib_{moment}"] = layout.gaps_per_gib


def _reads_buffered(parameters: Parameters) -> bool:
    """Return whether buffered reads are measured beside those with O_DIRECT.

    In small profiles fio takes as long to start as to read, so only the important read is done there.
    """
    return parameters.variant != "database" or parameters.profile not in {"smoke", "quick"}


def _check_origin(
    found: Outcome, before: UnitDigests, data: Path, parameters: Parameters, *, expected: int | None = None
) -> int:
    """Check that the origin holds new data in the written places, and old data elsewhere."""
    changed, updates = before.changed(data), parameters.extra["updates"]
    exact = parameters.variant != "printed"
    wanted = updates if expected is None else expected
    found.checks.append(
        Check(
            name="the origin holds the new data" if expected is None else "the second pass wrote the same pages",
            ok=changed == wanted if exact else changed > 0,
            detail=f"{changed} of {len(before.digests)} pieces are new; {updates} were written",
        )
    )
    return changed


def _judge(found: Outcome, snapshot: Snapshot, before: UnitDigests) -> None:
    """Check that the snapshot holds the origin's old data, record its space, and delete it."""
    found.metrics |= {"create_s": snapshot.create_s, "whole_s": snapshot.whole_s}
    usage, name = snapshot.usage(), "the snapshot holds the old data"
    if not usage.valid:
        detail = "the storage lost the snapshot: its room ran full under the updates"
        found.checks.append(Check(name=name, ok=False, detail=detail))
    else:
        with snapshot.opened() as folder:
            changed = before.changed(folder / _DATA)
        detail = f"{changed} of {len(before.digests)} pieces differ"
        found.checks.append(Check(name=name, ok=changed == 0, detail=detail))
    if usage.exclusive_bytes is None:
        found.notes.append("what the snapshot takes is not known cheaply on this storage")
    else:
        found.metrics["snapshot_bytes"] = float(usage.exclusive_bytes)
    found.metrics["delete_s"] = snapshot.delete()


def _used_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _add_pass(found: Outcome, name: str, done: WritePass) -> None:
    found.metrics |= write_figures(name, done)
    add_write_curve(found, name, _TITLES[name], done)


scenario = RandomUpdate()
