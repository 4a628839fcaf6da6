"""``snapmgr list``."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from snapmgr.cli.output import clean, format_table, is_terminal, print_lines
from snapmgr.cli.params import JobName, json_option
from snapmgr.contract.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.capacity.read import Capacities
    from snapmgr.catalog.manifest import Lease, Manifest
    from snapmgr.catalog.store import Catalog, Entry
    from snapmgr.cli.session import Session

_HEADS = ("ID", "JOB", "TAKEN", "STATE", "LEVEL", "HELD", "VERIFIED AT", "NOTES")
_USES = {"mount": "mounted"}


@click.command(
    epilog="""\b
Examples:
  snapmgr list
  snapmgr list nightly
  snapmgr list --json | jq -r '.snapshots[] | select(.state == "ready").id'
"""
)
@click.argument("job", required=False, type=JobName())
@json_option
@click.pass_obj
def command(session: Session, job: str | None) -> int:
    """List snapshots, oldest first.

    HELD is how long the database was locked or frozen. VERIFIED AT is when the snapshot was last verified, with FAILED
    if it did not restore, and partly if not all of it could be looked at. Files that cannot be read are named on
    stderr, and the exit code is 1.
    """
    catalog = session.catalog()
    entries, damaged = catalog.entries(job)
    leases, damaged_leases = catalog.leases()
    if job is not None and job not in session.config().jobs and not entries and not damaged:
        raise ConfigError(f"there is no job {job!r}, and no snapshot of one", hint="see: snapmgr list")
    problems = session.damaged([*damaged, *damaged_leases])
    code = 1 if problems else EXIT_OK
    if session.json:
        from snapmgr.cli.documents import snapshot

        session.document(code, snapshots=[snapshot(entry, leases) for entry in entries], damaged=problems)
    else:
        _print(entries, leases, catalog)
        if not entries:
            lost = "" if catalog.path.exists() else ", which does not exist; if it was lost, see: snapmgr doctor"
            session.console.tell("no snapshots" + (f" of job {job}" if job else "") + f" in {catalog.path}{lost}")
    return code


def _print(entries: list[Entry], leases: list[Lease], catalog: Catalog) -> None:
    from snapmgr.capacity.read import read_capacities
    from snapmgr.cli.documents import show_held, show_time, show_verified

    now = datetime.now(UTC)
    capacities = read_capacities(catalog, (entry.manifest for entry in entries if entry.manifest.state == "ready"))
    rows = [
        (
            entry.manifest.short_id,
            entry.manifest.job,
            show_time(entry.manifest.taken_at or entry.manifest.created_at),
            entry.manifest.state,
            entry.manifest.quiesce.level if entry.manifest.quiesce else "-",
            show_held(entry.manifest),
            show_verified(entry.verification),
            ", ".join(
                [
                    *_notes(entry, [lease for lease in leases if lease.snapshot_id == entry.manifest.id]),
                    *_capacity(entry.manifest, capacities, now),
                ]
            ),
        )
        for entry in entries
    ]
    if not rows:
        return
    if is_terminal(sys.stdout):
        from snapmgr.cli.render import print_table

        print_table(_HEADS, [[clean(cell) for cell in row] for row in rows])
    else:
        print_lines(format_table(_HEADS, rows))


def _capacity(manifest: Manifest, capacities: Capacities, now: datetime) -> Iterator[str]:
    from snapmgr.capacity.series import forecast, own_series

    if manifest.state != "ready":
        return
    for series in own_series(manifest.members, capacities):
        words = forecast(series, now, manifest.taken_at).words(now)
        yield f"{series.share:.0%} full" + (f", {words}" if words else "")


def _notes(entry: Entry, leases: list[Lease]) -> list[str]:
    from snapmgr.cli.documents import show_pin

    notes = [show_pin(entry.manifest)] if entry.manifest.pinned else []
    notes += [f"{_USES.get(lease.why, lease.why)} at {lease.point}" + _port(lease) for lease in leases]
    if entry.manifest.reason:
        notes.append(entry.manifest.reason)
    return notes


def _port(lease: Lease) -> str:
    return f" (port {lease.server.port})" if lease.server is not None and lease.server.port is not None else ""
