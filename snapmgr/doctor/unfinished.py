"""Finds leftovers of interrupted runs in the state directory: leases, unfinished snapshots and restores. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.catalog.manifest import UNFINISHED
from snapmgr.doctor.finding import Finding, Repair, of_state
from snapmgr.doctor.rebuild import job_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.doctor.facts import Facts, LeaseFacts
    from snapmgr.doctor.finding import RepairKind


def diagnose_unfinished(facts: Facts) -> Iterator[Finding]:
    """Return a finding for each leftover of an interrupted run, and for each mount that needs attention."""
    yield from _leases(facts)
    yield from _unfinished(facts)
    yield from _restores(facts)


def _leases(facts: Facts) -> Iterator[Finding]:
    for one in facts.leases:
        lease = one.lease
        end = f"snapmgr umount {lease.id}"
        why = _lease_is_over(facts, one)
        if why is not None:
            text = "removes the clone, with all changes to it" if lease.writable else "removes its lease"
            repair = Repair(kind="release", text=text, about=lease)
            yield of_state(lease.point, why, job=job_of(lease.snapshot_id), hint=end, repair=repair)
        elif one.problem is not None:
            # No repair: part of it may still be readable.
            hint = f"{one.problem.hint}; to unmount it: {end}"
            yield of_state(lease.point, one.problem.what, job=job_of(lease.snapshot_id), hint=hint)
        elif lease.until is not None and lease.until < facts.now:
            # No repair: somebody may be using it.
            what = f"is still mounted by {lease.user}, past its time limit {lease.until:%Y-%m-%dT%H:%M:%SZ}"
            yield of_state(lease.point, what, job=job_of(lease.snapshot_id), hint=end)


def _lease_is_over(facts: Facts, one: LeaseFacts) -> str | None:
    if one.lease.boot_id != facts.boot_id:
        return "was mounted before the last boot; its clone may still exist"
    if one.lease.server is not None and one.lease.stays:
        return None if one.server_alive else "is a clone whose server is not running"
    if one.alive or (one.lease.stays and one.mounted):
        return None  # a process that is alive may be about to mount
    if one.lease.stays:
        return "has a lease, but is not mounted"
    return f"was attached by a {one.lease.why} that was killed"


def _unfinished(facts: Facts) -> Iterator[Finding]:
    for manifest in facts.snapshots:
        if manifest.state not in UNFINISHED:
            continue
        what = f"is {manifest.state.upper()}, left by a run that was interrupted"
        pending = manifest.state == "pending"
        if pending and manifest.proved:
            text = "completes it, as it is proven"
        else:
            text = "removes its leftovers" if pending else "finishes its deletion"
        kind: RepairKind = "finish-pending" if pending else "finish-deletion"
        repair: Repair | None = Repair(kind=kind, text=text, about=manifest)
        hint = f"the next run of its job does the same: snapmgr prune {manifest.job}"
        pid = facts.hanging.get(manifest.id)
        if pid is not None and manifest.job not in facts.active:
            what, repair = f"its storage call still hangs in the helper process {pid}", None
            hint = f"check /proc/{pid}/stack and the kernel log; if a file system is frozen, thaw it: fsfreeze -u"
        yield of_state(manifest.id, what, job=manifest.job, hint=hint, repair=repair)


def _restores(facts: Facts) -> Iterator[Finding]:
    for one in facts.restores:
        repair = Repair(kind="clear-restore", text=one.repair, about=one)
        yield of_state(one.place, one.what, job=one.job, repair=repair)
