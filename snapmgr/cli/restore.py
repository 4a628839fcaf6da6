"""``snapmgr restore``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins
from msgspec.structs import asdict

from snapmgr.cli.choice import choose
from snapmgr.cli.output import print_lines
from snapmgr.cli.params import SnapshotName, dry_run_option, json_option, unverified_option
from snapmgr.contract.errors import EXIT_OK
from snapmgr.contract.units import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.cli.session import Session
    from snapmgr.restore.copy import FolderTarget, RestoreResult

_EXTERNAL_SHOWN = 10


@click.command(
    epilog="""\b
Examples:
  snapmgr restore latest /srv/restored
  snapmgr restore nightly@latest /var/lib/mysql       # must be missing or empty
  snapmgr restore 3f9a2c1b /mnt/other/data --no-check --json
  snapmgr restore nightly@latest orders.sql --table shop.orders
  snapmgr restore 3f9a2c1b --in-place --dry-run       # LVM: restores the volume itself
"""
)
@click.argument("snapshot", metavar="ID", type=SnapshotName())
@click.argument("dest", metavar="[DEST]", required=False, type=click.Path())
@click.option(
    "--table",
    "tables",
    metavar="DB.TABLE",
    multiple=True,
    help="Only dump this table, into the new file DEST; repeatable, within one database.",
)
@click.option("--no-check", is_flag=True, help="Do not read copied data back; attributes are always compared.")
@click.option(
    "--in-place", is_flag=True, help="Restore the volume itself to the snapshot (LVM). The server must be stopped."
)
@click.option("-y", "--yes", is_flag=True, help="With --in-place: do not ask for confirmation.")
@click.option("--force", is_flag=True, help="With --in-place: even if other snapshots may be lost.")
@unverified_option
@dry_run_option
@json_option
@click.pass_obj
def command(
    session: Session,
    snapshot: str,
    dest: str | None,
    *,
    tables: tuple[str, ...],
    no_check: bool,
    in_place: bool,
    yes: bool,
    force: bool,
    unverified: bool,
    dry_run: bool,
) -> int:
    """Copy a snapshot to DEST, a new or empty directory.

    Shares blocks where the file system supports it, otherwise copies the data. Owners, modes, times, attributes, links
    and holes are kept, and compared at the end. DEST shows nothing until the copy is complete; an interrupted
    restore leaves nothing, and after kill -9 the next restore or doctor removes what is left. If the source had several
    directories (redo log or binary logs elsewhere), DEST gets a directory for each.

    With --table, a throwaway server on a clone dumps these tables into the file DEST, as SQL statements that drop
    nothing.

    With --in-place there is no DEST: the volume itself goes back to the snapshot, and everything written to it since
    then is lost. snapmgr prints this and asks for confirmation first.
    """
    _check_usage(dest, tables, in_place=in_place, no_check=no_check, confirmed=yes or force)
    if in_place:
        from snapmgr.cli.inplace import restore_in_place

        return restore_in_place(session, snapshot, force=force, yes=yes, unverified=unverified, dry_run=dry_run)
    # Without --in-place there is a DEST.
    dest = dest or ""
    if tables:
        return _restore_tables(session, snapshot, tables, dest, unverified=unverified, dry_run=dry_run)
    from snapmgr.restore.run import RestoreDiffersError, plan, restore

    ctx = session.context()
    entry = choose(session, ctx, snapshot, unverified=unverified, dry_run=dry_run)
    if dry_run:
        intended = plan(ctx, entry, dest)
        return session.report(
            [f"would restore {entry.manifest.id} to {intended.dest}", *_show_places(intended.places)],
            dry_run=True,
            snapshot_id=entry.manifest.id,
            dest=intended.dest,
            places=[asdict(place) for place in intended.places],
            restored=None,
        )
    try:
        restored = restore(ctx, entry, dest, read_back=not no_check)
    except RestoreDiffersError as error:
        _warn(session, error.restored)
        if session.json:
            _document(session, error.restored, error)
        raise
    if session.json:
        _document(session, restored, None)
    else:
        print_lines(_report(restored))
    _warn(session, restored)
    _say_next(session, restored, mysql=entry.manifest.source == "mysql")
    return EXIT_OK


def _check_usage(dest: str | None, tables: tuple[str, ...], *, in_place: bool, no_check: bool, confirmed: bool) -> None:
    if in_place and (dest is not None or no_check or tables):
        raise click.UsageError("--in-place takes neither DEST nor --no-check nor --table.")
    if confirmed and not in_place:
        raise click.UsageError("--yes and --force need --in-place.")
    if dest is None and not in_place:
        raise click.UsageError("Missing argument 'DEST'.")
    if tables and no_check:
        raise click.UsageError("--table takes no --no-check.")


def _restore_tables(
    session: Session, name: str, tables: tuple[str, ...], dest: str, *, unverified: bool, dry_run: bool
) -> int:
    from snapmgr.verify.tables import dump_tables, load_hint, plan_tables

    ctx = session.context()
    entry = choose(session, ctx, name, unverified=unverified, dry_run=dry_run)
    plan = plan_tables(entry, tables, dest)
    manifest = entry.manifest
    about: dict[str, Any] = {"snapshot_id": manifest.id, "dest": str(plan.dest), "tables": list(tables)}
    if dry_run:
        line = f"would dump {', '.join(tables)} of {manifest.id} to {plan.dest}"
        return session.report([line], dry_run=True, **about, dumped=None)
    job = session.config().jobs.get(manifest.job)
    dumped = dump_tables(ctx, plan, job.verify if job is not None else None)
    session.console.tell(load_hint(plan, manifest))
    return session.report(
        [
            f"dumped {', '.join(tables)} of {manifest.id} to {plan.dest}: {format_size(dumped.size_bytes)} in "
            f"{format_duration(dumped.duration_s)}"
        ],
        dry_run=False,
        **about,
        dumped=asdict(dumped),
    )


def _document(session: Session, restored: RestoreResult, error: Any) -> None:  # noqa: ANN401
    session.document(
        error.exit_code if error else EXIT_OK,
        error,
        dry_run=False,
        snapshot_id=restored.snapshot_id,
        dest=restored.dest,
        places=[asdict(place) for place in restored.places],
        restored={
            key: value for key, value in to_builtins(restored).items() if key not in ("snapshot_id", "dest", "places")
        },
    )


def _report(restored: RestoreResult) -> list[str]:
    contents = restored.contents_compared and restored.copied_files
    checked = "attributes and copied contents compared" if contents else "attributes compared"
    others = [
        f"{what}: {number}"
        for number, what in (
            (restored.folders, "folders"),
            (restored.links, "hard links"),
            (restored.symlinks, "symlinks"),
            (restored.special, "FIFOs, sockets, devices"),
        )
        if number
    ]
    return [
        f"restored {restored.snapshot_id} to {restored.dest} in {format_duration(restored.duration_s)}",
        f"  {', '.join([f'files: {restored.files} ({format_size(restored.size_bytes)})', *others])}",
        f"  sharing their blocks with the snapshot: {restored.shared_files}, copied: {restored.copied_files} "
        f"({format_size(restored.copied_bytes)}); {checked}",
        *_show_places(restored.places),
        *([f"  server options: {shlex.join(restored.options)}"] if restored.options else []),
    ]


def _show_places(places: Sequence[FolderTarget]) -> list[str]:
    return [f"  {place.original} -> {place.path}" for place in places]


def _warn(session: Session, restored: RestoreResult) -> None:
    for path in restored.excluded:
        session.console.warn(f"the snapshot does not include {path}, a separate volume or mount")
    for lead in restored.external_paths[:_EXTERNAL_SHOWN]:
        what = "a path of the source" if lead.live else "outside of the restored data"
        session.console.warn(f"{lead.where} points to {lead.to}, {what}")
    more = len(restored.external_paths) - _EXTERNAL_SHOWN
    if more > 0:
        session.console.warn(f"{more} more external paths (--json lists them)")


def _say_next(session: Session, restored: RestoreResult, *, mysql: bool) -> None:
    if not mysql:
        return
    if restored.external_paths:
        session.console.tell(
            "next: change these paths, or move the old folders away, before you start a server on it: it would "
            "open the files that they point to (docs/how-to/restore.md)"
        )
    if any(lead.where.endswith(".isl") for lead in restored.external_paths):
        session.console.tell(
            "the redo log also contains the external tablespaces' paths, so recovery works only at the old paths: use "
            "the recovered files of `snapmgr prepare` instead, or restore to the original place"
        )
    if restored.options:
        session.console.tell("next: start a server with the options above: a my.cnf may name other paths")
    else:
        session.console.tell(f"next: start a server with --datadir={restored.data_path}")
