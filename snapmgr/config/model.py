"""Defines the tables of the configuration: keys, types, limits and defaults.

A key's TOML name is its attribute's name without the unit: ``max_stall = "3s"`` is `Job.max_stall_s`, a float.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from snapmgr.contract.errors import NotFoundError

# Markers for strings that become numbers or must have a certain form; `snapmgr.config.values` parses them.
Duration = Annotated[float, "duration"]
Size = Annotated[int, "size"]
AbsolutePath = Annotated[str, "path"]
Share = Annotated[float, "share"]
Room = Annotated[str, "room"]
"""A share or a size: "5%", "10G", "0"; see `snapmgr.contract.units.part_of`."""
Text = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]

Source = Literal["mysql", "physical", "directory"]
Quiesce = Literal["auto", "backup-lock", "global-read-lock", "stopped", "crash-consistent", "freeze-process"]
Check = Literal["none", "quick", "extended"]
WantedPosition = Literal["exact", "best"]
Step = Literal["verify", "prune"]
Tool = Literal["auto", "mariadb-backup", "xtrabackup", "clone"]
Mode = Literal["full", "incremental"]
Strategy = Literal["auto", "storage", "scratch", "overlay"]


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """``retention``: the same attributes as `snapmgr.retention.Policy`."""

    keep_last: Count = 0
    keep_hourly: Count = 0
    keep_daily: Count = 0
    keep_weekly: Count = 0
    keep_monthly: Count = 0
    keep_yearly: Count = 0
    keep_within_s: Duration | None = msgspec.field(default=None, name="keep-within")


class Verify(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``verify``: how a snapshot is proved on a writable clone."""

    check: Check = "quick"
    tables_share: Share = msgspec.field(default=1.0, name="tables")
    """Share of the tables that are checked, above 0 and up to 1."""
    assertions: tuple[Text, ...] = ()
    """SQL; each must return one true value."""
    time_limit_s: Duration = msgspec.field(default=1800.0, name="time_limit")
    memory_bytes: Size = msgspec.field(default=256 * 1024**2, name="memory")
    server: AbsolutePath | None = None
    options: tuple[Text, ...] = ()
    command: tuple[Text, ...] = ()
    """Program and arguments for a directory; "{}" stands for the clone's path."""


class Prepare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``prepare``: how a physical backup is prepared; ``snapmgr prepare --tune`` finds the values."""

    strategy: Strategy = "auto"
    use_memory_bytes: Size | None = msgspec.field(default=None, name="use_memory")
    """The tool's buffer pool; None: a share of the free memory."""
    tool_options: tuple[Text, ...] = ()
    writeback: bool = False
    """On a private mount of the storage's client: a write completes once it is in the local cache."""
    upload_delay_s: Duration = msgspec.field(default=0.0, name="upload_delay")
    cache_size_bytes: Size | None = msgspec.field(default=None, name="cache_size")
    cache_dir: AbsolutePath | None = None
    warm_up: bool = False
    """Whether the client reads the backup into its cache first."""
    mount_options: tuple[Text, ...] = ()
    """Further options of the client's private mount."""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[job.NAME]`` with ``[defaults]`` merged in."""

    source: Source
    backend: Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9_-]{0,47}\Z")] = "auto"
    # mysql
    socket: AbsolutePath | None = None
    defaults_file: AbsolutePath | None = None
    user: Text | None = None
    datadir: AbsolutePath | None = None
    quiesce: Quiesce = "auto"
    max_stall_s: Duration = msgspec.field(default=3.0, name="max_stall")
    """How long writers may queue behind the last request for the lock, all its stages together; earlier ones less."""
    lock_attempts: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 5
    lock_hold_s: Duration = msgspec.field(default=10.0, name="lock_hold")
    """Maximum time from the lock granted to the lock released."""
    position: WantedPosition = "exact"
    """"exact": no snapshot without the exact binlog position; "best": a weaker lock, or none, may be enough."""
    blocker_wait_s: Duration = msgspec.field(default=60.0, name="blocker_wait")
    """How long to wait for sessions that would block the lock, before asking for it."""
    blocker_age_s: Duration = msgspec.field(default=1.0, name="blocker_age")
    """Sessions count as blockers once they have blocked the lock for this long; younger ones probably end in time."""
    kill_selects_after_s: Duration | None = msgspec.field(default=None, name="kill_selects_after")
    """SELECTs that block the lock and run longer than this are killed; None: never."""
    stop_replica: bool = False
    """Whether a replica's applier is stopped during the snapshot."""
    # directory
    path: AbsolutePath | None = None
    # physical
    staging: AbsolutePath | None = None
    """Folder on the storage; the server's own tool writes the backup into a subfolder named for the job."""
    tool: Tool = "auto"
    mode: Mode = "full"
    """"incremental": fetch only changes and apply them to a clone of the last backup, which makes a full one."""
    tool_options: tuple[Text, ...] = ()
    parallel: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    """How many files the tool copies in parallel."""
    throttle_bytes: Size | None = msgspec.field(default=None, name="throttle")
    """Bytes a second that the tool may read; None: no limit."""
    checksums: bool = False
    """Whether the seal reads every file for its checksum, before and after the snapshot."""
    tool_time_limit_s: Duration = msgspec.field(default=86400.0, name="tool_time_limit")
    """How long the tool may take."""
    prepare: Prepare = Prepare()
    # all
    sync_target_s: Duration = msgspec.field(default=0.05, name="sync_target")
    """The flush before the lock is repeated until it takes no longer than this."""
    settle_timeout_s: Duration = msgspec.field(default=300.0, name="settle_timeout")
    retention: Retention = Retention()
    after_backup: tuple[Step, ...] = ()
    max_age_s: Duration | None = msgspec.field(default=None, name="max_age")
    """`status` calls the job overdue if its newest snapshot is older; for jobs that another scheduler runs."""
    grace_s: Duration = msgspec.field(default=3600.0, name="grace")
    """How long after its scheduled time `status` calls a job without its snapshot overdue."""
    capacity_warn_share: Share = msgspec.field(default=0.8, name="capacity_warn")
    """`status` and `doctor` report storage that is fuller than this share."""
    capacity_warn_within_s: Duration = msgspec.field(default=86400.0, name="capacity_warn_within")
    """They also report storage that will be full within this time, or before the next scheduled run."""
    free_min: Room = "5%"
    """A backup prunes first, or refuses, if less than this is free where a full storage stops the database."""
    verify: Verify = Verify()
    name: str = ""
    """NAME; not a key."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All configuration files together."""

    files: tuple[Path, ...]
    """The files that were read, in their order."""
    state_dir: Path
    scratch_dir: Path
    jobs: dict[str, Job]
    """By name, in the order of the files."""
    backends: dict[str, dict[str, Any]]
    """``[backend.NAME]`` as written; `snapmgr.config.plugins.make_backend` checks its types."""

    def job(self, name: str) -> Job:
        """Return the job `name`. Raises NotFoundError, which suggests other names."""
        if name in self.jobs:
            return self.jobs[name]
        import difflib  # noqa: PLC0415 - for messages alone

        near = difflib.get_close_matches(name, self.jobs, n=1)
        known = f"did you mean {near[0]}?" if near else f"configured jobs: {', '.join(self.jobs) or 'none'}"
        raise NotFoundError(f"there is no job {name!r} in {self.files[0]}", hint=known)


# Keys of `Job` and of its table `verify` that apply only to some sources, with these sources.
_SERVER, _LIVE = frozenset({"mysql", "physical"}), frozenset({"mysql"})
KEY_SOURCES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("socket", "defaults_file", "user", "datadir"), _SERVER),
    **dict.fromkeys(
        (
            "quiesce",
            "max_stall",
            "lock_attempts",
            "lock_hold",
            "position",
            "blocker_wait",
            "blocker_age",
            "kill_selects_after",
            "stop_replica",
        ),
        _LIVE,
    ),
    "path": frozenset({"directory"}),
    **dict.fromkeys(
        (
            "staging",
            "tool",
            "mode",
            "tool_options",
            "parallel",
            "throttle",
            "checksums",
            "tool_time_limit",
            "prepare",
        ),
        frozenset({"physical"}),
    ),
}
VERIFY_KEY_SOURCES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("check", "tables", "assertions", "memory", "server", "options"), _SERVER),
    "command": frozenset({"directory"}),
}
RESERVED_JOB_NAMES = frozenset({"latest", "latest-verified", "all"})
