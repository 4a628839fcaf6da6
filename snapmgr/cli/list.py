"""``snapmgr list``."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from snapmgr.cli.output import clean, format_table, is_terminal, print_lines
from snapmgr.cli.params import JobName, json_option
from snapmgr.contract.errors import EXIT_OK, ConfigError, NotFoundError, SnapmgrError
from snapmgr.contract.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from snapmgr.capacity.read import Capacities
    from snapmgr.catalog.manifest import Lease
    from snapmgr.catalog.store import Catalog, Entry
    from snapmgr.catalog.summary import Summary
    from snapmgr.cli.session import Session
    from snapmgr.contract.records import PoolKey, SnapshotRef

_HEADS = ("ID", "JOB", "TAKEN", "STATE", "LEVEL", "HELD", "VERIFIED AT", "NOTES")
_USES = {"mount": "mounted"}


@click.command(
    epilog="""\b
Examples:
  snapmgr list
  snapmgr list nightly
  snapmgr list --size
  snapmgr list --json | jq -r '.snapshots[] | select(.state == "ready").id'
"""
)
@click.argument("job", required=False, type=JobName())
@click.option("--size", is_flag=True, help="Also ask the storage what deleting each snapshot would free.")
@json_option
@click.pass_obj
def command(session: Session, job: str | None, *, size: bool) -> int:
    """List snapshots, oldest first.

    HELD is how long the database was locked or frozen. VERIFIED AT is when the snapshot was last verified, with FAILED
    if it did not restore, and partly if not all of it could be looked at. SIZE is what deleting that snapshot alone
    would free, or "-" where the storage cannot tell; this may take seconds for each snapshot. Files that cannot be read
    are named on stderr, and the exit code is 1.
    """
    catalog = session.catalog()
    found, damaged = catalog.summaries(job)
    leases, damaged_leases = catalog.leases()
    if job is not None and job not in session.config().jobs and not found and not damaged:
        raise ConfigError(f"there is no job {job!r}, and no snapshot of one", hint="see: snapmgr list")
    problems = session.damaged([*damaged, *damaged_leases])
    code = 1 if problems else EXIT_OK
    sizes = _sizes(session, found) if size else None
    if session.json:
        from snapmgr.cli.documents import snapshot

        listed = [
            snapshot(entry, leases) | {"exclusive_bytes": (sizes or {}).get(entry.manifest.id)}
            for entry in _loaded(catalog, found)
        ]
        session.document(code, snapshots=listed, damaged=problems)
    else:
        _print(found, leases, catalog, sizes)
        if not found:
            lost = "" if catalog.path.exists() else ", which does not exist; if it was lost, see: snapmgr doctor"
            session.console.tell("no snapshots" + (f" of job {job}" if job else "") + f" in {catalog.path}{lost}")
    return code


def _loaded(catalog: Catalog, found: Iterable[Summary]) -> Iterator[Entry]:
    """Yield the snapshots with all that their manifests say, but those that were deleted meanwhile."""
    for one in found:
        with suppress(NotFoundError):
            yield catalog.load(one.id)


def _sizes(session: Session, found: list[Summary]) -> dict[str, int]:
    """Return what deleting each READY snapshot would free, for those whose storage can tell, by id.

    Where it cannot tell cheaply it may look at every extent or file: seconds for each snapshot. Warn about a pool that
    does not answer, and ask it only once.
    """
    ctx = session.context()
    unread: set[PoolKey] = set()

    def size_of(ref: SnapshotRef) -> int | None:
        if ref.pool.key not in unread:
            try:
                backend = ctx.backend(ref.backend)
                cheap = backend.usage(ref).exclusive_bytes
                return cheap if cheap is not None else backend.usage(ref, exact=True).exclusive_bytes
            except NotFoundError as error:
                session.console.warn(f"the size of {ref.snapshot_id} is unknown: {error.message}")
            except SnapmgrError as error:
                unread.add(ref.pool.key)
                session.console.warn(f"the sizes of snapshots in {ref.pool.hint} are unknown: {error.message}")
        return None

    sizes = {}
    ready = [one for one in found if one.state == "ready"]
    for number, entry in enumerate(_loaded(ctx.catalog, ready)):
        ctx.progress("measuring snapshots", number, len(ready))
        manifest = entry.manifest
        parts = [size_of(member.ref) for member in manifest.members]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            sizes[manifest.id] = sum(known)
    return sizes


def _print(found: list[Summary], leases: list[Lease], catalog: Catalog, sizes: Mapping[str, int] | None) -> None:
    from snapmgr.capacity.read import pools_of, read_capacities
    from snapmgr.cli.documents import show_held, show_result, show_time

    now = datetime.now(UTC)
    capacities = read_capacities(catalog, pools_of(one for one in found if one.state == "ready"))
    own = {key: one for key, one in capacities.items() if any(series.native_id for series in one.series)}
    used = {lease.snapshot_id for lease in leases}
    heads = _HEADS if sizes is None else (*_HEADS[:-1], "SIZE", _HEADS[-1])
    rows = [
        (
            one.short_id,
            one.job,
            show_time(one.at),
            one.state,
            one.level or "-",
            show_held(one.level, one.held_s),
            show_result(one.result, one.verified_at),
            *([] if sizes is None else [_size(sizes.get(one.id))]),
            ", ".join(
                [
                    *_notes(one, [lease for lease in leases if lease.snapshot_id == one.id] if one.id in used else ()),
                    *(_capacity(one, own, now) if own and one.state == "ready" else ()),
                ]
            ),
        )
        for one in found
    ]
    if not rows:
        return
    if is_terminal(sys.stdout):
        from snapmgr.cli.render import print_table

        print_table(heads, [[clean(cell) for cell in row] for row in rows])
    else:
        print_lines(format_table(heads, rows))


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def _capacity(one: Summary, capacities: Capacities, now: datetime) -> Iterator[str]:
    from snapmgr.capacity.series import forecast, own_series

    for series in own_series(one.refs, capacities):
        words = forecast(series, now, one.at).words(now)
        yield f"{series.share:.0%} full" + (f", {words}" if words else "")


def _notes(one: Summary, leases: Iterable[Lease]) -> list[str]:
    from snapmgr.cli.documents import show_pin

    notes = [show_pin(one.pin_reason)] if one.pinned else []
    notes += [f"{_USES.get(lease.why, lease.why)} at {lease.point}" + _port(lease) for lease in leases]
    if one.reason:
        notes.append(one.reason)
    return notes


def _port(lease: Lease) -> str:
    return f" (port {lease.server.port})" if lease.server is not None and lease.server.port is not None else ""
