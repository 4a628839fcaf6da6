"""Makes the repairs that `snapmgr.doctor.diagnose` offers, until none is left (``doctor --fix``)."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from msgspec import Struct

from snapmgr.access.attach import release
from snapmgr.access.deletion import delete, delete_all, intended_pools, require_storage_answers
from snapmgr.access.note import store_note
from snapmgr.access.resume import resume_servers
from snapmgr.backup.publish import publish
from snapmgr.backup.sweep import finish_pending, job_settle_timeout_s
from snapmgr.capacity.lost import mark_all_lost
from snapmgr.catalog.manifest import GONE, Lease
from snapmgr.catalog.summary import Summary, summarize
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
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context
    from snapmgr.contract.records import Pool
    from snapmgr.doctor.finding import Finding, Repair

# One repair may reveal the next: the clone of a damaged lease, leftovers of a deletion.
_ROUNDS = 8

Result = Literal["would", "done", "failed", "left"]


class Action(Struct, frozen=True, kw_only=True):
    """A repair and its result."""

    finding: Finding
    repair: Repair
    result: Result
    """"left": a run of its job is active, or something is in use."""
    error: SnapmgrError | None = None


class Fixed(Struct, frozen=True, kw_only=True):
    """The actions of `fix`, and the findings about the state directory and the storage afterwards."""

    actions: tuple[Action, ...]
    findings: tuple[Finding, ...]
    thawed: tuple[str, ...] = ()
    """A line for each server that was still frozen, or whose replication was still stopped."""


def plan_fix(
    ctx: Context, pools: Iterable[Pool], named: Iterable[Pool] = (), *, jobs: Collection[str] | None = None
) -> Fixed:
    """Return what `fix` would do, and what would be left. Changes and locks nothing."""
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
    """Repair everything that can be repaired, or only what concerns `jobs`. Each step is idempotent.

    A repair rests on facts that were collected under the lock of its job; active jobs are skipped. Raises an error of
    the state directory as a whole.
    """
    pools, named = tuple(pools), tuple(named)
    thawed = resume_servers(ctx.catalog)
    actions: dict[tuple[str, str, str], Action] = {}
    with _Locks(ctx) as locks:
        for _ in range(_ROUNDS):
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
                # The facts may have changed before the lock was taken: collect them again.
                continue
            due = [(one, repair) for one, repair in due if one.key not in actions]
            if not due:
                break
            deletions = {one.subject: (one, repair) for one, repair in due if repair.kind == "finish-deletion"}
            for number, (one, repair) in enumerate(due):
                ctx.progress("repairing", number, len(due))
                if repair.kind != "finish-deletion":
                    actions[one.key] = _act(ctx, one, repair)
                elif one.key not in actions:  # the first one: all go together
                    actions |= {action.finding.key: action for action in _finish_deletions(ctx, deletions)}
            ctx.progress("repairing", len(due), len(due))
    left = [one for one in diagnose(collect_facts(ctx, pools, named)) if _concerns(one, jobs)]
    return Fixed(actions=tuple(actions.values()), findings=tuple(left), thawed=thawed)


def _concerns(finding: Finding, jobs: Collection[str] | None) -> bool:
    return jobs is None or finding.job in jobs


class _Locks:
    """The locks of the jobs with repairs, and the errors for those that others hold."""

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
        """Try to lock those of `jobs` that were not tried yet; return whether there were any."""
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
        """Return the error if the lock of `job` is in use."""
        return self._busy.get(job or "")


def _act(ctx: Context, finding: Finding, repair: Repair) -> Action:
    try:
        _carry_out(ctx, repair)
    except SnapmgrError as error:
        return _ended(finding, repair, error)
    except OSError as error:
        return _ended(finding, repair, SnapmgrError(f"{finding.subject}: {error.strerror or error}"))
    return _ended(finding, repair)


def _ended(finding: Finding, repair: Repair, error: SnapmgrError | None = None) -> Action:
    result: Result = "done" if error is None else "left" if isinstance(error, BusyError) else "failed"
    return Action(finding=finding, repair=repair, result=result, error=error)


def _finish_deletions(ctx: Context, due: Mapping[str, tuple[Finding, Repair]]) -> Iterator[Action]:
    """Finish the interrupted deletions of snapshots, by id, together: a storage that can deletes many at a time."""
    left = dict(due)
    found = [entry.manifest for entry in ctx.catalog.load_many(due)[0] if entry.manifest.state == "deleting"]
    with suppress(OSError):  # each alone tells whose it is
        for manifest, failure in delete_all(ctx, found):
            yield _ended(*left.pop(manifest.id), failure)
    yield from (_act(ctx, finding, repair) for finding, repair in left.values())


def _carry_out(ctx: Context, repair: Repair) -> None:
    match repair.about:
        case Summary() as known:
            entry = ctx.catalog.load(known.id)
            if entry.manifest.state != known.state:
                raise CatalogError(f"{known.id} was changed meanwhile", hint="repeat the command")
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
    publish(ctx, entry.manifest, settle_timeout_s=job_settle_timeout_s(ctx, entry.manifest.job))
    # Its note is missing or old, as its storage was.
    if entry.verification is not None:
        store_note(ctx, ctx.catalog.load(entry.manifest.id))


def _remove_remains(ctx: Context, entry: Entry) -> None:
    require_storage_answers(ctx, entry.manifest)
    backend = ctx.backend(entry.manifest.backend)
    for found in backend.inventory(intended_pools(entry.manifest), notes=False):
        if found.ref is not None and is_of(summarize(entry), found):
            backend.delete(found.ref)


def _adopt(ctx: Context, adoption: Adoption) -> None:
    """Add a snapshot to the state directory as its notes describe it; the note names its new owner first."""
    entry = adoption.entry
    if adoption.rewritten:
        try:
            store_note(ctx, entry)
        except SnapmgrError as error:
            # On a read-only disk, for example: the snapshot can be restored anyway.
            ctx.tell(f"warning: could not update the note of {entry.manifest.id}: {error.message}")
    ctx.catalog.write(entry.manifest)
    _restore_verification(ctx, adoption)


def _restore_verification(ctx: Context, adoption: Adoption) -> None:
    """Restore the verification from the note, unless the state directory has a sound one, which is newer."""
    snapshot_id, verification = adoption.entry.manifest.id, adoption.entry.verification
    if verification is not None and ctx.catalog.load(snapshot_id).verification is None:
        ctx.catalog.write_verification(snapshot_id, verification)


def _restore_manifest(ctx: Context, adoption: Adoption) -> None:
    """Copy the damaged manifest to STATE/damaged, then replace it, so that one of the two always exists."""
    path = ctx.catalog.path / "snapshots" / adoption.entry.manifest.id / "manifest.json"
    try:
        write_file(_free_path(ctx, path), read_file(path))
    except NotFoundError:
        pass
    except CatalogError:
        _set_aside(ctx, path)  # not a regular file, so it cannot be copied
    _adopt(ctx, adoption)


_OF_SNAPSHOTS: dict[str, Callable[[Context, Entry], object]] = {
    "finish-pending": lambda ctx, entry: finish_pending(
        ctx, entry.manifest, settle_timeout_s=job_settle_timeout_s(ctx, entry.manifest.job)
    ),
    "finish-deletion": lambda ctx, entry: delete(ctx, entry.manifest),
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


def _free_path(ctx: Context, path: Path) -> Path:
    """Return a free path in STATE/damaged for a damaged file: "ID.manifest.json", "LEASE.json", or with a number."""
    folder = ctx.catalog.path / "damaged"
    folder.mkdir(mode=0o700, exist_ok=True)
    sync_folder(ctx.catalog.path)
    name = path.name if path.parent.parent == ctx.catalog.path else f"{path.parent.name}.{path.name}"
    number = 0
    free = folder / name
    while os.path.lexists(free):
        number += 1
        free = folder / f"{name}.{number}"
    return free


def _set_aside(ctx: Context, path: Path) -> None:
    path.rename(_free_path(ctx, path))
    sync_folder(path.parent)


def _remove_file(_ctx: Context, path: Path) -> None:
    path.unlink(missing_ok=True)


def _remove_folder(_ctx: Context, path: Path) -> None:
    # Fails if something has appeared in it since then.
    path.rmdir()


def _remove_tree(ctx: Context, path: Path) -> None:
    real = os.path.realpath(path)
    for mount in ctx.mounter.mounts():
        if mount.point == real or mount.point.startswith(f"{real}/"):
            raise StorageError(f"a file system is mounted at {mount.point}", hint=f"umount {mount.point}")
    shutil.rmtree(path)


_OF_FILES: dict[str, Callable[[Context, Path], object]] = {
    "set-aside": _set_aside,
    "remove-file": _remove_file,
    "remove-folder": _remove_folder,
    "remove-tree": _remove_tree,
}
