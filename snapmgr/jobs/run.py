"""A job's whole run: back up, then what the job wants afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.errors import EXIT_OK, LaterStepError, SnapmgrError, VerificationError
from snapmgr.jobs.backup import backup
from snapmgr.jobs.prune import Pruned, prune
from snapmgr.jobs.verify import verify

if TYPE_CHECKING:
    from snapmgr.config import Job
    from snapmgr.jobs.context import Context
    from snapmgr.manifest import Manifest, Verification


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one job."""

    job: str
    manifest: Manifest | None = None
    verification: Verification | None = None
    pruned: Pruned | None = None
    error: SnapmgrError | None = None

    @property
    def exit_code(self) -> int:
        """The job's own exit code."""
        return EXIT_OK if self.error is None else self.error.exit_code


def run_job(ctx: Context, job: Job, *, with_verify: bool, with_prune: bool) -> Outcome:
    """Back up `job`, then verify and prune as asked; an error ends up in the outcome, not in an exception.

    A failed verification keeps the snapshot and prevents pruning: the older snapshots are what is left to rely on.
    """
    manifest: Manifest | None = None
    verification: Verification | None = None
    pruned: Pruned | None = None
    try:
        manifest = backup(ctx, job)
        if with_verify:
            verification = verify(ctx, ctx.catalog.load(manifest.id), job.verify)
        if with_prune:
            pruned = prune(ctx, job)
            if pruned.failures:
                raise pruned.failures[0]
    except SnapmgrError as error:
        failure = error
        if manifest is None and isinstance(error, LaterStepError):
            manifest = ctx.catalog.load(error.snapshot_id).manifest
        if manifest is not None and not isinstance(error, VerificationError | LaterStepError):
            message = f"snapshot {manifest.id} is kept, but: {error.message}"
            failure = LaterStepError(message, hint=error.hint, snapshot_id=manifest.id)
        return Outcome(job=job.name, manifest=manifest, verification=verification, pruned=pruned, error=failure)
    except OSError as error:
        # A full or dying disk may show at any line; the snapshot is there all the same.
        if manifest is None:
            raise
        failure = LaterStepError(f"snapshot {manifest.id} is kept, but: {error}", snapshot_id=manifest.id)
        return Outcome(job=job.name, manifest=manifest, verification=verification, pruned=pruned, error=failure)
    return Outcome(job=job.name, manifest=manifest, verification=verification, pruned=pruned)
