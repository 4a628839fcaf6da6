"""Defines a snapshot's manifest and the other records of the state directory, and stores them as JSON.

Schema version 1; newer ones are refused. Times are aware and in UTC, sizes in bytes, durations in seconds.
"""

import os
import re
from datetime import UTC, datetime
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from snapmgr.catalog.physical import PhysicalRecord
from snapmgr.contract.errors import CatalogError, StorageError
from snapmgr.contract.recordpath import (
    Absolute,
    AbsoluteOrNone,
    InnerOrSelf,
    Name,
    NameOrNone,
    Token,
    problem_of,
    require_usable,
)
from snapmgr.contract.records import AttachRecord, Intent, SnapshotRef
from snapmgr.system.host import Process

SCHEMA = 1
HIDDEN_NAME = re.compile(r"\.snapmgr-restore-(?P<token>[0-9a-f]{16})")
"""`RestoreRecord.hidden`."""

State = Literal["pending", "ready", "deleting", "broken"]
UNFINISHED: tuple[State, ...] = ("pending", "deleting")
"""What only a run that is active or was interrupted leaves."""
Purpose = Literal["mount", "verify", "prepare", "restore", "position", "clone"]
Level = Literal["none", "backup-lock", "global-read-lock", "freeze-process", "stopped", "crash-consistent"]

GONE = "its storage is gone"
"""Beginning of the reason of a BROKEN snapshot that was READY until its storage was removed."""


class Position(Struct, frozen=True, kw_only=True):
    """An exact binlog position. `gtid` is empty if the server wrote none."""

    file: Name
    offset: int
    gtid: str


class SourcePosition(Struct, frozen=True, kw_only=True):
    """The position up to which a replica had executed the events of one source: a new replica would start here.

    Events that were received but not executed do not count. It is exact or absent: `file` is empty and `offset` 0 if
    only the GTID is exact (several applier threads), `gtid` is empty if replication uses file and offset.
    """

    channel: str
    """MySQL's channel or MariaDB's connection name; "" is the default."""
    host: str
    port: int
    file: str = ""
    """Name of the source's binary log."""
    offset: int = 0
    gtid: str = ""
    """MySQL: the replica's gtid_executed; MariaDB: its gtid_slave_pos. For all channels together."""


class ServerRecord(Struct, frozen=True, kw_only=True):
    """The server of the data, with the settings that a server on a clone needs."""

    flavor: Literal["mariadb", "mysql"]
    version: str
    server_id: int | None
    server_uuid: str | None
    datadir: Absolute
    log_bin: str | None
    """Path and base name of the binary logs, from the datadir ("mysql-bin", "../log/bin"); None without binary logs."""
    settings: dict[str, str] = field(default_factory=dict)
    program: str | None = None
    """Path of its program; None if unknown, or if the file was replaced since it started."""
    gtid_purged: str = ""
    """MySQL: the executed GTIDs that are in none of its binary logs."""


class QuiesceRecord(Struct, frozen=True, kw_only=True):
    """How the source was quiesced, and how long it took."""

    level: Level
    why: str
    proof: str
    """The evidence that the lock or freeze still held after the storage call."""
    attempts: int
    waited_s: float
    """Time from asking for the lock until it was granted, over all attempts."""
    held_s: float
    """Time from the lock granted to the lock released."""
    frozen_s: float = 0.0
    """How long the server process was stopped (freeze-process); no client was served."""
    stall_s: float = 0.0
    """Longest time that a writer can have waited for us: from asking for the lock until its release, worst attempt."""
    position_from: Literal["server", "binlog", "nowhere"] = "nowhere"
    """Source of the binlog position: the server under the lock, or the end of the snapshot's own binary logs."""
    killed: tuple[str, ...] = ()
    """The SELECTs that were killed for the lock: connection, account, age, first words."""


class Member(Struct, frozen=True, kw_only=True):
    """One volume's share of a snapshot."""

    ref: SnapshotRef
    subpath: InnerOrSelf
    """Path of the source inside the volume; "" when the source is the volume."""
    call_s: float
    """Duration of the storage call."""
    path: AbsoluteOrNone = ""
    """Where the volume was mounted at that time."""
    places: dict[Absolute, InnerOrSelf] = field(default_factory=dict)
    """Every folder of the source in this volume, with its path inside the volume; includes the source itself."""


class Manifest(Struct, frozen=True, kw_only=True):
    """Everything known about a snapshot, except its verification."""

    id: Name
    job: Name
    source: Literal["mysql", "physical", "directory"]
    path: Absolute
    """Path of the snapshotted datadir, staged backup or directory at that time."""
    state: State
    created_at: datetime
    machine_id: str
    schema: int = SCHEMA
    taken_at: datetime | None = None
    """When the storage took it; set together with `proved_at`."""
    proved_at: datetime | None = None
    """Set once consistency is proven. A PENDING snapshot with it is completed, without it removed."""
    reason: str | None = None
    """Why it is broken."""
    number: int = 0
    """Grows over all snapshots of a state directory: the order in which they were started, independent of clocks."""
    pinned: bool = False
    """Kept regardless of retention, until it is unpinned."""
    pin_reason: str | None = None
    """Why it is pinned, as given by the user."""
    intents: tuple[Intent, ...] = ()
    members: tuple[Member, ...] = ()
    excluded: tuple[str, ...] = ()
    """Nested subvolumes and mounts that it does not include."""
    helper: Process | None = None
    """The process that takes it: as long as it lives, its storage call may still complete."""
    state_dir: AbsoluteOrNone = ""
    """The state directory that it belongs to; others ignore it when they find it in the storage."""
    quiesce: QuiesceRecord | None = None
    absent: tuple[Absolute, ...] = ()
    """Folders that the server writes but no member includes: those of its binary and relay logs."""
    server: ServerRecord | None = None
    position: Position | None = None
    sources: tuple[SourcePosition, ...] = ()
    """For a replica: one for each of its sources."""
    physical: PhysicalRecord | None = None

    @property
    def backend(self) -> str:
        """Name of the backend of its members."""
        return self.intents[0].pool.backend if self.intents else "?"

    @property
    def at(self) -> datetime:
        """When it was taken, or when its backup began if it was not taken."""
        return self.taken_at or self.created_at

    @property
    def refs(self) -> tuple[SnapshotRef, ...]:
        """The snapshots of its members."""
        return tuple(member.ref for member in self.members)

    @property
    def short_id(self) -> str:
        """The random part of the id, which is enough to name it."""
        return self.id.rsplit(".", 1)[-1]

    def require_ready(self, what: str) -> None:
        """Raise StorageError unless it is READY; `what` is what cannot be done otherwise ("mounted", "restored")."""
        if self.state != "ready":
            why = f": {self.reason}" if self.reason else ""
            raise StorageError(
                f"snapshot {self.id} is {self.state.upper()}{why}: it cannot be {what}", hint="see: snapmgr list"
            )

    def with_state(self, state: State, *, reason: str | None = None) -> "Manifest":
        """Return a copy in another state."""
        if reason is not None:  # an error's text may name any file
            reason = os.fsencode(reason).decode("utf-8", "backslashreplace")
        return replace(self, state=state, reason=reason)


class Verification(Struct, frozen=True, kw_only=True):
    """The result of the last verification of a snapshot."""

    at: datetime
    result: Literal["passed", "partly", "failed"]
    """"partly": what could be checked is as it should be, but not all could be."""
    duration_s: float
    checks: tuple[str, ...] = ()
    """The checks that passed, in words."""
    unchecked: tuple[str, ...] = ()
    """What could not be looked at on this machine, and why."""
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA


class LeasePart(Struct, frozen=True, kw_only=True):
    """One member's share of a lease."""

    record: AttachRecord
    subpath: InnerOrSelf
    """`Member.subpath`."""
    folder: NameOrNone = ""
    """Name of the folder below the lease's mount point; "" for the mount point itself, if there is only one member."""
    mounted: str | None = None
    """Device number and root folder of the mount, once it exists: another mount at the same point is not ours."""


class CloneServer(Struct, frozen=True, kw_only=True):
    """The server on a clone. Each step of its start is recorded on disk before it is taken."""

    folder: Annotated[str, msgspec.Meta(pattern=r"\A/")]
    """Folder of its socket, log and temporary files; removed with the clone."""
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
    """When it first answered. Before that it ends with the process that started it."""

    @property
    def socket(self) -> str:
        """Path of its socket."""
        return os.path.join(self.folder, "s")

    @property
    def log(self) -> str:
        """Path of its output."""
        return os.path.join(self.folder, "server.log")


class Lease(Struct, frozen=True, kw_only=True):
    """A use of a snapshot: who, why, until when; on disk before anything is attached."""

    parts: Annotated[tuple[LeasePart, ...], msgspec.Meta(min_length=1)]
    """One for each member of the snapshot, in their order."""
    holder: Process
    """The process that created it; see `stays`."""
    user: str
    why: Purpose
    created_at: datetime
    until: datetime | None
    point: Annotated[str, msgspec.Meta(pattern=r"\A/")]
    """The mount point."""
    server: CloneServer | None = None
    """For a "clone"."""
    schema: int = SCHEMA

    @property
    def stays(self) -> bool:
        """Whether it lasts until `umount`: a mount, or a clone whose server has answered.

        Others end with their holder.
        """
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
        """The boot in which it was created."""
        return self.parts[0].record.boot_id

    @property
    def writable(self) -> bool:
        """Whether it is a writable clone."""
        return self.parts[0].record.writable


class Schedule(Struct, frozen=True, kw_only=True):
    """When a job has to run, as installed; `status` computes overdue runs from it."""

    job: Name
    kind: Literal["systemd", "cron"]
    expression: str
    """OnCalendar, as in systemd.time(7)."""
    installed_at: datetime
    delay_s: float = 0.0
    """Maximum random delay of a run."""
    schema: int = SCHEMA


class RestoreRecord(Struct, frozen=True, kw_only=True):
    """A running or unfinished restore: on disk before anything is created, with a copy in its hidden folder."""

    token: Token
    snapshot_id: Name
    dest: Absolute
    """Absolute, its parent resolved."""
    made_dest: bool
    """Whether this restore created the folder `dest`; if so, undoing it removes the folder."""
    holder: Process
    user: str
    began_at: datetime
    inode: int = 0
    """Inode of the hidden folder: a copy made by somebody else is not ours."""
    finishing: bool = False
    report: str = ""
    """The restore's result as JSON, once it is finishing."""
    schema: int = SCHEMA

    @property
    def hidden(self) -> str:
        """Name of the hidden folder."""
        return f".snapmgr-restore-{self.token}"


_AnyRecord = TypeVar("_AnyRecord", bound=Struct)


class _Versioned(msgspec.Struct):
    schema: int


def new_id(job: str, now: datetime) -> str:
    """Return a new snapshot id: job, UTC time and 8 random hex digits, as in "nightly.20260131T023000Z.3f9a2c1b"."""
    return f"{job}.{now.astimezone(UTC):%Y%m%dT%H%M%SZ}.{os.urandom(4).hex()}"


def encode(record: Struct) -> bytes:
    """Return a record as indented JSON, as people read these files in emergencies.

    Raises CatalogError if it names something that is not UTF-8.
    """
    try:
        data = msgspec.json.encode(record)
    except UnicodeEncodeError as error:
        name = os.fsencode(error.object).decode("utf-8", "backslashreplace")
        raise CatalogError(f"{name} has a name that is not UTF-8", hint="use a path in UTF-8") from None
    return msgspec.json.format(data, indent=1) + b"\n"


def decode(data: bytes, kind: type[_AnyRecord], where: str) -> _AnyRecord:
    """Given JSON, return the record. Raises CatalogError that names `where` if it is damaged or of a newer schema."""
    try:
        schema = msgspec.json.decode(data, type=_Versioned).schema
        if schema > SCHEMA:
            raise CatalogError(
                f"{where} has schema {schema}, but this snapmgr knows only {SCHEMA}", hint="use a newer snapmgr"
            )
        record = msgspec.json.decode(data, type=kind)
        require_usable(record, data)
        return record
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise CatalogError(
            f"{where} is damaged: {problem_of(error)}",
            hint="restore it from the copy beside the snapshot, or see: snapmgr doctor",
        ) from None
