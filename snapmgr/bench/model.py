"""Defines the records that the rooms exchange: stacks, scenarios, parameters, and the outcome of a sample.

Scenarios measure; they see nothing of the benchmark but a `Workbench`. Everything here can be written as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from snapmgr.system.command import missing_programs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from snapmgr.bench.fio import FioRun, Section
    from snapmgr.contract.abilities import FolderCloning
    from snapmgr.contract.records import Completed, Found, Reason, Usage

Better = Literal["less", "more", "neither"]
ProfileName = Literal["smoke", "quick", "standard", "paper"]
PROFILES: tuple[ProfileName, ...] = ("smoke", "quick", "standard", "paper")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A storage under comparison: a file system, the layers below it, and the backend that takes its snapshots."""

    name: str
    """As ``--stacks`` takes it: "btrfs", "lvm-thin+xfs"."""
    title: str
    """In words: "btrfs without copy-on-write for data (nodatacow)"."""
    label: str = ""
    """In few words, at most 24 characters, for the page's charts and tables: "btrfs, nodatacow"; "": the name."""
    backend: str | None
    """Entry point of the backend that provisions and takes snapshots; None: a control, which has no snapshots."""
    options: Mapping[str, str] = field(default_factory=dict)
    """For its provisioner: {"file_system": "xfs", "thin": "yes"}."""

    @property
    def classic_lvm(self) -> bool:
        """Whether its snapshots are classic ones of LVM: each has space of its own, and costs every write a copy."""
        return self.backend == "lvm" and "thin" not in self.options


@dataclass(frozen=True, kw_only=True)
class MetricInfo:
    """The meaning of a figure of a scenario."""

    name: str
    """"update_s": the same word in every sample."""
    title: str
    """In words, "Random update, until it is durable"."""
    unit: str
    """SI, without a prefix: "s", "B", "B/s", "1/s"; "" for a plain number."""
    better: Better
    headline: bool = False
    """Whether the recommendation and the ratio chart use it."""


def metric(name: str, title: str, unit: str, better: Better, *, headline: bool = False) -> MetricInfo:
    """Return a `MetricInfo`: scenarios list dozens of them, as a table."""
    return MetricInfo(name=name, title=title, unit=unit, better=better, headline=headline)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Size and duration of a sample; the same for all stacks of a scenario, and recorded in every sample."""

    profile: ProfileName
    variant: str
    """Variant of the scenario: "printed", "repaired", "database"; "" where there is only one."""
    size_bytes: int
    """Size of the data set, chosen by the conductor within the limits of `Scenario.needs`. 0, as given to
    `Scenario.parameters`, stands for the scenario's default in that profile."""
    memory_bytes: int
    """Upper limit of the page cache, set by a cgroup or the machine's memory: a buffered scenario refuses data that
    fit into it."""
    seed: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The scenario's own parameters; `Scenario.parameters` fills in their defaults."""

    def over(self, defaults: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return `size_bytes`, and `extra` over `defaults`, which hold the default size as well."""
        own = {name: value for name, value in defaults.items() if name != "size_bytes"}
        return self.size_bytes or defaults["size_bytes"], {**own, **self.extra}


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The space and time for one sample of a scenario."""

    space_bytes: int
    """Space on the device, snapshot included."""
    seconds: float
    """Estimated duration on a disk of 100 MB/s and 1,000 IOPS; the conductor corrects it as it measures."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One proof that a sample measured the right thing; a sample with a failed check does not count."""

    name: str
    """"snapshot holds the old data"."""
    ok: bool
    detail: str = ""


@dataclass(kw_only=True)
class Outcome:
    """The result of one run of a scenario, which adds to it while it measures."""

    metrics: dict[str, float] = field(default_factory=dict)
    """By `MetricInfo.name`. A figure that could not be measured is absent, and `notes` says why."""
    series: dict[str, Sequence[float]] = field(default_factory=dict)
    """Figures over time or over a swept parameter, for curves: "read_per_interval"; axes in `axes` under that name."""
    axes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """{"title", "x_title", "x_unit", "x": […], "unit"} for each series."""
    layouts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """`FileLayout.document()` of a file by moment: "before", "after"."""
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences about this sample: "btrfs wrote buffered although O_DIRECT was asked for"."""

    def add_curve(
        self,
        name: str,
        values: Sequence[float],
        x: Sequence[float],
        *,
        title: str,
        x_title: str,
        x_unit: str = "",
        unit: str = "",
    ) -> None:
        """Add a series and its axes: `values` at each of `x`."""
        self.series[name] = values
        self.axes[name] = {"title": title, "x_title": x_title, "x_unit": x_unit, "x": list(x), "unit": unit}


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The cost of a measured part of a sample; `Workbench.measured` sets it when its context ends."""

    seconds: float
    cpu_seconds: float
    """CPU time of the whole machine without idle and iowait: kernel work for a file system belongs to no process."""
    read_bytes: int
    """Counted at the devices that see all traffic (below LVM, below the file system)."""
    written_bytes: int
    reads: int
    writes: int
    steal_seconds: float
    """CPU time that the hypervisor took from this machine."""


class Measuring(Protocol):
    """A part of a sample under measurement; `spent` is available once its context has ended."""

    spent: Spent


class Snapshot(Protocol):
    """One snapshot of the workbench's volume, made by the backend as a backup would be."""

    create_s: float
    """Duration of the backend's `fire`, during which a backup holds its lock."""
    whole_s: float
    """From arm to settled."""

    def opened(self, *, writable: bool = False) -> AbstractContextManager[Path]:
        """Attach it and yield the folder that corresponds to `Workbench.path`."""

    def usage(self) -> Usage:
        """Return its space usage according to the backend."""

    def delete(self, *, wait: Literal["name", "space"] = "space") -> float:
        """Delete it, wait until its space is free or its name is gone, and return the seconds until then."""


class Workbench(Protocol):
    """A fresh file system on one stack, with the means to measure it. Each sample has its own."""

    path: Path
    """An empty folder, a volume that the backend can take a snapshot of."""
    stack: Stack
    parameters: Parameters
    folder: Path
    """A folder on another file system for small files (job files, logs): no load goes there."""

    def snapshot(self, held: AbstractContextManager[object] | None = None) -> Snapshot:
        """Take a snapshot. Raises MissingRequirementError for a stack without a backend (see `Stack.backend`).

        `held` blocks writers: it is entered when all is flushed and ready, and left when the storage's call is over.
        """

    def at_once(self) -> bool:
        """Whether a snapshot captures one instant; otherwise files are copied one by one, while nothing may write."""

    def inventory(self) -> tuple[Found, ...]:
        """Return the backend's inventory of the volume's pool, as each backup requests it. Raises
        MissingRequirementError as `snapshot` does."""

    def cloning(self) -> FolderCloning | None:
        """Return the means to clone a folder in `path`, found as ``snapmgr prepare`` does; it may also be a
        `snapmgr.api.Remounting`. None: only copies are possible, or this is a control."""

    def measured(self) -> AbstractContextManager[Measuring]:
        """Measure time, processors and bytes at the devices while the context lasts."""

    def fio(self, name: str, sections: Mapping[str, Section]) -> FioRun:
        """Run fio with a job file made of `sections` ("global" first) under `path`; None stands for an option without a
        value. The file is kept with the sample under `name`. Raises CommandError with fio's own words."""

    def run(self, argv: Sequence[str], *, timeout_s: float | None = None) -> Completed:
        """Run a program; it is recorded with the sample."""

    def cold(self) -> None:
        """Sync, and drop the kernel's caches and those of the client: the next read comes from the storage."""

    def quiet(self) -> float:
        """Wait until the storage's background work (btrfs's cleaner, discards, uploads) is done; return the seconds."""

    def layout(self, file: Path) -> FileLayout:
        """Return where the file's blocks are, after a flush."""

    def tell(self, text: str) -> None:
        """Report the current step, for the progress line."""


class FileLayout(Protocol):
    """Where a file's blocks are: see snapmgr.bench.measure.layout."""

    @property
    def extents(self) -> int:
        """Number of extents, counted as filefrag does: adjacent ones are merged."""

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
    label: str = ""
    """In few words, for the page's headings: "Random updates after a snapshot"; "": the name."""
    variants: tuple[str, ...] = ()
    """Variants for ``--variant``, the default first; empty if there is one only."""
    metrics: tuple[MetricInfo, ...]
    programs: tuple[str, ...] = ()
    """The programs that it runs: fio, sysbench."""
    sweeps_threads: bool = False
    """Whether `Parameters.extra["threads"]` are numbers of threads that it runs with, one after another."""

    def missing(self) -> tuple[Reason, ...]:
        """Return its missing requirements on this machine; empty if it can run."""
        return missing_programs(*self.programs)

    def suits(self, stack: Stack) -> str | None:  # noqa: ARG002 - others look at it
        """Return why it cannot run on a stack, as a sentence; None if it can."""
        return None

    def needs(self, parameters: Parameters) -> Needs:
        """Return the space and time for one sample."""

    def parameters(self, given: Parameters) -> Parameters:
        """Return `given` with `extra` completed for its profile. Raises ConfigError for invalid values."""

    def run(self, bench: Workbench) -> Outcome:
        """Measure once."""
