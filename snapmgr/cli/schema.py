"""Defines the keys of every document that ``--json`` prints, and writes them as a JSON Schema.

``python -m snapmgr.cli.schema`` prints docs/reference/json.schema.json. docs/reference/json.md says what the keys mean.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Annotated, Any, Literal, get_origin

import msgspec

SCHEMA_VERSION = 1
EXIT_CODES = (0, 1, 2, 3, 4, 5, 6, 7, 130)
Time = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Open = dict[str, Any]
"""A part whose keys only json.md lists."""


class Error(msgspec.Struct):
    """What failed, on which object, and what to do."""

    message: str
    hint: str | None
    exit_code: int


class End(msgspec.Struct):
    """How one of several items ended."""

    exit_code: int | None
    error: Error | None


class Damaged(msgspec.Struct):
    """A file of the state directory that cannot be read."""

    path: str
    problem: str


class Server(msgspec.Struct):
    """The server of a clone."""

    program: str
    pid: int | None
    running: bool
    socket: str
    port: int | None
    log: str
    server_id: int | None
    server_uuid: str | None
    answered_at: Time | None


class Mount(msgspec.Struct):
    """A mount."""

    lease_id: str
    snapshot_id: str
    point: str
    data_path: str
    writable: bool
    why: str
    user: str
    pid: int
    created_at: Time
    until: Time | None
    server: Server | None


class Verification(msgspec.Struct):
    """The last verification of a snapshot."""

    at: Time
    result: str
    duration_s: float
    checks: list[str]
    unchecked: list[str]
    failures: list[str]
    notes: list[str]


class Snapshot(msgspec.Struct):
    """A snapshot."""

    id: str
    short_id: str
    job: str
    source: Literal["mysql", "physical", "directory"]
    path: str
    state: Literal["pending", "ready", "deleting", "broken"]
    reason: str | None
    created_at: Time
    taken_at: Time | None
    backend: str
    level: str | None
    lock_waited_s: float | None
    lock_held_s: float | None
    frozen_s: float | None
    stall_s: float | None
    pinned: bool
    pin_reason: str | None
    verification: Verification | None
    mounts: list[Mount]


class Listed(Snapshot):
    """A snapshot in a list."""

    exclusive_bytes: Bytes | None


class Capacity(msgspec.Struct):
    """How full a space was."""

    name: str
    snapshot_id: str | None
    when_full: str
    size_bytes: Bytes
    used_bytes: Bytes | None
    wanted_bytes: Bytes
    sampled_at: Time | None
    full_since: Time | None
    rate_bytes_s: float | None
    full_at: Time | None
    full_in_s: float | None
    alarm: str | None


class Member(msgspec.Struct):
    """One volume's share of a snapshot."""

    backend: str
    pool_id: str
    pool_hint: str
    volume_id: str
    name: str
    native_id: str
    path: str
    subpath: str
    places: list[dict[str, str]]
    call_s: float
    usage: Open


class Details(Snapshot):
    """Everything known about a snapshot."""

    proved_at: Time | None
    machine_id: str
    excluded: list[str]
    absent: list[str]
    quiesce: Open | None
    position: Open | None
    sources: list[Open]
    server: Open | None
    physical: Open | None
    capacity: list[Capacity]
    about: list[str]
    members: list[Member]


class Decision(msgspec.Struct):
    """What the rules decided about a snapshot."""

    id: str
    reasons: list[str]


class Pruned(msgspec.Struct):
    """What was pruned."""

    keep: list[Decision]
    delete: list[Decision]
    deleted: list[str]
    kept_in_use: list[str]
    kept_altered: list[str]
    failures: list[str]


class BackupJob(End):
    """One job of a backup; `plan` only with --dry-run, instead of the others."""

    job: str
    snapshot: Snapshot | None = None
    pruned: Pruned | None = None
    plan: Open | None = None


class PruneJob(Pruned):
    """One job of a prune."""

    job: str
    exit_code: int
    error: Error | None


class Released(End):
    """One released mount."""

    what: str
    mount: Mount | None


class Pinned(End):
    """One pinned or unpinned snapshot."""

    id: str
    pinned: bool
    pin_reason: str | None


class Deletion(End):
    """One snapshot to be deleted."""

    id: str
    job: str
    state: str
    protected_by: list[str]
    storage: str | None
    deleted: bool


class Problem(msgspec.Struct):
    """A problem of a job."""

    kind: str
    what: str
    hint: str | None


class JobStatus(msgspec.Struct):
    """Whether a job's snapshots are up to date."""

    job: str
    ok: bool
    watched: bool
    problems: list[Problem]
    newest_ready: Snapshot | None
    age_s: float | None
    newest_verified: Snapshot | None
    newest_failed: Snapshot | None
    expression: str | None
    next_due: Time | None
    overdue_since: Time | None
    capacity: list[Capacity]


class Schedule(msgspec.Struct):
    """An installed schedule."""

    job: str
    kind: Literal["systemd", "cron"]
    expression: str
    random_delay_s: Seconds
    installed_at: Time
    next_times: list[Time]


class ScheduleState(Schedule):
    """An installed schedule, and what the machine has of it."""

    files: list[str]
    missing_files: list[str]
    waiting: bool | None
    last_result: str | None


class Finding(msgspec.Struct):
    """A finding of doctor."""

    area: str
    subject: str
    level: Literal["ok", "note", "problem", "missing"]
    what: str
    hint: str | None
    job: str | None
    fix: str | None


class Action(msgspec.Struct):
    """A repair by doctor."""

    kind: str
    area: str
    subject: str
    job: str | None
    what: str
    fix: str
    result: Literal["done", "failed", "left", "would"]
    error: Error | None


_CHANGES: dict[str, Any] = {"dry_run": bool}
_PIN = _CHANGES | {"snapshots": list[Pinned]}
KEYS: dict[str, dict[str, Any]] = {
    "list": {"snapshots": list[Listed], "damaged": list[Damaged]},
    "show": {"snapshot": Details | None},
    "backup": _CHANGES | {"jobs": list[BackupJob]},
    "mount": _CHANGES
    | {"snapshot_id": str | None, "mount": Mount | None, "mounts": list[Mount], "damaged": list[Damaged]},
    "umount": _CHANGES | {"released": list[Released], "damaged": list[Damaged]},
    "verify": _CHANGES | {"snapshot": Snapshot | None},
    "restore": _CHANGES
    | {"in_place": bool, "snapshot_id": str | None, "dest": str | None, "places": list[Open]}
    | {"plan": Open | None, "restored": Open | None, "tables": list[str], "dumped": Open | None},
    "prepare": _CHANGES
    | {"snapshot_id": str | None, "mount": Mount | None, "prepared": Open | None, "source": str | None}
    | {"plan": Open | None, "job": str | None, "report": str | None, "tuning": Open | None}
    | {"first": str | None, "next": Any},
    "clone": _CHANGES | {"snapshot_id": str | None, "mount": Mount | None},
    "pin": _PIN,
    "unpin": _PIN,
    "delete": _CHANGES | {"snapshots": list[Deletion]},
    "prune": _CHANGES | {"jobs": list[PruneJob]},
    "status": {"jobs": list[JobStatus], "clones": list[Mount], "damaged": list[Damaged]}
    | {"scheduled_but_not_configured": list[str]},
    "trace record": {"path": str | None, "size_bytes": Bytes | None, "wall_s": Seconds | None}
    | {"stopped_by": str | None, "command_exit": int | None},
    "trace show": {"recording": Open | None, "truncated": str | None, "untimed": int | None}
    | {"analysis": Open | None, "verdict": Open | None},
    "trace compare": {"changed": list[str], "caveats": list[str], "measures": list[Open], "verdicts": list[list[Open]]},
    "bench run": _CHANGES
    | {"results": str | None, "report": str | None, "measured": int | None, "failed": int | None}
    | {"left_out": list[str], "given_up": list[str], "found": Open | None, "on": str | None}
    | {"budget_s": float | None, "preparation_s": float | None, "steps": list[Open], "total_s": float | None}
    | {"space_bytes": Bytes | None, "absent": list[Any]},
    "bench list": {"scenarios": list[Open], "stacks": list[Open]},
    "bench show": {"recommendation": Open | None, "scenarios": list[Open], "absent": list[Open], "failed": list[Open]},
    "bench advise": {"use": str | None, "storages": Any},
    "bench compare": {"rows": list[Open], "obstacles": list[str], "left_out": list[str]},
    "schedule install": _CHANGES | {"schedule": Schedule | None, "files": list[dict[str, str]], "arguments": list[str]},
    "schedule show": {"schedules": list[ScheduleState], "damaged": list[Damaged]},
    "schedule remove": _CHANGES | {"job": str | None, "removed": list[str]},
    "config validate": {"valid": bool, "problems": list[str], "files": list[str], "jobs": list[str]},
    "doctor": {"fix": bool, "thawed": list[str], "actions": list[Action], "findings": list[Finding]} | _CHANGES,
}
"""The keys of each command's document, with their types, besides those that all documents have."""


def blank(command: str) -> dict[str, Any]:
    """Return a command's own keys with the values of a command that got nowhere: empty lists, false, null."""
    return {
        name: [] if get_origin(kind) is list else False if kind is bool else None
        for name, kind in KEYS.get(command, {}).items()
    }


@cache
def kind_of(command: str) -> type[msgspec.Struct]:
    """Return the type of a command's document."""
    common = [
        ("schema_version", Literal[1]),
        ("exit_code", Annotated[int, msgspec.Meta(ge=0, le=255)]),
        ("error", Error | None),
    ]
    name = "".join(word.capitalize() for word in (*command.split(), "document"))
    return msgspec.defstruct(
        name, [*common, *KEYS[command].items()], tag_field="command", tag=command, kw_only=True, module=__name__
    )


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of all documents."""
    kinds = [kind_of(command) for command in KEYS]
    references, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The documents that snapmgr prints with --json",
        "oneOf": list(references),
        "$defs": dict(sorted(parts.items())),
    }


def text() -> str:
    """Return the published file."""
    return json.dumps(schema(), indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
