"""``snapmgr umount``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.output import end_document, print_lines
from snapmgr.cli.params import MountName, dry_run_option, json_option
from snapmgr.contract.errors import InUseError, NotFoundError, SnapmgrError, gravest

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Lease
    from snapmgr.cli.session import Session
    from snapmgr.context import Context


@click.command(
    epilog="""\b
Examples:
  snapmgr umount /mnt/look
  snapmgr umount nightly@latest
  snapmgr umount --all
"""
)
@click.argument("what", metavar="WHAT...", nargs=-1, type=MountName())
@click.option(
    "-a", "--all", "everything", is_flag=True, help="Unmount everything that `mount`, `prepare` and `clone` mounted."
)
@click.option("--force", is_flag=True, help="Kill the server of a clone instead of shutting it down.")
@dry_run_option
@json_option
@click.pass_obj
def command(session: Session, what: tuple[str, ...], *, everything: bool, force: bool, dry_run: bool) -> int:
    """Unmount snapshots and remove their writable clones.

    WHAT is a mount point, a snapshot, or the number that doctor prints. Everything written to a clone is lost. The
    server that "clone" started is shut down first. A mount that is in use stays, and the error names who uses it.
    """
    if everything == bool(what):
        raise click.UsageError("Name mounts, or give --all." if not what else "Name mounts or give --all, not both.")
    if "" in what:
        # It is the start of every id.
        raise click.UsageError("A mount's name cannot be empty.")
    ctx = session.context()
    leases, damaged = ctx.catalog.leases()
    problems = session.damaged(damaged)
    chosen: list[tuple[str, Lease | None]] = (
        [(lease.point, lease) for lease in leases if lease.stays]
        if everything
        else [(one, None) for one in dict.fromkeys(what)]
    )
    documents = [_release(session, ctx, name, lease, force=force, dry_run=dry_run) for name, lease in chosen]
    if not documents:
        session.console.tell("nothing is mounted")
    code = gravest([document["exit_code"] for document in documents] + ([1] if everything and problems else []))
    if session.json:
        session.document(code, dry_run=dry_run, released=documents, damaged=problems)
    return code


def _release(
    session: Session, ctx: Context, what: str, lease: Lease | None, *, force: bool, dry_run: bool
) -> dict[str, Any]:
    from snapmgr.cli.documents import mount
    from snapmgr.verify.clone import end_clone

    failure: SnapmgrError | None = None
    try:
        lease = lease or _find(ctx, what)
        _refuse_busy(lease)
        if not dry_run:
            end_clone(ctx, lease, force=force)
        if not session.json:
            print_lines([f"{'would unmount' if dry_run else 'unmounted'} {lease.point}"])
    except SnapmgrError as error:
        failure = error
        session.console.fail(error)
    return {
        "what": what,
        **end_document(failure),
        "mount": mount(lease) if lease is not None else None,
    }


def _find(ctx: Context, what: str) -> Lease:
    """Return the lease that `what` names: by itself, or by the snapshot that it names ("latest")."""
    from snapmgr.access.attach import find_lease

    try:
        return find_lease(ctx, what)
    except NotFoundError as not_mounted:
        try:
            snapshot_id = ctx.catalog.resolve(what).manifest.id
        except SnapmgrError:
            raise not_mounted from None
        return find_lease(ctx, snapshot_id)


def _refuse_busy(lease: Lease) -> None:
    from snapmgr.system.host import is_alive

    if not lease.stays and is_alive(lease.holder):
        raise InUseError(
            f"{lease.point} is in use by a running {lease.why} (pid {lease.holder.pid})",
            hint="wait until it ends, or end that process",
        )
