"""Runs one pass of writes or reads over a file and returns its figures."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from snapmgr.bench.fio import WINDOW_S, add_windows
from snapmgr.bench.model import metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from snapmgr.bench.fio import FioRun, Section, Windows
    from snapmgr.bench.model import MetricInfo, Outcome, Spent, Workbench

# As InnoDB's page cleaner: asynchronous writes are submitted in batches, and the file is synced after each.
BATCH = 64
BATCHED: Section = {
    "ioengine": "libaio",
    "iodepth": BATCH,
    "iodepth_batch_submit": BATCH,
    "iodepth_batch_complete_min": BATCH,
    "fsync": BATCH,
}
# A curve of two points says nothing.
_LEAST_WINDOWS = 3
_LATENCIES = {"p50": "p50", "p99": "p99", "p99.9": "p999", "max": "max"}


@dataclass(frozen=True, kw_only=True)
class WritePass:
    """The cost of a pass of writes."""

    seconds: float
    """Seconds until the last write had returned, without the final sync."""
    sync_s: float
    """Duration of the final sync."""
    asked_bytes: int
    """Bytes written by the load; `spent` counts those written to the device."""
    spent: Spent
    """Until all of the file system was on the device, metadata included."""
    latencies_s: Mapping[str, float] = field(default_factory=dict)
    """{"p50", "p99", "p99.9", "max"} of a write; empty if not measured."""
    sync_latencies_s: Mapping[str, float] = field(default_factory=dict)
    """The same of the syncs within the load."""
    windows: Windows | None = None

    @property
    def durable_s(self) -> float:
        """Seconds until the written data would have survived a power cut."""
        return self.seconds + self.sync_s


def settle(bench: Workbench) -> float:
    """Wait for background work and drop caches, so that all passes begin alike; return the seconds waited."""
    seconds = bench.quiet()
    bench.cold()
    return seconds


def write_pass(bench: Workbench, file: Path, load: Callable[[], FioRun]) -> WritePass:
    """Run a load of fio that writes to one file, and sync."""
    runs: list[FioRun] = []

    def run() -> tuple[float, int]:
        runs.append(load())
        return runs[0].seconds(), runs[0].moved_bytes("write")

    timed = timed_pass(bench, file, run)
    (found,) = runs
    return replace(
        timed,
        latencies_s=found.latencies_s("write"),
        sync_latencies_s=found.latencies_s("sync"),
        windows=add_windows(list(found.windows.values())),
    )


def timed_pass(bench: Workbench, file: Path, load: Callable[[], tuple[float, int]]) -> WritePass:
    """Run a load that returns its duration (seconds) and volume (bytes), and sync."""
    with bench.measured() as part:
        seconds, asked_bytes = load()
        start = time.monotonic()
        with open(file, "rb") as written:
            os.fsync(written.fileno())
        sync_s = time.monotonic() - start
        # Later writes of the file system itself (btrfs: its trees) are counted but not timed.
        bench.run(("sync", "--file-system", str(file)))
    return WritePass(seconds=seconds, sync_s=sync_s, asked_bytes=asked_bytes, spent=part.spent)


def write_infos(name: str, words: str, *, headline: bool = False) -> Iterator[MetricInfo]:
    """Yield what `write_figures` makes, for a pass called `name` ("update_first"): `words` say which it is."""
    yield metric(f"{name}_s", f"{words}, until durable", "s", "less", headline=headline)
    yield metric(f"{name}_unsynced_s", f"{words}, without the last sync", "s", "less")
    for quantile, key in _LATENCIES.items():
        yield metric(f"{name}_{key}_s", f"{words}: a write, {quantile}", "s", "less")
    yield metric(f"{name}_sync_p99_s", f"{words}: an fsync, p99", "s", "less")
    yield metric(f"{name}_windows_without_write", f"{words}: seconds without a write", "", "less")
    yield metric(f"{name}_written_per_byte", f"{words}: device bytes written per byte", "", "less")
    yield metric(f"{name}_read_per_byte", f"{words}: device bytes read per byte", "", "less")
    yield metric(f"{name}_cpu_s", f"{words}: processor time", "s", "less")


def write_figures(name: str, done: WritePass) -> dict[str, float]:
    """Return the figures of a pass by the names of `write_infos`; unmeasured ones are absent."""
    found = {
        f"{name}_s": done.durable_s,
        f"{name}_unsynced_s": done.seconds,
        f"{name}_cpu_s": done.spent.cpu_seconds,
    }
    found |= {f"{name}_{_LATENCIES[quantile]}_s": seconds for quantile, seconds in done.latencies_s.items()}
    if "p99" in done.sync_latencies_s:
        found[f"{name}_sync_p99_s"] = done.sync_latencies_s["p99"]
    if done.windows is not None and done.windows.write:
        found[f"{name}_windows_without_write"] = float(done.windows.without_write)
    # 0: the storage has no own device here, or has deferred all writes.
    if done.asked_bytes and done.spent.written_bytes:
        found[f"{name}_written_per_byte"] = done.spent.written_bytes / done.asked_bytes
        found[f"{name}_read_per_byte"] = done.spent.read_bytes / done.asked_bytes
    return found


def add_write_curve(outcome: Outcome, name: str, words: str, done: WritePass) -> None:
    """Add the writes of a pass in each second, if it lasted some."""
    if done.windows is not None and len(writes := done.windows.write) >= _LEAST_WINDOWS:
        ends_s = [WINDOW_S * number for number in range(1, len(writes) + 1)]
        outcome.add_curve(
            f"{name}_each_s", writes, ends_s, title=f"{words}: written", x_title="time", x_unit="s", unit="B/s"
        )


def linear_read(bench: Workbench, name: str, file: Path, *, direct: bool) -> float:
    """Read a file from beginning to end with cold caches, 1 MiB per call; return the seconds."""
    bench.cold()
    job: Section = {
        "rw": "read",
        "filename": file.name,
        "bs": "1M",
        "ioengine": "psync",
        "direct": int(direct),
    }
    run = bench.fio(name, {"global": {"size": file.stat().st_size}, "read": job})
    return run.seconds()
