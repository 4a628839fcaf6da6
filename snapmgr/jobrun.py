"""A job's whole run: back up, then what the job wants afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.backup.run import backup
from snapmgr.contract.errors import LaterStepError, SnapmgrError, VerificationError
from snapmgr.keep.prune import Pruned, prune
from snapmgr.verify.run import verify

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Manifest, Verification
    from snapmgr.config.model import Job
    from snapmgr.context import Context


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one job."""

    job: str
    manifest: Manifest | None = None
    verification: Verification | None = None
    pruned: Pruned | None = None
    error: SnapmgrError | None = None


def run_job(ctx: Context, job: Job, *, with_verify: bool, with_prune: bool) -> Outcome:
    """Back up `job`, then verify and prune as asked; an error ends up in the outcome, not in an exception.

    A failed verification keeps the snapshot and prevents pruning: the older snapshots are what is left to rely on.
    """
    manifest: Manifest | None = None
    verification: Verification | None = None
    pruned: Pruned | None = None
    failure: SnapmgrError | None = None
    try:
        try:
            manifest = backup(ctx, job)
        except LaterStepError as error:
            # The snapshot is READY all the same: it can be proved, and what is not needed any more makes room.
            manifest, failure = ctx.catalog.load(error.snapshot_id).manifest, error
        if with_verify:
            verification = verify(ctx, ctx.catalog.load(manifest.id), job.verify)
        if with_prune:
            pruned = prune(ctx, job)
            if pruned.failures:
                raise pruned.failures[0]
    except (SnapmgrError, OSError) as error:
        if failure is not None:
            ctx.tell(f"warning: {failure.message}")
        failure = _name(error, manifest)
    return Outcome(job=job.name, manifest=manifest, verification=verification, pruned=pruned, error=failure)


def _name(error: SnapmgrError | OSError, manifest: Manifest | None) -> SnapmgrError:
    """Return what ended a run as an error that says whether there is a snapshot all the same."""
    if manifest is None:
        if isinstance(error, OSError):
            raise error
        return error
    if isinstance(error, VerificationError):
        return error
    # A full or dying disk may show at any line.
    message, hint = (error.message, error.hint) if isinstance(error, SnapmgrError) else (str(error), None)
    return LaterStepError(f"snapshot {manifest.id} is kept, but: {message}", hint=hint, snapshot_id=manifest.id)
