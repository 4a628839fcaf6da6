"""Turns records into JSON documents, in the form that docs/reference/json.md promises to other programs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from snapmgr.contract.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from snapmgr.backup.run import BackupPlan
    from snapmgr.capacity.series import Reading
    from snapmgr.catalog.manifest import Lease, Level, SourcePosition, Verification
    from snapmgr.catalog.store import Entry
    from snapmgr.catalog.summary import Result
    from snapmgr.keep.prune import Pruned
    from snapmgr.retention import Decision

_SERVER = ("flavor", "version", "server_id", "server_uuid", "datadir", "log_bin", "settings")
_PHYSICAL = (
    *("tool", "tool_version", "kind", "state", "base", "full_because", "from_lsn", "to_lsn", "datadir"),
    *("fetched_bytes", "size_bytes", "files", "copy_s", "apply_s", "seal_s", "fingerprint"),
)


def fields(record: object, *names: str) -> dict[str, Any]:
    """Return the fields of a record that go into its document unchanged."""
    return {name: getattr(record, name) for name in names}


def iso(at: datetime | None) -> str | None:
    """Return a time as UTC ISO 8601 with milliseconds: "2026-01-31T02:30:00.123Z"."""
    return None if at is None else at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def show_time(at: datetime | None) -> str:
    """Return a time to print: UTC ISO 8601, whole seconds."""
    return "-" if at is None else f"{at.astimezone(UTC).isoformat()[:19]}Z"


def show_held(level: Level | None, held_s: float) -> str:
    """Return to print how long the source was locked or frozen."""
    return "-" if level in (None, "none", "crash-consistent") else format_duration(held_s)


def show_verified(verification: Verification | None) -> str:
    """Return to print when it was verified."""
    return "-" if verification is None else show_result(verification.result, verification.at)


def show_result(result: Result | None, at: datetime | None) -> str:
    """Return to print the result of the last verification, and when it was."""
    return "-" if result is None else {"passed": "", "partly": "partly ", "failed": "FAILED "}[result] + show_time(at)


def show_findings(verification: Verification) -> Iterator[str]:
    """Yield to print what a verification found, a line for each."""
    yield from (f"ok: {one}" for one in verification.checks)
    yield from (f"note: {one}" for one in verification.notes)
    yield from (f"NOT CHECKED: {one}" for one in verification.unchecked)
    yield from (f"FAILED: {one}" for one in verification.failures)


def show_pin(reason: str | None) -> str:
    """Return to print that a snapshot is pinned, and why."""
    return f"pinned ({reason})" if reason else "pinned"


def capacity(reading: Reading, now: datetime) -> dict[str, Any]:
    """Return how full a reservoir was, and when it will be full."""
    series, foreseen = reading.series, reading.forecast
    last = series.last
    left_s = (foreseen.full_at - now).total_seconds() if foreseen.full_at is not None else None
    return {
        "name": series.name,
        "snapshot_id": series.snapshot_id or None,
        "when_full": series.when_full,
        "size_bytes": series.size_bytes,
        "used_bytes": last.used_bytes if last is not None else None,
        "wanted_bytes": series.wanted_bytes,
        "sampled_at": iso(last.at) if last is not None else None,
        "full_since": iso(series.full_since),
        "rate_bytes_s": foreseen.rate_bytes_s,
        "full_at": iso(foreseen.full_at),
        "full_in_s": left_s,
        "alarm": reading.alarm,
    }


def snapshot(entry: Entry, leases: Iterable[Lease]) -> dict[str, Any]:
    """Return a snapshot's document as in a list; `leases` may be those of any snapshot."""
    manifest = entry.manifest
    quiesce = manifest.quiesce
    return fields(manifest, "id", "short_id", "job", "source", "path", "state", "reason") | {
        "created_at": iso(manifest.created_at),
        "taken_at": iso(manifest.taken_at),
        "backend": manifest.backend,
        "level": quiesce.level if quiesce else None,
        "lock_waited_s": quiesce.waited_s if quiesce else None,
        "lock_held_s": quiesce.held_s if quiesce else None,
        "frozen_s": quiesce.frozen_s if quiesce and quiesce.level == "freeze-process" else None,
        "stall_s": quiesce.stall_s if quiesce else None,
        "pinned": manifest.pinned,
        "pin_reason": manifest.pin_reason,
        "verification": verification(entry.verification),
        "mounts": [mount(lease) for lease in leases if lease.snapshot_id == manifest.id],
    }


def details(
    entry: Entry, leases: Iterable[Lease], usage: list[dict[str, Any]], capacities: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return everything known about a snapshot.

    `usage` has one document for each member, `capacities` one for each member that has space of its own.
    """
    manifest = entry.manifest
    return snapshot(entry, leases) | {
        "proved_at": iso(manifest.proved_at),
        **fields(manifest, "machine_id", "excluded", "absent"),
        "quiesce": asdict(manifest.quiesce) if manifest.quiesce is not None else None,
        "position": asdict(manifest.position) if manifest.position is not None else None,
        "sources": [_source(one) for one in manifest.sources],
        "server": fields(manifest.server, *_SERVER) if manifest.server is not None else None,
        "physical": fields(manifest.physical, *_PHYSICAL) if manifest.physical is not None else None,
        "capacity": capacities,
        "about": [one.about for one in manifest.intents if one.about],
        "members": [
            {
                "backend": member.ref.backend,
                "pool_id": member.ref.pool.id,
                "pool_hint": member.ref.pool.hint,
                **fields(member.ref, "volume_id", "name", "native_id"),
                **fields(member, "path", "subpath"),
                "places": [{"path": path, "subpath": subpath} for path, subpath in member.places.items()],
                "call_s": member.call_s,
                "usage": one,
            }
            for member, one in zip(manifest.members, usage, strict=True)
        ],
    }


def _source(one: SourcePosition) -> dict[str, Any]:
    return fields(one, "channel", "host", "port") | {
        "file": one.file or None,
        "offset": one.offset if one.file else None,
        "gtid": one.gtid or None,
    }


def verification(one: Verification | None) -> dict[str, Any] | None:
    """Return a verification's document."""
    if one is None:
        return None
    return {"at": iso(one.at), **fields(one, "result", "duration_s", "checks", "unchecked", "failures", "notes")}


def mount(lease: Lease) -> dict[str, Any]:
    """Return a lease's document."""
    from snapmgr.access.attach import data_path

    return {
        "lease_id": lease.id,
        **fields(lease, "snapshot_id", "point"),
        "data_path": str(data_path(lease)),
        **fields(lease, "writable", "why", "user"),
        "pid": lease.holder.pid,
        "created_at": iso(lease.created_at),
        "until": iso(lease.until),
        "server": _clone_server(lease),
    }


def _clone_server(lease: Lease) -> dict[str, Any] | None:
    from snapmgr.system.host import is_alive

    server = lease.server
    if server is None:
        return None
    return {
        "program": server.program,
        "pid": server.process.pid if server.process is not None else None,
        "running": server.process is not None and is_alive(server.process),
        **fields(server, "socket", "port", "log"),
        "server_id": server.server_id or None,
        "server_uuid": server.server_uuid,
        "answered_at": iso(server.answered_at),
    }


def show_server(lease: Lease) -> str:
    """Return to print where a clone's server listens, and whether it runs."""
    from snapmgr.system.host import is_alive

    server = lease.server
    if server is None:
        return "its server was never started"
    where = f"127.0.0.1:{server.port}, {server.socket}" if server.port is not None else server.socket
    if server.process is None or not is_alive(server.process):
        return f"its server ({where}) is not running"
    return f"{server.program} at {where}, pid {server.process.pid}"


def backup_plan(plan: BackupPlan | None) -> dict[str, Any] | None:
    """Return the document of a backup's plan."""
    if plan is None:
        return None
    return {
        **fields(plan, "path", "backend"),
        "volume_ids": [volume.id for volume in plan.volumes],
        **fields(plan, "level", "why", "excluded", "absent", "warnings"),
    }


def decisions(decided: Iterable[Decision]) -> list[dict[str, Any]]:
    """Return the document of retention's decisions."""
    return [{"id": one.id, "reasons": list(one.reasons)} for one in decided]


def pruned(done: Pruned | None) -> dict[str, Any] | None:
    """Return the document of a prune."""
    if done is None:
        return None
    return {
        "keep": decisions(done.plan.keep),
        "delete": decisions(done.plan.delete),
        "deleted": list(done.deleted),
        "kept_in_use": list(done.kept_in_use),
        "kept_altered": list(done.kept_altered),
        "failures": [failure.message for failure in done.failures],
    }
