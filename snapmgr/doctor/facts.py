"""Records the facts about state directory, storage, mounts and processes, for `snapmgr.doctor.diagnose`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct, field

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from pathlib import Path

    from snapmgr.capacity.series import CapacityLimits, PoolCapacity
    from snapmgr.catalog.manifest import Lease
    from snapmgr.catalog.summary import Summary
    from snapmgr.contract.errors import SnapmgrError
    from snapmgr.contract.records import Found, Pool, Reason
    from snapmgr.restore.unfinished import Unfinished


class PoolFacts(Struct, frozen=True, kw_only=True):
    """A pool, and its contents or the reason why it did not answer."""

    pool: Pool
    found: tuple[Found, ...] = ()
    error: SnapmgrError | None = None
    capacity: PoolCapacity | None = None
    """How full it is, if it can overflow."""
    expected: bool = True
    """Whether a manifest or the user names it; otherwise the first backup creates it."""


class FileFacts(Struct, frozen=True, kw_only=True):
    """A damaged or leftover file of ours in the state directory or the scratch directory."""

    path: Path
    kind: Literal["manifest", "verification", "lease", "too-new", "foreign", "temporary", "empty", "scratch"]
    problem: str
    snapshot_id: str | None = None
    """For manifests and verifications."""


class LeaseFacts(Struct, frozen=True, kw_only=True):
    """A lease, and the state of its holder and its mounts."""

    lease: Lease
    alive: bool
    """Whether the process that made it is still running."""
    mounted: bool
    """Whether all its mounts exist; always True without root, as nothing is mounted then."""
    server_alive: bool = False
    """For a clone: whether its server is still running."""
    problem: Reason | None = None
    """Why its data cannot be trusted."""


class Facts(Struct, frozen=True, kw_only=True):
    """All facts of one examination. The storage is read before the catalog, which then knows all that it holds."""

    state_dir: str
    machine_id: str
    boot_id: str
    now: datetime
    exists: bool = True
    jobs: frozenset[str] = frozenset()
    """The configured jobs."""
    limits: Mapping[str, CapacityLimits] = field(default_factory=dict)
    """The limits for the capacity of storage, by job."""
    snapshots: tuple[Summary, ...] = ()
    leases: tuple[LeaseFacts, ...] = ()
    files: tuple[FileFacts, ...] = ()
    pools: tuple[PoolFacts, ...] = ()
    hanging: Mapping[str, int] = field(default_factory=dict)
    """The unfinished snapshots whose helper process is still running, and its pid."""
    made_here: frozenset[str] = frozenset()
    """The snapshots with clones in the storage that were made with this state directory on this machine."""
    active: Mapping[str, int] = field(default_factory=dict)
    """The pid of the active run, by job; this process is not counted."""
    mounted: frozenset[str] = frozenset()
    """Record ids of clones that are mounted somewhere."""
    restores: tuple[Unfinished, ...] = ()
    """Unfinished restores, in-place restores included."""
    inplace: frozenset[str] = frozenset()
    """Snapshots with an active or unfinished in-place restore: storage and manifest may differ."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Snapshots that belong to another state directory on this machine, with its path."""
