"""The state directory against what the storage really holds: damage, leftovers of dead runs, forgotten mounts."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from snapmgr.blockdev import read_mounts
from snapmgr.errors import NotFoundError, SnapmgrError
from snapmgr.host import boot_id, is_alive
from snapmgr.jobs.attach import part_point
from snapmgr.jobs.doctor import Finding, of_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from snapmgr.catalog import Catalog, Entry
    from snapmgr.jobs.context import Context
    from snapmgr.jobs.doctor import Level
    from snapmgr.manifest import Lease, Manifest
    from snapmgr.records import Found, Pool


def examine_state(ctx: Context) -> Iterator[Finding]:
    """Look at manifests, leases and unfinished snapshots."""
    catalog = ctx.catalog
    if not catalog.path.exists():
        yield _state(str(catalog.path), "note", "is not there yet; the first backup makes it")
        return
    entries, damaged = catalog.entries()
    leases, damaged_leases = catalog.leases()
    for one in (*damaged, *damaged_leases):
        hint = "restore it from the copy beside the snapshot, or move it away"
        yield _state(str(one.path), "problem", one.problem, hint)
    for entry in entries:
        yield from _examine_unfinished(ctx, entry.manifest)
    points = {mount.point for mount in read_mounts()}
    for lease in leases:
        yield from _examine_lease(lease, points)
    orphans = sorted({entry.manifest.job for entry in entries} - set(ctx.config.jobs))
    for job in orphans:
        yield _state(job, "note", "has snapshots but is not configured: nothing prunes them")
    ready = sum(entry.manifest.state == "ready" for entry in entries)
    proved = sum(entry.verified for entry in entries)
    yield _state(str(catalog.path), "ok", f"{ready} snapshots are READY, {proved} of all are proved restorable")


def _state(subject: str, level: Level, what: str, hint: str | None = None) -> Finding:
    return Finding(area="state", subject=subject, level=level, what=what, hint=hint)


def active_run(catalog: Catalog, job: str) -> int | None:
    """Return the pid of the run that holds a job's lock, or None.

    Read from /proc/locks: trying the lock would, for a moment, make a real run fail.
    """
    try:
        inode = os.stat(catalog.path / "locks" / f"{job}.lock").st_ino
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in lines:
        # "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF"; "->" instead of FLOCK: only waits.
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):  # noqa: PLR2004
            return int(fields[4])
    return None


def _examine_unfinished(ctx: Context, manifest: Manifest) -> Iterator[Finding]:
    if manifest.state not in ("pending", "deleting"):
        return
    pid = active_run(ctx.catalog, manifest.job)
    if pid is not None:
        yield _state(manifest.id, "note", f"is {manifest.state.upper()}: a run of its job is active (pid {pid})")
        return
    if manifest.helper is not None and is_alive(manifest.helper):
        yield _state(
            manifest.id,
            "problem",
            f"its storage call still hangs in the helper process {manifest.helper.pid}",
            f"see /proc/{manifest.helper.pid}/stack and the kernel log; a frozen file system? (fsfreeze -u)",
        )
        return
    proven = manifest.state == "pending" and manifest.proved_at is not None
    then = "completes it: it was proven before" if proven else "removes it"
    what = f"is {manifest.state.upper()}, left by a run that was cut short"
    yield _state(manifest.id, "problem", what, f"the next run of its job {then}: snapmgr prune {manifest.job}")


def _examine_lease(lease: Lease, points: set[str]) -> Iterator[Finding]:
    end = f"snapmgr umount {lease.id}"
    if lease.boot_id != boot_id():
        yield _state(lease.point, "problem", "was mounted before the last boot; its clone may still be there", end)
    elif lease.why != "mount" and not is_alive(lease.holder):
        yield _state(lease.point, "problem", f"was attached by a {lease.why} that was killed", end)
    elif (
        os.geteuid() == 0
        and lease.why == "mount"
        and any(part_point(lease, part) not in points for part in lease.parts)
    ):
        yield _state(lease.point, "problem", "has a lease, but nothing is mounted there", end)
    elif lease.until is not None and lease.until < datetime.now(UTC):
        until = f"{lease.until.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        yield _state(lease.point, "problem", f"is mounted by {lease.user}, longer than until {until}", end)


def examine_storage(ctx: Context, pools: Iterable[Pool]) -> Iterator[Finding]:
    """Compare the catalog with what is in the storage: `pools`, and all that manifests name."""
    entries = ctx.catalog.entries()[0]
    everywhere = {(pool.backend, pool.id): pool for pool in pools}
    unused = set(everywhere)
    for entry in entries:
        if entry.manifest.state != "broken":
            for pool in (
                *(intent.pool for intent in entry.manifest.intents),
                *(member.ref.pool for member in entry.manifest.members),
            ):
                everywhere.setdefault((pool.backend, pool.id), pool)
                unused.discard((pool.backend, pool.id))
    for pool in everywhere.values():
        where = f"{pool.backend} {pool.hint}"
        try:
            found = ctx.backend(pool.backend).inventory((pool,))
        except SnapmgrError as error:
            if (pool.backend, pool.id) in unused:
                yield Finding(area="storage", subject=where, level="note", what="is not there yet", hint=None)
            else:
                yield of_error("storage", where, error)
            continue
        yield from _compare(ctx, pool, where, entries, found)


def _compare(ctx: Context, pool: Pool, where: str, entries: list[Entry], found: tuple[Found, ...]) -> Iterator[Finding]:
    there = {one.ref.identity for one in found if one.ref is not None and one.kind == "snapshot"}
    missing = False
    for entry in entries:
        refs = [member.ref for member in entry.manifest.members if _key(member.ref.pool) == _key(pool)]
        gone = any(ref.identity not in there for ref in refs)
        if entry.manifest.state == "ready" and gone and _state_now(ctx, entry.manifest.id) == "ready":
            missing = True
            hint = "somebody deleted it: restore from another one"
            yield _problem(where, f"the storage of {entry.manifest.id} is gone", hint)
    leases = {part.record.id for lease in ctx.catalog.leases()[0] for part in lease.parts}
    for one in found:
        yield from _examine_found(ctx, where, one, leases)
    if not missing:
        held = sum(one.kind == "snapshot" for one in found)
        yield Finding(area="storage", subject=where, level="ok", what=f"holds {held} snapshots; none is missing")


def _problem(where: str, what: str, hint: str) -> Finding:
    return Finding(area="storage", subject=where, level="problem", what=what, hint=hint)


def _examine_found(ctx: Context, where: str, one: Found, leases: set[str]) -> Iterator[Finding]:
    """Say what is wrong with one thing that is in the storage."""
    if one.kind == "attachment" and one.record_id not in leases:
        yield _problem(where, f"{one.name} is a clone that no lease knows", "delete it by hand once nobody uses it")
    elif one.kind == "debris" and not _is_running(ctx, one):
        known = one.snapshot_id is not None and _state_now(ctx, one.snapshot_id) in ("pending", "deleting")
        hint = "the next run of its job removes it" if known else "no run of ours knows it: delete it by hand"
        yield _problem(where, f"{one.name} is unfinished: {one.why}", hint)
    elif one.kind == "snapshot" and one.snapshot_id is not None:
        state = _state_now(ctx, one.snapshot_id)
        if state is None:
            hint = "does it belong to another state directory? Else delete it by hand"
            yield _problem(where, f"{one.name} is not in this state directory", hint)
        elif state == "broken":
            yield _problem(where, f"{one.name} is there, though its manifest says BROKEN", "delete it by hand")


def _key(pool: Pool) -> tuple[str, str]:
    return (pool.backend, pool.id)


def _state_now(ctx: Context, snapshot_id: str) -> str | None:
    """Return a snapshot's state, read again: a run may have made or deleted it since the list was read."""
    with suppress(NotFoundError):
        try:
            return ctx.catalog.load(snapshot_id).manifest.state
        except SnapmgrError as error:
            if isinstance(error, NotFoundError):
                raise
            return "damaged"
    return None


def _is_running(ctx: Context, found: Found) -> bool:
    return found.snapshot_id is not None and active_run(ctx.catalog, found.snapshot_id.partition(".")[0]) is not None
