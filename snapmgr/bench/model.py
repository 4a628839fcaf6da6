"""What the benchmark's parts hand to each other: stacks, scenarios, parameters, and what one sample found.

Scenarios measure; they see a `Workbench` and nothing else of the benchmark. Everything here can be written as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from snapmgr.bench.fio import FioRun
    from snapmgr.contract.abilities import FolderCloning
    from snapmgr.contract.records import Completed, Found, Reason, Usage

Better = Literal["less", "more", "neither"]
ProfileName = Literal["smoke", "quick", "standard", "paper"]
PROFILES: tuple[ProfileName, ...] = ("smoke", "quick", "standard", "paper")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A storage as it is compared: a file system, what is below it, and the backend that takes its snapshots."""

    name: str
    """As ``--stacks`` takes it: "btrfs", "lvm-thin+xfs"."""
    title: str
    """In words, for the report: "btrfs without copy-on-write for data (nodatacow)"."""
    backend: str | None
    """Entry point of the backend that provisions and takes snapshots; None: a control, which has no snapshots."""
    options: Mapping[str, str] = field(default_factory=dict)
    """For its provisioner: {"file_system": "xfs", "thin": "yes"}."""


@dataclass(frozen=True, kw_only=True)
class MetricInfo:
    """What a figure of a scenario means."""

    name: str
    """"update_s": the same word in every sample."""
    title: str
    """In words, "Random update, until it is durable"."""
    unit: str
    """SI, without a prefix: "s", "B", "B/s", "1/s"; "" for a plain number."""
    better: Better
    headline: bool = False
    """Whether the recommendation and the ratio chart are made of it."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How large and how long a sample is; the same for all stacks of a scenario, and part of every sample."""

    profile: ProfileName
    variant: str
    """Variant of the scenario: "printed", "repaired", "database"; "" where there is only one."""
    size_bytes: int
    """Of the data a scenario fills in, chosen by the conductor within what `Scenario.needs` asks for. 0, as given to
    `Scenario.parameters`, stands for what the scenario takes in that profile."""
    memory_bytes: int
    """What the page cache may hold at most, by a cgroup limit or the machine's memory: a buffered scenario refuses
    data that fit."""
    seed: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """A scenario's own, with their defaults filled in by `Scenario.parameters`."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one sample of a scenario takes."""

    space_bytes: int
    """Of the device, snapshot included."""
    seconds: float
    """About how long, on a disk of 100 MB/s and 1,000 IOPS; the conductor corrects it by what it measures."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One proof that a sample measured what it says; a sample with a failed one counts for nothing."""

    name: str
    """"snapshot holds the old data"."""
    ok: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run of a scenario found."""

    metrics: Mapping[str, float]
    """By `MetricInfo.name`. A figure that could not be measured is absent, and `notes` says why."""
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Figures over time or over a swept parameter, for curves: "read_per_interval"; axes in `axes` under that name."""
    axes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """{"title", "x_title", "x_unit", "x": […], "unit"} for each series."""
    layouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`FileLayout.document()` of a file by moment: "before", "after"."""
    checks: Sequence[Check] = ()
    notes: Sequence[str] = ()
    """Sentences about this sample: "btrfs wrote buffered although O_DIRECT was asked for"."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a measured part of a sample took; made by `Workbench.measured` when its context ends."""

    seconds: float
    cpu_seconds: float
    """Of the whole machine but idle and iowait: what the kernel does for a file system is nobody's process."""
    read_bytes: int
    """At the devices that tell the truth (below LVM, below the file system)."""
    written_bytes: int
    reads: int
    writes: int
    steal_seconds: float
    """What the hypervisor took from this machine meanwhile."""


class Measuring(Protocol):
    """A part that is being measured; `spent` once its context has ended."""

    spent: Spent


class Snapshot(Protocol):
    """One snapshot of the workbench's volume, made by the backend as a backup would be."""

    create_s: float
    """The backend's `fire`, which is what a lock would be held for."""
    whole_s: float
    """From arm to settled."""

    def opened(self, *, writable: bool = False) -> AbstractContextManager[Path]:
        """Attach it and yield the folder that corresponds to `Workbench.path`."""

    def usage(self) -> Usage:
        """Return what the backend says that it takes."""

    def delete(self, *, wait: Literal["name", "space"] = "space") -> float:
        """Delete it and wait until its space is free, or its name gone; return the seconds until that."""


class Workbench(Protocol):
    """A fresh file system on one stack, and the means to measure on it. One for each sample."""

    path: Path
    """An empty folder, a volume that the backend can take a snapshot of."""
    stack: Stack
    parameters: Parameters
    folder: Path
    """A folder on another file system for small files (job files, logs): no load goes there."""

    def snapshot(self, held: AbstractContextManager[object] | None = None) -> Snapshot:
        """Take one. Raises MissingRequirementError for a stack without a backend (see `Stack.backend`).

        `held` is what keeps writers still: entered when all is flushed and ready, left when the storage's call is over.
        """

    def at_once(self) -> bool:
        """Whether a snapshot is of one instant; else files are copied one by one, and nothing may write meanwhile."""

    def inventory(self) -> tuple[Found, ...]:
        """Return what the backend finds in the volume's pool, as each backup asks it. Raises MissingRequirementError as
        `snapshot` does."""

    def cloning(self) -> FolderCloning | None:
        """Return what clones a folder in `path`, as ``snapmgr prepare`` finds it; it may be `snapmgr.api.Remounting` as
        well. None: only copies are possible, or this is a control."""

    def measured(self) -> AbstractContextManager[Measuring]:
        """Measure what happens while the context lasts: time, processors, bytes at the devices."""

    def fio(self, name: str, sections: Mapping[str, Mapping[str, str | int | None]]) -> FioRun:
        """Run fio with a job file made of `sections` ("global" first) under `path`; None stands for an option without a
        value. The file is kept with the sample under `name`. Raises CommandError with fio's own words."""

    def run(self, argv: Sequence[str], *, timeout_s: float | None = None) -> Completed:
        """Run a program; it is recorded with the sample."""

    def cold(self) -> None:
        """Sync, and drop the kernel's caches and those of the storage's client: the next read is the storage's own."""

    def quiet(self) -> float:
        """Wait until the storage's background work (btrfs's cleaner, discards, uploads) is done; return the seconds."""

    def layout(self, file: Path) -> FileLayout:
        """Return where the file's blocks are, after a flush."""

    def tell(self, text: str) -> None:
        """Say what goes on, for the progress line."""


class FileLayout(Protocol):
    """Where a file's blocks are: see snapmgr.bench.measure.layout."""

    @property
    def extents(self) -> int:
        """As filefrag counts them: neighbours that touch are merged."""

    @property
    def gaps_per_gib(self) -> float:
        """Physical jumps per GiB in the order of reading; compares compressed files too."""

    def document(self) -> dict[str, Any]:
        """Return it for the sample, extents thinned out to at most 2,000 points for a map."""


class Scenario(Protocol):
    """One experiment. A module in snapmgr/bench/scenarios with an instance called `scenario`."""

    name: str
    """As on the command line: "random-update"."""
    title: str
    """One sentence: what question it answers."""
    variants: tuple[str, ...]
    """Variants for ``--variant``, the default first; empty if there is one only."""
    metrics: tuple[MetricInfo, ...]

    def missing(self) -> tuple[Reason, ...]:
        """Return all that this machine lacks for it (fio, sysbench); empty if it can run."""

    def suits(self, stack: Stack) -> str | None:
        """Return why it cannot run on a stack, as a sentence; None if it can."""

    def needs(self, parameters: Parameters) -> Needs:
        """Return what one sample takes."""

    def parameters(self, given: Parameters) -> Parameters:
        """Return `given` with `extra` completed for its profile. Raises ConfigError for what makes no sense."""

    def run(self, bench: Workbench) -> Outcome:
        """Measure once."""
