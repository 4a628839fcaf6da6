"""Names the bottleneck of a program on a JuiceFS mount and a remedy: a pure function from facts to a verdict.

The thresholds come from measurements: mariadb-backup's prepare of 2.1 GB on an object store with 15 and 25 ms latency.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Literal

from snapmgr.contract.units import format_duration, format_size
from snapmgr.trace.remedy import remedy, too_little_room

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from snapmgr.trace.counters import Counted
    from snapmgr.trace.remedy import Action

Bottleneck = Literal["fsync", "upload", "download", "read", "write", "cpu", "compaction", "program", "unknown"]
FSYNC_SHARE = 0.2
MANY_FSYNCS = 20
"""With enough memory for all changed pages the measured prepare needed 15, else 91."""
HELD_SHARE = 0.5
MISS_SHARE = 0.2
MANY_REQUESTS = 100
SMALL_PUT_BYTES = 1 << 20
"""A quarter of JuiceFS's block: below it most requests transfer single pages."""
CPU_SHARE = 0.7
COMPACTION_FACTOR = 5
UNREAD_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class TraceFacts:
    """Measurements over a span of time; None or 0 if unknown."""

    wall_s: float
    read_s: float = 0.0
    """Seconds in which a read was running; see `summed`. Likewise for writes and fsyncs."""
    write_s: float = 0.0
    fsync_s: float = 0.0
    fsyncs: int = 0
    counted: Counted | None = None
    """Growth of the mount's counters, if known."""
    writeback: bool | None = None
    """Whether the mount has `--writeback`; None: unknown."""
    writeback_allowed: bool = True
    """False if the mount's options cannot be changed."""
    prepares: bool = False
    """Whether the program prepares a backup."""
    folder: str | None = None
    """The folder that the program works on."""
    data_bytes: int | None = None
    """Size of the folder that the program works on."""
    scratch_free_bytes: int | None = None
    """Free space on a local disk."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Operations that the mount counted but the log does not have, by kind.

    With any of these, no verdict is possible.
    """
    summed: bool = False
    """Whether the seconds of parallel operations are added up: then they can be more than `wall_s`."""
    unchecked: bool = False
    """Whether nothing shows that the log is complete."""
    silent_s: float = 0.0
    """Seconds in which lines may be missing, or the program was idle: of an unchecked log."""
    unread_share: float = 0.0
    """Lines of an unchecked log that could not be parsed, as a share of its operations."""
    untimed: int = 0
    """Operations without a time: nothing is known about shares of time."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One bottleneck and its remedy."""

    bottleneck: Bottleneck
    why: str
    """One sentence, with the numbers."""
    action: Action
    advice: str
    """One sentence: the next thing to try."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All findings, the first thing to try first; never empty."""

    findings: tuple[Finding, ...]
    condition: str | None = None
    """What nothing shows, but must be true for the findings to be true."""

    @property
    def bottleneck(self) -> Bottleneck:
        """The first finding's."""
        return self.findings[0].bottleneck

    @property
    def why(self) -> str:
        """The first finding's."""
        return self.findings[0].why

    @property
    def advice(self) -> str:
        """The first finding's."""
        return self.findings[0].advice


def facts_from_counters(
    counted: Counted,
    wall_s: float,
    *,
    writeback: bool | None = None,
    writeback_allowed: bool = True,
    folder: str | None = None,
    data_bytes: int | None = None,
    scratch_free_bytes: int | None = None,
) -> TraceFacts:
    """Given the growth of a mount's counters over `wall_s`, the time of a prepare, return the facts without a log."""
    return TraceFacts(
        wall_s=wall_s,
        read_s=counted.operation_s.get("read", 0.0),
        write_s=counted.operation_s.get("write", 0.0),
        fsync_s=counted.operation_s.get("fsync", 0.0),
        fsyncs=counted.operations.get("fsync", 0),
        counted=counted,
        summed=True,
        prepares=True,
        folder=folder,
        writeback=writeback,
        writeback_allowed=writeback_allowed,
        data_bytes=data_bytes,
        scratch_free_bytes=scratch_free_bytes,
    )


def judge(facts: TraceFacts) -> Verdict:
    """Return the bottlenecks and their remedies, the most promising first."""
    if any(facts.missing.values()):
        return Verdict(findings=(_incomplete(facts),))
    if facts.wall_s <= 0:
        nothing = "nothing was recorded, so there is no verdict"
        return Verdict(findings=(Finding(bottleneck="unknown", why=nothing, action="record", advice=_RECORD_LONGER),))
    if facts.unread_share > UNREAD_SHARE or facts.untimed:
        return Verdict(findings=(_unreadable(facts),))
    found = _complete(facts)
    fills = [_complete(fill) for fill in _fills(facts)]
    if any((fill[0].bottleneck, fill[0].action) != (found[0].bottleneck, found[0].action) for fill in fills):
        return Verdict(findings=(_silent(facts, found[0]),))
    return Verdict(findings=found, condition=_CONDITION if facts.unchecked else None)


def _complete(facts: TraceFacts) -> tuple[Finding, ...]:
    """Return the findings for a log that has all lines."""
    found = tuple(_findings(facts)) or (_elsewhere(facts),)
    first = found[0]
    if facts.prepares and first.action not in {"scratch", "record", "none"} and _has_room(facts):
        # In the storage it takes several times as long, whatever the settings are.
        advice = f"{_advice('scratch', facts)}; or stay on the mount: {first.advice}"
        return (replace(first, action="scratch", advice=advice), *found[1:])
    return found


def _fills(facts: TraceFacts) -> Iterator[TraceFacts]:
    """Yield the extremes of what may have happened while the log is silent: each kind may have run all the time."""
    if not facts.silent_s:
        return
    for read, write, fsync, fsyncs in product((0, 1), (0, 1), (0, 1), (0, MANY_FSYNCS)):
        yield replace(
            facts,
            read_s=facts.read_s + read * facts.silent_s,
            write_s=facts.write_s + write * facts.silent_s,
            fsync_s=facts.fsync_s + fsync * facts.silent_s,
            fsyncs=facts.fsyncs + fsyncs,
        )


_RECORD_LONGER = "record while the program works: snapmgr trace record MOUNT -- COMMAND"
_CONDITION = "only if no line is missing in the log: it has no counters of the mount, which would show that"
_RECORD_COUNTERS = (
    "record with snapmgr trace record, which adds the mount's counters: they distinguish downloads from uploads"
)


def _incomplete(facts: TraceFacts) -> Finding:
    lost = {kind: count for kind, count in facts.missing.items() if count}
    shown = ", ".join(f"{count} {kind}" for kind, count in sorted(lost.items(), key=lambda item: -item[1]))
    return Finding(
        bottleneck="unknown",
        why=f"{sum(lost.values())} operations are missing in the log ({shown}), so there is no verdict: "
        "JuiceFS drops lines that are not read fast enough",
        action="record",
        advice="record again with less load on this machine, or with -o on a faster disk",
    )


def _silent(facts: TraceFacts, idle: Finding) -> Finding:
    rest = replace(facts, wall_s=facts.wall_s - facts.silent_s, silent_s=0.0)
    other = _complete(rest)[0] if rest.wall_s > 0 else idle
    both = f"If the program was idle then: {idle.bottleneck}, as {idle.why}"
    if other.bottleneck != idle.bottleneck:
        both += f". In the other {format_duration(rest.wall_s)}: {other.bottleneck}, as {other.why}"
    return Finding(
        bottleneck="unknown",
        why=f"for {_share(facts.silent_s, facts)} the log has no operation, and nothing shows whether the program was "
        f"idle or lines are missing, so there is no verdict. {both}",
        action="record",
        advice=f"{_RECORD_LONGER}; this saves the mount's counters, which show whether lines are missing",
    )


def _unreadable(facts: TraceFacts) -> Finding:
    what = f"{facts.untimed} operations have no time" if facts.untimed else "too many lines cannot be parsed"
    return Finding(bottleneck="unknown", why=f"{what}, so there is no verdict", action="record", advice=_RECORD_LONGER)


def _findings(facts: TraceFacts) -> Iterator[Finding]:
    """Yield the findings that apply, the most promising first."""
    counted = facts.counted
    if facts.fsync_s > FSYNC_SHARE * facts.wall_s and facts.fsyncs >= MANY_FSYNCS:
        yield Finding(
            bottleneck="fsync",
            why=_took(f"{facts.fsyncs} fsyncs", facts.fsync_s, facts),
            action="use-memory",
            advice=_advice("use-memory", facts),
        )
    if facts.read_s > HELD_SHARE * facts.wall_s:
        yield from _of_reads(facts)
    elif facts.fsync_s > FSYNC_SHARE * facts.wall_s and facts.fsyncs < MANY_FSYNCS:
        why = f"{_took(f'{facts.fsyncs} fsyncs', facts.fsync_s, facts)}: each waits until its file is uploaded"
        yield _to_writeback(facts, "fsync", why)
    if facts.write_s > HELD_SHARE * facts.wall_s:
        yield _to_writeback(facts, "write", f"{_took('writes', facts.write_s, facts)}: they wait for uploads")
    if counted is None:
        return
    held_s = facts.read_s + facts.write_s + facts.fsync_s
    if held_s < HELD_SHARE * facts.wall_s and counted.cpu_s > CPU_SHARE * facts.wall_s:
        yield Finding(
            bottleneck="cpu",
            why=f"the JuiceFS client used {counted.cpu_s / facts.wall_s:.1f} processors, while reads, writes and "
            f"fsyncs together took only {_share(held_s, facts)}",
            action="scratch",
            advice=_advice("scratch", facts),
        )
    if counted.written_bytes and counted.compaction_bytes > COMPACTION_FACTOR * counted.written_bytes:
        yield Finding(
            bottleneck="compaction",
            why=f"compaction rewrote {format_size(counted.compaction_bytes)} for {format_size(counted.written_bytes)} "
            "written: each small write becomes a separate slice",
            action="scratch",
            advice=_advice("scratch", facts),
        )


def _of_reads(facts: TraceFacts) -> Iterator[Finding]:
    """Yield why reads are slow: a read first uploads its file's changes, then downloads blocks that are not cached."""
    counted = facts.counted
    took = _took("reads", facts.read_s, facts)
    if counted is None:
        yield Finding(bottleneck="read", why=took, action="record", advice=_RECORD_COUNTERS)
        return
    causes: list[tuple[float, Finding]] = []
    # Compaction uploads whole blocks, which nobody waits for.
    put_bytes = max(counted.put_bytes - counted.compaction_bytes, 0)
    if counted.puts >= MANY_REQUESTS and put_bytes < SMALL_PUT_BYTES * counted.puts:
        average = format_size(put_bytes // counted.puts)
        why = (
            f"{took}, and {counted.puts} uploads of {average} each, compaction left out: a read waits until its file's "
            "changes are uploaded"
        )
        causes.append((counted.put_s, _to_writeback(facts, "upload", why)))
    looked_up = counted.cache_hits + counted.cache_misses
    if counted.gets >= MANY_REQUESTS and counted.cache_misses > MISS_SHARE * looked_up:
        causes.append((counted.get_s, _to_cache(facts, counted, took)))
    if causes:
        yield from (finding for _, finding in sorted(causes, key=lambda cause: -cause[0]))
    else:
        why = f"{took}, though little of it was downloaded or uploaded"
        yield Finding(bottleneck="read", why=why, action="scratch", advice=_advice("scratch", facts))


def _to_cache(facts: TraceFacts, counted: Counted, took: str) -> Finding:
    missed = f"{counted.cache_misses} of {counted.cache_hits + counted.cache_misses} blocks were not in the cache"
    why = f"{took}, and {counted.gets} downloads brought {format_size(counted.get_bytes)}: {missed}"
    if counted.evictions and facts.writeback_allowed:
        return Finding(
            bottleneck="download",
            why=f"{why}, which evicted {counted.evictions}",
            action="cache-size",
            advice=_advice("cache-size", facts),
        )
    return Finding(bottleneck="download", why=why, action="warm-up", advice=_advice("warm-up", facts))


def _to_writeback(facts: TraceFacts, bottleneck: Bottleneck, why: str) -> Finding:
    action: Action = "upload-delay" if facts.writeback else "writeback"
    if not facts.writeback_allowed:
        action = "flush-method"
    return Finding(bottleneck=bottleneck, why=why, action=action, advice=_advice(action, facts))


def _advice(action: Action, facts: TraceFacts) -> str:
    if action == "scratch" and not _has_room(facts):
        return too_little_room(facts.scratch_free_bytes or 0, facts.data_bytes or 0)
    return remedy(action, prepares=facts.prepares, folder=facts.folder)


def _has_room(facts: TraceFacts) -> bool:
    """Whether a local disk has room for a copy, as far as is known."""
    return facts.data_bytes is None or facts.scratch_free_bytes is None or facts.scratch_free_bytes > facts.data_bytes


def _elsewhere(facts: TraceFacts) -> Finding:
    took = {"reads": facts.read_s, "writes": facts.write_s, "fsyncs": facts.fsync_s}
    each = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in took.items())
    return Finding(
        bottleneck="program",
        why=f"of {format_duration(facts.wall_s)} the mount had {'at most' if facts.summed else 'only'} {each}: "
        "the rest is the program's own time, and operations on names and attributes",
        action="record" if facts.unchecked else "none",
        advice="make sure that no line is missing: snapmgr trace record MOUNT -- COMMAND"
        if facts.unchecked
        else "nothing to tune at the mount",
    )


def _took(what: str, seconds: float, facts: TraceFacts) -> str:
    if seconds > facts.wall_s:
        at_once = seconds / facts.wall_s
        return f"{what} overlapped, {at_once:.1f} at once on average over {format_duration(facts.wall_s)}"
    return f"{what} took {'up to ' if facts.summed else ''}{_share(seconds, facts)}"


def _share(seconds: float, facts: TraceFacts) -> str:
    """Return "41 s of 60 s (68 %)"."""
    percent = 100 * seconds / facts.wall_s
    return f"{format_duration(seconds)} of {format_duration(facts.wall_s)} ({percent:.0f} %)"
