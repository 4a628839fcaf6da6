"""Collects the facts about state directory, storage, mounts and processes; `snapmgr.doctor.diagnose` judges them."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from snapmgr.access.attach import part_point
from snapmgr.capacity.read import attachment_problem, sample_pool
from snapmgr.capacity.series import capacity_limits
from snapmgr.catalog.inplace import inplace_records
from snapmgr.catalog.manifest import GONE, SCHEMA, UNFINISHED
from snapmgr.catalog.summary import summarize
from snapmgr.config.plugins import list_plugins
from snapmgr.contract.errors import CatalogError, ConfigError, NotFoundError, SnapmgrError
from snapmgr.contract.records import NotMine, Pool
from snapmgr.doctor.facts import Facts, FileFacts, LeaseFacts, PoolFacts
from snapmgr.doctor.leftovers import scratch_files, stray_files
from snapmgr.doctor.rebuild import claimed_by, job_of
from snapmgr.restore.unfinished import unfinished_restores
from snapmgr.system.blockdev import find_target
from snapmgr.system.boot import boot_id, machine_id
from snapmgr.system.files import read_file
from snapmgr.system.host import is_alive

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from snapmgr.catalog.manifest import Lease, LeasePart
    from snapmgr.catalog.recordfolder import Damaged
    from snapmgr.catalog.store import Catalog
    from snapmgr.catalog.summary import Summary
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.contract.records import Mount, PoolKey, Reason

_RECORD_ID = re.compile(r"[0-9a-f]{16}")


class _Versioned(msgspec.Struct):
    schema: int


def collect_facts(ctx: Context, pools: Iterable[Pool] = (), named: Iterable[Pool] = ()) -> Facts:
    """Collect the facts about `pools`, `named` (pools that must exist), and all pools that the catalog names.

    Changes and locks nothing. Raises MissingRequirementError without permission to read the state directory.
    """
    catalog = ctx.catalog
    before = _active_runs(catalog)
    named = tuple(named)
    stored: dict[PoolKey, PoolFacts] = {}
    due = _by_key((*pools, *named))
    while True:
        stored |= {key: _read_pool(ctx, pool) for key, pool in due.items()}
        # After the storage: the catalog knows a snapshot or a clone before it exists.
        snapshots, damaged = catalog.summaries()
        leases, damaged_leases = catalog.leases()
        cataloged = _cataloged(snapshots, leases)
        due = _by_key(pool for pool in cataloged if pool.key not in stored)
        if not due:
            break
    expected = {pool.key for pool in named} | {pool.key for pool, wanted in cataloged.items() if wanted}
    pool_facts = tuple(replace(one, expected=key in expected) for key, one in stored.items())
    sound = [known for one in damaged if (known := _manifest_of(catalog, one)) is not None]
    mounts = ctx.mounter.mounts()
    state_dir = str(catalog.path.absolute())
    inplace = inplace_records(catalog)
    restores = unfinished_restores(ctx)
    if inplace:
        from snapmgr.restore.inplace.run import unfinished_inplace  # noqa: PLC0415 - nearly always there is none

        restores += unfinished_inplace(ctx)
    now = datetime.now(UTC)
    return Facts(
        state_dir=state_dir,
        machine_id=machine_id(),
        boot_id=boot_id(),
        now=now,
        exists=catalog.path.exists(),
        jobs=frozenset(ctx.config.jobs),
        limits={job.name: capacity_limits(job, now) for job in ctx.config.jobs.values()},
        snapshots=tuple(sorted((*snapshots, *sound), key=lambda one: one.created_at)),
        leases=tuple(_lease_facts(ctx, lease, mounts) for lease in leases),
        files=(
            *(_manifest_facts(catalog, one, sound) for one in damaged),
            *(_lease_file(one) for one in damaged_leases),
            *stray_files(catalog, {one.id for one in (*snapshots, *sound)}, damaged),
            *scratch_files(ctx.config.scratch_dir, leases, mounts),
        ),
        pools=pool_facts,
        hanging=dict(_hanging(catalog, snapshots)),
        made_here=frozenset(_cloned_here(catalog, pool_facts, state_dir)),
        active=before | _active_runs(catalog),
        mounted=frozenset(record for mount in mounts for record in _RECORD_ID.findall(f"{mount.root} {mount.source}")),
        elsewhere=_known_elsewhere(pool_facts, state_dir, {one.id for one in (*snapshots, *sound)}),
        restores=tuple(one for one in restores if not one.active),
        inplace=frozenset(one.snapshot_id for one in inplace),
    )


# -------------------------------------------------------------------------------------------------------------- storage


def _by_key(pools: Iterable[Pool]) -> dict[PoolKey, Pool]:
    """Return pools by their keys; the first place where one was seen counts."""
    found: dict[PoolKey, Pool] = {}
    for pool in pools:
        found.setdefault(pool.key, pool)
    return found


def _read_pool(ctx: Context, pool: Pool) -> PoolFacts:
    try:
        found = ctx.backend(pool.backend).inventory((pool,))
        return PoolFacts(pool=pool, found=found, capacity=sample_pool(ctx, pool))
    except SnapmgrError as error:
        return PoolFacts(pool=pool, error=error)


def _cataloged(snapshots: Iterable[Summary], leases: Iterable[Lease]) -> dict[Pool, bool]:
    """Return the pools that manifests and leases name, and whether they must exist."""
    pools: dict[Pool, bool] = {}
    for one in snapshots:
        # A BROKEN snapshot has no storage, unless its storage was missing.
        wanted = one.state != "broken" or (one.reason or "").startswith(GONE)
        for part in one.parts:
            pools[part.pool] = wanted or pools.get(part.pool, False)
    return pools | {part.record.ref.pool: True for lease in leases for part in lease.parts}


def _known_elsewhere(pools: Iterable[PoolFacts], state_dir: str, known: Collection[str]) -> dict[str, str]:
    """Return the snapshots whose note names another state directory on this machine that has their manifest.

    Only those without a manifest here (`known`), and those with a clone: nobody asks for the others.
    """
    elsewhere: dict[str, str] = {}
    everything = [found for pool in pools for found in pool.found]
    cloned = {one.snapshot_id for one in everything if one.record_id is not None}
    for one in everything:
        if one.snapshot_id is None or one.note is None or (one.snapshot_id in known and one.snapshot_id not in cloned):
            continue
        # Check the id before it becomes part of a path.
        if job_of(one.snapshot_id) is None:
            continue
        owner = claimed_by(one.note)
        with suppress(OSError, ValueError):
            if owner.startswith("/") and os.path.realpath(owner) != os.path.realpath(state_dir):
                os.lstat(os.path.join(owner, "snapshots", one.snapshot_id, "manifest.json"))
                elsewhere[one.snapshot_id] = owner
    return elsewhere


def pools_at(ctx: Context, path: str) -> tuple[Pool, ...]:
    """Given a folder in a storage, or a store of copies itself, return the pools there that answer.

    Raises ConfigError if no backend finds one.
    """
    try:
        target = find_target(os.path.abspath(path), runner=ctx.runner)
    except SnapmgrError as error:
        raise ConfigError(f"--pool {path}: {error.message}", hint=error.hint) from None
    answered: list[Pool] = []
    refusals: list[str] = []
    for plugin in list_plugins():
        try:
            backend = ctx.backend(plugin.name)
            volume = backend.locate(target)
            # The folder itself may be the pool of a backend that copies folders.
            pool = (
                Pool(backend=plugin.name, id=target.path, hint=target.path)
                if isinstance(volume, NotMine)
                else volume.pool
            )
            backend.inventory((pool,), notes=False)
            answered.append(pool)
        except SnapmgrError as error:
            refusals.append(f"{plugin.name}: {error.message}")
    if not answered:
        raise ConfigError(
            f"--pool {path}: no backend finds snapshots there: {'; '.join(refusals)}",
            hint="name a folder on the file system that holds them, or the store of copies itself",
        )
    return tuple(answered)


def pools_near(ctx: Context, job: Job) -> tuple[Pool, ...]:
    """Return the pools that may hold a job's snapshots if its source cannot be located: those at its old path."""
    path = {"directory": job.path, "physical": job.staging}.get(job.source, job.datadir)
    if path is None:
        return ()
    folder = Path(path).absolute()
    while not folder.is_dir():
        folder = folder.parent
    with suppress(ConfigError):
        return pools_at(ctx, str(folder))
    return ()


# ------------------------------------------------------------------------------------------------------ state directory


def active_run(catalog: Catalog, job: str) -> int | None:
    """Return the pid of the run that holds a job's lock, or None.

    Reads /proc/locks: trying the lock could make a real run fail.
    """
    try:
        lock = os.stat(catalog.path / "locks" / f"{job}.lock")
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in lines:
        # "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF"; a process that only waits has "->" instead of FLOCK.
        fields = line.split()
        if len(fields) <= 5 or fields[1] != "FLOCK":  # noqa: PLR2004
            continue
        device, _, inode = fields[5].rpartition(":")
        if inode == str(lock.st_ino) and (device == _device(lock) or _has_open(int(fields[4]), lock)):
            return int(fields[4])
    return None


def _device(status: os.stat_result) -> str:
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"


def _has_open(pid: int, status: os.stat_result) -> bool:
    """Whether a process has a file open: /proc/locks and stat(2) name a file of btrfs by different devices."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), status):
                    return True
    return False


def _active_runs(catalog: Catalog) -> dict[str, int]:
    """Return the jobs whose lock another process holds, and its pid."""
    jobs = [path.name.removesuffix(".lock") for path in (catalog.path / "locks").glob("*.lock")]
    return {job: pid for job in jobs if (pid := active_run(catalog, job)) not in (None, os.getpid())}


def _lease_facts(ctx: Context, lease: Lease, mounts: tuple[Mount, ...]) -> LeaseFacts:
    sources = {(mount.point, f"{mount.device} {mount.root}") for mount in mounts}
    points = {point for point, _ in sources}

    def is_mounted(part: LeasePart) -> bool:
        point = os.path.realpath(part_point(lease, part))
        return (point, part.mounted) in sources if part.mounted is not None else point in points

    mounted = os.geteuid() != 0 or all(map(is_mounted, lease.parts))
    server = lease.server.process if lease.server is not None else None
    problem: Reason | None = None
    if mounted and lease.boot_id == boot_id():
        # The facts of its pool report a storage that does not answer.
        with suppress(SnapmgrError):
            problem = attachment_problem(ctx, lease)
    return LeaseFacts(
        lease=lease,
        alive=is_alive(lease.holder),
        mounted=mounted,
        server_alive=server is not None and is_alive(server),
        problem=problem,
    )


def _cloned_here(catalog: Catalog, pools: Iterable[PoolFacts], state_dir: str) -> Iterator[str]:
    """Yield the snapshots with clones in the storage whose manifest names this state directory and machine."""
    cloned = {one.snapshot_id for pool in pools for one in pool.found if one.record_id is not None}
    for snapshot_id in cloned:
        # Check the id before it becomes part of a path.
        if snapshot_id is None or job_of(snapshot_id) is None:
            continue
        with suppress(CatalogError, NotFoundError):
            manifest = catalog.load(snapshot_id).manifest
            if (manifest.state_dir, manifest.machine_id) == (state_dir, machine_id()):
                yield manifest.id


def _hanging(catalog: Catalog, snapshots: Iterable[Summary]) -> Iterator[tuple[str, int]]:
    for one in snapshots:
        if one.state in UNFINISHED:
            with suppress(CatalogError, NotFoundError):
                helper = catalog.load(one.id).manifest.helper
                if helper is not None and is_alive(helper):
                    yield one.id, helper.pid


def _manifest_of(catalog: Catalog, damaged: Damaged) -> Summary | None:
    """Return the snapshot of a damaged folder if its manifest is sound and only its verification is damaged."""
    try:
        return summarize(catalog.load(damaged.path.name))
    except (CatalogError, NotFoundError):
        return None


def _is_too_new(path: Path) -> bool:
    with suppress(SnapmgrError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(read_file(path), type=_Versioned).schema > SCHEMA
    return False


def _manifest_facts(catalog: Catalog, one: Damaged, sound: list[Summary]) -> FileFacts:
    snapshot_id = one.path.name
    if one.path.is_symlink():
        return FileFacts(path=one.path, kind="foreign", problem=one.problem, snapshot_id=snapshot_id)
    is_sound = any(known.id == snapshot_id for known in sound)
    path = catalog.path / "snapshots" / snapshot_id / ("verified.json" if is_sound else "manifest.json")
    if _is_too_new(path):
        return FileFacts(path=path, kind="too-new", problem=one.problem, snapshot_id=snapshot_id)
    return FileFacts(
        path=path, kind="verification" if is_sound else "manifest", problem=one.problem, snapshot_id=snapshot_id
    )


def _lease_file(one: Damaged) -> FileFacts:
    return FileFacts(path=one.path, kind="too-new" if _is_too_new(one.path) else "lease", problem=one.problem)
