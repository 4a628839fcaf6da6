"""Runs a job: backs it up, then verifies and prunes as the job wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.backup.run import backup
from snapmgr.contract.errors import LaterStepError, ShortOfSpaceError, SnapmgrError, VerificationError

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Manifest, Verification
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.keep.prune import Pruned


class Outcome(Struct, frozen=True, kw_only=True):
    """The result of one run of a job."""

    job: str
    manifest: Manifest | None = None
    verification: Verification | None = None
    pruned: Pruned | None = None
    error: SnapmgrError | None = None


def run_job(ctx: Context, job: Job, *, with_verify: bool, with_prune: bool) -> Outcome:
    """Back up `job`, then verify and prune as requested; an error becomes part of the outcome, not an exception.

    Without enough free space for the backup, `with_prune` prunes before it. A failed verification keeps the snapshot
    and prevents pruning: then the older snapshots are the ones to rely on. A partial one is an error, too, but the
    prune goes on. While another run of the job is active, until its last step has ended, the outcome is BusyError.
    """
    try:
        ctx.catalog.make()
        with ctx.catalog.run_lock(job.name):
            return _run(ctx, job, with_verify=with_verify, with_prune=with_prune)
    except SnapmgrError as error:
        return Outcome(job=job.name, error=error)


def _run(ctx: Context, job: Job, *, with_verify: bool, with_prune: bool) -> Outcome:
    manifest: Manifest | None = None
    verification: Verification | None = None
    pruned: Pruned | None = None
    failure: SnapmgrError | None = None
    try:
        try:
            try:
                manifest = backup(ctx, job)
            except ShortOfSpaceError as short:
                pruned = _make_room(ctx, job, short) if with_prune else None
                if pruned is None:
                    raise
                manifest = backup(ctx, job)
        except LaterStepError as error:
            # The snapshot is READY nevertheless: verify it, and let the prune free space.
            manifest, failure = ctx.catalog.load(error.snapshot_id).manifest, error
        if with_verify:
            from snapmgr.verify.run import incomplete, verify  # noqa: PLC0415 - not every run verifies

            verification = verify(ctx, ctx.catalog.load(manifest.id), job.verify)
            if (missing := incomplete(manifest, verification)) is not None:
                failure = _noted(ctx, failure, missing, manifest)
        if with_prune:
            from snapmgr.keep.prune import prune  # noqa: PLC0415 - not every run prunes

            first = pruned.deleted if pruned is not None else ()
            pruned = prune(ctx, job)
            pruned = replace(pruned, deleted=(*first, *pruned.deleted))
            if pruned.failures:
                raise pruned.failures[0]
    except (SnapmgrError, OSError) as error:
        failure = _noted(ctx, failure, error, manifest)
    return Outcome(job=job.name, manifest=manifest, verification=verification, pruned=pruned, error=failure)


def _make_room(ctx: Context, job: Job, short: ShortOfSpaceError) -> Pruned | None:
    """Prune before a backup that lacks space, and wait until the space is free; return None if nothing was deleted."""
    from snapmgr.keep.prune import prune  # noqa: PLC0415 - few runs lack space

    ctx.tell(f"{short.message}: pruning first")
    pruned = prune(ctx, job, wait=True)
    for failure in pruned.failures:
        ctx.tell(f"warning: {failure.message}")
    return pruned if pruned.deleted else None


def _noted(
    ctx: Context, before: SnapmgrError | None, error: SnapmgrError | OSError, manifest: Manifest | None
) -> SnapmgrError:
    """Return the error of a later step, after telling the one `before` it, which only one can be the outcome's."""
    if before is not None:
        ctx.tell(f"warning: {before.message}")
    return _with_snapshot(error, manifest)


def _with_snapshot(error: SnapmgrError | OSError, manifest: Manifest | None) -> SnapmgrError:
    """Return the error that ended a run; if there is a snapshot nevertheless, as one that says so."""
    if manifest is None:
        if isinstance(error, OSError):
            raise error
        return error
    if isinstance(error, VerificationError):
        return error
    # Any step may fail with an OSError if a disk is full or dying.
    message, hint = (error.message, error.hint) if isinstance(error, SnapmgrError) else (str(error), None)
    return LaterStepError(f"snapshot {manifest.id} is kept, but: {message}", hint=hint, snapshot_id=manifest.id)
