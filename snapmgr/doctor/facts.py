"""What a look at the state directory, the storage, mounts and processes saw: records, for `snapmgr.doctor.diagnose`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from pathlib import Path

    from snapmgr.capacity.series import CapacityLimits, PoolCapacity
    from snapmgr.catalog.manifest import Lease
    from snapmgr.catalog.store import Entry
    from snapmgr.contract.errors import SnapmgrError
    from snapmgr.contract.records import Found, Pool, Reason
    from snapmgr.restore.unfinished import Unfinished


@dataclass(frozen=True, kw_only=True)
class PoolFacts:
    """A pool, and what is in it or why it did not answer."""

    pool: Pool
    found: tuple[Found, ...] = ()
    error: SnapmgrError | None = None
    capacity: PoolCapacity | None = None
    """How full it is, where it can run full."""
    expected: bool = True
    """Whether a manifest or a person names it; else the first backup has yet to make it."""


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """A file of ours in the state directory or the scratch directory that is not as it should be."""

    path: Path
    kind: Literal["manifest", "verification", "lease", "too-new", "foreign", "temporary", "empty", "scratch"]
    problem: str
    snapshot_id: str | None = None
    """For manifests and verifications."""


@dataclass(frozen=True, kw_only=True)
class LeaseFacts:
    """A lease, and what has become of its holder and its mounts."""

    lease: Lease
    alive: bool
    """Whether the process that made it still runs."""
    mounted: bool
    """Whether all its mounts are there; without root, when nothing is mounted, True."""
    server_alive: bool = False
    """Of a clone: whether its server still runs."""
    problem: Reason | None = None
    """Why what is read there is not to be believed."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was seen, in one look. The storage was read before the catalog: what it holds is known there by then."""

    state_dir: str
    machine_id: str
    boot_id: str
    now: datetime
    exists: bool = True
    jobs: frozenset[str] = frozenset()
    """Those that are configured."""
    limits: Mapping[str, CapacityLimits] = field(default_factory=dict)
    """From when on storage is too full, by job."""
    entries: tuple[Entry, ...] = ()
    leases: tuple[LeaseFacts, ...] = ()
    files: tuple[FileFacts, ...] = ()
    pools: tuple[PoolFacts, ...] = ()
    hanging: frozenset[str] = frozenset()
    """Snapshots whose helper process still lives."""
    active: Mapping[str, int] = field(default_factory=dict)
    """The jobs that a run is active of, and its pid; ourselves not counted."""
    mounted: frozenset[str] = frozenset()
    """Record ids of clones that are mounted somewhere."""
    restores: tuple[Unfinished, ...] = ()
    """What restores left that were cut short, those in place among them."""
    inplace: frozenset[str] = frozenset()
    """Snapshots that are being restored in place, or that was cut short: between the storage and their manifests."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Snapshots that another state directory on this machine knows, and which."""
