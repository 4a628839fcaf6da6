"""Measures InnoDB's mix of reads and writes on a file system as threads are added: the published fio model."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from snapmgr.bench.model import Check, Needs, Outcome, Scenario, metric
from snapmgr.contract.errors import ConfigError
from snapmgr.contract.units import format_size
from snapmgr.system.host import regression_side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from snapmgr.bench.fio import FioRun, Section
    from snapmgr.bench.model import MetricInfo, Parameters, ProfileName, Stack, Workbench

_MIB = 1 << 20
_PAGE = 16 << 10
_EXTEND_BYTES = 4 * _MIB
_EXTEND_EVERY_S = 0.25
_LOG_BYTES = 16 * _MIB
_TABLESPACES = 8
_WRITERS = 4
"""The number of InnoDB's page cleaners."""
_BATCH = 16
_SYNC_EVERY = 64
_ALL_THREADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_MOST_THREADS = 1024
_PROFILES: Mapping[ProfileName, Mapping[str, Any]] = {
    "smoke": {"size_bytes": 64 * _MIB, "threads": (1, 8), "point_s": 0.6},
    "quick": {"size_bytes": 512 * _MIB, "threads": (1, 16, 128, 512), "point_s": 2.0},
    "standard": {"size_bytes": 8192 * _MIB, "threads": _ALL_THREADS, "point_s": 10.0},
    "paper": {"size_bytes": 100_000_000_000, "threads": _ALL_THREADS, "point_s": 60.0},
}
_METHODS = {"direct": "O_DIRECT", "dsync": "O_DSYNC"}
_SIDES = {
    "before": "it is older than ext4's regression with O_DIRECT (Linux 4.9 to 5.5)",
    "within": "it is one of those with ext4's regression with O_DIRECT (Linux 4.9 to 5.5), unless the distribution has"
    " cured it: what ext4 loses against XFS here is expected",
    "after": "it is newer than ext4's regression with O_DIRECT (Linux 4.9 to 5.5) and cannot show it",
}

Sections = dict[str, dict[str, "str | int | None"]]


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """A figure by number of threads."""

    name: str
    title: str
    unit: str
    of: Callable[[FioRun], float | None]


def _pages(run: FioRun) -> float:
    return run.iops("read", "readers") + run.iops("write", "writers")


_CURVES = (
    _Curve(name="iops", title="Pages read and written", unit="1/s", of=_pages),
    _Curve(name="reads", title="Pages read", unit="1/s", of=lambda run: run.iops("read", "readers")),
    _Curve(name="writes", title="Pages written", unit="1/s", of=lambda run: run.iops("write", "writers")),
    _Curve(name="log_writes", title="Durable writes of the log", unit="1/s", of=lambda run: run.iops("write", "log")),
    _Curve(name="read_p50", title="A read, median", unit="s", of=lambda run: run.latency_s("read", 0.5, "readers")),
    _Curve(
        name="read_p99",
        title="A read, 99th percentile",
        unit="s",
        of=lambda run: run.latency_s("read", 0.99, "readers"),
    ),
    _Curve(
        name="read_p999",
        title="A read, 99.9th percentile",
        unit="s",
        of=lambda run: run.latency_s("read", 0.999, "readers"),
    ),
    _Curve(
        name="write_p99",
        title="A write, 99th percentile",
        unit="s",
        of=lambda run: run.latency_s("write", 0.99, "writers"),
    ),
)


def _metrics() -> Iterator[MetricInfo]:
    for method, words in _METHODS.items():
        direct = method == "direct"
        yield metric(
            f"iops_best_{method}",
            f"Pages per second, {words}, at the best number of threads",
            "1/s",
            "more",
            headline=direct,
        )
        for moment, at in (("least", "with the fewest threads"), ("most", "with the most threads")):
            yield metric(f"iops_{moment}_{method}", f"Pages per second, {words}, {at}", "1/s", "more")
            yield metric(f"read_p99_{moment}_{method}_s", f"A read, p99, {words}, {at}", "s", "less")
        for what, said in (("read", "a read"), ("write", "a write"), ("either", "either")):
            yield metric(f"windows_without_{what}_{method}", f"Seconds without {said}, {words}", "", "less")
        yield metric(f"written_per_byte_{method}", f"Device bytes written per byte, {words}", "", "less")
        yield metric(f"cpu_per_page_{method}_s", f"Processor time a page, {words}", "s", "less")
    yield metric("dsync_over_direct", "Pages per second: O_DSYNC ÷ O_DIRECT, most threads", "", "neither")


class InnodbIo(Scenario):
    """See `snapmgr.bench.model.Scenario`.

    All of this runs at the same time: a swept number of threads read pages of random tablespaces, one after another;
    four write pages asynchronously in batches, with an fsync after every 64; one extends a tablespace by
    posix_fallocate four times a second while another writes its first page and syncs it; one appends 4 KiB blocks to
    the log and makes each durable. The flush methods are InnoDB's: O_DIRECT opens tablespaces with that flag, and syncs
    the log by fsync; O_DSYNC opens the log with O_DSYNC, and leaves tablespaces to the page cache and fsync.
    """

    name = "innodb-io"
    title = "What does InnoDB's mix of synchronous reads and asynchronous writes get as threads are added?"
    label = "InnoDB's reads and writes"
    metrics = tuple(_metrics())
    programs = ("fio",)
    sweeps_threads = True

    def suits(self, stack: Stack) -> str | None:
        """Accept only controls: nothing here involves snapshots."""
        return None if stack.backend is None else "it compares file systems as such, without snapshots: ext4 and XFS"

    def parameters(self, given: Parameters) -> Parameters:
        """Complete them: {"threads", "point_s", "methods"}. Raises ConfigError for invalid values.

        O_DSYNC reads through the page cache; it is left out by default if the data fit into memory.
        """
        size_bytes, extra = given.over(_PROFILES[given.profile])
        fits = size_bytes <= given.memory_bytes
        extra.setdefault("methods", ("direct",) if fits else tuple(_METHODS))
        extra |= {"threads": tuple(extra["threads"]), "methods": tuple(extra["methods"])}
        if size_bytes < _TABLESPACES * _MIB:
            raise ConfigError(
                f"{format_size(size_bytes)} of data are too few for {_TABLESPACES} tablespaces",
                hint=f"use a --size of at least {format_size(_TABLESPACES * _MIB)}",
            )
        if not set(extra["methods"]) <= set(_METHODS) or not extra["methods"]:
            raise ConfigError(f"innodb-io has the methods {', '.join(_METHODS)}, not {extra['methods']}")
        wrong = [count for count in extra["threads"] if not 1 <= count <= _MOST_THREADS]
        if wrong or not extra["threads"]:
            raise ConfigError(f"innodb-io runs with 1 to {_MOST_THREADS} threads, not {wrong or 'none'}")
        if "dsync" in extra["methods"] and fits:
            raise ConfigError(
                f"O_DSYNC reads through the page cache, and {format_size(size_bytes)} of data fit into memory"
                f" ({format_size(given.memory_bytes)})",
                hint="use a --size larger than the memory, or limit the memory (--memory)",
            )
        return replace(given, variant="", size_bytes=size_bytes, extra=extra)

    def needs(self, parameters: Parameters) -> Needs:
        """Return the needs of a sample."""
        extra = parameters.extra
        points = len(extra["threads"]) * len(extra["methods"])
        # Starting hundreds of threads takes fio a second.
        seconds = parameters.size_bytes / 100e6 + points * (extra["point_s"] + 1) + 2
        space_bytes = int(parameters.size_bytes * 1.2) + _extended_bytes(extra["point_s"]) + _LOG_BYTES + 64 * _MIB
        return Needs(space_bytes=space_bytes, seconds=seconds)

    def run(self, bench: Workbench) -> Outcome:
        """Measure once."""
        found = Outcome()
        found.notes.append(regression_note(os.uname().release))
        bench.tell("innodb-io: fills the tablespaces")
        _fill(bench)
        bench.quiet()
        for method, words in _METHODS.items():
            if method in bench.parameters.extra["methods"]:
                _sweep(bench, found, method)
            else:
                found.notes.append(f"{words} was not measured: the data fit into memory, or it was left out")
        if most := found.metrics.get("iops_most_direct"):
            dsync = found.metrics.get("iops_most_dsync")
            found.metrics |= {} if dsync is None else {"dsync_over_direct": dsync / most}
        return found


def regression_note(kernel: str) -> str:
    """Return whether a kernel can show ext4's regression, in words."""
    return f"kernel {kernel}: {_SIDES[regression_side(kernel)]}"


def _names() -> str:
    return ":".join(f"tablespace{number}" for number in range(_TABLESPACES))


def _share(bench: Workbench) -> int:
    return bench.parameters.size_bytes // _TABLESPACES // _MIB * _MIB


def _fill(bench: Workbench) -> None:
    for number in range(_TABLESPACES):
        (bench.path / f"tablespace{number}").touch()
    whole: Section = {"rw": "write", "bs": "1M", "direct": 1, "end_fsync": 1, "fallocate": "none"}
    whole["randseed"] = bench.parameters.seed
    # The files are written one after another, so that each is in one piece.
    bench.fio(
        "fill",
        {
            "global": whole,
            "tablespaces": {
                "filename": _names(),
                "size": _share(bench) * _TABLESPACES,
                "file_service_type": "sequential",
            },
            "log": {"stonewall": None, "filename": "log", "size": _LOG_BYTES},
        },
    )


def _extended_bytes(point_s: float) -> int:
    return (int(point_s / _EXTEND_EVERY_S) + 4) * _EXTEND_BYTES


def _sections(bench: Workbench, method: str, threads: int) -> Sections:
    """Return the job file of one point."""
    parameters = bench.parameters
    direct, pause = int(method == "direct"), f"{round(_EXTEND_EVERY_S * 1000)}ms"
    tablespaces: Section = {
        "filename": _names(),
        "size": _share(bench) * _TABLESPACES,
        "file_service_type": "random",
        "bs": _PAGE,
        "direct": direct,
        # A page may be requested twice.
        "norandommap": 1,
    }
    log: Section = {"filename": "log", "size": _LOG_BYTES, "rw": "write", "bs": "4k"}
    log |= {"ioengine": "psync"} | ({"fsync": 1} if direct else {"sync": "dsync"})
    return {
        "global": {
            "thread": None,
            "time_based": None,
            "runtime": f"{round(parameters.extra['point_s'] * 1000)}ms",
            "randseed": parameters.seed + threads,
            "fallocate": "none",
        },
        "readers": {"rw": "randread", "ioengine": "psync", "numjobs": threads, **tablespaces},
        "writers": {
            "rw": "randwrite",
            "ioengine": "libaio",
            "iodepth": _BATCH,
            "iodepth_batch_submit": _BATCH,
            "fsync": _SYNC_EVERY,
            "numjobs": _WRITERS,
            **tablespaces,
        },
        "log": log,
        # fio's engine for fallocate cannot sync; the write of the first page does, as in InnoDB.
        "extend": {
            "filename": "extended",
            "rw": "write",
            "ioengine": "falloc",
            "bs": _EXTEND_BYTES,
            "size": _extended_bytes(parameters.extra["point_s"]),
            "thinktime": pause,
            "thinktime_blocks": 1,
        },
        "header": {
            "filename": "extended",
            "rw": "write",
            "ioengine": "psync",
            "bs": _PAGE,
            "size": _PAGE,
            "fsync": 1,
            "thinktime": pause,
            "thinktime_blocks": 1,
        },
    }


def _sweep(bench: Workbench, found: Outcome, method: str) -> None:
    """Run the mix with each number of threads."""
    threads = bench.parameters.extra["threads"]
    curves: dict[str, list[float]] = {curve.name: [] for curve in _CURVES}
    asked_bytes = written_bytes = pages = 0
    cpu_s = 0.0
    without = dict.fromkeys(("read", "write", "either"), 0)
    for count in threads:
        bench.tell(f"innodb-io: {_METHODS[method]}, {count} threads")
        # An empty file is extended in each point.
        (bench.path / "extended").unlink(missing_ok=True)
        bench.cold()
        with bench.measured() as part:
            run = bench.fio(f"{method}-{count}", _sections(bench, method, count))
        _check(bench, found, run, f"{_METHODS[method]}, {count} threads")
        for curve in _CURVES:
            # Without any operation the latency is at least the whole time.
            value = curve.of(run)
            curves[curve.name].append(run.seconds() if value is None else value)
        pages += run.ios("read", "readers") + run.ios("write", "writers")
        asked_bytes += run.moved_bytes("write") - run.moved_bytes("write", "extend")
        written_bytes += part.spent.written_bytes
        cpu_s += part.spent.cpu_seconds
        without["read"] += run.windows["readers"].without_read
        without["write"] += run.windows["writers"].without_write
        windows = zip(run.windows["readers"].read, run.windows["writers"].write, strict=False)
        without["either"] += sum(1 for both in windows if not any(both))
    found.metrics |= {
        f"iops_best_{method}": max(curves["iops"]),
        f"iops_least_{method}": curves["iops"][0],
        f"iops_most_{method}": curves["iops"][-1],
        f"read_p99_least_{method}_s": curves["read_p99"][0],
        f"read_p99_most_{method}_s": curves["read_p99"][-1],
    }
    if pages:
        found.metrics[f"cpu_per_page_{method}_s"] = cpu_s / pages
    if asked_bytes and written_bytes:
        found.metrics[f"written_per_byte_{method}"] = written_bytes / asked_bytes
    if bench.parameters.extra["point_s"] >= 1:
        found.metrics |= {f"windows_without_{what}_{method}": float(number) for what, number in without.items()}
    for curve in _CURVES:
        found.add_curve(
            f"{curve.name}_by_threads_{method}",
            curves[curve.name],
            threads,
            title=f"{curve.title}, {_METHODS[method]}",
            x_title="threads",
            unit=curve.unit,
        )


def _check(bench: Workbench, found: Outcome, run: FioRun, point: str) -> None:
    """Check that each part of the mix took place: reads alone would give too good a curve."""
    done = {
        "pages read": run.ios("read", "readers"),
        "pages written": run.ios("write", "writers"),
        "writes of the log": run.ios("write", "log"),
        "extensions": run.ios("write", "extend"),
        "first pages": run.ios("write", "header"),
    }
    grown = (bench.path / "extended").stat().st_size
    wanted = min(done["extensions"] * _EXTEND_BYTES, _extended_bytes(bench.parameters.extra["point_s"]))
    detail = ", ".join(f"{count} {what}" for what, count in done.items())
    found.checks.append(
        Check(
            name=f"all of the mix took place: {point}",
            ok=all(done.values()) and grown == wanted,
            detail=f"{detail}; extended to {grown} of {wanted} bytes",
        )
    )


scenario = InnodbIo()
