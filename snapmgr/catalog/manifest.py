"""A snapshot's manifest: what is written down about it, as records and as JSON.

Schema version 1; a newer one is refused, never half understood. Times are aware UTC, sizes bytes, durations seconds.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec

from snapmgr.catalog.physical import PhysicalRecord
from snapmgr.contract.errors import CatalogError, StorageError
from snapmgr.contract.records import AttachRecord, Intent, SnapshotRef
from snapmgr.system.host import Process

SCHEMA = 1
_FIRST_YEAR, _LAST_YEAR = 1970, 9000
HIDDEN_NAME = re.compile(r"\.snapmgr-restore-(?P<token>[0-9a-f]{16})")
"""`RestoreRecord.hidden`."""

State = Literal["pending", "ready", "deleting", "broken"]
Purpose = Literal["mount", "verify", "prepare", "restore", "position", "clone"]
Level = Literal["none", "backup-lock", "global-read-lock", "freeze-process", "stopped", "crash-consistent"]


GONE = "its storage is gone"
"""How the reason of a BROKEN snapshot begins that was READY until its storage was removed."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """An exact binlog position. `gtid` is empty where the server wrote none."""

    file: str
    offset: int
    gtid: str


@dataclass(frozen=True, kw_only=True)
class SourcePosition:
    """How far a replica had executed what it gets from one source: where another replica of it would have to begin.

    What was received and not yet executed does not count. Exact or absent: `file` is empty and `offset` 0 where only
    the GTID is exact (several applier threads), `gtid` is empty where replication goes by file and offset.
    """

    channel: str
    """MySQL's channel or MariaDB's connection name; "" is the default one."""
    host: str
    port: int
    file: str = ""
    """Of the source's binary logs."""
    offset: int = 0
    gtid: str = ""
    """MySQL: the replica's gtid_executed; MariaDB: its gtid_slave_pos. Of all channels together."""


@dataclass(frozen=True, kw_only=True)
class ServerRecord:
    """The server whose data these are, with the settings that a server on a clone needs."""

    flavor: Literal["mariadb", "mysql"]
    version: str
    server_id: int | None
    server_uuid: str | None
    datadir: str
    log_bin: str | None
    """Path and base name of the binary logs, from the datadir ("mysql-bin", "../log/bin"); None without binary logs."""
    settings: dict[str, str] = field(default_factory=dict)
    program: str | None = None
    """The program that it ran then; None if that cannot be told, or was replaced under it."""
    gtid_purged: str = ""
    """MySQL: the GTIDs that it had executed and that none of its binary logs names."""


@dataclass(frozen=True, kw_only=True)
class QuiesceRecord:
    """How the source was held still, and the price of it."""

    level: Level
    why: str
    proof: str
    """What showed that it still held after the storage call."""
    attempts: int
    waited_s: float
    """Asking for the lock until it was granted, over all attempts."""
    held_s: float
    """Granted to released."""
    frozen_s: float = 0.0
    """How long the server process stood still (freeze-process): no client was served."""
    stall_s: float = 0.0
    """The longest that a writer can have waited for us: from asking for what stops writers until it was gone, in the
    worst of all attempts."""
    position_from: Literal["server", "binlog", "nowhere"] = "nowhere"
    """Who said the binlog position: the server under the lock, or the end of the snapshot's own binary logs."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One volume's share of a snapshot."""

    ref: SnapshotRef
    subpath: str
    """Path of the source inside the volume; "" when the source is the volume."""
    call_s: float
    """Duration of the storage call."""
    path: str = ""
    """Where the volume was reachable then."""
    places: dict[str, str] = field(default_factory=dict)
    """Every folder of the source that is in this volume, the source's own among them, and its path inside it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that is known of a snapshot, but its verification."""

    id: str
    job: str
    source: Literal["mysql", "physical", "directory"]
    path: str
    """What was snapshotted: the datadir, staged backup or directory, as it was reachable then."""
    state: State
    created_at: datetime
    machine_id: str
    schema: int = SCHEMA
    taken_at: datetime | None = None
    """When the storage took it; set together with `proved_at`."""
    proved_at: datetime | None = None
    """Set once consistency is proven; what is pending without it is removed, with it is completed."""
    reason: str | None = None
    """Why it is broken."""
    number: int = 0
    """Grows over all snapshots of a state directory: the order in which they were begun, whatever clocks said."""
    pinned: bool = False
    """Kept whatever retention says, until somebody unpins it."""
    pin_reason: str | None = None
    """Why it is pinned, in the words of who did it."""
    intents: tuple[Intent, ...] = ()
    members: tuple[Member, ...] = ()
    excluded: tuple[str, ...] = ()
    """Nested subvolumes and mounts that it does not hold."""
    helper: Process | None = None
    """The process that was to take it: if it still lives, its storage call may still arrive."""
    state_dir: str = ""
    """The state directory that it was taken for: another one that meets it in the storage leaves it to this one."""
    quiesce: QuiesceRecord | None = None
    absent: tuple[str, ...] = ()
    """Folders that the server writes and that no member holds: those of its binary and relay logs."""
    server: ServerRecord | None = None
    position: Position | None = None
    sources: tuple[SourcePosition, ...] = ()
    """Of a replica: one for each of its sources."""
    physical: PhysicalRecord | None = None

    @property
    def backend(self) -> str:
        """Name of the backend of its members."""
        return self.intents[0].pool.backend if self.intents else "?"

    @property
    def short_id(self) -> str:
        """The id's random part, enough to name it."""
        return self.id.rsplit(".", 1)[-1]

    def require_ready(self, what: str) -> None:
        """Raise StorageError unless it is READY: nothing else can be `what` ("mounted", "restored")."""
        if self.state != "ready":
            why = f": {self.reason}" if self.reason else ""
            raise StorageError(
                f"snapshot {self.id} is {self.state.upper()}{why}: it cannot be {what}", hint="see: snapmgr list"
            )

    def with_state(self, state: State, *, reason: str | None = None) -> Manifest:
        """Return a copy in another state."""
        if reason is not None:  # an error's text may name any file
            reason = os.fsencode(reason).decode("utf-8", "backslashreplace")
        return replace(self, state=state, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What became of the last try to prove that a snapshot restores."""

    at: datetime
    result: Literal["passed", "failed"]
    duration_s: float
    checks: tuple[str, ...] = ()
    """What was checked, in words."""
    failures: tuple[str, ...] = ()
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class LeasePart:
    """One member's share of a lease."""

    record: AttachRecord
    subpath: str
    """`Member.subpath`."""
    folder: Annotated[str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[^/]*\Z")] = ""
    """Name of the folder below the lease's point where it is mounted; "" for the point itself, where there is but one
    member."""
    mounted: str | None = None
    """Device number and root folder of the mount, once it is made: what else is mounted there later is not ours."""


@dataclass(frozen=True, kw_only=True)
class CloneServer:
    """The server on a clone. Every step of its start is on disk before it is made."""

    folder: Annotated[str, msgspec.Meta(pattern=r"\A/")]
    """Of its socket, log and temporary files; it goes with the clone."""
    port: int | None
    """At 127.0.0.1; None: only the socket."""
    process: Process | None = None
    """None: not started yet."""
    program: str = ""
    """Flavor and version."""
    server_id: int = 0
    server_uuid: str | None = None
    """MySQL: the clone's own. MariaDB has none."""
    answered_at: datetime | None = None
    """Since when it runs for itself; before that it goes with the process that made it."""

    @property
    def socket(self) -> str:
        """Path of its socket."""
        return os.path.join(self.folder, "s")

    @property
    def log(self) -> str:
        """Path of what it prints."""
        return os.path.join(self.folder, "server.log")


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Somebody's use of a snapshot: who, why, until when; on disk before anything is attached."""

    parts: Annotated[tuple[LeasePart, ...], msgspec.Meta(min_length=1)]
    """One for each member of the snapshot, in their order."""
    holder: Process
    """Who made it; see `stays`."""
    user: str
    why: Purpose
    created_at: datetime
    until: datetime | None
    point: Annotated[str, msgspec.Meta(pattern=r"\A/")]
    """Where it is (to be) mounted."""
    server: CloneServer | None = None
    """Of a "clone"."""
    schema: int = SCHEMA

    @property
    def stays(self) -> bool:
        """Whether only `umount` ends it: a mount, a clone whose server has answered. Others end with their holder."""
        return self.why == "mount" or (self.server is not None and self.server.answered_at is not None)

    @property
    def id(self) -> str:
        """16 hex digits."""
        return self.parts[0].record.id

    @property
    def snapshot_id(self) -> str:
        """The snapshot that is used."""
        return self.parts[0].record.ref.snapshot_id

    @property
    def boot_id(self) -> str:
        """The boot that it is of."""
        return self.parts[0].record.boot_id

    @property
    def writable(self) -> bool:
        """Whether it is of a clone."""
        return self.parts[0].record.writable


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a job is to run, as it was installed: what was due is told from this."""

    job: str
    kind: Literal["systemd", "cron"]
    expression: str
    """OnCalendar, as in systemd.time(7)."""
    installed_at: datetime
    delay_s: float = 0.0
    """A run may begin so much later, at random."""
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class RestoreRecord:
    """A restore that is under way or was cut short: on disk before anything is made, and in its hidden folder."""

    token: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    snapshot_id: str
    dest: str
    """Absolute, its parent resolved."""
    made_dest: bool
    """Whether the folder `dest` was made by this restore: then it goes with it."""
    holder: Process
    user: str
    began_at: datetime
    inode: int = 0
    """Of the hidden folder: a copy of it, made by somebody else, is not ours."""
    finishing: bool = False
    report: str = ""
    """The restore's result as JSON, once it is finishing."""
    schema: int = SCHEMA

    @property
    def hidden(self) -> str:
        """Name of the hidden folder."""
        return f".snapmgr-restore-{self.token}"


class _Record(Protocol):
    @property
    def schema(self) -> int: ...


_AnyRecord = TypeVar("_AnyRecord", bound=_Record)


class _Versioned(msgspec.Struct):
    schema: int
    number: int = 0


def new_id(job: str, now: datetime) -> str:
    """Return a new snapshot id: job, UTC time and 8 random hex digits, as in "nightly.20260131T023000Z.3f9a2c1b"."""
    return f"{job}.{now.astimezone(UTC):%Y%m%dT%H%M%SZ}.{os.urandom(4).hex()}"


def encode(record: _Record) -> bytes:
    """Return a record as JSON, indented: people read these files in emergencies.

    Raises CatalogError if it names something that is not UTF-8.
    """
    try:
        data = msgspec.json.encode(record)
    except UnicodeEncodeError as error:
        name = os.fsencode(error.object).decode("utf-8", "backslashreplace")
        raise CatalogError(f"{name} has a name that is not UTF-8", hint="use a path that is UTF-8") from None
    return msgspec.json.format(data, indent=1) + b"\n"


def decode(data: bytes, kind: type[_AnyRecord], where: str) -> _AnyRecord:
    """Given JSON, return the record. Raises CatalogError that names `where` if it is damaged or of a newer schema."""
    try:
        schema = msgspec.json.decode(data, type=_Versioned).schema
        if schema > SCHEMA:
            raise CatalogError(
                f"{where} is of schema {schema}; this snapmgr understands {SCHEMA}", hint="use the newer snapmgr"
            )
        record = msgspec.json.decode(data, type=kind)
        _require_usable(record, data)
        return record
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise CatalogError(
            f"{where} is damaged: {error}", hint="restore it from the copy beside the snapshot, or see: snapmgr doctor"
        ) from None


def decode_number(data: bytes) -> int:
    """Return a manifest's number without reading the rest; 0 if it is damaged."""
    try:
        return msgspec.json.decode(data, type=_Versioned).number
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0


def _require_usable(record: object, data: bytes) -> None:
    """Raise ValueError for a text or time in a record that the type allows and the system calls do not."""
    # JSON can write it only so; looking at each text of a thousand manifests takes longer than reading them.
    if b"\\u0000" in data and _holds_nul(record):
        raise ValueError("a text in it holds a NUL character")
    for value in vars(record).values():
        if isinstance(value, datetime) and (value.tzinfo is None or not _FIRST_YEAR <= value.year <= _LAST_YEAR):
            raise ValueError(f"{value.isoformat()} is no time with a zone, or not one of these centuries")


def _holds_nul(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_nul, (*value, *value.values())))
    if is_dataclass(value):
        return any(map(_holds_nul, vars(value).values()))
    return any(map(_holds_nul, value)) if isinstance(value, tuple) else isinstance(value, str) and "\0" in value
