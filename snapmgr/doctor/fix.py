"""``doctor --fix``: carries out the repairs that `snapmgr.doctor.diagnose` names, until none is left."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from snapmgr.access.attach import release
from snapmgr.access.deletion import delete
from snapmgr.access.note import store_note
from snapmgr.access.resume import resume_servers
from snapmgr.backup.publish import publish
from snapmgr.backup.sweep import SETTLE_S, finish_pending
from snapmgr.capacity.lost import mark_all_lost
from snapmgr.catalog.manifest import GONE, Lease
from snapmgr.catalog.store import Entry
from snapmgr.contract.errors import BusyError, CatalogError, LostError, NotFoundError, SnapmgrError, StorageError
from snapmgr.contract.records import AttachRecord, Found
from snapmgr.doctor.collect import collect_facts
from snapmgr.doctor.diagnose import diagnose, is_of
from snapmgr.doctor.rebuild import Adoption
from snapmgr.restore.unfinished import Unfinished
from snapmgr.system.boot import boot_id
from snapmgr.system.files import read_file, sync_folder, write_file
from snapmgr.system.probe import require_pools_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from snapmgr.context import Context
    from snapmgr.contract.records import Pool
    from snapmgr.doctor.finding import Finding, Repair

# One repair may lay bare the next: a damaged lease's clone, what the deletion of a snapshot leaves.
_LOOKS = 8

Result = Literal["would", "done", "failed", "left"]


@dataclass(frozen=True, kw_only=True)
class Action:
    """A repair, and what became of it."""

    finding: Finding
    repair: Repair
    result: Result
    """"left": its job, or whoever works on it, is active."""
    error: SnapmgrError | None = None


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What `fix` did, and what is to be said of the state directory and the storage afterwards."""

    actions: tuple[Action, ...]
    findings: tuple[Finding, ...]
    thawed: tuple[str, ...] = ()
    """Servers that had been left standing, frozen or with stopped replication, in words."""


def plan_fix(
    ctx: Context, pools: Iterable[Pool], named: Iterable[Pool] = (), *, jobs: Collection[str] | None = None
) -> Fixed:
    """Return what `fix` would do, and what would be left; touches and locks nothing."""
    findings = [finding for finding in diagnose(collect_facts(ctx, pools, named)) if _concerns(finding, jobs)]
    return Fixed(
        actions=tuple(
            Action(finding=one, repair=one.repair, result="would") for one in findings if one.repair is not None
        ),
        findings=tuple(one for one in findings if one.repair is None),
    )


def fix(
    ctx: Context, pools: Iterable[Pool], named: Iterable[Pool] = (), *, jobs: Collection[str] | None = None
) -> Fixed:
    """Mend all that can be mended, or what concerns `jobs`; each step is idempotent, so an interrupted one is repeated.

    Each job's lock is held from before the look that a repair rests on; a job that is active is left alone. Raises what
    is wrong with the state directory as a whole.
    """
    pools, named = tuple(pools), tuple(named)
    thawed = resume_servers(ctx.catalog)
    actions: dict[tuple[str, str, str], Action] = {}
    with _Locks(ctx) as locks:
        for _ in range(_LOOKS):
            found = diagnose(collect_facts(ctx, pools, named))
            due = [
                (one, one.repair)
                for one in found
                if one.repair is not None and one.key not in actions and _concerns(one, jobs)
            ]
            for one, repair in due:
                error = locks.refusal(one.job)
                if error is not None:
                    actions[one.key] = Action(finding=one, repair=repair, result="left", error=error)
            if locks.take({one.job for one, _ in due}):
                # What was seen before the lock may be different by now.
                continue
            due = [(one, repair) for one, repair in due if one.key not in actions]
            if not due:
                break
            for number, (one, repair) in enumerate(due):
                ctx.progress("mending", number, len(due))
                actions[one.key] = _act(ctx, one, repair)
            ctx.progress("mending", len(due), len(due))
    left = [one for one in diagnose(collect_facts(ctx, pools, named)) if _concerns(one, jobs)]
    return Fixed(actions=tuple(actions.values()), findings=tuple(left), thawed=thawed)


def _concerns(finding: Finding, jobs: Collection[str] | None) -> bool:
    return jobs is None or finding.job in jobs


class _Locks:
    """The locks of the jobs that have something to be mended, and who has those that are not to be had."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._held: set[str] = set()
        self._busy: dict[str, SnapmgrError] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_details: object) -> None:
        self._stack.close()

    def take(self, jobs: Collection[str | None]) -> bool:
        """Lock those of `jobs` that were not tried yet; return whether there were any."""
        new = sorted({job for job in jobs if job is not None} - self._held - self._busy.keys())
        if jobs and not all((self._ctx.catalog.path / name).is_dir() for name in ("snapshots", "leases", "locks")):
            self._ctx.catalog.make()
        for job in new:
            try:
                self._stack.enter_context(self._ctx.catalog.job_lock(job))
                self._held.add(job)
            except BusyError as error:
                self._busy[job] = error
        return bool(new)

    def refusal(self, job: str | None) -> SnapmgrError | None:
        """Return who has the lock of `job`, if we cannot have it."""
        return self._busy.get(job or "")


def _act(ctx: Context, finding: Finding, repair: Repair) -> Action:
    try:
        _carry_out(ctx, repair)
    except BusyError as error:
        return Action(finding=finding, repair=repair, result="left", error=error)
    except SnapmgrError as error:
        return Action(finding=finding, repair=repair, result="failed", error=error)
    except OSError as error:
        failure = SnapmgrError(f"{finding.subject}: {error.strerror or error}")
        return Action(finding=finding, repair=repair, result="failed", error=failure)
    return Action(finding=finding, repair=repair, result="done")


def _carry_out(ctx: Context, repair: Repair) -> None:
    match repair.about:
        case Entry() as entry:
            _OF_SNAPSHOTS[repair.kind](ctx, entry)
        case Adoption() as adoption:
            _OF_NOTES[repair.kind](ctx, adoption)
        case Found() as found:
            require_pools_answer((found.pool,), ctx.mounter.mounts())
            _OF_STORAGE[repair.kind](ctx, found)
        case Lease() as lease:
            release(ctx, lease)
        case Unfinished() as leftover:
            ctx.tell(leftover.resolve())
        case path:
            _OF_FILES[repair.kind](ctx, path)


# ------------------------------------------------------------------------------------------------------------ snapshots


def _mark_broken(ctx: Context, entry: Entry) -> None:
    ctx.catalog.write(entry.manifest.with_state("broken", reason=GONE))


def _mark_lost(ctx: Context, entry: Entry) -> None:
    for error in mark_all_lost(ctx, (entry.manifest,)):
        if not isinstance(error, LostError):
            raise error


def _mark_ready(ctx: Context, entry: Entry) -> None:
    publish(ctx, entry.manifest, settle_timeout_s=SETTLE_S)
    # Its note went with the storage, or is as old as that.
    if entry.verification is not None:
        store_note(ctx, ctx.catalog.load(entry.manifest.id))


def _remove_remains(ctx: Context, entry: Entry) -> None:
    pools = tuple(dict.fromkeys(intent.pool for intent in entry.manifest.intents))
    require_pools_answer(pools, ctx.mounter.mounts())
    backend = ctx.backend(entry.manifest.backend)
    for found in backend.inventory(pools):
        if found.ref is not None and is_of(entry.manifest, found):
            backend.delete(found.ref)


def _adopt(ctx: Context, adoption: Adoption) -> None:
    """Write down a snapshot as its notes describe it; whose it is from now on stands in the note first."""
    entry = adoption.entry
    if adoption.rewritten:
        try:
            store_note(ctx, entry)
        except SnapmgrError as error:
            # On a disk that is attached read-only, say: it can be restored from all the same.
            ctx.tell(f"warning: the note of {entry.manifest.id} stays as it is: {error.message}")
    ctx.catalog.write(entry.manifest)
    _restore_verification(ctx, adoption)


def _restore_verification(ctx: Context, adoption: Adoption) -> None:
    """Write down what the note says, unless a sound one lies in the state directory: that is the newer one."""
    snapshot_id, verification = adoption.entry.manifest.id, adoption.entry.verification
    if verification is not None and ctx.catalog.load(snapshot_id).verification is None:
        ctx.catalog.write_verification(snapshot_id, verification)


def _restore_manifest(ctx: Context, adoption: Adoption) -> None:
    """Keep the damaged manifest aside, then replace it; never without one of the two."""
    path = ctx.catalog.path / "snapshots" / adoption.entry.manifest.id / "manifest.json"
    try:
        write_file(_place_aside(ctx, path), read_file(path))
    except NotFoundError:
        pass
    except CatalogError:
        _set_aside(ctx, path)  # no file that could be copied
    _adopt(ctx, adoption)


_OF_SNAPSHOTS: dict[str, Callable[[Context, Entry], object]] = {
    "finish-pending": lambda ctx, entry: finish_pending(ctx, entry.manifest),
    "finish-deletion": lambda ctx, entry: delete(ctx, entry.manifest.id),
    "mark-broken": _mark_broken,
    "mark-lost": _mark_lost,
    "mark-ready": _mark_ready,
    "remove-remains": _remove_remains,
}
_OF_NOTES: dict[str, Callable[[Context, Adoption], object]] = {
    "adopt": _adopt,
    "restore-manifest": _restore_manifest,
    "restore-verification": _restore_verification,
}

# -------------------------------------------------------------------------------------------------------------- storage


def _remove_clone(ctx: Context, found: Found) -> None:
    if found.ref is not None and found.record_id is not None:
        record = AttachRecord(id=found.record_id, ref=found.ref, writable=True, boot_id=boot_id())
        ctx.backend(found.pool.backend).detach(record)


_OF_STORAGE: dict[str, Callable[[Context, Found], object]] = {
    "remove-clone": _remove_clone,
    "repair": lambda ctx, found: ctx.backend(found.pool.backend).repair(found),
}

# ---------------------------------------------------------------------------------------------------------------- files


def _place_aside(ctx: Context, path: Path) -> Path:
    """Return a free name in STATE/damaged for a damaged file: "ID.manifest.json", "LEASE.json", with a number."""
    folder = ctx.catalog.path / "damaged"
    folder.mkdir(mode=0o700, exist_ok=True)
    sync_folder(ctx.catalog.path)
    name = path.name if path.parent.parent == ctx.catalog.path else f"{path.parent.name}.{path.name}"
    number = 0
    place = folder / name
    while os.path.lexists(place):
        number += 1
        place = folder / f"{name}.{number}"
    return place


def _set_aside(ctx: Context, path: Path) -> None:
    path.rename(_place_aside(ctx, path))
    sync_folder(path.parent)


def _remove_file(_ctx: Context, path: Path) -> None:
    path.unlink(missing_ok=True)


def _remove_folder(_ctx: Context, path: Path) -> None:
    # What has come to lie in it since stays.
    path.rmdir()


def _remove_tree(ctx: Context, path: Path) -> None:
    real = os.path.realpath(path)
    for mount in ctx.mounter.mounts():
        if mount.point == real or mount.point.startswith(f"{real}/"):
            raise StorageError(f"something is mounted at {mount.point}", hint=f"umount {mount.point}")
    shutil.rmtree(path)


_OF_FILES: dict[str, Callable[[Context, Path], object]] = {
    "set-aside": _set_aside,
    "remove-file": _remove_file,
    "remove-folder": _remove_folder,
    "remove-tree": _remove_tree,
}
