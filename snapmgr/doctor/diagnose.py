"""Decides what is wrong with state directory and storage, and how to repair it. Pure: facts in, findings out.

`snapmgr doctor` prints the findings, ``doctor --fix`` makes their repairs.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.access.note import decode_note
from snapmgr.capacity.series import was_overflowed
from snapmgr.catalog.entry import Entry
from snapmgr.catalog.manifest import GONE, UNFINISHED
from snapmgr.contract.errors import CatalogError
from snapmgr.doctor.finding import Finding, Repair, of_error, of_state
from snapmgr.doctor.overflow import diagnose_capacity, lost_snapshots, overflowed_members, remaining_members
from snapmgr.doctor.rebuild import Adoption, adopt, job_of
from snapmgr.doctor.unfinished import diagnose_unfinished

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from snapmgr.catalog.summary import Summary
    from snapmgr.contract.records import Found, PoolKey
    from snapmgr.doctor.facts import Facts
    from snapmgr.doctor.finding import RepairKind


_UNKNOWN_OWNER = "owner unknown; delete it manually when it is no longer in use"


def diagnose(facts: Facts) -> list[Finding]:
    """Return all findings; those about a job with an active run have no repair, as that run may still repair them."""
    view = _View.of(facts)
    if not facts.exists:
        what = "does not exist yet; the first backup creates it"
        findings = [Finding(area="state", subject=facts.state_dir, level="note", what=what)]
    else:
        findings = [*diagnose_unfinished(facts), *_files(facts, view), *_orphans(facts)]
    findings += [*_members(facts, view), *diagnose_capacity(facts), *_stored(facts, view), *_pools(facts, view)]
    return [_leave_to_run(facts, finding) for finding in findings]


def _leave_to_run(facts: Facts, finding: Finding) -> Finding:
    pid = facts.active.get(finding.job or "")
    if pid is None or finding.repair is None:
        return finding
    what = f"{finding.what}; skipped: a run of its job is active (pid {pid})"
    return replace(finding, level="note", what=what, hint=None, repair=None)


# ------------------------------------------------------------------------------------------------------ state directory


def _files(facts: Facts, view: _View) -> Iterator[Finding]:
    for one in facts.files:
        job = job_of(one.snapshot_id) if one.snapshot_id else None
        repair: Repair | None = None
        hint: str | None = None
        if one.kind == "manifest":
            # If the storage has a sound note, `_stored` offers to restore it.
            if one.snapshot_id in view.adoptable:
                continue
            hint = "no readable storage has a copy of it: restore it from your backups, or move it away"
        elif one.kind == "too-new":
            hint = "use the newer snapmgr"
        elif one.kind == "foreign":
            hint = "check it, and move it away"
        elif one.kind in ("verification", "lease"):
            repair = Repair(kind="set-aside", text=f"moves it to {facts.state_dir}/damaged", about=one.path)
        elif one.kind == "temporary":
            repair = Repair(kind="remove-file", text="removes it", about=one.path)
        else:
            kind: RepairKind = "remove-folder" if one.kind == "empty" else "remove-tree"
            repair = Repair(kind=kind, text="removes it", about=one.path)
        yield of_state(str(one.path), one.problem, job=job, hint=hint, repair=repair)


def _orphans(facts: Facts) -> Iterator[Finding]:
    for job in sorted({one.job for one in facts.snapshots} - facts.jobs):
        what = "has snapshots but is not configured: they are never pruned"
        yield Finding(area="state", subject=job, level="note", what=what, job=job)
    ready = sum(one.state == "ready" for one in facts.snapshots)
    verified = sum(one.verified for one in facts.snapshots)
    what = f"READY snapshots: {ready}, VERIFIED snapshots: {verified}"
    yield Finding(area="state", subject=facts.state_dir, level="ok", what=what)


# -------------------------------------------------------------------------------------------------------------- storage


class _View(Struct, frozen=True, kw_only=True):
    """The facts, indexed for the checks of the storage."""

    known: Mapping[str, Summary]
    records: frozenset[str]
    """The record ids of all leases, readable or not."""
    answered: frozenset[PoolKey]
    found: tuple[Found, ...]
    snapshots: Mapping[tuple[str, str, str], Found]
    """Sound snapshots by their identity."""
    adoptable: Mapping[str, tuple[Adoption, Found]]
    """Snapshots without a sound manifest that can be adopted from their notes; each with its first member."""
    refused: Mapping[str, tuple[str, str | None]]
    """Snapshots that cannot be adopted: the reason, and a hint for the user."""

    @staticmethod
    def of(facts: Facts) -> _View:
        known = {one.id: one for one in facts.snapshots}
        found = tuple(one for pool in facts.pools for one in pool.found)
        answered = frozenset(pool.pool.key for pool in facts.pools if pool.error is None)
        stems = {one.path.name.removesuffix(".json") for one in facts.files if one.path.parent.name == "leases"}
        adoptable: dict[str, tuple[Adoption, Found]] = {}
        refused: dict[str, tuple[str, str | None]] = {}
        unknown: dict[str, list[Found]] = {}
        named = known.keys() | {one.snapshot_id for one in facts.files if one.kind in ("too-new", "foreign")}
        for one in found:
            if one.kind == "snapshot" and one.snapshot_id is not None and one.snapshot_id not in named:
                unknown.setdefault(one.snapshot_id, []).append(one)
        for snapshot_id, members in unknown.items():
            if snapshot_id in facts.elsewhere:
                continue
            result = adopt(members, answered, state_dir=facts.state_dir, machine_id=facts.machine_id)
            if isinstance(result, Adoption):
                adoptable[snapshot_id] = (result, members[0])
            else:
                refused[snapshot_id] = (result.why, result.hint)
        return _View(
            known=known,
            records=frozenset(part.record.id for one in facts.leases for part in one.lease.parts) | stems,
            answered=answered,
            found=found,
            snapshots={one.ref.identity: one for one in found if one.kind == "snapshot" and one.ref is not None},
            adoptable=adoptable,
            refused=refused,
        )


def _members(facts: Facts, view: _View) -> Iterator[Finding]:
    """Yield the differences between each READY or BROKEN snapshot and its storage."""
    lost = lost_snapshots(facts)
    altered = {one.ref.identity for one in view.found if one.kind == "debris" and one.ref is not None}
    for manifest in facts.snapshots:
        if manifest.id in facts.inplace:
            continue
        missing = [
            ref
            for ref in manifest.refs
            if ref.identity not in view.snapshots and ref.identity not in altered and ref.identity[:2] in view.answered
        ]
        if manifest.state == "ready" and missing:
            yield _missing(manifest, [ref.name for ref in missing])
        elif manifest.id in lost:
            yield lost[manifest.id]
        elif manifest.state == "ready" and manifest.result is None:
            yield from _unverified(view, manifest)
        elif manifest.state == "broken":
            yield from _broken(facts, view, manifest)


def _missing(manifest: Summary, missing: list[str]) -> Finding:
    what = f"the storage of {manifest.id} is gone"
    hint = "somebody deleted it: restore from another snapshot"
    if len(missing) < len(manifest.refs):
        what = f"part of the storage of {manifest.id} is gone: {', '.join(missing)}"
        hint += f"; to delete the rest: snapmgr delete {manifest.short_id} --force"
    return Finding(
        area="storage",
        subject=manifest.refs[0].pool.title,
        level="problem",
        what=what,
        hint=hint,
        job=manifest.job,
        repair=Repair(kind="mark-broken", text="marks it BROKEN", about=manifest),
    )


def _unverified(view: _View, known: Summary) -> Iterator[Finding]:
    """Yield a verification that only the note has: it is written after the state directory, which has lost it."""
    one = view.snapshots.get(known.refs[0].identity) if known.refs else None
    # Most notes have none, and to decode ten thousand takes half a second.
    if one is None or one.note is None or b'"verification"' not in one.note:
        return
    try:
        manifest, verification = decode_note(one.note, one.name)
    except CatalogError:
        return
    if manifest.id == known.id and verification is not None:
        about = Adoption(entry=Entry(manifest=manifest, verification=verification))
        repair = Repair(kind="restore-verification", text="restores it from the note beside the snapshot", about=about)
        yield of_state(manifest.id, "its verification is missing", job=manifest.job, repair=repair)


def _broken(facts: Facts, view: _View, manifest: Summary) -> Iterator[Finding]:
    """Yield the storage of a BROKEN snapshot: it was missing and is back, or its removal was interrupted."""
    present = [ref for ref in manifest.refs if ref.identity in view.snapshots]
    if manifest.reason is not None and manifest.reason.startswith(GONE) and manifest.proved:
        if present and len(present) == len(manifest.refs):
            what = f"the storage of {manifest.id} was gone, and is available again"
            repair = Repair(kind="mark-ready", text="marks it READY", about=manifest)
            pool = present[0].pool.title
            yield Finding(area="storage", subject=pool, level="problem", what=what, job=manifest.job, repair=repair)
        elif present:
            yield remaining_members(manifest, present)
        return
    if was_overflowed(manifest) and len(manifest.refs) > 1:
        lost = overflowed_members(facts, manifest)
        if lost:
            what = f"{', '.join(lost)} of {manifest.id} has overflowed, and still exists"
            repair = Repair(kind="mark-lost", text="deletes it", about=manifest)
            pool = manifest.refs[0].pool.title
            yield Finding(area="storage", subject=pool, level="problem", what=what, job=manifest.job, repair=repair)
        elif present:
            yield remaining_members(manifest, present)
        return
    for one in view.found:
        if is_of(manifest, one):
            repair = Repair(kind="remove-remains", text="deletes it", about=manifest)
            what = f"{one.name} still exists, although its manifest says BROKEN"
            yield _problem(one, what, None, repair)


def is_of(known: Summary, one: Found) -> bool:
    """Whether a snapshot in the storage belongs to a manifest: by its members, or by its intents if it has none."""
    if one.kind != "snapshot" or one.ref is None or one.snapshot_id != known.id:
        return False
    if known.refs:
        return one.ref.identity in [ref.identity for ref in known.refs]
    made = (one.pool.key, one.name, one.ref.volume_id)
    return any((part.pool.key, part.name, part.volume_id) == made for part in known.parts)


def _elsewhere(facts: Facts, view: _View) -> Iterator[Finding]:
    """Yield one note for each pool and other state directory: on shared storage there may be many of its snapshots."""
    counts = Counter(
        (one.pool.title, folder)
        for one in view.found
        if one.kind == "snapshot"
        and one.snapshot_id not in view.known
        and (folder := facts.elsewhere.get(one.snapshot_id or "")) is not None
    )
    for (title, folder), count in counts.items():
        what = f"snapshots of the state directory {folder}: {count}"
        yield Finding(area="storage", subject=title, level="note", what=what)


def _stored(facts: Facts, view: _View) -> Iterator[Finding]:
    """Yield objects in the storage that are leftovers or unknown."""
    yield from _elsewhere(facts, view)
    for one in view.found:
        if one.snapshot_id in facts.inplace:
            continue
        if one.kind == "attachment":
            yield from _clone(facts, view, one)
        elif one.kind == "debris":
            yield from _debris(facts, view, one)
        elif one.snapshot_id is not None:
            yield from _snapshot(facts, view, one)


def _problem(one: Found, what: str, hint: str | None, repair: Repair | None = None) -> Finding:
    job = job_of(one.snapshot_id) if one.snapshot_id else None
    return Finding(
        area="storage", subject=one.pool.title, level="problem", what=what, hint=hint, job=job, repair=repair
    )


def _snapshot(facts: Facts, view: _View, one: Found) -> Iterator[Finding]:
    snapshot_id = one.snapshot_id or ""
    known = view.known.get(snapshot_id)
    if known is not None:
        if known.refs and not is_of(known, one) and known.state != "pending":
            hint = "somebody put it there: move it out of the folder"
            yield _problem(one, f"{one.name} has the name of {snapshot_id}, but is not this snapshot", hint)
    elif snapshot_id in view.refused:
        why, todo = view.refused[snapshot_id]
        yield _problem(one, f"{one.name} is not in this state directory, and {why}", todo)
    elif snapshot_id in view.adoptable and view.adoptable[snapshot_id][1] is one:
        yield _adoptable(facts, one, view.adoptable[snapshot_id][0])


def _adoptable(facts: Facts, one: Found, adoption: Adoption) -> Finding:
    manifest = adoption.entry.manifest
    remarks = f" ({'; '.join(adoption.remarks)})" if adoption.remarks else ""
    damaged = [file for file in facts.files if file.kind == "manifest" and file.snapshot_id == manifest.id]
    if damaged:
        repair = Repair(
            kind="restore-manifest",
            text=f"restores it from the note beside the snapshot, and moves it to {facts.state_dir}/damaged",
            about=adoption,
        )
        return of_state(str(damaged[0].path), damaged[0].problem + remarks, job=manifest.job, repair=repair)
    repair = Repair(kind="adopt", text="adopts it as its note describes it", about=adoption)
    return _problem(one, f"{one.name} is not in this state directory{remarks}", None, repair)


def _clone(facts: Facts, view: _View, one: Found) -> Iterator[Finding]:
    if one.record_id in view.records:
        return
    what = f"{one.name} is a clone without a lease"
    snapshot_id = one.snapshot_id or ""
    if snapshot_id in facts.elsewhere:
        what = f"{one.name} is a clone that belongs to the state directory {facts.elsewhere[snapshot_id]}"
        yield Finding(area="storage", subject=one.pool.title, level="note", what=what)
    elif one.record_id in facts.mounted:
        yield _problem(one, f"{what}, and it is mounted", "unmount it when it is not in use; then: doctor --fix")
    elif not _is_ours(facts, view, one):
        yield _problem(one, what, _UNKNOWN_OWNER)
    else:
        repair = Repair(kind="remove-clone", text="removes it, with all changes to it", about=one)
        yield _problem(one, what, None, repair)


def _is_ours(facts: Facts, view: _View, one: Found) -> bool:
    """Whether only this state directory can have made a clone: its snapshot belongs to this state directory."""
    known = view.known.get(one.snapshot_id or "")
    # Only the id of an incomplete clone is known.
    return (
        known is not None
        and known.id in facts.made_here
        and (one.ref is None or any(ref.identity == one.ref.identity for ref in known.refs))
    )


def _debris(facts: Facts, view: _View, one: Found) -> Iterator[Finding]:
    what = f"{one.name} is unfinished: {one.why}"
    known = view.known.get(one.snapshot_id or "")
    if one.record_id is not None:
        if one.record_id in view.records:
            return
        if one.record_id in facts.mounted or not _is_ours(facts, view, one):
            yield _problem(one, what, _UNKNOWN_OWNER)
            return
    elif one.ref is not None:
        # A complete snapshot that can no longer be trusted: it may hold somebody's changes.
        manually = f"snapmgr delete --force {known.short_id}" if known is not None else "delete it manually"
        yield _problem(one, f"{one.name}: {one.why}", f"move it elsewhere to keep it, or {manually}")
        return
    elif one.note is not None and known is None:
        yield _problem(one, what, "the snapshot may have been moved: move it back, or delete the note manually")
        return
    elif known is not None and known.state in UNFINISHED:
        return  # `diagnose_unfinished` reports it
    yield _problem(one, what, None, Repair(kind="repair", text=one.cure, about=one))


def _pools(facts: Facts, view: _View) -> Iterator[Finding]:
    lost = {
        ref.identity[:2]
        for one in facts.snapshots
        for ref in one.refs
        if one.state == "ready" and ref.identity not in view.snapshots
    }
    for pool in facts.pools:
        title = pool.pool.title
        if pool.error is not None:
            if pool.expected:
                yield of_error("storage", title, pool.error)
            else:
                yield Finding(area="storage", subject=title, level="note", what="does not exist yet")
        elif pool.pool.key not in lost:
            count = sum(one.kind == "snapshot" for one in pool.found)
            what = f"snapshots in it: {count}; none is missing"
            yield Finding(area="storage", subject=title, level="ok", what=what)
