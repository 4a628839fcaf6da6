"""Formats the result of a tuning: the job's table, the command line, the summary, the JSON document."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from snapmgr.contract.units import format_duration, format_size
from snapmgr.physical.tuning.rungs import RungSettings, changes
from snapmgr.physical.tuning.tune import tables_compared

if TYPE_CHECKING:
    from snapmgr.physical.tuning.tune import Measured, Tuning

# The published ladder: 11 GB; its last rung also has another disk for the cache.
PUBLISHED_BYTES = 11 * 10**9
PUBLISHED = (
    ("default, cache 1 GB", 62.0),
    ("+ use-memory", 33.0),
    ("+ 16 io threads", 23.0),
    ("+ writeback", 11.8),
    ("+ 64 io threads", 11.2),
    ("+ cache 10 GB, on a faster disk", 6.9),
)

_MIB = 1 << 20


def job_table(job: str, settings: RungSettings) -> str:
    """Return the settings as the table of a job in the configuration."""
    lines = [f"[job.{_key(job)}.prepare]", 'strategy = "storage"']
    if settings.use_memory_bytes is not None:
        lines.append(f"use_memory = {_quoted(exact_size(settings.use_memory_bytes))}")
    if settings.tool_options():
        lines.append(f"tool_options = {_listed(settings.tool_options())}")
    if settings.writeback:
        lines.append("writeback = true")
    if settings.upload_delay_s:
        lines.append(f"upload_delay = {_quoted(_exact_duration(settings.upload_delay_s))}")
    if settings.cache_bytes is not None:
        lines.append(f"cache_size = {_quoted(exact_size(settings.cache_bytes))}")
    if settings.cache_dir is not None:
        lines.append(f"cache_dir = {_quoted(settings.cache_dir)}")
    if settings.warm_up:
        lines.append("warm_up = true")
    extra = settings.client_options().extra
    if extra:
        lines.append(f"mount_options = {_listed(extra)}")
    return "\n".join(lines)


def arguments(settings: RungSettings) -> list[str]:
    """Return the settings as options of ``snapmgr prepare``."""
    found = ["--strategy", "storage"]
    if settings.use_memory_bytes is not None:
        found += ["--use-memory", exact_size(settings.use_memory_bytes)]
    for option in settings.tool_options():
        found += ["--tool-option", option]
    for option in _mount_options(settings):
        found += ["--mount-option", option]
    return found


def command_line(source: str, options: list[str]) -> str:
    """Return the command that prepares with these options, for a shell."""
    return shlex.join(["snapmgr", "prepare", source, *options])


def scratch_is_quickest(tuning: Tuning) -> bool:
    """Whether the way over scratch took less time than the best rung."""
    now, run = tuning.standing, tuning.scratch
    return now is not None and run is not None and run.failure is None and run.seconds < now.best_s


def quickest_arguments(tuning: Tuning, best: RungSettings) -> list[str]:
    """Return the options of ``snapmgr prepare`` for the quickest measured way: over scratch, or the best rung."""
    if not scratch_is_quickest(tuning):
        return arguments(best)
    memory = tuning.start.use_memory_bytes
    return ["--strategy", "scratch", *(["--use-memory", exact_size(memory)] if memory is not None else [])]


def quickest_table(tuning: Tuning, job: str, best: RungSettings) -> str:
    """Return the table of a job for the quickest measured way."""
    if not scratch_is_quickest(tuning):
        return job_table(job, best)
    only_memory = RungSettings(use_memory_bytes=tuning.start.use_memory_bytes)
    return job_table(job, only_memory).replace('strategy = "storage"', 'strategy = "scratch"')


def _mount_options(settings: RungSettings) -> list[str]:
    found = ["writeback"] if settings.writeback else []
    if settings.upload_delay_s:
        found.append(f"upload-delay={_exact_duration(settings.upload_delay_s)}")
    if settings.cache_bytes is not None:
        found.append(f"cache-size={exact_size(settings.cache_bytes)}")
    if settings.cache_dir is not None:
        found.append(f"cache-dir={settings.cache_dir}")
    if settings.warm_up:
        found.append("warm-up")
    words = list(settings.client_options().extra)
    while words:
        name = words.pop(0).lstrip("-")
        value = words.pop(0) if words and not words[0].startswith("-") else None
        found.append(name if value is None else f"{name}={value}")
    return found


def exact_size(size_bytes: int) -> str:
    """Return a size as text that parses to exactly the same number."""
    for unit, letter in ((1 << 30, "G"), (_MIB, "M"), (1 << 10, "K")):
        if size_bytes % unit == 0 and size_bytes:
            return f"{size_bytes // unit}{letter}"
    return str(size_bytes)


def _exact_duration(seconds: float) -> str:
    return f"{int(seconds) // 3600}h" if seconds % 3600 == 0 else f"{int(seconds)}s"


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if plain else _quoted(name)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _listed(texts: tuple[str, ...]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


def _runs(tuning: Tuning) -> str:
    count = len(tuning.measured)
    return f"{count} run{'' if count == 1 else 's'}"


def summary(tuning: Tuning) -> list[str]:
    """Return the result in sentences."""
    now, first = tuning.standing, tuning.first_s
    if now is None or first is None:
        return ["nothing was measured"]
    lines = []
    times = f"{format_duration(first)} with {tuning.start}, {format_duration(now.best_s)} with {now.best}"
    if now.best == tuning.start:
        lines.append(f"no settings are faster than {tuning.start} ({format_duration(first)})")
    else:
        lines.append(f"{tuning.speed_up or 0:.1f} times faster: {times}")
    if now.noise is not None:
        lines.append(f"repeats of a rung differed by {now.noise:.0%} (standard deviation): less gain counts as none")
    if tuning.stop is not None:
        lines.append(f"{_runs(tuning)} in {format_duration(tuning.spent_s)}; {tuning.stop.why}")
    else:
        lines.append(f"{_runs(tuning)} in {format_duration(tuning.spent_s)}; then it was ended")
    if now.best != tuning.start:
        lines.append(tables_compared(tuning))
    if tuning.scratch is not None:
        lines.append(_over_scratch(tuning, now.best_s))
    return lines


def _over_scratch(tuning: Tuning, best_s: float) -> str:
    run = tuning.scratch
    if run is None or run.failure is not None:
        return f"over local scratch it could not be measured: {run.failure if run else ''}"
    steps = f"copy {format_duration(run.copy_s)}, prepare {format_duration(run.tool_s)}"
    better = "faster than any settings in the storage" if run.seconds < best_s else "slower"
    return f"over local scratch it takes {format_duration(run.seconds)} ({steps}): {better}"


def document(tuning: Tuning) -> dict[str, Any]:
    """Return everything as a part of the JSON document."""
    now = tuning.standing
    return {
        "name": tuning.name,
        "tool": tuning.tool,
        "data_bytes": tuning.data_bytes,
        "redo_bytes": tuning.redo_bytes,
        "time_s": tuning.time_s,
        "spent_s": tuning.spent_s,
        "finished": tuning.stop is not None,
        "exhausted": tuning.stop.exhausted if tuning.stop is not None else False,
        "why_ended": tuning.stop.why if tuning.stop is not None else None,
        "noise": now.noise if now is not None else None,
        "first_s": tuning.first_s,
        "best_s": now.best_s if now is not None else None,
        "speed_up": tuning.speed_up,
        "best": asdict(now.best) if now is not None else None,
        "arguments": arguments(now.best) if now is not None else None,
        "quickest": quickest_arguments(tuning, now.best) if now is not None else None,
        "tables": tables_compared(tuning),
        "scratch": asdict(tuning.scratch) | {"seconds": tuning.scratch.seconds} if tuning.scratch else None,
        "runs": [_run(one) for one in tuning.measured],
        "published": [{"rung": rung, "seconds": seconds} for rung, seconds in PUBLISHED],
    }


def _run(one: Measured) -> dict[str, Any]:
    return {
        "settings": asdict(one.run.settings),
        "words": str(one.run.settings),
        "why": one.why,
        "temperature": one.temperature,
        "seconds": one.run.seconds,
        "cut": one.run.cut,
        "warm_up_s": one.warm_up_s,
        "tool_s": one.tool_s,
        "settle_s": one.settle_s,
        "bottleneck": one.run.bottleneck,
        "verdict": one.verdict,
        "advice": one.advice,
        "failure": one.failure,
        "counters": dataclasses.asdict(one.counted) if one.counted is not None else None,
        "samples": [asdict(sample) for sample in one.samples],
    }


def lines(tuning: Tuning) -> list[list[str]]:
    """Return the rungs as rows of a table: time, changes, verdict."""
    rows = []
    best: RungSettings | None = None
    steps = set(tuning.standing.steps) if tuning.standing is not None else set()
    for one in tuning.measured:
        rung = str(one.run.settings) if best is None else changes(best, one.run.settings)
        time = format_duration(one.run.seconds)
        word = "failed" if one.failure else f"> {time}" if one.run.cut else time
        rows.append([word, one.temperature, rung, one.failure or one.verdict])
        if one.temperature == "cold" and one.run.settings in steps:
            best = one.run.settings
    return rows


def size_words(tuning: Tuning) -> str:
    """Return the amount of data to prepare, in words."""
    redo = f", {format_size(tuning.redo_bytes)} of redo log" if tuning.redo_bytes else ""
    return f"{format_size(tuning.data_bytes)}{redo}"
