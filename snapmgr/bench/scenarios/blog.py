"""Measures the load of a blog server before and after a snapshot: its throughput and its stalls."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from snapmgr.bench.load import blogbench
from snapmgr.bench.load.blogengine import BLOG_BYTES
from snapmgr.bench.load.blogrun import ALL_WRITTEN, COMMENTED, READ, REWRITTEN, WRITTEN, BlogRun
from snapmgr.bench.measure.proof import TreeFacts, flush, tree_facts
from snapmgr.bench.model import Check, Needs, Outcome, Scenario, metric
from snapmgr.contract.errors import CommandError, ConfigError, MissingRequirementError, StorageError
from snapmgr.contract.units import format_size
from snapmgr.system.command import PROGRAM_PATH, find_program

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from snapmgr.bench.model import MetricInfo, Parameters, ProfileName, Snapshot, Spent, Workbench

_MIB = 1 << 20
_WINDOW_S = 1
"""Length of the windows in which stalls are counted; an interval consists of several windows."""
_CREW = {"writers": 3, "rewriters": 1, "commenters": 5, "readers": 100}
_PROFILES: Mapping[ProfileName, Mapping[str, Any]] = {
    "smoke": {"size_bytes": 32 * _MIB, "interval_s": 1, "intervals": 1, "writers": 1, "commenters": 2, "readers": 5},
    "quick": {"size_bytes": 512 * _MIB, "interval_s": 2, "intervals": 5},
    "standard": {"size_bytes": 2048 * _MIB, "interval_s": 5, "intervals": 12},
    "paper": {"size_bytes": 10_000_000_000, "interval_s": 10, "intervals": 30},
}
_SAMPLED_FILES = 64
# Time for operations that hang at the end of a run: a stall must be reported, not truncated.
_PATIENCE_S = 900.0
_MOMENTS = ("before", "after")
_WHEN = {"before": "before the snapshot", "after": "after the snapshot"}
_FILES = {"read": READ, "written": WRITTEN, "rewritten": REWRITTEN, "commented": COMMENTED}
_COUNTED = {**_FILES, "blogs_written": ("blogs_written",), "blogs_read": ("blogs_read",)}


def _metrics() -> Iterator[MetricInfo]:
    for moment in _MOMENTS:
        when, after = _WHEN[moment], moment == "after"
        yield metric(f"reads_{moment}", f"Blogs read {when}", "", "more", headline=after)
        yield metric(f"writes_{moment}", f"Blogs written {when}", "", "more")
        # A disk that is slow enough finishes no blog: of that there would be no ratio.
        yield metric(
            f"files_written_{moment}", f"Files written, rewritten and commented {when}", "", "more", headline=after
        )
        for what, words in (("write", "a write"), ("read", "a read"), ("either", "either")):
            yield metric(f"windows_without_{what}_{moment}", f"Seconds' windows without {words} {when}", "", "less")
            yield metric(
                f"longest_without_{what}_{moment}_s",
                f"Longest time without {words} {when} (a second if there was none)",
                "s",
                "less",
                headline=after and what == "write",
            )
        yield metric(f"intervals_without_write_{moment}", f"Intervals of the load without a write {when}", "", "less")
        yield metric(f"sync_{moment}_s", f"Sync at the end of the load {when}", "s", "less")
        yield metric(f"written_per_byte_{moment}", f"Device bytes written per byte of files {when}", "", "less")
    yield metric("reads_kept", "Blogs read: after ÷ before", "", "more")
    yield metric("writes_kept", "Blogs written: after ÷ before", "", "more")
    yield metric("create_s", "Snapshot call", "s", "less")
    yield metric("snapshot_bytes", "Space that the snapshot takes afterwards", "B", "less")


@dataclass(frozen=True, kw_only=True)
class _Phase:
    run: BlogRun
    sync_s: float
    spent: Spent


class Blog(Scenario):
    """See `snapmgr.bench.model.Scenario`.

    Variants: "repaired" runs both loads on a tree that was filled before, with cold caches, so that they differ only in
    the snapshot. "printed" is as published: the first load begins on an empty folder. A control shows the effect of a
    second load alone.
    """

    name = "blog"
    title = "What does a server with many small files get done before and after a snapshot, and does it stall?"
    label = "Many small files"
    variants = ("repaired", "printed")
    metrics = tuple(_metrics())

    def parameters(self, given: Parameters) -> Parameters:
        """Complete them. Raises ConfigError for data that are smaller than a blog, or that the cache would hold."""
        size_bytes, extra = given.over({**_CREW, "zeros": False, **_PROFILES[given.profile]})
        extra["blogs"] = size_bytes // BLOG_BYTES
        if not extra["blogs"]:
            raise ConfigError(
                f"{format_size(size_bytes)} of data are less than one blog",
                hint=f"a blog takes up to {format_size(BLOG_BYTES)}: use --size",
            )
        if given.profile == "paper" and size_bytes <= given.memory_bytes:
            raise ConfigError(
                f"{format_size(size_bytes)} of blogs fit into memory ({format_size(given.memory_bytes)}):"
                " reads would measure the page cache",
                hint="use a larger --size, limit the memory (--memory), or choose another profile",
            )
        return replace(given, size_bytes=size_bytes, extra=extra)

    def needs(self, parameters: Parameters) -> Needs:
        """Return the needs of a sample: the tree, and the snapshot's version of all of it.

        On classic LVM a quarter of the space belongs to the snapshot, and new files consume it even in free places.
        """
        load_s = parameters.extra["interval_s"] * parameters.extra["intervals"]
        fill_s = parameters.size_bytes / 100e6 if parameters.variant == "repaired" else 0.0
        return Needs(space_bytes=int(parameters.size_bytes * 4.8) + 64 * _MIB, seconds=2 * load_s + fill_s + 2)

    def run(self, bench: Workbench) -> Outcome:
        """Measure once."""
        tree = bench.path / "blogs"
        tree.mkdir()
        load, before = _before(bench, tree)
        seed = bench.parameters.seed
        facts = tree_facts(tree, seed=seed, sample=_SAMPLED_FILES)
        snapshot = bench.snapshot() if bench.stack.backend is not None else None
        bench.tell("blogs, after the snapshot")
        after = _phase(bench, load, 2)
        now = tree_facts(tree, seed=seed, sample=0, names=list(facts.contents))
        changed = Check(
            name="the load changed the origin", ok=bool(facts.differences(now)), detail=f"{now.files} files"
        )
        found = Outcome(checks=[changed], notes=[load.note, *_notes(bench, before.run, after.run)])
        interval = bench.parameters.extra["interval_s"] // _WINDOW_S
        found.metrics = _figures("before", before, interval) | _figures("after", after, interval)
        for what in ("reads", "writes"):
            if found.metrics[f"{what}_before"]:
                found.metrics[f"{what}_kept"] = found.metrics[f"{what}_after"] / found.metrics[f"{what}_before"]
        if snapshot is None:
            found.notes.append(
                "a control: no snapshot was taken, so the second load shows what a second load alone changes"
            )
        else:
            found.metrics["create_s"] = snapshot.create_s
            found.checks.append(_check(snapshot, facts, seed))
            usage = snapshot.usage().exclusive_bytes
            if usage is None:
                found.notes.append("what the snapshot takes is not known cheaply on this storage")
            else:
                found.metrics["snapshot_bytes"] = float(usage)
        _add_curves(found, "before", before.run, interval)
        _add_curves(found, "after", after.run, interval)
        return found


class _Own:
    """Our own load; see snapmgr.bench.load.blogengine."""

    def __init__(self, bench: Workbench, tree: Path, why: str) -> None:
        self._bench = bench
        self._tree = tree
        extra = bench.parameters.extra
        self.note = (
            f"the load is snapmgr's own, with the mix and the scores of blogbench, {why}; it reads"
            f" 64 KiB a call and writes {'zeros' if extra['zeros'] else 'data that cannot be compressed'}, in at most"
            f" {extra['blogs']} blogs"
        )

    def fill(self) -> None:
        """Write each blog once."""
        self._run("--fill", f"--writers={self._bench.parameters.extra['writers']}", turn=0, seconds=None)

    def run(self, turn: int) -> BlogRun:
        """Run the load for the scenario's time."""
        extra = self._bench.parameters.extra
        filled = ("--filled",) if self._bench.parameters.variant == "repaired" else ()
        crew = [f"--{role}={extra[role]}" for role in _CREW]
        seconds = extra["interval_s"] * extra["intervals"]
        document = self._run(*filled, *crew, f"--seconds={seconds}", turn=turn, seconds=seconds)
        counts = {name: tuple(values) for name, values in document["counts"].items()}
        wrapped = f"load {turn}: all {extra['blogs']} blogs were written, so writers began again with the first"
        return BlogRun(
            ends_s=tuple(document["ends_s"]),
            counts=counts,
            writes=document["writes"],
            reads=document["reads"],
            bytes_written=sum(counts["bytes_written"]),
            notes=(wrapped,) if document["wrapped"] else (),
        )

    def _run(self, *options: str, turn: int, seconds: float | None) -> dict[str, Any]:
        parameters = self._bench.parameters
        zeros = ("--zeros",) if parameters.extra["zeros"] else ()
        argv = (
            *(sys.executable, "-P", "-m", "snapmgr.bench.load.blogengine", f"--folder={self._tree}"),
            *(f"--blogs={parameters.extra['blogs']}", f"--window={_WINDOW_S}", f"--seed={parameters.seed + turn}"),
            *(*zeros, *options),
        )
        try:
            done = self._bench.run(argv, timeout_s=None if seconds is None else seconds + _PATIENCE_S)
        except CommandError as error:
            if "the disk is full" in error.message:
                raise StorageError(
                    f"the disk was full while the blogs were written: {error.message}",
                    hint="give it a larger device, or a smaller --size",
                ) from None
            raise
        document: dict[str, Any] = json.loads(done.stdout)
        return document


class _Blogbench:
    """The program itself."""

    note = (
        "the load is the program blogbench: it writes zeros, which a storage that compresses gains by, and reads 8"
        " bytes a call, so that its score for reads of cached data measures system calls"
    )

    def __init__(self, bench: Workbench, tree: Path) -> None:
        self._bench = bench
        self._tree = tree

    def fill(self) -> None:
        """Run it once for as long as the later measurement."""
        self.run(0)

    def run(self, turn: int) -> BlogRun:  # noqa: ARG002 - it takes no seed
        """Run it for the scenario's time."""
        extra = self._bench.parameters.extra
        seconds = extra["interval_s"] * extra["intervals"]
        crew = {role: extra[role] for role in _CREW}
        argv = blogbench.command(self._tree, crew, window_s=_WINDOW_S, windows=seconds // _WINDOW_S)
        done = self._bench.run(argv, timeout_s=seconds + _PATIENCE_S)
        return blogbench.parse(done.stdout, window_s=_WINDOW_S)


_Load = TypeVar("_Load", _Own, _Blogbench)


def _before(bench: Workbench, tree: Path) -> tuple[_Own | _Blogbench, _Phase]:
    """Return the load, and its run before the snapshot: by blogbench if it is installed and works, else by our own."""
    try:
        find_program(blogbench.PROGRAM)
    except MissingRequirementError:
        return _first(bench, _Own(bench, tree, f"which is not installed (searched in {PROGRAM_PATH})"))
    try:
        return _first(bench, _Blogbench(bench, tree))
    except CommandError as error:
        bench.tell(f"blogbench does not work: {error.message}")
        # What it wrote would be part of the other load's tree.
        shutil.rmtree(tree)
        tree.mkdir()
        return _first(bench, _Own(bench, tree, f"which is installed but did not work ({error.message})"))


def _first(bench: Workbench, load: _Load) -> tuple[_Load, _Phase]:
    if bench.parameters.variant == "repaired":
        bench.tell("fills the tree")
        load.fill()
    bench.tell("blogs, before the snapshot")
    return load, _phase(bench, load, 1)


def _phase(bench: Workbench, load: _Own | _Blogbench, turn: int) -> _Phase:
    if bench.parameters.variant == "repaired":
        bench.quiet()
        bench.cold()
    with bench.measured() as whole:
        run = load.run(turn)
        with bench.measured() as sync:
            flush(bench.path)
    return _Phase(run=run, sync_s=sync.spent.seconds, spent=whole.spent)


def _figures(moment: str, phase: _Phase, interval: int) -> dict[str, float]:
    """Return the figures of one load; `interval` is the number of windows in an interval."""
    stalls = phase.run.stalls()
    written = phase.run.intervals(ALL_WRITTEN, interval)
    figures = {
        f"reads_{moment}": phase.run.reads,
        f"writes_{moment}": phase.run.writes,
        f"files_written_{moment}": sum(phase.run.files(ALL_WRITTEN)),
        f"windows_without_write_{moment}": stalls.without_write,
        f"windows_without_read_{moment}": stalls.without_read,
        f"windows_without_either_{moment}": stalls.without_either,
        f"intervals_without_write_{moment}": written.count(0),
        # Stalls shorter than a window are invisible, and 0 stalls have no ratio.
        f"longest_without_write_{moment}_s": max(stalls.longest_write_s, _WINDOW_S),
        f"longest_without_read_{moment}_s": max(stalls.longest_read_s, _WINDOW_S),
        f"longest_without_either_{moment}_s": max(stalls.longest_either_s, _WINDOW_S),
        f"sync_{moment}_s": phase.sync_s,
    }
    if phase.run.bytes_written and phase.spent.written_bytes:
        figures[f"written_per_byte_{moment}"] = phase.spent.written_bytes / phase.run.bytes_written
    return {name: float(value) for name, value in figures.items()}


def _notes(bench: Workbench, *runs: BlogRun) -> list[str]:
    notes = [note for run in runs for note in run.notes]
    if bench.parameters.size_bytes <= bench.parameters.memory_bytes:
        notes.append("the blogs fit into memory: what is read twice comes from the page cache")
    late_s = max(end - _WINDOW_S * number for run in runs for number, end in enumerate(run.ends_s, start=1))
    if late_s > _WINDOW_S / 2:
        notes.append(f"the processors were so busy that a window ended more than {_WINDOW_S / 2:g} s late")
    return notes


def _check(snapshot: Snapshot, facts: TreeFacts, seed: int) -> Check:
    name = "the snapshot holds what the tree held"
    if not snapshot.usage().valid:
        return Check(name=name, ok=False, detail="the storage lost the snapshot: its room ran full under the load")
    with snapshot.opened() as folder:
        then = tree_facts(folder / "blogs", seed=seed, sample=0, names=list(facts.contents))
    wrong = facts.differences(then)
    said = "; ".join(wrong[:3]) or f"names and sizes of {facts.files} files, contents of {len(facts.contents)}"
    return Check(name=name, ok=not wrong, detail=said)


def _add_curves(found: Outcome, moment: str, run: BlogRun, interval: int) -> None:
    """Add counts per interval ("read_before"), which is of so many windows, and per window ("read_each_s_before")."""
    for what, names in _COUNTED.items():
        if not any(name in run.counts for name in names):
            continue
        title = f"{what.replace('_', ' ')}, {_WHEN[moment]}"
        title = title.capitalize() if what.startswith("blogs") else f"Files {title}"
        for key, windows in ((what, interval), (f"{what}_each_s", 1)):
            values = run.intervals(names, windows)
            ends_s = [windows * _WINDOW_S * number for number in range(1, len(values) + 1)]
            found.add_curve(f"{key}_{moment}", values, ends_s, title=title, x_title="time", x_unit="s")


scenario = Blog()
