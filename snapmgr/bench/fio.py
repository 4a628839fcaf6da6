"""Runs fio and reads its results: rates, latencies, and the seconds without any completed operation.

The job file is kept and contains nothing private to this process: ``cd FOLDER && fio NAME.fio`` repeats a run by hand
on the `directory` that it names. Stalls come from fio's own bandwidth log, with one average a second: its helper thread
wakes up once a second for that. ``--status-interval`` would print the whole json+ document, bins included, every time.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from snapmgr.contract.errors import CommandError, ConfigError
from snapmgr.system.command import find_program

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from snapmgr.contract.backend import Runner

Direction = Literal["read", "write", "sync"]
Section = dict[str, str | int | None]
"""Options of a part of a job file; None stands for an option without a value."""
WINDOW_S = 1.0
PERCENTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}

_WINDOW_MS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# fio prints the result of a division by zero as printf does; JSON does not allow such a number.
_NO_NUMBER = re.compile(r"(:\s*)-?(?:nan|inf)\b")
_DIED = re.compile(r"fio: pid=\d+, got signal=\d+")
_LOGGED = {"0": "read", "1": "write"}
_GLOBAL: Section = {
    # Reports of hundreds of threads, bins included, would be many megabytes: one report per section is enough.
    "group_reporting": 1,
    # A storage that compresses or deduplicates must gain nothing from it.
    "refill_buffers": 1,
    "randseed": 1,
    # Otherwise random places do not depend on the seed (fio 3.33, td_fill_rand_seeds); with it they repeat too.
    "randrepeat": 0,
    # Counted from the start of a request: a synchronous file system does all the work in the submission.
    "lat_percentiles": 1,
    "clat_percentiles": 0,
    "log_avg_msec": _WINDOW_MS,
    "bwavgtime": _WINDOW_MS,
    "per_job_logs": 0,
}


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The throughput of a section in each whole second of its run, in bytes per second."""

    read: tuple[float, ...]
    write: tuple[float, ...]

    @property
    def without_read(self) -> int:
        """Windows in which no read was finished."""
        return self.read.count(0)

    @property
    def without_write(self) -> int:
        """Windows in which no write was finished."""
        return self.write.count(0)

    @property
    def without_either(self) -> int:
        """Windows in which nothing was finished."""
        return sum(1 for both in zip(self.read, self.write, strict=True) if not any(both))


@dataclass(frozen=True, kw_only=True)
class FioRun:
    """One finished run of fio. `section` names a section of the job file; None stands for all of them."""

    document: Mapping[str, Any]
    """Its json+ document."""
    job_file: str
    """Text of the job file."""
    windows: Mapping[str, Windows]
    """By section."""

    def ios(self, direction: Direction, section: str | None = None) -> int:
        """Return how many reads, writes or syncs were finished."""
        return sum(int(report[direction]["total_ios"]) for report in self._reports(section))

    def moved_bytes(self, direction: Literal["read", "write"], section: str | None = None) -> int:
        """Return the number of bytes that were requested and finished."""
        return sum(int(report[direction]["io_bytes"]) for report in self._reports(section))

    def seconds(self, section: str | None = None) -> float:
        """Return how long the longest job ran, without fio's own start and end; fio counts milliseconds."""
        return _runtime_s(self._reports(section))

    def iops(self, direction: Direction, section: str | None = None) -> float:
        """Return finished operations per second of the longest job; 0 for a run of less than a millisecond."""
        seconds = self.seconds(section)
        return self.ios(direction, section) / seconds if seconds else 0.0

    def latency_s(self, direction: Direction, quantile: float, section: str | None = None) -> float | None:
        """Return a quantile (0 … 1) of the operations' latency; None without operations.

        The latency is the time from start to completion, including time waiting in a batch; for a sync it is the
        call's duration. It comes from fio's bins, which are 1.6 % wide at most; the quantile 1 is exact.
        """
        found = [_latencies(report, direction) for report in self._reports(section)]
        if quantile >= 1:
            return max((one["max"] for one in found if one.get("N")), default=0) / 1e9 or None
        bins: Counter[int] = Counter()
        for one in found:
            bins.update({int(nanoseconds): count for nanoseconds, count in one.get("bins", {}).items()})
        wanted, reached = quantile * bins.total(), 0
        for nanoseconds in sorted(bins):
            reached += bins[nanoseconds]
            if reached >= wanted:
                return nanoseconds / 1e9
        return None

    def latencies_s(self, direction: Direction, section: str | None = None) -> dict[str, float]:
        """Return {"p50", "p99", "p99.9", "max"}; empty without operations."""
        longest = self.latency_s(direction, 1.0, section)
        if longest is None:
            return {}
        # A bin's value is its middle, which may exceed the longest latency.
        found = {name: self.latency_s(direction, quantile, section) for name, quantile in PERCENTILES.items()}
        return {name: min(value or longest, longest) for name, value in found.items()} | {"max": longest}

    def _reports(self, section: str | None) -> list[Mapping[str, Any]]:
        reports = [one for one in self.document["jobs"] if section in {None, one["jobname"]}]
        if not reports:
            raise KeyError(f"no section {section} in this run of fio")
        return reports


def _latencies(report: Mapping[str, Any], direction: Direction) -> Mapping[str, Any]:
    # A job may have requested completion latencies only.
    found: list[Mapping[str, Any]] = [report[direction].get(kind, {}) for kind in ("lat_ns", "clat_ns")]
    return next((one for one in found if "bins" in one), {})


def run_fio(
    name: str,
    sections: Mapping[str, Section],
    *,
    directory: Path,
    keep: Path,
    runner: Runner,
    prefix: Sequence[str] = (),
) -> FioRun:
    """Run fio with a job file made of `sections`, and return its results.

    Args:
        name: name of the run, unique in `keep`; its files are ``NAME.fio``, ``NAME.json``, ``NAME-SECTION_bw.log``.
        sections: options by section, "global" first; None stands for an option without a value. The defaults are
            incompressible data, a fixed `randseed`, and one report for each section.
        directory: folder for the files of the load; written into the job file.
        keep: an existing folder for job file, document and logs; no load goes there.
        runner: runs fio, without a time limit: the job alone decides how long it takes.
        prefix: command line that starts fio: ("setpriv", …, "--").

    Raises MissingRequirementError without fio, CommandError with its own words if it fails or prints no document,
    ConfigError for names or values that a job file cannot hold.
    """
    find_program("fio")
    job_file = write_job(name, sections, directory=directory)
    (keep / f"{name}.fio").write_text(job_file, encoding="utf-8")
    named = [section for section in sections if section != "global"]
    logs = {section: keep / f"{name}-{section}_bw.log" for section in named}
    for log in logs.values():
        # fio appends to existing logs.
        log.unlink(missing_ok=True)
    argv = [*prefix, "env", f"--chdir={keep}", "fio", "--output-format=json+", "--eta=never", f"{name}.fio"]
    try:
        done = runner.run(argv, timeout_s=None)
    except CommandError as error:
        raise _failure(error.message) from None
    document = parse_document(done.stdout)
    (keep / f"{name}.json").write_text(done.stdout, encoding="utf-8")
    if failed := [report["jobname"] for report in document["jobs"] if report.get("error")]:
        raise CommandError(
            f"fio {name}.fio failed in {', '.join(failed)}: {(done.stderr or done.stdout)[:2000].strip()}"
        )
    if (died := _DIED.search(done.stderr)) is not None:
        # Neither the exit status nor the document shows the failure of one of a job's processes.
        raise CommandError(
            f"the result of fio {name}.fio is incomplete: {died[0]}", hint="check whether memory ran out: dmesg"
        )
    windows = {}
    for section, log in logs.items():
        runtime_s = _runtime_s(report for report in document["jobs"] if report["jobname"] == section)
        windows[section] = read_windows(log.read_text() if log.exists() else "", runtime_s)
    return FioRun(document=document, job_file=job_file, windows=windows)


def _failure(message: str) -> CommandError:
    full = os.strerror(errno.ENOSPC) in message
    return CommandError(message, hint="use less data (--size), or a larger device" if full else None)


def write_job(name: str, sections: Mapping[str, Section], *, directory: Path) -> str:
    """Return the text of a job file. Raises ConfigError for values that it cannot hold."""
    # fio treats a colon as the end of one of several folders, and "${" as a variable (fio(1)).
    folder = str(directory).replace(":", r"\:")
    whole: dict[str, Section] = {"global": {"directory": folder, **_GLOBAL, **sections.get("global", {})}}
    for section, options in sections.items():
        if section != "global":
            # Without its own group, its report would be merged with its neighbours'.
            whole[section] = {"new_group": None, "write_bw_log": f"{name}-{section}", **options}
    lines: list[str] = []
    for section, options in whole.items():
        if not _NAME.fullmatch(section) or not _NAME.fullmatch(name):
            raise ConfigError(f"{section if _NAME.fullmatch(name) else name} cannot name a part of a job of fio")
        lines.append(f"[{section}]")
        for option, value in options.items():
            text = option if value is None else f"{option}={value}"
            if "\n" in text or "${" in text:
                raise ConfigError(f"a job file of fio cannot hold {text!r}")
            lines.append(text)
        lines.append("")
    return "\n".join(lines)


def parse_document(printed: str) -> dict[str, Any]:
    """Return the json+ document in fio's output, without any notes before or after it.

    Raises CommandError that quotes the output if it contains no document.
    """
    for text in (printed, _NO_NUMBER.sub(r"\1null", printed)):
        for start in re.finditer(r"^\{", text, re.MULTILINE):
            try:
                document, _ = json.JSONDecoder().raw_decode(text, start.start())
            except ValueError:
                continue
            if isinstance(document.get("jobs"), list) and document["jobs"]:
                return dict(document)
    raise CommandError(
        f"fio printed no json+ document: {printed.strip()[:500] or 'nothing'}", hint="see what `fio --version` says"
    )


def read_windows(log: str, runtime_s: float) -> Windows:
    """Given a bandwidth log and the duration of the job, return its throughput in each whole second.

    A line is "end of the window in ms, KiB/s, direction, …" for one job and direction; an idle window has no line.
    """
    count = math.floor(runtime_s / WINDOW_S)
    moved = {"read": [0.0] * count, "write": [0.0] * count}
    for line in log.splitlines():
        end_ms, kib_per_s, direction, *_ = (field.strip() for field in line.split(","))
        number = max(round(int(end_ms) / _WINDOW_MS) - 1, 0)
        if direction in _LOGGED and number < count:
            moved[_LOGGED[direction]][number] += int(kib_per_s) * 1024
    return Windows(read=tuple(moved["read"]), write=tuple(moved["write"]))


def add_windows(windows: Sequence[Windows]) -> Windows:
    """Add up the windows of sections that ran at the same time; the result is as long as the longest."""
    count = max((len(one.read) for one in windows), default=0)
    sums = {
        way: tuple(sum(one[at] for one in rows if at < len(one)) for at in range(count))
        for way, rows in (("read", [one.read for one in windows]), ("write", [one.write for one in windows]))
    }
    return Windows(read=sums["read"], write=sums["write"])


def _runtime_s(reports: Iterable[Mapping[str, Any]]) -> float:
    return float(max((report[way]["runtime"] for report in reports for way in ("read", "write")), default=0)) / 1000
