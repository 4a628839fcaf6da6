"""``snapmgr show``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from snapmgr.capacity.read import pools_of, read_capacities
from snapmgr.capacity.series import capacity_limits, readings_of
from snapmgr.cli.output import print_lines
from snapmgr.cli.params import SnapshotName, json_option
from snapmgr.contract.errors import EXIT_OK, SnapmgrError
from snapmgr.contract.units import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.capacity.series import Reading
    from snapmgr.catalog.manifest import Lease, Manifest, SourcePosition
    from snapmgr.catalog.physical import PhysicalRecord
    from snapmgr.catalog.store import Entry
    from snapmgr.cli.session import Session
    from snapmgr.context import Context


_STATES = {
    "raw": "as the tool wrote them: the redo log is not applied yet",
    "redo-applied": "redo log applied, ready for increments",
    "prepared": "ready for a server",
}


@click.command(
    epilog="""\b
Examples:
  snapmgr show latest
  snapmgr show nightly@latest
  snapmgr show 3f9a2c1b --json | jq .snapshot.position
"""
)
@click.argument("snapshot", metavar="ID", type=SnapshotName())
@json_option
@click.pass_obj
def command(session: Session, snapshot: str) -> int:
    """Show everything known about one snapshot.

    ID is a snapshot id, the start of one or of its random part, "latest" (the newest one that did not fail its
    verification), "latest-verified", or one of these after "JOB@".
    """
    from snapmgr.cli.documents import capacity, details

    ctx = session.context()
    entry = ctx.resolve(snapshot)
    all_leases, damaged = ctx.catalog.leases()
    session.damaged(damaged)
    leases = [lease for lease in all_leases if lease.snapshot_id == entry.manifest.id]
    usage = [_usage(session, entry, number) for number in range(len(entry.manifest.members))]
    now = datetime.now(UTC)
    readings = _readings(ctx, entry.manifest, now)
    if session.json:
        session.document(EXIT_OK, snapshot=details(entry, leases, usage, [capacity(one, now) for one in readings]))
    else:
        print_lines([*_lines(entry, leases, usage), *_capacity_lines(readings, now)])
    return EXIT_OK


def _readings(ctx: Context, manifest: Manifest, now: datetime) -> tuple[Reading, ...]:
    """Return how full its own space was when it was last sampled, judged by its job's limits or the defaults."""
    from snapmgr.config.model import Job

    if manifest.state != "ready":
        return ()
    job = ctx.config.jobs.get(manifest.job) or Job(source=manifest.source)
    found = readings_of(
        (manifest,), read_capacities(ctx.catalog, pools_of((manifest,))), capacity_limits(job, now), now
    )
    return tuple(one for one in found if one.series.native_id)


def _capacity_lines(readings: tuple[Reading, ...], now: datetime) -> Iterator[str]:
    from snapmgr.capacity.series import describe

    for one in readings:
        yield f"capacity    {describe(one.series, one.forecast, now)}"


def _usage(session: Session, entry: Entry, number: int) -> dict[str, Any]:
    """Return how much space one member takes, or why that is unknown."""
    ref = entry.manifest.members[number].ref
    try:
        usage = session.context().backend(ref.backend).usage(ref)
    except SnapmgrError as error:
        return {"exclusive_bytes": None, "valid": None, "problem": error.message}
    return {"exclusive_bytes": usage.exclusive_bytes, "valid": usage.valid, "problem": None}


def _lines(entry: Entry, leases: list[Lease], usage: list[dict[str, Any]]) -> Iterator[str]:
    from snapmgr.cli.documents import show_findings, show_server, show_time, show_verified

    manifest = entry.manifest
    yield f"snapshot    {manifest.id}"
    yield f"state       {manifest.state}" + (f": {manifest.reason}" if manifest.reason else "")
    yield f"source      {manifest.path} ({manifest.source})"
    yield f"taken       {show_time(manifest.taken_at)}" + (
        f", proved {show_time(manifest.proved_at)}" if manifest.proved_at else ", not proved"
    )
    if manifest.pinned:
        yield f"pinned      {manifest.pin_reason or 'yes'}"
    yield from _consistency(manifest)
    yield f"verified    {show_verified(entry.verification)}"
    if entry.verification is not None:
        yield f"            in {format_duration(entry.verification.duration_s)}"
        yield from (f"            {line}" for line in show_findings(entry.verification))
    for path in manifest.excluded:
        yield f"excluded    {path}"
    for member, one in zip(manifest.members, usage, strict=True):
        ref = member.ref
        yield f"stored      {ref.backend}: {ref.name} in {ref.pool.hint} (id {ref.native_id})"
        yield f"            of volume {ref.volume_id}" + (f", source in {member.subpath}" if member.subpath else "")
        yield f"            {_size(one)}; storage call {format_duration(member.call_s)}"
    yield from (f"            {intent.about}" for intent in manifest.intents if intent.about)
    for lease in leases:
        until = f" until {show_time(lease.until)}" if lease.until else ""
        how = "writable" if lease.writable else "read-only"
        since = show_time(lease.created_at)
        yield f"mounted     {lease.point} ({how}, {lease.why} by {lease.user} since {since}{until})"
        if lease.why == "clone":
            yield f"            {show_server(lease)}"


def _consistency(manifest: Manifest) -> Iterator[str]:
    if manifest.server is not None:
        yield f"server      {manifest.server.flavor} {manifest.server.version}, server_id {manifest.server.server_id}"
    quiesce = manifest.quiesce
    if quiesce is not None:
        yield f"level       {quiesce.level}: {quiesce.why}"
        if quiesce.level not in ("none", "crash-consistent"):
            yield (
                f"lock        waited {format_duration(quiesce.waited_s)}, held {format_duration(quiesce.held_s)}"
                f" ({quiesce.attempts} {'try' if quiesce.attempts == 1 else 'tries'});"
                f" no writer waited longer than {format_duration(quiesce.stall_s)}"
            )
        if quiesce.level == "freeze-process":
            yield f"frozen      {format_duration(quiesce.frozen_s)}: no client was served for this time"
        if quiesce.level == "crash-consistent" and quiesce.stall_s:
            stall = format_duration(quiesce.stall_s)
            yield f"lock        not granted, and not needed; no writer waited longer than {stall}"
        for statement in quiesce.killed:
            yield f"killed      the SELECT of {statement}"
        yield f"proof       {quiesce.proof}"
    position = manifest.position
    if position is not None:
        yield f"position    {position.file}:{position.offset}, GTID {position.gtid or 'none'}"
    yield from map(_replicated, manifest.sources)
    if manifest.physical is not None:
        yield from _fetched(manifest.physical)
    for folder in manifest.absent:
        yield f"excluded    the logs in {folder}"


def _fetched(record: PhysicalRecord) -> Iterator[str]:
    # The tool's last LSN is that of a checkpoint: the redo log has later changes.
    what = f"changes since LSN {record.from_lsn}" if record.base else "all data"
    checkpoint = f", checkpoint at LSN {record.to_lsn}," if record.to_lsn else ""
    yield (
        f"fetched     {what}{checkpoint} by {record.tool} {record.tool_version}: "
        f"{format_size(record.fetched_bytes)} in {format_duration(record.copy_s)}"
    )
    if record.base is not None:
        yield f"            applied to a clone of {record.base} in {format_duration(record.apply_s)}"
    if record.full_because is not None:
        yield f"            not incremental: {record.full_because}"
    yield f"holds       {format_size(record.size_bytes)} in {record.files} files, {_STATES[record.state]}"


def _replicated(one: SourcePosition) -> str:
    channel = f' (channel "{one.channel}")' if one.channel else ""
    known = [f"{one.file}:{one.offset}"] if one.file else []
    known += [f"GTID {one.gtid}"] if one.gtid else []
    return f"executed    of {one.host}:{one.port}{channel} up to {', '.join(known) or 'no exact position'}"


def _size(usage: dict[str, Any]) -> str:
    if usage["problem"] is not None:
        return f"size unknown: {usage['problem']}"
    if usage["exclusive_bytes"] is None:
        size = "size unknown (measuring it is expensive)"
    else:
        size = f"{format_size(usage['exclusive_bytes'])} exclusive"
    return size if usage["valid"] else f"LOST by the storage; {size}"
