"""``snapmgr clone``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapmgr.cli.choice import choose
from snapmgr.cli.output import print_lines
from snapmgr.cli.params import SizeText, SnapshotName, dry_run_option, json_option, unverified_option
from snapmgr.contract.errors import EXIT_OK
from snapmgr.contract.units import format_size

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import CloneServer, Lease
    from snapmgr.cli.session import Session
    from snapmgr.verify.clone import ClonePlan


@click.command(
    epilog="""\b
Examples:
  snapmgr clone latest /srv/dev --port 3307
  snapmgr clone nightly@latest /srv/test --memory 2G --option sql-mode=ANSI
  snapmgr umount /srv/dev
"""
)
@click.argument("snapshot", metavar="ID", type=SnapshotName())
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option(
    "--port", metavar="N", type=click.IntRange(1, 65535), help="Also listen at 127.0.0.1:N; default: only at a socket."
)
@click.option(
    "--memory",
    "memory_bytes",
    metavar="SIZE",
    type=SizeText(),
    default="256M",
    show_default=True,
    help="Memory for all of the server's buffers together.",
)
@click.option(
    "--server",
    metavar="PATH",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="The server program.  [default: the job's verify.server, else the installed one]",
)
@click.option("--option", "options", metavar="OPT", multiple=True, help="A further server option; repeatable.")
@unverified_option
@dry_run_option
@json_option
@click.pass_obj
def command(
    session: Session,
    snapshot: str,
    folder: str,
    *,
    port: int | None,
    memory_bytes: int,
    server: str | None,
    options: tuple[str, ...],
    unverified: bool,
    dry_run: bool,
) -> int:
    """Start a development server on a writable clone of a snapshot.

    The clone is mounted at DIR. Its server has the accounts of the source and keeps running until "snapmgr umount DIR"
    shuts it down and removes the clone. It does not replicate and runs no events. The snapshot does not change.
    """
    from snapmgr.verify.clone import clear_dead, clone, plan_clone

    ctx = session.context()
    entry = choose(session, ctx, snapshot, unverified=unverified, dry_run=dry_run)
    if not dry_run:
        clear_dead(ctx, folder)
    job = session.config().jobs.get(entry.manifest.job)
    plan = plan_clone(
        ctx,
        entry,
        folder,
        port=port,
        memory_bytes=memory_bytes,
        server=server,
        options=options,
        how=job.verify if job is not None else None,
    )
    if dry_run:
        return session.report([_plan_line(plan)], dry_run=True, snapshot_id=entry.manifest.id, mount=None)
    if job is None:
        session.console.warn(f"job {entry.manifest.job} is no longer configured: cloning with the defaults")
    lease = clone(ctx, plan)
    if session.json:
        from snapmgr.cli.documents import mount

        session.document(EXIT_OK, dry_run=False, snapshot_id=entry.manifest.id, mount=mount(lease))
    elif lease.server is not None:
        session.console.tell(f"{entry.manifest.id}: its server runs until you stop it: snapmgr umount {lease.point}")
        print_lines(_lines(lease, lease.server))
    return EXIT_OK


def _plan_line(plan: ClonePlan) -> str:
    at = f"at 127.0.0.1:{plan.port} and a socket" if plan.port is not None else "at a socket"
    return (
        f"would mount a writable clone of {plan.entry.manifest.id} at {plan.point} and start a server on it, {at}"
        f" ({format_size(plan.memory_bytes)} for its buffers)"
    )


def _lines(lease: Lease, server: CloneServer) -> list[str]:
    from snapmgr.access.attach import data_path

    ids = f"server_id {server.server_id}" + (f", UUID {server.server_uuid}" if server.server_uuid else "")
    pid = server.process.pid if server.process is not None else "?"
    return [
        f"socket  {server.socket}",
        *([f"port    127.0.0.1:{server.port}"] if server.port is not None else []),
        f"data    {data_path(lease)}",
        f"log     {server.log}",
        f"server  {server.program} (pid {pid}, {ids})",
    ]
