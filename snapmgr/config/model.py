"""The configuration's shape: what each table may hold, with which types, limits and defaults.

A key's TOML name is its attribute's name without the unit: ``lock_wait = "3s"`` is `Job.lock_wait_s`, a float.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from snapmgr.contract.errors import NotFoundError

# Markers for the texts that become numbers or must have a form; `snapmgr.config.values` parses them.
Duration = Annotated[float, "duration"]
Size = Annotated[int, "size"]
AbsolutePath = Annotated[str, "path"]
Share = Annotated[float, "share"]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]

Source = Literal["mysql", "physical", "directory"]
Quiesce = Literal["auto", "backup-lock", "global-read-lock", "stopped", "crash-consistent", "freeze-process"]
Check = Literal["none", "quick", "extended"]
WantedPosition = Literal["exact", "none"]
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
    """Share of the tables that are checked, more than 0 up to 1."""
    assertions: tuple[Text, ...] = ()
    """SQL; each must return one true value."""
    time_limit_s: Duration = msgspec.field(default=1800.0, name="time_limit")
    memory_bytes: Size = msgspec.field(default=256 * 1024**2, name="memory")
    server: AbsolutePath | None = None
    options: tuple[Text, ...] = ()
    command: tuple[Text, ...] = ()
    """Program and arguments for a directory; "{}" stands for the clone's path."""


class Prepare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``prepare``: how a physical backup is made ready for a server; ``snapmgr prepare --tune`` finds the values."""

    strategy: Strategy = "auto"
    use_memory_bytes: Size | None = msgspec.field(default=None, name="use_memory")
    """The tool's buffer pool; None: a share of what is free."""
    tool_options: tuple[Text, ...] = ()
    writeback: bool = False
    """On a private mount of the storage's client: a write is done once it is in the local cache."""
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
    lock_wait_s: Duration = msgspec.field(default=3.0, name="lock_wait")
    """How long the last try may wait for the lock, all its stages together; those before it less."""
    lock_attempts: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 5
    lock_hold_s: Duration = msgspec.field(default=10.0, name="lock_hold")
    """The bound from the lock granted to the lock released."""
    position: WantedPosition = "exact"
    """Whether the binlog position must be exact; without it a lesser lock, or none, may do."""
    blocker_wait_s: Duration = msgspec.field(default=60.0, name="blocker_wait")
    """How long to wait, before asking for the lock, for what would hold it off."""
    kill_selects_after_s: Duration | None = msgspec.field(default=None, name="kill_selects_after")
    """SELECTs that hold off the lock and run longer than this are killed; None: never."""
    stop_replica: bool = False
    """Whether a replica's applier stands still during the snapshot."""
    # directory
    path: AbsolutePath | None = None
    # physical
    staging: AbsolutePath | None = None
    """Folder on the storage: in a folder of the job's name there the server's own tool writes the backup."""
    tool: Tool = "auto"
    mode: Mode = "full"
    """"incremental": only what changed is fetched, and applied to a clone of the last backup: a full one again."""
    tool_options: tuple[Text, ...] = ()
    parallel: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    """How many files the tool copies at once."""
    throttle_bytes: Size | None = msgspec.field(default=None, name="throttle")
    """Bytes a second that the tool may read; None: no limit."""
    checksums: bool = False
    """Whether the seal reads every file for its checksum, before and after the snapshot."""
    tool_time_limit_s: Duration = msgspec.field(default=86400.0, name="tool_time_limit")
    """How long the tool may take."""
    prepare: Prepare = Prepare()
    # all
    sync_target_s: Duration = msgspec.field(default=0.05, name="sync_target")
    """Flushing is repeated before the lock until it takes no longer than this."""
    settle_timeout_s: Duration = msgspec.field(default=300.0, name="settle_timeout")
    retention: Retention = Retention()
    after_backup: tuple[Step, ...] = ()
    max_age_s: Duration | None = msgspec.field(default=None, name="max_age")
    """`status` calls the job overdue when its newest snapshot is older: for jobs that something else schedules."""
    grace_s: Duration = msgspec.field(default=3600.0, name="grace")
    """How long after its scheduled time a job may be without its snapshot before `status` calls it overdue."""
    capacity_warn_share: Share = msgspec.field(default=0.8, name="capacity_warn")
    """`status` and `doctor` complain of storage that is fuller than this share."""
    capacity_warn_within_s: Duration = msgspec.field(default=86400.0, name="capacity_warn_within")
    """… or that will be full within this time, or before the next scheduled run."""
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
    """``[backend.NAME]`` as it is written; `snapmgr.config.plugins.make_backend` knows its types."""

    def job(self, name: str) -> Job:
        """Return the job called `name`. Raises NotFoundError, which names the jobs that there are."""
        if name in self.jobs:
            return self.jobs[name]
        near = difflib.get_close_matches(name, self.jobs, n=1)
        known = f"did you mean {near[0]}?" if near else f"jobs here: {', '.join(self.jobs) or 'none'}"
        raise NotFoundError(f"there is no job {name!r} in {self.files[0]}", hint=known)


# Keys of `Job`, and of its table `verify`, that not every source has; those who have them.
_SERVER, _LIVE = frozenset({"mysql", "physical"}), frozenset({"mysql"})
KEY_SOURCES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("socket", "defaults_file", "user", "datadir"), _SERVER),
    **dict.fromkeys(
        (
            "quiesce",
            "lock_wait",
            "lock_attempts",
            "lock_hold",
            "position",
            "blocker_wait",
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
RESERVED_JOB_NAMES = frozenset({"latest", "all"})
